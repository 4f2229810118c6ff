"""Low-rank adapters by name, the frozen reference under them, and moving averages.

peft owns adapters: their configuration, the names of their layers and tensors, and which of them is active; it injects
the layers of `omni_train.lora_linear`. The first adapter is the policy. Further adapters, such as "old", are frozen
copies: `ema_update` writes them, `with adapter(module, "old")` uses them.
"""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_train.lora_linear import LoraLinear, factors
from omni_train.weights.snapshot import ema_update_params

Init = Literal["default", "gaussian"]


def add_lora(  # noqa: PLR0913 - all but two are keyword-only, and each is one of peft's
    module: nn.Module,
    targets: Sequence[str] | str,
    *,
    exclude: Sequence[str] = (),
    rank: int,
    alpha: float,
    use_rslora: bool = False,
    adapter: str = "default",
    seed: int,
    init: Init = "default",
) -> int:
    """Add an adapter to the linear layers that `targets` names, before `shard`; return the number of layers.

    The first adapter becomes active and trainable and everything else is frozen; a later one stays inactive and frozen.
    A fresh adapter changes no output: A depends only on `seed` and the layers' order, B is 0. There is no dropout: the
    sampling policy must be the trained one.

    Args:
        module: a diffusers model or any other module.
        targets: endings of layer names, such as "to_q", or one regular expression for whole names.
        exclude: endings of names of layers that get none.
        rank: inner size.
        alpha: scale; the adapter's product is multiplied by alpha / rank.
        use_rslora: multiply it by alpha / sqrt(rank), which keeps the size of gradients at all ranks (rsLoRA, arXiv
            2312.03732).
        adapter: the new adapter's name.
        seed: of A; the same on every rank.
        init: of A: uniform within sqrt(1 / in) ("default", the layer's own), or normal with standard deviation
            1 / rank ("gaussian").

    Raises:
        ValueError: the module is sharded or has an adapter of that name, a target names no layer or one that is not
            linear, an exclusion names none of the targets or all are excluded, or `rank` is below 1.
    """
    if rank < 1:
        raise ValueError(f"rank must be >= 1, got {rank}")
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {get_args(Init)}, got {init!r}")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError("module must get its adapters before it is sharded, got sharded parameters")
    before = lora_layers(module)
    if any(adapter in layer.lora_A for layer in before.values()):
        raise ValueError(f"adapter must be a new name, got {adapter!r} again")
    active = next((layer.active_adapters for layer in before.values()), adapter)
    named = _without(_named(module, targets), exclude)
    longer = tuple(f".{name}" for name in named)  # peft also matches names that end like these
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by the rank, or its root
        use_rslora=use_rslora,
        target_modules=named,  # peft would apply a regular expression to experts of transformers differently
        exclude_modules=[name for name, _ in module.named_modules() if name not in named and name.endswith(longer)],
        init_lora_weights="gaussian" if init == "gaussian" else True,
    )
    config._register_custom_module({nn.Linear: LoraLinear})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # of the adapters before
        inject_adapter_in_model(config, module, adapter, low_cpu_mem_usage=True)  # samples no random number
    for layer in lora_layers(module).values():
        layer.set_adapter(active)
    added = adapter_layers(module, adapter).values()
    for layer in added:
        for side in (layer.lora_A[adapter], layer.lora_B[adapter]):
            side.to_empty(device=layer.weight.device).requires_grad_(not before)
    init_adapter(module, adapter, seed=seed, init=init)
    return len(added)


@torch.no_grad()
def init_adapter(module: nn.Module, adapter: str = "default", *, seed: int, init: Init = "default") -> None:
    """Initialize an adapter as `add_lora` does; sharded or not. On the meta device it does nothing.

    Args:
        module: with the adapter.
        adapter: its name.
        seed, init: as for `add_lora`.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(module, adapter).values():
        down, up = factors(layer, adapter)
        if down.is_meta:
            continue
        values = torch.empty(down.shape)  # in float32 on the CPU: the same for all devices
        if init == "gaussian":
            values.normal_(std=1 / len(values), generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        if isinstance(down, DTensor):
            values = distribute_tensor(values, down.device_mesh, down.placements, src_data_rank=None)  # nothing is sent
        down.copy_(values)
        up.zero_()


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers that carry adapters, by module name; empty without LoRA."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def base_name(name: str) -> str:
    """Return the name that a layer, parameter or buffer has without adapters."""
    return name.replace(".base_layer", "")


def unadapted_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that adapters do not change, by their names without adapters; all of them without LoRA.

    Adapters and the weights below them are left out: a receiver of weights needs their merged value.
    """
    left_out = tuple(f"{name}.{piece}" for name in lora_layers(module) for piece in ("lora_", "base_layer.weight"))
    for name, param in module.named_parameters():
        if not name.startswith(left_out):
            yield base_name(name), param


@contextmanager
def adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Run the module with adapter `name` instead of the active one in the `with` block."""
    adapter_layers(module, name)  # raises for an unknown one
    with _restored(module) as layers:
        for layer in layers:
            layer.set_adapter(name)
        yield


@contextmanager
def reference(module: nn.Module) -> Iterator[None]:
    """Run the module without any adapter, as it was before training, in the `with` block.

    Raises:
        ValueError: the module has no adapters; a fully trained module needs a frozen copy as its reference.
    """
    if not lora_layers(module):
        raise ValueError("module must have adapters to be its own reference, got none")
    with _restored(module) as layers:
        for layer in layers:
            layer.enable_adapters(False)
        yield


def ema_update(module: nn.Module, src: str, dst: str, decay: float) -> None:
    """Move adapter `dst` towards adapter `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not."""
    ema_update_params(adapter_params(module, src), adapter_params(module, dst), decay)


def adapter_params(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters of one adapter, A then B of each layer in the module's order.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    return [p for layer in adapter_layers(module, name).values() for p in factors(layer, name)]


def adapter_layers(module: nn.Module, name: str) -> dict[str, LoraLinear]:
    """Return the layers that carry one adapter, by module name.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    layers = lora_layers(module)
    found = {key: layer for key, layer in layers.items() if name in layer.lora_A}
    if not found:
        known = sorted({key for layer in layers.values() for key in layer.lora_A})
        raise ValueError(f"adapter must be one of {known}, got {name!r}")
    return found


def all_factors(module: nn.Module) -> set[nn.Parameter]:
    """Return A and B of every layer and adapter."""
    return {p for layer in lora_layers(module).values() for name in layer.lora_A for p in factors(layer, name)}


@contextmanager
def _restored(module: nn.Module) -> Iterator[list[LoraLinear]]:
    """Yield the layers with adapters, and restore their active adapters afterwards."""
    layers = list(lora_layers(module).values())
    before = [(layer, layer.active_adapters, layer.disable_adapters) for layer in layers]
    try:
        yield layers
    finally:
        for layer, names, is_disabled in before:
            layer.set_adapter(names)
            layer.enable_adapters(not is_disabled)


def _named(module: nn.Module, targets: Sequence[str] | str) -> list[str]:
    """Return the names of the linear layers that `targets` names; raise ValueError unless each names one."""
    patterns = {targets: targets} if isinstance(targets, str) else {t: rf"(.*\.)?{re.escape(t)}" for t in targets}
    whole = re.compile("|".join(patterns.values()))
    inside = tuple(f"{name}." for name in lora_layers(module))
    named = {
        name: layer for name, layer in module.named_modules() if whole.fullmatch(name) and not name.startswith(inside)
    }
    missing = [target for target, pattern in patterns.items() if not any(re.fullmatch(pattern, n) for n in named)]
    if missing or not patterns:
        raise ValueError(f"targets must all name layers of {type(module).__name__}, found none named {missing}")
    if others := [name for name, layer in named.items() if type(layer) not in (nn.Linear, LoraLinear)]:
        raise ValueError(f"targets must name linear layers, got {others[0]}, a {type(named[others[0]]).__name__}")
    return list(named)


def _without(named: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the names that have none of the endings; raise ValueError unless each ending is of one, and some stay."""
    endings = {name: re.compile(rf"(.*\.)?{re.escape(name)}") for name in exclude}
    missing = [name for name, ending in endings.items() if not any(map(ending.fullmatch, named))]
    left = [name for name in named if not any(ending.fullmatch(name) for ending in endings.values())]
    if missing or not left:
        raise ValueError(f"exclude must name some of the layers that targets name, got {list(exclude)}")
    return left
