"""Attention on the CPU for vLLM-Omni's pipelines."""

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):
    """Scaled dot-product attention; vLLM-Omni's dispatch knows five platforms, and this is not one of them."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> torch.Tensor:
        """Attention of [B, T, heads, head size] tensors, with the metadata's mask."""
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    """The backend that has `CpuAttention`."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        """The class that computes."""
        return CpuAttention
