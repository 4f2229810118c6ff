"""Rotary positions on accelerators without complex numbers and float64.

diffusers lists the device types without float64; they also lack complex numbers, and rotate with real ones.
"""

import torch
from diffusers.utils.torch_utils import maybe_adjust_dtype_for_device
from torch import Tensor


def uses_real_rotation(device: torch.device) -> bool:
    """True if rotations on the device use real numbers."""
    return not has_float64(device)


def has_float64(device: torch.device) -> bool:
    """True if the device computes in float64 at a usable speed."""
    return maybe_adjust_dtype_for_device(torch.float64, device) == torch.float64


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return queries or keys [B, N, H, d] with neighboring pairs of entries rotated by angles [(B,) N, d/2]."""
    cosines, sines = (table.repeat_interleave(2, dim=-1).unsqueeze(-2) for table in (angles.cos(), angles.sin()))
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * cosines + turned.float() * sines).to(x.dtype)
