"""Offloading of frozen modules while they are idle."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from omni_rollout.types import to_device

Place = tuple[dict[str, Any], str, Tensor]  # a module's dict of tensors, a name in it, and the tensor


class Rest:
    """Offloading of frozen modules' tensors from the device to copies on the host, from `begin` to `end`."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        places = places_of(submodule for module in modules for submodule in module.modules())
        self._host = [(table, name, on_host(tensor)) for table, name, tensor in places if tensor.device == device]
        self._device = device

    def begin(self) -> None:
        """Free the tensors' memory on the device."""
        leave(self._host)

    def end(self) -> None:
        """Copy the tensors back to the device."""
        arrive(self._host, self._device)


def places_of(modules: Iterable[nn.Module]) -> list[Place]:
    """Return the places of the tensors that belong directly to the modules."""
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def arrive(places: list[Place], device: torch.device) -> None:
    """Replace host tensors by copies on the device."""
    for table, name, tensor in places:
        copy = tensor.detach().to(device, non_blocking=True)
        table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def leave(places: list[Place]) -> None:
    """Restore the host tensors."""
    for table, name, tensor in places:
        table[name] = tensor


def bring(unit: nn.Module, places: list[Place], device: torch.device) -> None:
    """Copy host tensors, which are pinned here, to the device whenever a module runs, without blocking the host.

    Autograd keeps the copies that it needs for the backward pass.
    """
    for _, _, tensor in places if device.type != "cpu" else ():
        if not tensor.is_pinned():
            tensor.data = tensor.data.pin_memory()
    unit.register_forward_pre_hook(lambda *_: arrive(places, device))
    unit.register_forward_hook(lambda *_: leave(places), always_call=True)


def visit(module: nn.Module, device: torch.device) -> None:
    """Make a frozen, offloaded module run on `device`, with its inputs; its outputs stay there. Call it once.

    A text encoder runs for a few texts per step. Its weights are copied each time, without blocking the host, and the
    device holds those of one block at a time.
    """
    module.register_forward_pre_hook(partial(_bring_inputs, device), with_kwargs=True)
    for unit, inside in _units(module):
        bring(unit, places_of(inside), device)


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each block (an entry of a list) with its modules, and each other module with tensors by itself."""
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        yield module, [module]
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, list(child.modules())
        else:
            yield from _units(child)


def _bring_inputs(
    device: torch.device, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def brought(value: Any) -> Any:
        return to_device(value, device) if isinstance(value, Tensor) else value

    return tuple(map(brought, args)), {name: brought(value) for name, value in kwargs.items()}


def bring_blocks(net: nn.Module, block_names: Collection[str], device: torch.device) -> None:
    """Move a net from the host to the device, except the blocks' frozen weights, which are copied while a block runs.

    Adapters stay on the device. Recompute the blocks; otherwise autograd keeps the copies for all of them.

    block_names: class names of the blocks.
    """
    blocks = [block for block in net.modules() if type(block).__name__ in block_names]
    block_places = [
        places_of(module for name, module in block.named_modules() if ".lora_" not in name) for block in blocks
    ]
    for table, name, _ in chain(*block_places):
        table[name] = None
    net.to(device)
    for block, places in zip(blocks, block_places, strict=True):
        leave(places)
        bring(block, places, device)


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the host, pinned if it was on another device."""
    host = tensor.detach().to("cpu")
    host = host if tensor.device.type == "cpu" else host.pin_memory()
    return nn.Parameter(host, requires_grad=False) if isinstance(tensor, nn.Parameter) else host
