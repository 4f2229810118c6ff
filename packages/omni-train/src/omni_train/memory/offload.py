"""What waits on the host while the device has no use for it: Adam's moments, and the inputs of recomputed blocks.

Copies are queued behind the work of the device, whose order they keep; the host memory is pinned where there is an
accelerator. No bit depends on where a tensor waits.
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

_BATCH_BYTES = 2**28  # of the parameters whose moments are on the device at a time
_MOMENTS = ("exp_avg", "exp_avg_sq")


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, for which the host does not wait; of a sharded tensor this rank's rows, sharded alike."""
    if isinstance(tensor, DTensor):
        return _with_local(tensor, to_host(tensor.to_local()))
    if tensor.device.type == "cpu":
        return tensor.detach().to("cpu")
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of what `to_host` gave."""
    if isinstance(tensor, DTensor):
        return _with_local(tensor, to_device(tensor.to_local(), device))
    return tensor.to(device, non_blocking=True)


def saved_on_host() -> AbstractContextManager[None]:
    """Within the `with` block, what is kept for the backward pass waits on the host."""

    def back(kept: tuple[torch.device, Tensor]) -> Tensor:
        return to_device(kept[1], kept[0])

    return saved_tensors_hooks(lambda tensor: (tensor.device, to_host(tensor)), back)


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments wait on the host, and visit the device for some parameters at a time, in `step`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no loss to return
        """Take a step, as AdamW does."""
        groups = self.param_groups
        for group in groups:
            having = [p for p in group["params"] if p.grad is not None]
            for batch in in_batches(having, _BATCH_BYTES, num_bytes=lambda p: _local(p).nbytes):
                self.param_groups = [{**group, "params": batch}]
                self._move(batch, partial(to_device, device=_local(batch[0]).device))
                super().step()
                self._move(batch, to_host)
        self.param_groups = groups
        synchronize()  # the host may read them now

    def rest(self) -> None:
        """Bring all moments to the host, as after loading."""
        self._move(self.state, to_host)
        synchronize()

    def _move(self, params: Iterable[Tensor], move: Callable[[Tensor], Tensor]) -> None:
        for state in [self.state[p] for p in params]:
            state |= {name: move(state[name]) for name in _MOMENTS if name in state}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A tensor sharded as that one, of other rows, which may lie elsewhere than the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)
