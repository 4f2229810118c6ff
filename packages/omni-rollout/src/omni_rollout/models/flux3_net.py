"""FLUX.3's transformer: diffusers' modules and weights, with a text mask, and shifts computed once per sample.

Text, image and references each run through their own blocks, and then together. diffusers' forward takes one prompt
and treats its padding as part of it; here a batch may also have longer texts, whose positions are masked for others.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_flux3 import Flux3Attention, Flux3AttnProcessor
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

Rotary = tuple[Tensor, Tensor, Tensor | None]  # cosines and sines [N, d] of positions, mask of keys [B, 1, 1, N]


class Flux3Transformer2DModel(diffusers.Flux3Transformer2DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.Flux3Transformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Flux3Attention):
                module.set_processor(Attention())
                module.norm_q.__class__ = module.norm_k.__class__ = Norm

    def forward(
        self,
        *,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        img_ids: Tensor,
        txt_ids: Tensor,
        image_cond_hidden_states: Tensor | None = None,
        image_cond_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity [B, N, C] of an image's N latent pixels.

        hidden_states: latent pixels [B, N, C] of the image. timestep: [B], in [0, 1]. encoder_hidden_states: text
        embeddings [B, T, D]. encoder_hidden_states_mask: bool [B, T], False for positions of longer texts, or None.
        image_cond_hidden_states: latent pixels [B, M, C] of all references, or None. img_ids, txt_ids, image_cond_ids:
        positions [N, 4], [T, 4] and [M, 4].
        """
        dtype = hidden_states.dtype
        temb, clean_temb = (
            self.timestep_embedder(self.time_proj(level.to(dtype) * 1000).to(dtype))[:, None]
            for level in (timestep, torch.zeros_like(timestep))
        )
        mask = None if encoder_hidden_states_mask is None else encoder_hidden_states_mask[:, None, None]
        text_rotary = (*self.pos_embed(txt_ids), mask)
        text = self._run_stream_blocks(
            "txt", self.context_embedder(encoder_hidden_states), text_rotary, silu(clean_temb)
        )
        image_streams = [("image", hidden_states, img_ids, temb)]
        if image_cond_hidden_states is not None and image_cond_ids is not None:
            image_streams.append(("image_cond", image_cond_hidden_states, image_cond_ids, clean_temb))
        pieces, shifts, rotaries = [], [], [text_rotary]
        for name, tokens, ids, level in image_streams:
            rotaries.append((*self.pos_embed(ids), None))
            pieces.append(self._run_stream_blocks(name, self.x_embedders[name](tokens), rotaries[-1], silu(level)))
            shift = self.single_stream_modulations[name](silu(level))
            shifts.append(shift if len(image_streams) == 1 else shift.expand(-1, tokens.shape[1], -1))
        content, content_shift = torch.cat(pieces, dim=1), torch.cat(shifts, dim=1)
        text_shift = self.single_stream_modulations["txt"](silu(clean_temb))
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(*mask.shape[:3], content.shape[1])], dim=3)
        rotary = (torch.cat([cos for cos, _, _ in rotaries]), torch.cat([sin for _, sin, _ in rotaries]), mask)
        for block in self.single_transformer_blocks:
            text, content = self._run(block, content, text, content_shift, text_shift, rotary)
        velocity: Tensor = self.proj_out(self.norm_out(content[:, : hidden_states.shape[1]], temb))
        return velocity

    def _run_stream_blocks(self, name: str, tokens: Tensor, rotary: Rotary, level: Tensor) -> Tensor:
        """Return tokens [B, N, D] of one kind after the blocks in which they attend only to each other."""
        blocks: Iterable[nn.Module] = self.txt_mode_blocks if name == "txt" else self.mode_blocks[name]
        shift = self.early_stream_modulations[name](level)
        for block in blocks:
            tokens = self._run(block, tokens, shift, rotary)
        return tokens

    def _run(self, block: nn.Module, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, *inputs)
        return block(*inputs)


class Attention(Flux3AttnProcessor):
    """diffusers' attention, which receives the mask together with the positions."""

    def __call__(self, attn: Any, hidden_states: Tensor, attention_mask: None, image_rotary_emb: Rotary) -> Tensor:
        """Return the states [B, N, D] after attention."""
        cosines, sines, mask = image_rotary_emb
        states: Tensor = super().__call__(attn, hidden_states, mask, (cosines, sines))
        return states


class Norm(nn.RMSNorm):
    """torch's RMSNorm, whose weights may be bfloat16 while queries and keys are float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., d], float32, divided by its root mean square and scaled."""
        return rms_norm(x, self.normalized_shape, weight=self.weight.to(x.dtype), eps=self.eps)
