"""Krea 2 (github.com/krea-ai/krea-2), raw and turbo: text to image, a flow in the latents of Qwen-Image's VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text tokens, L text encoder
layers (12), D text width. The net fuses the hidden states of all L layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, check_size, needed_mask, pack, unpack
from omni_rollout.models.qwen_image import MAX_PROMPT_TOKENS, TEMPLATE, TEMPLATE_TOKENS, QwenVaeModel
from omni_rollout.types import Cond, Params, Parts, Prompt, to_device

BEFORE, AFTER = TEMPLATE.split("{}")
AFTER_TOKENS = 5
DISTILLED_MU = 1.15  # shift mu of the turbo checkpoint for all sizes


class Krea2(QwenVaeModel):
    """Krea 2 for one checkpoint. Its guidance is `guidance_scale`, on above 0; the turbo checkpoint requires 0."""

    PIPELINE = "Krea2Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen3VLModel"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "Krea2Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"text_encoder": ("visual",)}
    GUIDANCE: ClassVar[Mapping[str, float]] = {"guidance_scale": 0.0}
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("Krea2TransformerBlock", "Krea2TextFusionBlock")
    LORA_TARGETS: ClassVar[tuple[str, ...]] = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    LAYERS: ClassVar[tuple[int, ...]] = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)  # by default

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "z_dim", int)
        self._expect("transformer", in_channels=4 * channels, num_text_layers=len(self.layers))
        if self.config.get("patch_size", 2) != 2:
            rule = f"patch_size of {self.folder / 'model_index.json'} must be 2 for a {self.PIPELINE}"
            raise ValueError(f"{rule}, got {self.config['patch_size']!r:.80}")

    @property
    def layers(self) -> list[int]:
        """Hidden states of the text encoder that the net reads; 0 is the input of the first layer."""
        layers = self.config.get("text_encoder_select_layers")
        layers = list(self.LAYERS) if layers is None else layers
        texts = self.config["text_encoder"].get("text_config")
        num_layers = texts.get("num_hidden_layers") if isinstance(texts, dict) else None
        if not isinstance(num_layers, int):
            file = self.config_file("text_encoder")
            raise ValueError(f"text_config of {file} must have num_hidden_layers, got {texts!r:.80}")
        if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer <= num_layers for layer in layers):
            file = self.folder / "model_index.json"
            raise ValueError(f"text_encoder_select_layers of {file} must be from 0 to {num_layers}, got {layers!r:.80}")
        return layers

    def _class(self, part: str) -> Any:
        cls = super()._class(part)  # raises if diffusers is too old
        if part != "transformer":
            return cls
        from omni_rollout.models.krea2_net import Krea2Transformer2DModel

        return Krea2Transformer2DModel

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN)

    def _mu(self, params: Params) -> float:
        return DISTILLED_MU if self.config.get("is_distilled") else super()._mu(params)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, L, D] in the encoder's dtype, and `embeds_mask` [T], True.

        A long prompt is truncated before the end of the template.
        """
        text = BEFORE + (prompt.negative if negative else prompt.text)
        max_length = MAX_PROMPT_TOKENS + TEMPLATE_TOKENS - AFTER_TOKENS
        tokens = [
            parts.tokenizer([text], max_length=max_length, truncation=True, return_tensors="pt").input_ids,
            parts.tokenizer([AFTER], return_tensors="pt").input_ids,
        ]
        ids = to_device(torch.cat(tokens, dim=1), parts.text_encoder.device)  # without a mask, which would be all ones
        states = parts.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states
        embeds = torch.stack([states[layer][0, TEMPLATE_TOKENS:] for layer in self.layers], dim=1)
        return {"embeds": embeds, "embeds_mask": torch.ones(len(embeds), dtype=torch.bool)}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, L, D] and `embeds_mask` [B, T]; with guidance also their negatives.
        """
        tokens, (rows, columns) = pack(x), (torch.arange(side // 2, device=x.device) for side in x.shape[-2:])
        places = torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns)  # of the image; texts are at 0

        def predict(embeds: Tensor, mask: Tensor) -> Tensor:
            return net(
                hidden_states=tokens.to(embeds.dtype),
                timestep=(sigma.float() * 1000 / 1000).to(embeds.dtype),  # rounded as in diffusers
                encoder_hidden_states=embeds,
                encoder_attention_mask=needed_mask(mask, x.device),
                position_ids=pad(places, [0, 0, embeds.shape[1], 0]),
                return_dict=False,
            )[0].float()

        velocity = predict(cond["embeds"], cond["embeds_mask"])
        if self.is_guided(params):
            negative = predict(cond["negative_embeds"], cond["negative_embeds_mask"])
            velocity = velocity + params.guidance_scale * (velocity - negative)
        return unpack(velocity, x.shape)
