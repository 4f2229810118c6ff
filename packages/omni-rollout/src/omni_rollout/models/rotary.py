"""Rotary positions on accelerators without complex numbers and float64.

diffusers' table of rotations by device lists those that compute with complex numbers. Every other accelerator takes its
real form. diffusers also lists the kinds without float64.
"""

import torch
from diffusers.models.transformers.transformer_qwenimage import ROPE_PER_DEVICE, apply_rotary_emb_qwen_neuron
from diffusers.utils.torch_utils import maybe_adjust_dtype_for_device

rotate = apply_rotary_emb_qwen_neuron


def is_real(device: torch.device) -> bool:
    """True if rotations on that device are of real numbers; an accelerator that diffusers' table lacks is added."""
    if device.type not in ("cpu", "meta"):
        ROPE_PER_DEVICE.setdefault(device.type, rotate)
    return ROPE_PER_DEVICE.get(device.type) is rotate


def has_float64(device: torch.device) -> bool:
    """True if a device computes in float64, at a usable speed."""
    return maybe_adjust_dtype_for_device(torch.float64, device) == torch.float64
