"""The engines by the names of --engine. One more is a class with the methods of `omni_rollout.Engine`, and a row."""

from collections.abc import Callable
from functools import partial

import torch
from omni_rollout import Engine, Model
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.sampler import TextCache
from omni_train.dist import Dist, same_error
from torch import nn

OpenEngine = Callable[[Model, nn.Module | None, Dist, torch.dtype, TextCache], tuple[Engine, nn.Module]]


def open_diffusers(
    model: Model, net: nn.Module | None, dist: Dist, dtype: torch.dtype, texts: TextCache
) -> tuple[Engine, nn.Module]:
    """The embedded engine, which samples with the net that is trained; None loads the checkpoint's own."""
    parts = model.load(device=dist.device, dtype=dtype, net=net)
    return DiffusersEngine(model, parts, texts=texts), parts.net


def open_vllm_omni(
    model: Model, net: nn.Module | None, dist: Dist, dtype: torch.dtype, texts: TextCache
) -> tuple[Engine, nn.Module]:
    """vLLM-Omni in this process, and beside it the net that is trained; None loads the checkpoint's own to the host."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    together = partial(same_error, dist)
    engine = VllmOmniEngine(model, device=dist.device, dtype=dtype, together=together, texts=texts)
    return engine, model.load_net(device="cpu", dtype=dtype) if net is None else net


ENGINES: dict[str, OpenEngine] = {"diffusers": open_diffusers, "vllm-omni": open_vllm_omni}
