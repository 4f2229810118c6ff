"""The engines by the names of --engine. One more is a class with the methods of `omni_rollout.Engine`, and a row.

Imports no torch, as the settings are checked with it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from omni_rollout import Engine, Model
    from omni_rollout.conditioning import TextCache
    from omni_train.dist import Dist
    from torch import nn

RolloutDtype = Literal["auto", "int8", "fp8"]


class EngineRow(NamedTuple):
    """open: opens the engine for a net that is trained. library: what one with its own weights needs."""

    open: "Callable[[Model, nn.Module, Dist, torch.dtype, RolloutDtype, TextCache], Engine]"
    library: str = ""
    install: str = ""


def open_diffusers(
    model: "Model", net: "nn.Module", dist: "Dist", dtype: "torch.dtype", form: "RolloutDtype", texts: "TextCache"
) -> "Engine":
    """Open the embedded engine, which samples with the net that is trained."""
    from omni_rollout.engines.diffusers import DiffusersEngine

    return DiffusersEngine(model, model.load(device=dist.device, dtype=dtype, net=net), texts=texts)


def open_vllm_omni(
    model: "Model", net: "nn.Module", dist: "Dist", dtype: "torch.dtype", form: "RolloutDtype", texts: "TextCache"
) -> "Engine":
    """Open vLLM-Omni in this process, beside the net that is trained."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine
    from omni_train.dist import same_error

    from omni_rl.settings.fields import flag

    together, quantization = partial(same_error, dist), None if form == "auto" else form
    with flag("--memory.rollout-dtype: ") if quantization else nullcontext():
        return VllmOmniEngine(
            model, device=dist.device, dtype=dtype, quantization=quantization, together=together, texts=texts
        )


ENGINES = {
    "diffusers": EngineRow(open_diffusers),
    "vllm-omni": EngineRow(
        open_vllm_omni, "vllm_omni", "in a clone run make install-vllm-omni, then the python in .venv-vllm-omni"
    ),
}
