"""The kernels that may compute attention, chosen once for sampling and training.

Left to itself torch chooses at every call, and may sample with other kernels than it takes gradients through. Where
they round differently, the ratio before the first update is not 1.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# By the names of torch's SDPBackend. auto leaves out cuDNN's, whose plan depends on whether gradients are wanted.
BACKENDS = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


def check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels on a few tokens, with and without gradients.

    Raises:
        ValueError: they do not run on the device, or not in the dtype.
    """
    for trained in (False, True):
        x = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype, requires_grad=trained)
        try:
            with sdpa_kernel(BACKENDS[name]):
                scaled_dot_product_attention(x, x, x)
        except RuntimeError as exc:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"attention must be auto, or have kernels for {kind} on {device.type}, got {name}"
            ) from exc


def choose_attention(module: nn.Module, name: str, block_names: Collection[str]) -> None:
    """Have the blocks of a module compute attention with these kernels alone, in the backward pass too.

    name: a key of BACKENDS. block_names: class names of the modules that hold all attention.
    """
    for block in module.modules():
        if type(block).__name__.removeprefix("FSDP") in block_names:  # where it is sharded already
            block.forward = sdpa_kernel(BACKENDS[name])(block.forward)
