"""Attention on the CPU for vLLM-Omni's pipelines."""

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):
    """Scaled dot-product attention; vLLM-Omni's dispatch supports five platforms, but not this one."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> torch.Tensor:
        """Return the attention of [B, T, heads, head size] tensors, with the metadata's mask."""
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    """Backend with `CpuAttention`."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        """Return the class that computes attention."""
        return CpuAttention
