"""FLUX.2 klein, klein-base and dev: text to image, optionally with references, a flow in the latents of a 16x VAE.

Shapes: B samples, C latent channels (128), h x w latent pixels (a sixteenth of the image; h' x w' of a reference),
T text tokens (512: shorter texts are padded, and the net attends to padding), D text width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from omni_rollout.models.diffusers_model import (
    JOINT_ATTENTION,
    PIXELS_PER_TOKEN,
    DiffusersModel,
    cfg_batch,
    check_size,
    pixels,
    resize_image,
)
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates

TEXT_TOKENS = 512
AREA = 1024 * 1024  # largest reference by default, in pixels; larger ones are downscaled
MIN_SIDE, MAX_RATIO = 64, 8  # of a reference
SYSTEM = (  # the system prompt that dev was trained with
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)


class Flux2Klein(DiffusersModel):
    """FLUX.2 klein or klein-base for one checkpoint.

    The guidance of klein-base is `guidance_scale`, which is on above 1; klein, which is distilled, has none.
    The option image_area is the maximum number of pixels of a reference for its latents, by default 4,096 tokens.
    """

    PIPELINE = "Flux2KleinPipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen3ForCausalLM"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "Flux2Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"text_encoder": ("lm_head", "model.layers.28:")}
    OPTIONS: ClassVar[Mapping[str, float]] = {"image_area": AREA}
    IMAGES = range(11)
    CONTEXT_PARALLEL = True
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # as published; only the first layer of the single blocks
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
    )
    LAYERS: ClassVar[tuple[int, ...]] = (9, 18, 27)  # of the text encoder, whose hidden states are the embeddings
    CHAT: ClassVar[Mapping[str, bool]] = {"add_generation_prompt": True, "enable_thinking": False}

    def _check_config(self) -> None:
        super()._check_config()
        channels = 4 * self.value("vae", "latent_channels", int, 32)
        self._expect("transformer", patch_size=1, in_channels=channels, out_channels=channels)
        self._expect("vae", patch_size=[2, 2])
        self._expect_length("vae", "block_out_channels", 4)  # each except the first halves the sides

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can compute a forward pass together, each a part of a text."""
        if TEXT_TOKENS % self.context:
            rule = f"context must divide the {TEXT_TOKENS} tokens of each text of a {self.PIPELINE}"
            raise ValueError(f"{rule}, got {self.context}")
        super().check_context()

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN)
        if self.config.get("is_distilled") and params.guidance_scale != 1:
            raise ValueError(f"guidance_scale must be 1 for a distilled {self.PIPELINE}, got {params.guidance_scale}")
        self._check_tokens(params, PIXELS_PER_TOKEN)
        if "image_area" in self.OPTIONS:
            self._check_area(self.option(params, "image_area"))

    def _check_area(self, area: float) -> None:
        if not area >= PIXELS_PER_TOKEN**2:
            raise ValueError(f"image_area must be >= {PIXELS_PER_TOKEN**2} pixels, got {area}")
        if self.context > 1 and area != AREA:  # check_image counts a reference's tokens with the default
            raise ValueError(f"image_area must be {AREA} if {self.context} ranks compute a forward, got {area}")

    def check_image(self, height: int, width: int) -> None:
        """Raise ValueError for a reference that is too small, too elongated, or has tokens that ranks cannot share."""
        if min(height, width) < MIN_SIDE or max(height, width) > MAX_RATIO * min(height, width):
            rule = f"images must have sides of {MIN_SIDE} pixels or more, one at most {MAX_RATIO} times the other"
            raise ValueError(f"{rule}, got height {height} and width {width}")
        _, _, rows, columns = _crop_box(*_reduced_size(height, width))
        if (tokens := rows * columns // PIXELS_PER_TOKEN**2) % self.context:
            rule = f"images must have tokens that {self.context} ranks can share"
            raise ValueError(f"{rule}, got height {height} and width {width}, which makes {tokens}")

    def latent_shape(self, params: Params) -> tuple[int, int, int]:
        """Return (C, h, w).

        Raises:
            ValueError: height or width is not a positive multiple of 16 pixels.
        """
        check_size(params, PIXELS_PER_TOKEN)
        size = params.height // PIXELS_PER_TOKEN, params.width // PIXELS_PER_TOKEN
        return self.value("transformer", "in_channels", int, 128), *size

    def _mu(self, params: Params) -> float:
        """Return the shift mu for the number of tokens and of steps.

        It is linear in the tokens at 10 steps and at 200 steps, and interpolated between these by the number of steps;
        above 4,300 tokens, it is the value at 200 steps.
        """
        (_, h, w), S = self.latent_shape(params), params.num_inference_steps
        at_200 = 0.00016927 * h * w + 0.45666666
        at_10 = 8.73809524e-05 * h * w + 1.89833333
        return at_200 if h * w > 4300 else at_200 + (at_10 - at_200) * (200 - S) / 190

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] in the encoder's dtype, states of several layers."""
        text = prompt.negative if negative else prompt.text
        tokens = parts.tokenizer.apply_chat_template(
            [self._chat(text)],
            tokenize=True,
            padding="max_length",
            truncation=True,
            max_length=TEXT_TOKENS,
            return_dict=True,
            return_tensors="pt",
            **self.CHAT,
        ).to(parts.text_encoder.device)
        states = parts.text_encoder(**tokens, output_hidden_states=True, use_cache=False).hidden_states
        return {"embeds": torch.cat([states[layer][0] for layer in self.LAYERS], dim=-1)}

    def _chat(self, text: str) -> list[dict[str, object]]:
        """Return the chat messages for a text."""
        return [{"role": "user", "content": text}]

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of the references, `reference_0` [C, h', w'] and so on."""
        area = self.option(params, "image_area")
        return {
            f"reference_{i}": self.encode_media(parts, {"image": fit_reference(image, area)[None]}, params)[0]
            for i, image in enumerate(prompt.images)
        }

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D], with guidance also their negatives; `reference_0` and so on: latents [B, C, h', w'] of
        references. Both halves of classifier-free guidance run as one batch.
        """
        embeds, guided = cond["embeds"], self.is_guided(params)
        images = [x, *(latents for name, latents in cond.items() if name.startswith("reference_"))]
        tokens = torch.cat([latents.flatten(2).mT for latents in images], dim=1)
        if guided:
            embeds, tokens, sigma = cfg_batch(cond, "embeds"), torch.cat([tokens, tokens]), torch.cat([sigma, sigma])
        places = torch.cat([_token_positions(latents, 10 * i) for i, latents in enumerate(images)])
        words = pad(torch.arange(embeds.shape[1], device=x.device)[:, None], (3, 0))
        velocity = net(
            hidden_states=tokens.to(embeds.dtype),
            timestep=sigma.float() * 1000 / 1000,  # rounded as in diffusers, whose timesteps are float32 sigma * 1000
            guidance=self._embedded_guidance(params, sigma),
            encoder_hidden_states=embeds,
            txt_ids=words.expand(len(tokens), -1, -1),
            img_ids=places.expand(len(tokens), -1, -1),
            return_dict=False,
        )[0].float()
        velocity = velocity[:, : x[0, 0].numel()].mT.unflatten(2, x.shape[2:])  # without the references' velocities
        if not guided:
            return velocity
        positive, negative = velocity.chunk(2)
        return negative + params.guidance_scale * (positive - negative)

    def _embedded_guidance(self, params: Params, sigma: Tensor) -> Tensor | None:
        """Return the guidance [B] that the net takes as input, or None if it takes none."""
        return None

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return images [B, 16h, 16w, 3] in [0, 1], float32, from clean latents x0 [B, C, h, w]."""
        mean, std = _statistics(parts.vae.bn)
        code = pixel_shuffle(x0 * std + mean, 2).to(parts.vae.dtype)
        images = parts.vae.decode(code, return_dict=False)[0]
        return {"image": (images.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)}, {}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, H/16, W/16] of images [B, H, W, 3]: the mean of the VAE's code."""
        mean, std = _statistics(parts.vae.bn)
        images = pixels(media["image"]).to(parts.vae.device, parts.vae.dtype)
        return (pixel_unshuffle(parts.vae.encode(images).latent_dist.mode().float(), 2) - mean) / std


class Flux2(Flux2Klein):
    """FLUX.2 dev for one checkpoint: `guidance_scale` is an input of its net, and there are no negatives."""

    PIPELINE = "Flux2Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        **Flux2Klein.PARTS,
        "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
        "tokenizer": ("transformers", "PixtralProcessor"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": (
            "lm_head",
            "model.vision_tower",
            "model.multi_modal_projector",
            "model.language_model.layers.31:",
        )
    }
    GUIDANCE: ClassVar[Mapping[str, float]] = {}
    LAYERS: ClassVar[tuple[int, ...]] = (10, 20, 30)
    CHAT: ClassVar[Mapping[str, bool]] = {}

    def _chat(self, text: str) -> list[dict[str, object]]:
        contents = {"system": SYSTEM, "user": text.replace("[IMG]", "")}  # a placeholder for an image
        return [{"role": role, "content": [{"type": "text", "text": part}]} for role, part in contents.items()]

    def _embedded_guidance(self, params: Params, sigma: Tensor) -> Tensor | None:
        return torch.full_like(sigma, params.guidance_scale)

    def _class(self, part: str) -> Any:
        if part != "tokenizer":
            return super()._class(part)
        from transformers import AutoTokenizer  # the text half of the processor, which needs no torchvision

        return AutoTokenizer


def fit_reference(image: Tensor, area: float = AREA) -> Tensor:
    """Return a reference, uint8 [H, W, 3], downscaled to about `area` pixels and center-cropped to whole tokens."""
    size = _reduced_size(image.shape[0], image.shape[1], area)
    image = image if size == image.shape[:2] else resize_image(image, *size)
    top, left, rows, columns = _crop_box(*size)
    return image[top : top + rows, left : left + columns]


def _reduced_size(height: int, width: int, area: float = AREA) -> tuple[int, int]:
    """Return the size of a reference after downscaling to at most `area` pixels; each side is at least a token."""
    if height * width <= area:
        return height, width
    scale = math.sqrt(area / (width * height))
    return max(PIXELS_PER_TOKEN, int(height * scale)), max(PIXELS_PER_TOKEN, int(width * scale))


def _crop_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Return the first row, first column, height and width of the whole tokens in the center of an image."""
    unit = PIXELS_PER_TOKEN
    return height % unit // 2, width % unit // 2, height // unit * unit, width // unit * unit


def _token_positions(latents: Tensor, first: int) -> Tensor:
    """Return the position (first, row, column, 0) of each token of latents [B, C, h, w], [hw, 4]."""
    sizes = latents.shape[2:]
    rows, columns = torch.meshgrid(*(torch.arange(size, device=latents.device) for size in sizes), indexing="ij")
    return torch.stack([torch.full_like(rows, first), rows, columns, torch.zeros_like(rows)], dim=-1).flatten(0, 1)


def _statistics(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation [1, C, 1, 1] of the VAE's latents, from its batch norm."""
    mean, variance = (norm.get_buffer(f"running_{name}").float().view(1, -1, 1, 1) for name in ("mean", "var"))
    return mean, (variance + norm.eps).sqrt()
