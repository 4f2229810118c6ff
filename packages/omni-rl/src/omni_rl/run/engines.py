"""The engines by the names of --engine. One more is a class with the methods of `omni_rollout.Engine`, and a row.

Imports no torch, as the settings are checked with it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from omni_rollout import Engine, Model
    from omni_rollout.conditioning import TextCache
    from omni_train.dist import Dist
    from torch import nn


class EngineRow(NamedTuple):
    """open: opens the engine, and the net that is trained. library: what it needs besides; install: how to get that."""

    open: "Callable[[Model, nn.Module | None, Dist, torch.dtype, TextCache], tuple[Engine, nn.Module]]"
    library: str = ""
    install: str = ""


def open_diffusers(
    model: "Model", net: "nn.Module | None", dist: "Dist", dtype: "torch.dtype", texts: "TextCache"
) -> "tuple[Engine, nn.Module]":
    """The embedded engine, which samples with the net that is trained; None loads the checkpoint's own."""
    from omni_rollout.engines.diffusers import DiffusersEngine

    parts = model.load(device=dist.device, dtype=dtype, net=net)
    return DiffusersEngine(model, parts, texts=texts), parts.net


def open_vllm_omni(
    model: "Model", net: "nn.Module | None", dist: "Dist", dtype: "torch.dtype", texts: "TextCache"
) -> "tuple[Engine, nn.Module]":
    """vLLM-Omni in this process, and beside it the net that is trained; None loads the checkpoint's own to the host."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine
    from omni_train.dist import same_error

    together = partial(same_error, dist)
    engine = VllmOmniEngine(model, device=dist.device, dtype=dtype, together=together, texts=texts)
    return engine, model.load_net(device="cpu", dtype=dtype) if net is None else net


ENGINES = {
    "diffusers": EngineRow(open_diffusers),
    "vllm-omni": EngineRow(
        open_vllm_omni, "vllm_omni", "run make install-vllm-omni, then the python in .venv-vllm-omni"
    ),
}
