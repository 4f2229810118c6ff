"""Offload to the host: Adam's moments between steps, and the inputs of recomputed blocks.

Copies are queued in the order of the device's work; host memory is pinned if there is an accelerator. Offloading does
not change results, bit for bit.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from omni_train.checkpoint.state import in_batches
from omni_train.dist import synchronize

_BATCH_BYTES = 2**28  # of parameters whose moments are on the device at a time
_MOMENTS = ("exp_avg", "exp_avg_sq")


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host without waiting for the copy; that of a sharded tensor is sharded in the same way."""
    if isinstance(tensor, DTensor):
        return _with_local(tensor, to_host(tensor.to_local()))
    if tensor.device.type == "cpu":
        return tensor.detach().to("cpu")
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a result of `to_host` to the device."""
    if isinstance(tensor, DTensor):
        return _with_local(tensor, to_device(tensor.to_local(), device))
    return tensor.to(device, non_blocking=True)


def saved_on_host() -> AbstractContextManager[None]:
    """Offload the tensors that the `with` block saves for the backward pass."""

    def to_original(kept: tuple[torch.device, Tensor]) -> Tensor:
        return to_device(kept[1], kept[0])

    return saved_tensors_hooks(lambda tensor: (tensor.device, to_host(tensor)), to_original)


class HostAdamW(torch.optim.AdamW):
    """AdamW with offloaded moments; `step` loads them for some parameters at a time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no loss to return
        """Take a step of AdamW."""
        groups = self.param_groups
        for group in groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            for batch in in_batches(with_grad, _BATCH_BYTES, num_bytes=lambda p: _local(p).nbytes):
                self.param_groups = [{**group, "params": batch}]
                self._move(batch, partial(to_device, device=_local(batch[0]).device))
                super().step()
                self._move(batch, to_host)
        self.param_groups = groups
        synchronize()  # the host may read them afterwards

    def offload(self) -> None:
        """Offload all moments, for example after loading."""
        self._move(self.state, to_host)
        synchronize()

    def _move(self, params: Iterable[Tensor], move: Callable[[Tensor], Tensor]) -> None:
        for state in [self.state[p] for p in params]:
            state |= {name: move(state[name]) for name in _MOMENTS if name in state}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a tensor sharded like `tensor`, with other rows, which need not be on the mesh's device."""
    return DTensor(local, tensor._spec, requires_grad=False)
