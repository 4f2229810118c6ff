"""FLUX.1, dev, schnell and Kontext (arXiv 2506.15742): text to image, or image editing, a flow in an 8x VAE's latents.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image; h' x w' of a reference), T text
positions of T5 (max_sequence_length), D text width, D' width of CLIP's pooled text. Every text fills all positions, so
there is no mask.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import (
    JOINT_ATTENTION,
    PIXELS_PER_TOKEN,
    ImageModel,
    cfg_batch,
    check_size,
    pack,
    resize_image,
    text_ids,
    unpack,
)
from omni_rollout.types import Cond, Params, Parts, Prompt

# Widths and heights of the images that Kontext was trained on: these portrait sizes, their landscape versions, and
# squares.
SIZES = ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
AREA = 1024 * 1024  # approximate pixels of each size


class Flux1(ImageModel):
    """FLUX.1 for one checkpoint.

    `guidance_scale` is an input of dev's net, which was distilled from a guided one; schnell's net has no such input.
    The option `true_cfg_scale` is the scale of additional classifier-free guidance, which is on above 1.
    The option max_sequence_length is the length to which T5's text is padded or truncated: 512, or 256 for schnell.
    """

    PIPELINE = "FluxPipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "tokenizer_2": ("transformers", "T5Tokenizer"),
        "transformer": ("diffusers", "FluxTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0, "max_sequence_length": 512}
    TEXT_OPTIONS: ClassVar[tuple[str, ...]] = ("max_sequence_length",)
    GUIDANCE: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0}
    CONTEXT_PARALLEL = True
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # as published; only q, k and v in the single blocks
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    @property
    def takes_scale(self) -> bool:
        """True if guidance_scale is an input of the net."""
        return self.value("transformer", "guidance_embeds", bool, False)

    def _check_config(self) -> None:
        super()._check_config()
        channels = 4 * self.value("vae", "latent_channels", int)
        self._expect("transformer", patch_size=1, in_channels=channels, out_channels=channels)

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        self.check_text_length(params)
        check_size(params, PIXELS_PER_TOKEN)
        scale = params.guidance_scale
        if scale < 0:
            raise ValueError(f"guidance_scale must be >= 0, got {scale}")
        if scale != 1 and not self.takes_scale:
            raise ValueError(f"guidance_scale must be 1 for a {self.PIPELINE} without guidance_embeds, got {scale}")
        if (length := self.option(params, "max_sequence_length")) % self.context:
            raise ValueError(f"max_sequence_length must be a multiple of {self.context} ranks, got {length:g}")
        self._check_tokens(params, PIXELS_PER_TOKEN)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False, max_sequence_length: float = 512) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] and `pooled` [D'], in the encoders' dtype."""
        text = prompt.negative if negative else prompt.text
        clip = text_ids(parts.tokenizer, parts.text_encoder, text, parts.tokenizer.model_max_length)
        t5 = text_ids(parts.tokenizer_2, parts.text_encoder_2, text, max_sequence_length)
        return {"embeds": parts.text_encoder_2(t5)[0][0], "pooled": parts.text_encoder(clip).pooler_output[0]}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `pooled` [B, D'], and with classifier-free guidance their negatives, which run in
        the same batch; `reference_0`, if any: latents [B, C, h', w'] of the image to edit.
        """
        embeds, pooled = cond["embeds"], cond["pooled"]
        images = [x, cond["reference_0"]] if "reference_0" in cond else [x]
        tokens = torch.cat([pack(latents) for latents in images], dim=1)
        guided = self.is_guided(params)
        if guided:
            embeds, pooled = cfg_batch(cond, "embeds"), cfg_batch(cond, "pooled")
            tokens, sigma = torch.cat([tokens, tokens]), torch.cat([sigma, sigma])
        velocity = net(
            hidden_states=tokens.to(embeds.dtype),
            timestep=(sigma.float() * 1000).to(embeds.dtype) / 1000,  # rounded as in diffusers
            guidance=torch.full_like(sigma, params.guidance_scale) if self.takes_scale else None,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=x.new_zeros(embeds.shape[1], 3),
            img_ids=torch.cat([_token_positions(latents, image) for image, latents in enumerate(images)]),
            return_dict=False,
        )[0].float()
        velocity = velocity[:, : x[0, 0].numel() // 4]  # without the reference's velocity
        if guided:
            positive, negative = velocity.chunk(2)
            velocity = negative + self.option(params, "true_cfg_scale") * (positive - negative)
        return unpack(velocity, x.shape)


class Flux1Kontext(Flux1):
    """FLUX.1 Kontext for one checkpoint, which edits one reference.

    The option image_area is the number of pixels of the reference's latents, by default 4,096 tokens.
    """

    PIPELINE = "FluxKontextPipeline"
    OPTIONS: ClassVar[Mapping[str, float]] = {**Flux1.OPTIONS, "image_area": AREA}
    CONTEXT_PARALLEL = False  # the number of a reference's tokens may not be divisible
    IMAGES = range(1, 2)

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        if not (area := self.option(params, "image_area")) >= PIXELS_PER_TOKEN**2:
            raise ValueError(f"image_area must be >= {PIXELS_PER_TOKEN**2} pixels, got {area}")

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of the reference, `reference_0` [C, h', w']."""
        image = _fit_reference(prompt.images[0], self.option(params, "image_area"))
        return {"reference_0": self.encode_media(parts, {"image": image[None]}, params)[0]}


def _fit_reference(image: Tensor, area: float) -> Tensor:
    """Return an image, uint8 [H, W, 3], at about `area` pixels and the trained size nearest in aspect ratio."""
    rows, columns = (max(1, side // PIXELS_PER_TOKEN) for side in image.shape[:2])
    sizes = [*SIZES, (1024, 1024), *((height, width) for width, height in reversed(SIZES))]
    width, height = min(sizes, key=lambda size: abs(columns / rows - size[0] / size[1]))
    unit = PIXELS_PER_TOKEN / math.sqrt(area / AREA)
    return resize_image(image, *(max(1, round(side / unit)) * PIXELS_PER_TOKEN for side in (height, width)))


def _token_positions(x: Tensor, image: int) -> Tensor:
    """Return the position [(h/2)(w/2), 3] of each token of latents [B, C, h, w]: image, row and column."""
    rows, columns = (torch.arange(side // 2, device=x.device, dtype=torch.float32) for side in x.shape[-2:])
    return torch.cartesian_prod(torch.full_like(rows[:1], image), rows, columns)
