"""Qwen-Image's transformer: diffusers' class, with positions that any accelerator can use."""

from functools import cache, wraps
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0, QwenEmbedRope
from torch import Tensor

from omni_rollout.models.rotary import rotate, uses_real_rotation
from omni_rollout.types import to_device


class QwenImageTransformer2DModel(diffusers.QwenImageTransformer2DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.QwenImageTransformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pos_embed.__class__ = Positions
        for block in self.transformer_blocks:
            block.attn.set_processor(Attention())


class Positions(QwenEmbedRope):
    """Frequencies as complex numbers, or as angles if rotations are real."""

    @cache  # noqa: B019  # as in diffusers
    def _get_device_freqs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if not uses_real_rotation(device):
            return super()._get_device_freqs(device)
        return to_device(self.pos_freqs.angle(), device), to_device(self.neg_freqs.angle(), device)


class Attention(QwenDoubleStreamAttnProcessor2_0):
    """diffusers' attention, which also accepts angles."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the image [B, N, D] and of the text [B, T, D] after joint attention.

        encoder_hidden_states_mask: bool [B, T], False for padding. image_rotary_emb: frequencies or angles, [N, d/2]
        for the image and [T, d/2] for the text.
        """
        if image_rotary_emb is None or image_rotary_emb[0].is_complex():
            inputs = hidden_states, encoder_hidden_states, encoder_hidden_states_mask, None, image_rotary_emb
            return super().__call__(attn, *inputs)
        image, text, size = hidden_states, encoder_hidden_states, attn.inner_dim // attn.heads
        image_angles, text_angles = image_rotary_emb
        of_text = attn.add_q_proj, attn.norm_added_q, attn.add_k_proj, attn.norm_added_k, attn.add_v_proj
        of_image = attn.to_q, attn.norm_q, attn.to_k, attn.norm_k, attn.to_v
        streams = []
        for x, angles, (to_q, norm_q, to_k, norm_k, to_v) in (
            (text, text_angles, of_text),
            (image, image_angles, of_image),
        ):
            query, key, value = (layer(x).unflatten(-1, (-1, size)) for layer in (to_q, to_k, to_v))
            streams.append((rotate(norm_q(query), angles), rotate(norm_k(key), angles), value))
        query, key, value = (torch.cat(parts, dim=1) for parts in zip(*streams, strict=True))
        text_mask, mask = encoder_hidden_states_mask, None
        if text_mask is not None:
            mask = torch.cat([text_mask, text_mask.new_ones(image.shape[:2])], dim=1)[:, None, None]
        settings = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out = dispatch_attention_fn(query, key, value, attn_mask=mask, **settings).flatten(2).to(query.dtype)
        return attn.to_out[0](out[:, text.shape[1] :]), attn.to_add_out(out[:, : text.shape[1]])
