"""torch versions of vLLM's 8-bit and activation kernels, which are missing in its build without kernels."""

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS, CutlassInt8ScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum
from vllm_omni.quantization import int8_config

MOST = torch.finfo(torch.float8_e4m3fn).max


def static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, group_shape: object = None) -> None:
    """Write input / scale in the nearest 8-bit numbers."""
    result.copy_((input.float() / scale).clamp(-MOST, MOST).to(result.dtype))


def dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write the scale [1] for which the largest number fits, and input / scale."""
    scale.copy_((input.float().abs().max() / MOST).reshape(1))
    static_scaled_fp8_quant(result, input, scale)


def dynamic_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    """Write each row's scale [rows, 1], which makes its largest number 127, and the nearest whole input / scale."""
    rows = input.reshape(len(scale), -1).float()
    scale.copy_(rows.abs().amax(1, keepdim=True) / 127)
    result.copy_((rows / scale).round().reshape(input.shape))


def cutlass_scaled_mm(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    """Write the product of two int8 matrices, of which `b` has a scale per column, plus the bias."""
    product = a.float() @ b.float() * a_scales * b_scales.t()
    out.copy_(product if bias is None else product + bias)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """Write the tanh approximation of GELU."""
    out.copy_(torch.nn.functional.gelu(input, approximate="tanh"))


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """Write the SiLU of the first half of the last axis times the second half."""
    gate, value = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * value)


OPERATORS = {
    gelu_new: "(Tensor! out, Tensor input) -> ()",
    silu_and_mul: "(Tensor! out, Tensor input) -> ()",
    static_scaled_fp8_quant: "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    dynamic_scaled_fp8_quant: "(Tensor! result, Tensor input, Tensor! scale) -> ()",
    dynamic_scaled_int8_quant: "(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    cutlass_scaled_mm: "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
}


class CutlassOnCpu(CutlassInt8ScaledMMLinearKernel):
    """int8 layers of an NVIDIA GPU, on the operators above."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that the kernel is supported."""
        return True, None


class LikeCuda:
    """What vLLM-Omni requires of the platform before it uses these layers."""

    is_npu = staticmethod(lambda: False)
    is_cuda = staticmethod(lambda: True)


def register() -> None:
    """Define the operators that vLLM lacks, and make vLLM-Omni use its int8 layers."""
    if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for kernel, form in OPERATORS.items():
        library.define(kernel.__name__ + form)
        library.impl(kernel.__name__, kernel, "CPU")
    _KEPT.append(library)  # otherwise its operators are removed
    _POSSIBLE_INT8_KERNELS[PlatformEnum.CPU].insert(0, CutlassOnCpu)
    int8_config.current_omni_platform = LikeCuda


_KEPT: list[torch.library.Library] = []
