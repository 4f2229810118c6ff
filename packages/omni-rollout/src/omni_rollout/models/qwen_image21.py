"""Qwen-Image-2.1: text to image and editing in one net, a flow in the latents of a 16x VAE with transparency.

Shapes: B samples, C latent channels (64), h x w latent pixels (a sixteenth of the image; h' x w' of a reference),
T text tokens, D text width.

A reference enters twice: the text encoder reads it, and its latents are inserted at its place in the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import DiffusersModel, check_size, needed_mask, pixels
from omni_rollout.models.parts import open_processor, open_tokenizer
from omni_rollout.models.qwen_image import channel_statistics
from omni_rollout.models.qwen_image_edit import (
    PLACE,
    check_image_area,
    fit_reference,
    image_processor_class,
    reference_latents,
)
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

STRIDE = 16  # pixels of a latent pixel
# The chat template that the model was trained with; the embeddings of its system message are dropped.
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Processor:
    """Tokenizer and image processor for the text encoder."""

    tokenizer: Any
    images: Any


class QwenImage21(DiffusersModel):
    """Qwen-Image-2.1 for one checkpoint. Its guidance is `true_cfg_scale`, on above 1; it was trained to need none.

    The option image_area is the number of pixels of each reference for its latents, by default 4,096 tokens.
    """

    PIPELINE = "QwenImage21Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "transformer": ("diffusers", "QwenImage21Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage21"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"text_encoder": ("lm_head",)}
    OPTIONS: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0, "image_area": 1024 * 1024}
    GUIDANCE: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0}
    IMAGES = range(11)
    SEEN_AREA: ClassVar[int] = 1024 * 1024  # pixels of a reference that the text encoder sees
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("QwenImage21TransformerBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "img_mlp.proj",
        "img_mlp.gate_layer",
        "img_mlp.out",
    )

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "z_dim", int, 64)
        self._expect("transformer", patch_size=1, in_channels=channels, out_channels=channels, causal_condition=True)
        self._expect("vae", in_channels=4, out_channels=4, patch_size=None, scale_factor_spatial=STRIDE)
        self._expect_length("vae", "dim_mult", 5)  # each except the first halves the sides
        if self.config.get("sample_sigmas") is not None:
            file = self.folder / "model_index.json"
            raise ValueError(f"sample_sigmas of {file} must be null, got {self.config['sample_sigmas']!r:.80}")

    def _class(self, part: str) -> Any:
        cls = super()._class(part)  # raises if diffusers is too old
        if part != "transformer":
            return cls
        from omni_rollout.models.qwen_image21_net import QwenImage21Transformer2DModel

        return QwenImage21Transformer2DModel

    def _load(self, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        if part != "processor":
            module = super()._load(part, device, dtype)
            if part == "text_encoder":  # the net was trained on the last norm's input
                module.set_submodule("model.language_model.norm", nn.Identity())
            return module
        from transformers import Qwen2Tokenizer

        folder = self.folder / part
        return Processor(open_tokenizer(Qwen2Tokenizer, folder), open_processor(image_processor_class(), folder))

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_size(params, 2 * STRIDE)
        if params.guidance_scale != 1:
            rule = f"guidance_scale must be 1 for a {self.PIPELINE}, whose guidance is true_cfg_scale"
            raise ValueError(f"{rule}, got {params.guidance_scale}")
        check_image_area(self, params)

    def latent_shape(self, params: Params) -> tuple[int, int, int]:
        """Return (C, h, w)."""
        return self.value("vae", "z_dim", int, 64), params.height // STRIDE, params.width // STRIDE

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of a prompt and its references, in the encoder's dtype.

        `before_0` [T, D] and so on are the tokens before each reference, `embeds` [T, D] the tokens after the last one;
        `embeds_mask` [T] is all True.
        """
        text = (prompt.negative if negative else prompt.text) or " "  # an empty text could not be encoded
        tokenizer, encoder = parts.processor.tokenizer, parts.text_encoder
        images, vision = [fit_reference(image, self.SEEN_AREA) for image in prompt.images], {}
        if images:
            vision = dict(parts.processor.images(images=images, return_tensors="pt"))
        lengths = [
            int(grid.prod()) // parts.processor.images.merge_size**2 for grid in vision.get("image_grid_thw", ())
        ]
        places = " ".join(
            f"<image{i}><|vision_start|>{PLACE * length}<|vision_end|>" for i, length in enumerate(lengths, start=1)
        )
        tokens = tokenizer([SYSTEM + TEMPLATE.format(places + text)], return_tensors="pt")
        is_image = tokens.input_ids == tokenizer.convert_tokens_to_ids(PLACE)
        inputs: dict[str, Tensor] = {**tokens, **vision, "mm_token_type_ids": is_image.int()}
        inputs = {name: to_device(tensor, encoder.device) for name, tensor in inputs.items()}
        hidden = encoder(**inputs, output_hidden_states=True).hidden_states[-1][0]
        cond, start = {}, len(tokenizer(SYSTEM).input_ids)
        for i, length in enumerate(lengths):
            first = start + int(is_image[0, start:].int().argmax())
            cond[f"before_{i}"], start = hidden[start:first], first + length
        return cond | {"embeds": hidden[start:], "embeds_mask": torch.ones(len(hidden) - start, dtype=torch.bool)}

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of the references, `reference_0` [C, h', w'] and so on."""
        images = [fit_reference(image, self.option(params, "image_area")) for image in prompt.images]
        return reference_latents(self, parts, images, params)

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `embeds_mask` [B, T], with guidance also their negatives; with references,
        `reference_0` and so on, latents [B, C, h', w'], and `before_0` and so on, embeddings [B, T', D].
        """
        references = [latents for name, latents in cond.items() if name.startswith("reference_")]
        images = [*references, x]
        tokens = torch.cat([latents.flatten(2).mT for latents in images], dim=1)

        def predict(sign: str) -> Tensor:
            texts = [cond[f"{sign}before_{i}"] for i in range(len(references))] + [cond[f"{sign}embeds"]]
            dtype = texts[-1].dtype
            return net(
                hidden_states=tokens.to(dtype),
                timestep=(sigma.float() * 1000).to(dtype) / 1000,  # rounded as in diffusers
                encoder_hidden_states=texts,
                encoder_hidden_states_mask=needed_mask(cond[f"{sign}embeds_mask"], x.device),
                img_shapes=[(latents.shape[-2], latents.shape[-1]) for latents in images],
            ).float()

        velocity = predict("")
        if self.is_guided(params):
            negative = predict("negative_")
            velocity = negative + self.option(params, "true_cfg_scale") * (velocity - negative)
        return velocity.mT.unflatten(2, x.shape[2:])

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return images [B, 16h, 16w, 3] in [0, 1], float32, on white, from clean latents x0 [B, C, h, w]."""
        mean, std = channel_statistics(self, x0)
        latents = (x0 * std + mean).to(parts.vae.dtype)
        decoded = parts.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0]
        color, alpha = (decoded.float() / 2 + 0.5).clamp(0, 1).split([3, 1], dim=1)
        return {"image": (color * alpha + 1 - alpha).movedim(1, -1)}, {}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, H/16, W/16] of opaque images [B, H, W, 3]: the mean of the VAE's code."""
        images = pixels(media["image"]).to(parts.vae.device, parts.vae.dtype)
        images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)
        code = parts.vae.encode(images[:, :, None]).latent_dist.mode()[:, :, 0].float()
        mean, std = channel_statistics(self, code)
        return (code - mean) / std
