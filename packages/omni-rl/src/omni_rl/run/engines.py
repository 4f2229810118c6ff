"""The engines that --engine names. To add one, add a class with the methods of `omni_rollout.Engine`, and a row here.

Imports no torch, because the check of settings imports this module.
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
    """open: opens the engine for the trained net. library: required by an engine with its own weights, else empty."""

    open: "Callable[[Model, nn.Module, Dist, torch.dtype, RolloutDtype, TextCache], Engine]"
    library: str = ""
    install: str = ""


def open_diffusers(
    model: "Model",
    net: "nn.Module",
    dist: "Dist",
    dtype: "torch.dtype",
    rollout_dtype: "RolloutDtype",
    texts: "TextCache",
) -> "Engine":
    """Open the embedded engine, which samples with the trained net."""
    from omni_rollout.engines.diffusers import DiffusersEngine

    return DiffusersEngine(model, model.load(device=dist.device, dtype=dtype, net=net), texts=texts)


def open_vllm_omni(
    model: "Model",
    net: "nn.Module",
    dist: "Dist",
    dtype: "torch.dtype",
    rollout_dtype: "RolloutDtype",
    texts: "TextCache",
) -> "Engine":
    """Open vLLM-Omni in this process, with its own copy of the weights."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine
    from omni_train.dist import same_error

    from omni_rl.settings.fields import prefix_errors

    together, quantization = partial(same_error, dist), None if rollout_dtype == "auto" else rollout_dtype
    with prefix_errors("--memory.rollout-dtype: ") if quantization else nullcontext():
        return VllmOmniEngine(
            model, device=dist.device, dtype=dtype, quantization=quantization, together=together, texts=texts
        )


ENGINES = {
    "diffusers": EngineRow(open_diffusers),
    "vllm-omni": EngineRow(
        open_vllm_omni, "vllm_omni", "in a clone run make install-vllm-omni, then the python in .venv-vllm-omni"
    ),
}
