"""Qwen-Image's transformer: diffusers' class, with positions for any accelerator."""

from functools import cache, wraps
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor

from omni_rollout.models.rotary import is_real
from omni_rollout.types import to_device


class QwenImageTransformer2DModel(diffusers.QwenImageTransformer2DModel):
    """The net of diffusers' class, under the same name."""

    @wraps(diffusers.QwenImageTransformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pos_embed.__class__ = Positions


class Positions(QwenEmbedRope):
    """Frequencies as complex numbers, or as angles where rotations are real."""

    @cache  # noqa: B019  # as in diffusers
    def _get_device_freqs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if not is_real(device):
            return super()._get_device_freqs(device)
        return to_device(self.pos_freqs.angle(), device), to_device(self.neg_freqs.angle(), device)
