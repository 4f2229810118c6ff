"""LTX-2's modules with positions: diffusers' classes, with float64 tables that any accelerator can use."""

from functools import partial, wraps
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import SeqAllToAllDim
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.pipelines import ltx2
from diffusers.pipelines.ltx2.connectors import LTX2RotaryPosEmbed1d
from torch import Tensor, nn

from omni_rollout.models.rotary import has_float64
from omni_rollout.types import to_device

Rotations = tuple[Tensor, Tensor]  # cosines and sines
Inputs = tuple[Tensor, ...]  # positional inputs
Hooked = tuple[Inputs, dict[str, Any]]  # inputs changed by a hook


class LTX2VideoTransformer3DModel(diffusers.LTX2VideoTransformer3DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.LTX2VideoTransformer3DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LTX2AudioVideoRotaryPosEmbed):
                module.__class__ = Positions


class LTX2TextConnectors(ltx2.LTX2TextConnectors):
    """Connectors of diffusers' class, under the same name."""

    @wraps(ltx2.LTX2TextConnectors.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LTX2RotaryPosEmbed1d):
                module.__class__ = TextPositions


class Positions(LTX2AudioVideoRotaryPosEmbed):
    """Rotations of frames or sound. Without float64 they are computed on the host, where the positions are, and cached.

    found: the positions of the last call, and their rotations.
    """

    found: tuple[Tensor, Rotations] | None = None

    def forward(self, coords: Tensor, device: torch.device) -> Rotations:
        """Return the rotations on the device for positions [B, axes, N, 2], which all samples share."""
        if has_float64(device):
            return super().forward(to_device(coords, device), device)
        if self.found is None or not torch.equal(self.found[0], coords[:1]):
            self.found = coords[:1], expand_rotations(super().forward(coords[:1]), 1, device)
        return expand_rotations(self.found[1], len(coords), device)


class TextPositions(LTX2RotaryPosEmbed1d):
    """Rotations of words; without float64 they are computed on the host."""

    def forward(self, batch_size: int, pos: int, device: torch.device) -> Rotations:
        """Return the rotations on the device for the first `pos` positions."""
        if has_float64(device):
            return super().forward(batch_size, pos, device)
        return expand_rotations(super().forward(1, pos, "cpu"), batch_size, device)


def expand_rotations(rotations: Rotations, num_samples: int, device: torch.device) -> Rotations:
    """Return one sample's rotations, on a device, for all samples."""
    cosines, sines = (
        (table if table.device.type == device.type else to_device(table, device)).expand(num_samples, *table.shape[1:])
        for table in rotations
    )
    return cosines, sines


def share_frames(net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
    """Make each rank's frames attend to all texts and sound, and all sound attend to all frames.

    diffusers' parallel attention has no backward pass if the numbers of keys and queries differ. It is kept for frames
    that attend to frames.

    mesh: mesh with the axis "ulysses".
    """
    ranks = mesh["ulysses"]
    for block in net.get_submodule("transformer_blocks").children():
        for name in ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"):
            block.get_submodule(name).processor._parallel_config = None  # type: ignore[union-attr]
        take = partial(_take_positions, ranks.get_local_rank(), ranks.size())
        block.get_submodule("audio_to_video_attn").register_forward_pre_hook(take, with_kwargs=True)
        gather = partial(_gather_frames, ranks.get_group(), ranks.size())
        block.get_submodule("video_to_audio_attn").register_forward_pre_hook(gather, with_kwargs=True)


def _take_positions(rank: int, size: int, module: nn.Module, frames: Inputs, inputs: dict[str, Any]) -> Hooked:
    """Return the inputs with the positions of the rank's own frames."""
    rotations = tuple(table.chunk(size, dim=-2)[rank] for table in inputs["query_rotary_emb"])
    return frames, {**inputs, "query_rotary_emb": rotations}


def _gather_frames(group: Any, size: int, module: nn.Module, sound: Inputs, inputs: dict[str, Any]) -> Hooked:
    """Return the inputs with the frames of all ranks; gradients are summed on the rank that owns each frame."""
    copies = inputs["encoder_hidden_states"][:, :, None].expand(-1, -1, size, -1)  # one per rank
    return sound, {**inputs, "encoder_hidden_states": SeqAllToAllDim.apply(group, copies, 2, 1)[:, :, 0]}
