"""FLUX.3 klein-base: text to image, optionally with references, a flow in the latents of FLUX.2's VAE.

Shapes: B samples, C latent channels (128), h x w latent pixels (a sixteenth of the image; h' x w' of a reference),
T text tokens (a multiple of 80: the net attends to this padding), D text width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, needed_mask, resize_image
from omni_rollout.models.flux2 import MIN_SIDE, Flux2Klein, fit_reference
from omni_rollout.types import Cond, Params, Parts, Prompt

WINDOW, MAX_TEXT_TOKENS = 80, 8192
MAX_PIXELS, MAX_SIDE = 4 * 1024 * 1024, 4096  # of a single reference
PLACE_SCALE = 0.5  # step of rows and columns in the net's positions
SCHEDULER = {"shift": 6.93}  # from diffusers' pipeline, whose files have none


class Flux3Klein(Flux2Klein):
    """FLUX.3 klein-base for one checkpoint. Its guidance is `guidance_scale`, which is on above 1."""

    PIPELINE = "Flux3ModularPipeline"
    INDEX = "modular_model_index.json"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen3VLProcessor"),
        "transformer": ("diffusers", "Flux3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLFlux2"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    OPTIONAL: ClassVar[tuple[str, ...]] = ("scheduler",)
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": ("lm_head", "model.visual", "model.language_model.layers.33:")
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {}
    CONTEXT_PARALLEL = False
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock")
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "ff.linear_in",
        "ff.linear_out",
    )
    LAYERS: ClassVar[tuple[int, ...]] = (4, 8, 12, 16, 20, 24, 28, 32)

    def _check_config(self) -> None:
        self.config.setdefault("scheduler", dict(SCHEDULER))
        super()._check_config()
        self._expect("transformer", flow_map=False, cond_in_channels=self.value("transformer", "in_channels", int, 128))

    def _class(self, part: str) -> Any:
        if part == "tokenizer":
            from transformers import Qwen2Tokenizer  # the text half of the processor, which needs no torchvision

            return Qwen2Tokenizer
        cls = super()._class(part)  # raises if diffusers is too old
        if part != "transformer":
            return cls
        from omni_rollout.models.flux3_net import Flux3Transformer2DModel

        return Flux3Transformer2DModel

    def _mu(self, params: Params) -> float:
        return super(Flux2Klein, self)._mu(params)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt, hidden states of several layers.

        `embeds` [T, 8D] are in the encoder's dtype; `embeds_mask` [T] is all True, because the net also sees the
        padding to T.
        """
        chat = [{"role": "user", "content": prompt.negative if negative else prompt.text}]
        text = parts.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        tokens = parts.tokenizer([text], max_length=MAX_TEXT_TOKENS, truncation=True, return_tensors="pt")
        ids = tokens.input_ids.to(parts.text_encoder.device)
        padding = [0, min(-ids.shape[1] % WINDOW, MAX_TEXT_TOKENS - ids.shape[1])]
        mask, ids = pad(torch.ones_like(ids), padding), pad(ids, padding, value=parts.tokenizer.pad_token_id)
        places = torch.arange(ids.shape[1], device=ids.device)[None].masked_fill(mask == 0, 1)  # as in training
        states = parts.text_encoder(
            input_ids=ids, attention_mask=mask, position_ids=places, output_hidden_states=True, use_cache=False
        ).hidden_states
        embeds = torch.cat([states[layer][0] for layer in self.LAYERS], dim=-1)
        return {"embeds": embeds, "embeds_mask": torch.ones(len(embeds), dtype=torch.bool)}

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of the references, `reference_0` [C, h', w'] and so on; a single one is not cropped."""
        prepare = _pad_reference if len(prompt.images) == 1 else fit_reference
        return {
            f"reference_{i}": self.encode_media(parts, {"image": prepare(image)[None]}, params)[0]
            for i, image in enumerate(prompt.images)
        }

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, 8D] and `embeds_mask` [B, T], with guidance also their negatives; `reference_0` and so on:
        latents [B, C, h', w'] of references.
        """
        references = [latents for name, latents in cond.items() if name.startswith("reference_")]
        inputs: dict[str, Tensor] = {"img_ids": _token_positions(x, 0)}
        if references:
            inputs["image_cond_ids"] = torch.cat(
                [_token_positions(latents, -1 - i) for i, latents in enumerate(references)]
            )

        def predict(embeds: Tensor, mask: Tensor) -> Tensor:
            tokens = [latents.flatten(2).mT.to(embeds.dtype) for latents in (x, *references)]
            extra = {"image_cond_hidden_states": torch.cat(tokens[1:], dim=1)} if references else {}
            return net(
                hidden_states=tokens[0],
                timestep=(sigma.float() * 1000 / 1000).to(embeds.dtype),  # rounded as in diffusers
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=needed_mask(mask, x.device),
                txt_ids=pad(torch.arange(embeds.shape[1], device=x.device).float()[:, None], [3, 0]),
                **inputs,
                **extra,
            ).float()

        velocity = predict(cond["embeds"], cond["embeds_mask"])
        if self.is_guided(params):
            negative = predict(cond["negative_embeds"], cond["negative_embeds_mask"])
            velocity = negative + params.guidance_scale * (velocity - negative)
        return velocity.mT.unflatten(2, x.shape[2:])


def _pad_reference(image: Tensor) -> Tensor:
    """Return a reference, uint8 [H, W, 3], downscaled if too large and padded by reflection to whole tokens."""
    height, width = image.shape[:2]
    scale = min(1.0, math.sqrt(MAX_PIXELS / (width * height)), MAX_SIDE / max(width, height))
    sizes = round(height * scale), round(width * scale)
    while math.prod(map(_padded_side, sizes)) > MAX_PIXELS:  # with their padding
        scale *= 0.995
        sizes = round(height * scale), round(width * scale)
    image = image if sizes == (height, width) else resize_image(image, *sizes)
    top, left = ((_padded_side(size) - size) // 2 for size in sizes)
    edges = [left, _padded_side(sizes[1]) - sizes[1] - left, top, _padded_side(sizes[0]) - sizes[0] - top]
    return pad(image.movedim(-1, 0).float(), edges, mode="reflect").movedim(0, -1).to(image.dtype)


def _padded_side(side: int) -> int:
    """Return a side length in whole tokens that holds `side` pixels."""
    return min(MAX_SIDE, max(MIN_SIDE, -(-side // PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN))


def _token_positions(latents: Tensor, last: int) -> Tensor:
    """Return the position (0, row, column, last) of each latent pixel of [B, C, h, w], [hw, 4]."""
    rows, columns = (torch.arange(side, device=latents.device) * PLACE_SCALE for side in latents.shape[2:])
    return torch.cartesian_prod(rows.new_zeros(1), rows, columns, rows.new_full([1], last))
