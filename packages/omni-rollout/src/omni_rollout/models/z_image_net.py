"""Z-Image's transformer: diffusers' class, with positions that any accelerator can use."""

from functools import wraps
from typing import Any

import diffusers
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_z_image import RopeEmbedder, ZSingleStreamAttnProcessor
from torch import Tensor

from omni_rollout.models.rotary import rotate, uses_real_rotation
from omni_rollout.types import to_device


class ZImageTransformer2DModel(diffusers.ZImageTransformer2DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.ZImageTransformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope_embedder.__class__ = Positions
        for module in self.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(Attention())


class Positions(RopeEmbedder):
    """Frequencies as complex numbers, or as angles if rotations are real."""

    freqs_cis: list[Tensor] | None

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the frequencies [N, d/2] of positions [N, axes]."""
        if self.freqs_cis is None and uses_real_rotation(ids.device):
            tables = self.precompute_freqs_cis(self.axes_dims, self.axes_lens, theta=self.theta)
            self.freqs_cis = [to_device(table.angle(), ids.device) for table in tables]
        return super().__call__(ids)


class Attention(ZSingleStreamAttnProcessor):
    """diffusers' attention, which also accepts angles."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """Return the states [B, N, D] after attention, rotated by frequencies or angles [B, N, d/2]."""
        if freqs_cis is None or freqs_cis.is_complex():
            return super().__call__(attn, hidden_states, None, attention_mask, freqs_cis)
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (
            rotate(norm(x) if norm else x, freqs_cis) for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
        )
        mask = None if attention_mask is None else attention_mask[:, None, None]
        options = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out = dispatch_attention_fn(query, key, value, attn_mask=mask, **options)
        return attn.to_out[0](out.flatten(2))
