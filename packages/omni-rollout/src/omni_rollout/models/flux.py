"""FLUX.1, dev and schnell: text to image, a flow in the latents of an 8x VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text positions of T5 (512, or
256 for schnell), D text width, D' that of CLIP's pooled text. All texts fill all positions, so that nothing is masked.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import (
    PIXELS_PER_TOKEN,
    ImageModel,
    both,
    check_size,
    pack,
    text_ids,
    unpack,
)
from omni_rollout.types import Cond, Params, Parts, Prompt


class Flux1(ImageModel):
    """FLUX.1 for one checkpoint.

    `guidance_scale` is an input of the net of dev, which was distilled from a guided one; the net of schnell has none.
    The option `true_cfg_scale` is that of classifier-free guidance besides, on above 1.
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
    OPTIONS: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0}
    GUIDANCE = OPTIONS
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # as published; of the single blocks q, k and v alone
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    @property
    def takes_scale(self) -> bool:
        """Whether guidance_scale is an input of the net."""
        return self.value("transformer", "guidance_embeds", bool, False)

    def check(self, params: Params) -> None:
        """Raises ValueError for a size or option that the model lacks."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN)
        scale = params.guidance_scale
        if scale < 0:
            raise ValueError(f"guidance_scale must be >= 0, got {scale}")
        if scale != 1 and not self.takes_scale:
            raise ValueError(f"guidance_scale must be 1 for a {self.PIPELINE} without guidance_embeds, got {scale}")

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """The text features of one prompt: `embeds` [T, D] and `pooled` [D'], in the encoders' dtype."""
        text = prompt.negative if negative else prompt.text
        clip = text_ids(parts.tokenizer, parts.text_encoder, text, parts.tokenizer.model_max_length)
        t5 = text_ids(parts.tokenizer_2, parts.text_encoder_2, text, 512 if self.takes_scale else 256)
        return {"embeds": parts.text_encoder_2(t5)[0][0], "pooled": parts.text_encoder(clip).pooler_output[0]}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """The velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `pooled` [B, D']; with classifier-free guidance also their negatives, and both
        halves run as one batch.
        """
        embeds, pooled, tokens = cond["embeds"], cond["pooled"], pack(x)
        guided = self.is_guided(params)
        if guided:
            embeds, pooled = both(cond, "embeds"), both(cond, "pooled")
            tokens, sigma = torch.cat([tokens, tokens]), torch.cat([sigma, sigma])
        velocity = net(
            hidden_states=tokens.to(embeds.dtype),
            timestep=(sigma.float() * 1000).to(embeds.dtype) / 1000,  # diffusers' own rounding
            guidance=torch.full_like(sigma, params.guidance_scale) if self.takes_scale else None,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=x.new_zeros(embeds.shape[1], 3),
            img_ids=_places(x),
            return_dict=False,
        )[0].float()
        if guided:
            positive, negative = velocity.chunk(2)
            velocity = negative + self.option(params, "true_cfg_scale") * (positive - negative)
        return unpack(velocity, x.shape)


def _places(x: Tensor, picture: int = 0) -> Tensor:
    """The place [(h/2)(w/2), 3] of each token of latents [B, C, h, w]: picture, row and column."""
    rows, columns = (torch.arange(side // 2, device=x.device, dtype=torch.float32) for side in x.shape[-2:])
    return torch.cartesian_prod(torch.full_like(rows[:1], picture), rows, columns)
