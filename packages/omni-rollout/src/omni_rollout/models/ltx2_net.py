"""LTX-2's modules with positions: diffusers' classes, whose tables of float64 any accelerator can use."""

from functools import wraps
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.pipelines import ltx2
from diffusers.pipelines.ltx2.connectors import LTX2RotaryPosEmbed1d
from torch import Tensor

from omni_rollout.models.rotary import has_float64
from omni_rollout.types import to_device

Rotations = tuple[Tensor, Tensor]  # cosines and sines


class LTX2VideoTransformer3DModel(diffusers.LTX2VideoTransformer3DModel):
    """The net of diffusers' class, under the same name."""

    @wraps(diffusers.LTX2VideoTransformer3DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LTX2AudioVideoRotaryPosEmbed):
                module.__class__ = Positions


class LTX2TextConnectors(ltx2.LTX2TextConnectors):
    """The connectors of diffusers' class, under the same name."""

    @wraps(ltx2.LTX2TextConnectors.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LTX2RotaryPosEmbed1d):
                module.__class__ = TextPositions


class Positions(LTX2AudioVideoRotaryPosEmbed):
    """Rotations of frames or sound: without float64 computed on the host, where the places are, once for equal ones.

    found: the places of the last call, and their rotations.
    """

    found: tuple[Tensor, Rotations] | None = None

    def forward(self, coords: Tensor, device: torch.device) -> Rotations:
        """Return the rotations on the device for places [B, axes, N, 2], which all samples share."""
        if has_float64(device):
            return super().forward(to_device(coords, device), device)
        if self.found is None or not torch.equal(self.found[0], coords[:1]):
            self.found = coords[:1], spread(super().forward(coords[:1]), 1, device)
        return spread(self.found[1], len(coords), device)


class TextPositions(LTX2RotaryPosEmbed1d):
    """Rotations of words: without float64 computed on the host."""

    def forward(self, batch_size: int, pos: int, device: torch.device) -> Rotations:
        """Return the rotations on the device of the first `pos` places."""
        if has_float64(device):
            return super().forward(batch_size, pos, device)
        return spread(super().forward(1, pos, "cpu"), batch_size, device)


def spread(rotations: Rotations, num_samples: int, device: torch.device) -> Rotations:
    """Return one sample's rotations on a device, for each of the samples."""
    cosines, sines = (
        (each if each.device.type == device.type else to_device(each, device)).expand(num_samples, *each.shape[1:])
        for each in rotations
    )
    return cosines, sines
