"""Low-rank adapters by name, the frozen reference under them, and moving averages.

A LoRA layer computes `W x + (alpha / rank) * B A x`; W is frozen, A is [rank, in], B is [out, rank] (LoRA,
arXiv 2106.09685). The first adapter is the policy. Further adapters, such as "old", are frozen copies: `ema_update`
writes them, `with adapter(module, "old")` uses them.

peft sets `requires_grad` anew whenever it switches adapters. A sharded module that runs at such a moment would take
over the wrong flags, so the functions here put them back at once: what is trained never changes.
"""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Init = Literal["default", "gaussian"]


def add_lora(
    module: nn.Module,
    targets: Sequence[str] | str,
    *,
    rank: int,
    alpha: float,
    adapter: str = "default",
    seed: int,
    dtype: torch.dtype = torch.float32,
    init: Init = "default",
) -> int:
    """Add an adapter to the linear layers that `targets` names; the number of those layers. Call it before `shard`.

    The first adapter becomes active and trainable and everything else is frozen; a later one stays inactive and frozen.
    A fresh adapter changes no output: A depends on `seed` and the layers' order alone, B is 0. There is no dropout, so
    that the policy that samples is the one that trains.

    Args:
        module: a diffusers model or any other module.
        targets: endings of layer names, such as "to_q", or one regular expression for whole names.
        rank: inner size.
        alpha: scale; the adapter's product is multiplied by alpha / rank.
        adapter: the new adapter's name.
        seed: of A; the same on every rank.
        dtype: of A and B, whatever that of W; the optimizer takes float32 alone.
        init: of A: uniform within sqrt(1 / in) ("default", the layer's own), or normal with standard deviation
            1 / rank ("gaussian").

    Raises:
        ValueError: the module is sharded or has an adapter of that name, a target names no layer, or `rank` is below 1.
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
    active = next(iter(before.values())).active_adapters if before else [adapter]
    _check_targets(module, targets)
    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)  # type: ignore[arg-type]
    _inject(module, config, adapter)
    _initialize(module, adapter, seed, dtype, init)
    layers = lora_layers(module).values()
    for layer in layers:
        layer.set_adapter(active)
    return len(adapter_layers(module, adapter))


def lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers that carry adapters, by module name; empty without LoRA."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def unadapted_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that count as they are, under the names they had before LoRA; all of them without LoRA.

    Left out are the adapters and the weights below them, for which a receiver of weights needs the merged value.
    """
    layers = lora_layers(module)
    left_out = tuple(piece for name in layers for piece in (f"{name}.lora_", f"{name}.base_layer.weight"))
    for name, param in module.named_parameters():
        if not name.startswith(left_out):
            yield name.replace(".base_layer.", "."), param


@contextmanager
def adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Run the module with adapter `name` instead of the active one, for the length of the `with` block."""
    adapter_layers(module, name)  # raises for an unknown one
    with _switched(module, name):
        yield


@contextmanager
def reference(module: nn.Module) -> Iterator[None]:
    """Run the module without any adapter, as it was before training, for the length of the `with` block.

    Raises:
        ValueError: the module has no adapters; a fully trained module needs a frozen copy as its reference.
    """
    if not lora_layers(module):
        raise ValueError("module must have adapters to be its own reference, got none")
    with _switched(module, None):
        yield


def ema_update(module: nn.Module, src: str, dst: str, decay: float) -> None:
    """Move adapter `dst` towards adapter `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not."""
    ema_update_params(adapter_params(module, src), adapter_params(module, dst), decay)


@torch.no_grad()
def ema_update_params(src: Sequence[Tensor], dst: Sequence[Tensor], decay: float) -> None:
    """Move each tensor of `dst` towards its partner in `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not.

    Raises:
        ValueError: `decay` is outside [0, 1], or the lists differ in length or shapes.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    if [p.shape for p in src] != [p.shape for p in dst]:
        raise ValueError(f"src and dst must have the same shapes, got {len(src)} and {len(dst)} tensors that differ")
    if decay == 0.0:  # a copy to the last bit, which the interpolation does not promise
        for old, new in zip(dst, src, strict=True):  # sharded tensors have no _foreach_copy_
            old.copy_(new)
    else:
        torch._foreach_lerp_(list(dst), list(src), 1.0 - decay)


def adapter_params(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters of one adapter, A then B of each layer in the module's order.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    return [p for layer in adapter_layers(module, name).values() for p in factors(layer, name)]


def adapter_layers(module: nn.Module, name: str) -> dict[str, LoraLayer]:
    """The layers that carry one adapter, by module name.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    layers = lora_layers(module)
    found = {key: layer for key, layer in layers.items() if name in layer.lora_A}
    if not found:
        known = sorted({key for layer in layers.values() for key in layer.lora_A})
        raise ValueError(f"adapter must be one of {known}, got {name!r}")
    return found


def factors(layer: LoraLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank, in] and B [out, rank] of one layer's adapter."""
    return layer.lora_A.get_parameter(f"{name}.weight"), layer.lora_B.get_parameter(f"{name}.weight")


@contextmanager
def _switched(module: nn.Module, name: str | None) -> Iterator[None]:
    """Within the `with` block adapter `name` runs, or none; afterwards what ran before."""
    before = [(layer, layer.active_adapters, not layer.disable_adapters) for layer in lora_layers(module).values()]
    flags = [(p, p.requires_grad) for p in module.parameters()]  # which peft's switches change
    for layer, _, _ in before:
        if name is None:
            layer.enable_adapters(False)
        else:
            layer.set_adapter(name)
    _set_trainable(flags)
    try:
        yield
    finally:
        for layer, active, enabled in before:
            layer.set_adapter(active)
            layer.enable_adapters(enabled)
        _set_trainable(flags)


def _set_trainable(flags: Sequence[tuple[nn.Parameter, bool]]) -> None:
    for p, flag in flags:
        p.requires_grad_(flag)


def _check_targets(module: nn.Module, targets: Sequence[str] | str) -> None:
    """Raises ValueError unless each target names a layer: peft is content when one of them does."""
    names = [name for name, _ in module.named_modules()]
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if missing or not targets:
        raise ValueError(f"targets must all name layers of {type(module).__name__}, found none named {missing}")


def _inject(module: nn.Module, config: LoraConfig, adapter: str) -> None:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws values that `_initialize` replaces
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second adapter is meant
        add_adapter = getattr(module, "add_adapter", None)  # diffusers keeps its own record of adapters
        if add_adapter is not None:
            add_adapter(config, adapter_name=adapter)
        else:
            inject_adapter_in_model(config, module, adapter_name=adapter)


@torch.no_grad()
def _initialize(module: nn.Module, adapter: str, seed: int, dtype: torch.dtype, init: Init) -> None:
    """Draw A in float32 on the CPU, so that the kind of device does not matter."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(module, adapter).values():
        down, up = factors(layer, adapter)
        drawn = torch.empty(down.shape)
        if init == "gaussian":
            drawn.normal_(std=1 / len(drawn), generator=generator)
        else:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        down.data = drawn.to(down.device, dtype)
        up.data = torch.zeros(up.shape, device=up.device, dtype=dtype)
