"""Krea 2's transformer: diffusers' class, with norms that add 1 to their weights in float32."""

from functools import wraps
from typing import Any

import diffusers
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from torch import Tensor
from torch.nn.functional import rms_norm


class Krea2Transformer2DModel(diffusers.Krea2Transformer2DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.Krea2Transformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Krea2RMSNorm):
                module.__class__ = Norm


class Norm(Krea2RMSNorm):
    """diffusers' norm for bfloat16 weights, for which diffusers would compute 1 + weight in steps of 1/128."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return states [..., D], divided by their root mean square and scaled by 1 + weight."""
        scale = self.weight.float() + 1
        return rms_norm(hidden_states.float(), (self.dim,), weight=scale, eps=self.eps).to(hidden_states.dtype)
