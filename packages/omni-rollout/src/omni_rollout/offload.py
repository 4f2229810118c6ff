"""Offloading of frozen modules while they are idle."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from omni_rollout.types import to_device

Slot = tuple[dict[str, Any], str, Tensor]  # a module's dict of tensors, a name in it, and the tensor


class Offloader:
    """Offloading of frozen modules' tensors from the device to copies on the host, from `begin` to `end`."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        places = tensor_slots(submodule for module in modules for submodule in module.modules())
        self._host = [(table, name, to_host(tensor)) for table, name, tensor in places if tensor.device == device]
        self._device = device

    def begin(self) -> None:
        """Free the tensors' memory on the device."""
        restore_host(self._host)

    def end(self) -> None:
        """Copy the tensors back to the device."""
        copy_to_device(self._host, self._device)


def tensor_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return the places of the tensors that belong directly to the modules."""
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def copy_to_device(places: list[Slot], device: torch.device) -> None:
    """Replace host tensors by copies on the device."""
    for table, name, tensor in places:
        copy = tensor.detach().to(device, non_blocking=True)
        table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def restore_host(places: list[Slot]) -> None:
    """Restore the host tensors."""
    for table, name, tensor in places:
        table[name] = tensor


def copy_on_call(unit: nn.Module, places: list[Slot], device: torch.device) -> None:
    """Copy host tensors, which are pinned here, to the device whenever a module runs, without blocking the host.

    Autograd keeps the copies that it needs for the backward pass.
    """
    for _, _, tensor in places if device.type != "cpu" else ():
        if not tensor.is_pinned():
            tensor.data = tensor.data.pin_memory()
    unit.register_forward_pre_hook(lambda *_: copy_to_device(places, device))
    unit.register_forward_hook(lambda *_: restore_host(places), always_call=True)


def run_offloaded(module: nn.Module, device: torch.device) -> None:
    """Make a frozen, offloaded module run on `device`, with its inputs; its outputs stay there. Call it once.

    A text encoder runs for a few texts per step. Its weights are copied each time, without blocking the host, and the
    device holds those of one block at a time.
    """
    module.register_forward_pre_hook(partial(_move_inputs, device), with_kwargs=True)
    for unit, inside in _units(module):
        copy_on_call(unit, tensor_slots(inside), device)


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each block (an entry of a list) with its modules, and each other module with tensors by itself."""
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        yield module, [module]
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, list(child.modules())
        else:
            yield from _units(child)


def _move_inputs(
    device: torch.device, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def move(value: Any) -> Any:
        return to_device(value, device) if isinstance(value, Tensor) else value

    return tuple(map(move, args)), {name: move(value) for name, value in kwargs.items()}


def offload_blocks(net: nn.Module, block_names: Collection[str], device: torch.device) -> None:
    """Move a net from the host to the device, except the blocks' frozen weights, which are copied while a block runs.

    Adapters stay on the device. Recompute the blocks; otherwise autograd keeps the copies for all of them.

    block_names: class names of the blocks.
    """
    blocks = [block for block in net.modules() if type(block).__name__ in block_names]
    block_places = [
        tensor_slots(module for name, module in block.named_modules() if ".lora_" not in name) for block in blocks
    ]
    for table, name, _ in chain(*block_places):
        table[name] = None
    net.to(device)
    for block, places in zip(blocks, block_places, strict=True):
        restore_host(places)
        copy_on_call(block, places, device)


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the host, pinned if it was on another device."""
    host = tensor.detach().to("cpu")
    host = host if tensor.device.type == "cpu" else host.pin_memory()
    return nn.Parameter(host, requires_grad=False) if isinstance(tensor, nn.Parameter) else host
