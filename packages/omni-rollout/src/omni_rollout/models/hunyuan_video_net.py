"""HunyuanVideo 1.5's transformer: diffusers' modules and weights, with shapes that do not depend on texts.

diffusers' class moves each sample's words before its padding, for which the host waits in every forward pass; it has
tokens for an absent image, and a mask of all queries times all keys. Attention to words has no order, so here they
stay in place, absent tokens are omitted, and the mask covers only keys, or is None.

For 17 frames of 256 x 320 and 220 words this takes 0.45 of the operations of diffusers' pipeline, and 0.3 of the time
on a CPU; 0.9 of the time if diffusers' class gets no padding and an image without tokens. For 33 frames of 480 x 848,
it saves a mask of 0.2 GB, which would rule out flash attention.
"""

from functools import wraps
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor
from torch.nn.functional import pad


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.HunyuanVideo15Transformer3DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer_blocks:
            block.attn.set_processor(HunyuanVideoAttnProcessor2_0())

    def forward(
        self,
        *,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_2: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_attention_mask_2: Tensor | None = None,
        image_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity [B, C, f, h, w] at hidden_states [B, 2C + 1, f, h, w], latents with their condition.

        timestep: [B], from 0 to 1000. encoder_hidden_states: words [B, T, D]. encoder_hidden_states_2: glyphs
        [B, G, D']. The masks, bool [B, T] and [B, G], are False for padding; both None without padding.
        image_embeds: [B, I, D''].
        """
        B, _, f, h, w = hidden_states.shape
        temb, rope = self.time_embed(timestep), self.rope(hidden_states)
        context = [self._refine_tokens(encoder_hidden_states, timestep, encoder_attention_mask)]
        context += [self.context_embedder_2(encoder_hidden_states_2)]
        context += [] if image_embeds is None else [self.image_embedder(image_embeds)]
        words = torch.cat([x + kind for x, kind in zip(context, self.cond_type_embed.weight, strict=False)], dim=1)
        x, mask = self.x_embedder(hidden_states), None
        ranks = self._parallel_config.context_parallel_config.ulysses_degree if self._parallel_config else 1
        length, padding = words.shape[1], -words.shape[1] % ranks  # each rank takes equally many words
        if encoder_attention_mask is not None and encoder_attention_mask_2 is not None:
            text_mask = torch.cat([encoder_attention_mask, encoder_attention_mask_2], dim=1)
            mask = pad(text_mask, [0, length - text_mask.shape[1]], value=True)
        elif padding:
            mask = x.new_ones(B, length, dtype=torch.bool)
        if mask is not None:  # first the tokens and words of the first rank
            words, mask = pad(words, [0, 0, 0, padding]), pad(mask, [0, padding])
            pairs = zip(mask.new_ones(B, x.shape[1]).chunk(ranks, dim=1), mask.chunk(ranks, dim=1), strict=True)
            mask = torch.cat([part for pair in pairs for part in pair], dim=1)[:, None, None]
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x, words = self._gradient_checkpointing_func(block, x, words, temb, mask, rope)
            else:
                x, words = block(x, words, temb, mask, rope)
        velocity: Tensor = self.proj_out(self.norm_out(x, temb))
        size, time = self.config.patch_size, self.config.patch_size_t
        tokens = velocity.view(B, f // time, h // size, w // size, -1, time, size, size)
        return tokens.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(B, -1, f, h, w)

    def _refine_tokens(self, words: Tensor, timestep: Tensor, mask: Tensor | None) -> Tensor:
        """Return the words [B, T, D] for the blocks; values in padding are arbitrary."""
        embedder = self.context_embedder
        weights = words.new_ones(words.shape[:2]) if mask is None else mask.float()
        mean = (words * weights[..., None]).sum(dim=1) / weights.sum(dim=1, keepdim=True)
        temb, hidden = embedder.time_text_embed(timestep, mean.to(words.dtype)), embedder.proj_in(words)
        keys = None if mask is None else mask[:, None, None]
        for block in embedder.token_refiner.refiner_blocks:
            hidden = block(hidden, temb, keys)
        return hidden
