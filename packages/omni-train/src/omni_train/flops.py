"""Floating-point operations of a net's calls, counted on the meta device, and peak rates of devices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from omni_train.breaker import Breaker

PEAK_TFLOPS = {  # dense bfloat16, from the vendor, by part of the device's name, first match
    "H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, " B200": 2250, "A100": 312,
    "L40S": 362, "MI300X": 1307,
}  # fmt: skip
Calls = Counter[tuple[str, bool, torch.Size]]  # samples by phase, True with gradients, and shape of the first input


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak TFLOP/s of a device in bfloat16; None if it is not in the table."""
    name = device_name(device)
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device; "" for a CPU."""
    return str(getattr(torch.get_device_module(device), "get_device_name", lambda _: "")(device))


class FlopTable:
    """The operations per sample in a call of the net, by the shape [...] of its first input without the batch.

    There are two counts: for a forward pass, and for a forward and backward pass. They omit recomputation in gradient
    checkpointing, and texts longer than in the first call with a shape. An error disables the count. Calls are counted
    when their total is requested, so that no call is delayed.

    make: returns the net on the meta device, with its trained parameters.
    """

    def __init__(self, make: Callable[[], nn.Module], net: nn.Module) -> None:
        self.make, self.net = make, net
        self.known: dict[torch.Size, tuple[float, float]] = {}
        self.breaker = Breaker("the count of operations")
        self._seen: dict[tuple[torch.Size, object], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.watch()

    def watch(self) -> None:
        """Record the inputs of the net's calls, until all shapes are known."""
        self._hook = self.net.register_forward_pre_hook(self.breaker.wrap(self._record_call), with_kwargs=True)

    def total(self, calls: Calls) -> dict[str, float]:
        """Return the operations of calls, by phase; empty if a shape is new: its next call will count it."""
        return self.breaker(self._total, calls) or {}

    def _total(self, calls: Calls) -> dict[str, float]:
        recorded, self._seen = self._seen, {}
        for args, kwargs in recorded.values():
            self._count(args, kwargs)
        self._hook.remove()
        if not calls or any(shape not in self.known for _, _, shape in calls):
            self.watch()
            return {}
        total = Counter[str]()
        for (phase, is_trained, shape), samples in calls.items():
            total[phase] += samples * self.known[shape][is_trained]  # type: ignore[assignment]  # not integers
        return dict(total)

    def _record_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = first_input(args, kwargs)
        key = first[0].shape, kwargs.get("expert")
        if key in self._seen or key[0] in self.known or not first[0].is_floating_point():  # text has many shapes
            return
        self._seen[key] = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), (args, dict(kwargs)))

    @torch.enable_grad()
    def _count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = first_input(args, kwargs)
        if first[0].shape in self.known:
            return
        with FlopCounterMode(display=False) as counter:
            out = self.make()(*args, **kwargs)
            forward = counter.get_total_flops()
            trained = [t.sum() for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.backward(trained)
        if trained:  # otherwise a frozen expert; the next call may use another one
            self.known[first[0].shape] = forward / len(first), counter.get_total_flops() / len(first)


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the first input of a call: a batch, as one tensor or as a list with one tensor per sample."""
    first: Sequence[Tensor] = next(iter((*args, *kwargs.values())))
    return first
