"""vLLM's kernels that quantize to float8_e4m3, which its build without kernels lacks, by torch."""

import torch
from torch import Tensor

MOST = torch.finfo(torch.float8_e4m3fn).max


def static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, group_shape: object = None) -> None:
    """Write input / scale, in the nearest numbers of 8 bits."""
    result.copy_((input.float() / scale).clamp(-MOST, MOST).to(result.dtype))


def dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write the scale [1] with which the largest number fits, and input / scale."""
    scale.copy_((input.float().abs().max() / MOST).reshape(1))
    static_scaled_fp8_quant(result, input, scale)


def register() -> None:
    """Define them as operators of vLLM, where it has none."""
    if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()")
    library.define("dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")
    for kernel in (static_scaled_fp8_quant, dynamic_scaled_fp8_quant):
        library.impl(kernel.__name__, kernel, "CPU")
    _KEPT.append(library)  # or its operators go


_KEPT: list[torch.library.Library] = []
