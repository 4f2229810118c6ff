"""Low-rank adapters by name, the frozen reference under them, and moving averages.

peft manages adapters: their configuration, the names of their layers and tensors, and which of them is active; it
injects the layers of `omni_train.lora_layer`. The first adapter is the policy. Further adapters, such as "old", are
frozen copies: `ema_update` writes to them, `with adapter(module, "old")` uses them.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_train.lora_layer import (
    INITIAL,
    AdaptedLayer,
    LoraLinear,
    ParamWrapper,
    adapter_tensors,
    add_product,
    factors,
    has_dora,
)
from omni_train.weights.snapshot import ema_update_params

Init = Literal["default", "gaussian", "pissa"]


def add_lora(  # noqa: PLR0913 - all but two are keyword-only, and each is one of peft's
    module: nn.Module,
    targets: Sequence[str] | str,
    *,
    exclude: Sequence[str] = (),
    parameters: Sequence[str] = (),
    rank: int,
    alpha: float,
    use_rslora: bool = False,
    use_dora: bool = False,
    in_float32: bool = False,
    adapter: str = "default",
    seed: int,
    init: Init = "default",
) -> int:
    """Add an adapter to the linear layers named by `targets`, before `shard`; return the number of adapted layers.

    The first adapter becomes active and trainable, and everything else is frozen; a later one stays inactive and
    frozen. A new adapter does not change the output: A depends only on `seed` and the order of the layers, B is 0.
    There is no dropout, so that the sampling policy equals the trained one.

    Args:
        module: a diffusers model or any other module.
        targets: endings of layer names, such as "to_q", or one regular expression for whole names.
        exclude: endings of names of layers to leave out.
        parameters: endings of names of parameters [experts, out, in] to adapt too, such as "experts.down_proj".
        rank: inner size; for `parameters`, of each expert.
        alpha: scale; the adapter's product is multiplied by alpha / rank.
        use_rslora: multiply it by alpha / sqrt(rank), which keeps the scale of gradients at all ranks (rsLoRA, arXiv
            2312.03732).
        use_dora: also train the row norms of the adapted weight (DoRA, arXiv 2402.09353).
        in_float32: compute the adapters' products in linear layers in float32 for any input, as peft does; always on
            with DoRA and PiSSA.
        adapter: name of the new adapter.
        seed: seed of A; the same on every rank.
        init: A is uniform within sqrt(1 / in) ("default", as in the layer itself), or normal with standard deviation 1
            / rank ("gaussian"). With "pissa", A and B start as the weight's largest singular values and vectors (arXiv
            2404.02948), which peft finds by iteration and subtracts from the weight; a frozen adapter "initial" keeps
            them. All adapters of a module then have the same rank and scale.

    Raises:
        ValueError: the module is sharded or has an adapter of that name, a target matches no layer or a layer that is
            not linear, an exclusion matches none of the targets or all are excluded, `parameters` matches none or one
            without experts, `rank` is below 1, DoRA is combined with experts or PiSSA, or PiSSA does not match the
            layers or the earlier adapters.
    """
    if rank < 1:
        raise ValueError(f"rank must be >= 1, got {rank}")
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {get_args(Init)}, got {init!r}")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError("module must get its adapters before it is sharded, got sharded parameters")
    before = lora_layers(module)
    if adapter == INITIAL or any(adapter in layer.lora_A for layer in before.values()):
        raise ValueError(f"adapter must be a new name, got {adapter!r} again")
    active = next((layer.active_adapters for layer in before.values()), adapter)
    layers, of_experts = find_layers(module, targets, exclude=exclude, parameters=parameters, rank=rank, init=init)
    scales = {(layer.r[INITIAL], layer.scaling[INITIAL]) for layer in before.values() if INITIAL in layer.lora_A}
    if scales - {(rank, alpha / (rank**0.5 if use_rslora else rank))} or (before and bool(scales) != (init == "pissa")):
        raise ValueError("adapters of one module must all begin as PiSSA's, with one rank and scale, or none")
    if use_dora and (of_experts or init == "pissa"):
        raise ValueError(f"use_dora is of linear layers that begin at 0, got init {init!r} and parameters {of_experts}")
    longer = tuple(f".{name}" for name in layers)  # peft also matches names with these endings
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by the rank, or its square root
        use_rslora=use_rslora,
        use_dora=use_dora,
        target_modules=layers,  # peft would apply a regular expression to experts of transformers differently
        target_parameters=of_experts or None,
        exclude_modules=[name for name, _ in module.named_modules() if name not in layers and name.endswith(longer)],
        init_lora_weights="gaussian" if init == "gaussian" else True,
    )
    config._register_custom_module({nn.Linear: LoraLinear, nn.Module: ParamWrapper})  # the first that matches
    names = [adapter, INITIAL] if init == "pissa" and not before else [adapter]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # from earlier adapters
        for name in names:
            inject_adapter_in_model(config, module, name, low_cpu_mem_usage=True)  # uses no random numbers
    for layer in lora_layers(module).values():
        layer.set_adapter(active)
    added = adapter_layers(module, adapter).values()
    for layer in added:
        layer.in_float32 = in_float32 or use_dora or init == "pissa"
        for name in names:
            parts = [part[name] for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector) if name in part]
            for part, param in zip(parts, adapter_tensors(layer, name), strict=True):
                values = torch.empty(param.shape, dtype=torch.float32, device=layer.frozen.device)
                part.weight = nn.Parameter(values, requires_grad=name == active)
    if INITIAL in names:
        extract_principal(module, seed=seed)
    init_adapter(module, adapter, seed=seed, init=init)
    return len(added)


def find_layers(
    module: nn.Module,
    targets: Sequence[str] | str,
    *,
    exclude: Sequence[str] = (),
    parameters: Sequence[str] = (),
    rank: int = 1,
    init: Init = "default",
) -> tuple[list[str], list[str]]:
    """Return the names of the layers, and of the parameters of experts, to which `add_lora` adds an adapter.

    The module may be on the meta device; the arguments are as in `add_lora`.

    Raises:
        ValueError: a name matches no layer or one of the wrong kind, or the layers are too small for PiSSA.
    """
    layers = _exclude_layers(_match_layers(module, targets), exclude)
    of_experts = _match_parameters(module, parameters)
    if init == "pissa":
        _check_pissa({name: module.get_submodule(name).weight.shape for name in layers}, rank, of_experts)  # type: ignore[misc]
    return layers, of_experts


@torch.no_grad()
def init_adapter(module: nn.Module, adapter: str = "default", *, seed: int, init: Init = "default") -> None:
    """Initialize an adapter as `add_lora` does; sharded or not. On the meta device it does nothing.

    Args:
        module: a module with the adapter.
        adapter: name of the adapter.
        seed, init: as in `add_lora`.

    Raises:
        ValueError: with DoRA, a row of the weight has norm zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, layer in adapter_layers(module, adapter).items():
        down, up = factors(layer, adapter)
        if down.is_meta:
            continue
        if init == "pissa":
            for factor, first in zip((down, up), factors(layer, INITIAL), strict=True):
                factor.copy_(first)
            continue
        values = torch.empty(down.shape)  # in float32 on the CPU: the same on all devices
        if init == "gaussian":
            values.normal_(std=1 / layer.r[adapter], generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        if isinstance(down, DTensor):
            values = distribute_tensor(values, down.device_mesh, down.placements, src_data_rank=None)  # nothing is sent
        down.copy_(values)
        up.zero_()
        if has_dora(layer, adapter):
            tensors = (adapter_tensors(layer, adapter)[-1], layer.frozen)  # sharded by the same rows
            magnitudes, weight = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
            if not magnitudes.copy_(weight.float().norm(dim=1)).all():
                raise ValueError(f"use_dora must divide by the norms of rows, got a row of zeros in {name}: exclude it")


@torch.no_grad()
def extract_principal(module: nn.Module, *, seed: int) -> None:
    """Move the largest part of each weight into the adapter "initial" with peft; do nothing on the meta device."""
    for layer in adapter_layers(module, INITIAL).values():
        device = layer.frozen.device
        if device.type != "meta":
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(seed)
                layer.pissa_init(INITIAL, "pissa_niter_16")


@contextmanager
@torch.no_grad()
def same_initial_weights(module: nn.Module) -> Iterator[None]:
    """Preserve the effective weights of PiSSA layers while the `with` block replaces the adapter "initial".

    It is needed if a device of another kind has found a slightly different largest part.

    Raises:
        ValueError: the rest is quantized, so it cannot be adjusted.
    """
    layers = {name: layer for name, layer in lora_layers(module).items() if INITIAL in layer.lora_A}
    before = [[factor.clone() for factor in factors(layer, INITIAL)] for layer in layers.values()]
    yield
    for (name, layer), kept in zip(layers.items(), before, strict=True):
        (old_down, old_up), (down, up), scale = kept, factors(layer, INITIAL), layer.scaling[INITIAL]
        if old_down.equal(down) and old_up.equal(up):
            continue
        if not isinstance(layer.frozen, nn.Parameter):
            raise ValueError(f"init pissa must find the same part of a quantized weight again, did not for {name}")
        whole = add_product(layer.frozen.float(), old_down, old_up, scale)
        layer.frozen.copy_(add_product(whole, down, up, -scale))


def lora_layers(module: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers that carry adapters, by module name; empty without LoRA."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLayer)}


def adapted_params(module: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers that carry adapters, by the names that their frozen parameters have without adapters."""
    return {f"{base_name(name)}.{layer.parameter_name}": layer for name, layer in lora_layers(module).items()}


def base_name(name: str) -> str:
    """Return the name that a layer, parameter or buffer has without adapters."""
    return name.replace(".base_layer", "")


def unadapted_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that adapters do not change, by their names without adapters; all of them without LoRA.

    Adapters and the weights below them are omitted: a receiver of weights needs their merged value.
    """
    adapted, adapters = adapted_params(module), all_factors(module)
    for name, param in module.named_parameters():
        if param not in adapters and base_name(name) not in adapted:
            yield base_name(name), param


@contextmanager
def adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Run the module with adapter `name` instead of the active one in the `with` block."""
    adapter_layers(module, name)  # raises for an unknown name
    with _restore_active(module) as layers:
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
    with _restore_active(module) as layers:
        for layer in layers:
            layer.set_adapter(INITIAL)  # exists only with PiSSA
            layer.enable_adapters(INITIAL in layer.lora_A)
        yield


def ema_update(module: nn.Module, src: str, dst: str, decay: float) -> None:
    """Move adapter `dst` towards adapter `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not."""
    ema_update_params(adapter_params(module, src), adapter_params(module, dst), decay)


def adapter_params(module: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters of one adapter: A, then B, then any magnitudes, layer by layer in the module's order.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    return [p for layer in adapter_layers(module, name).values() for p in adapter_tensors(layer, name)]


def adapter_layers(module: nn.Module, name: str) -> dict[str, AdaptedLayer]:
    """Return the layers that carry one adapter, by module name.

    Raises:
        ValueError: no layer has an adapter of that name.
    """
    layers = lora_layers(module)
    adapted = {key: layer for key, layer in layers.items() if name in layer.lora_A}
    if not adapted:
        known = sorted({key for layer in layers.values() for key in layer.lora_A})
        raise ValueError(f"adapter must be one of {known}, got {name!r}")
    return adapted


def all_factors(module: nn.Module) -> set[nn.Parameter]:
    """Return A, B and any magnitudes of all layers and adapters."""
    return {p for layer in lora_layers(module).values() for name in layer.lora_A for p in adapter_tensors(layer, name)}


@contextmanager
def _restore_active(module: nn.Module) -> Iterator[list[AdaptedLayer]]:
    """Yield the layers with adapters, and restore their active adapters afterwards."""
    layers = list(lora_layers(module).values())
    before = [(layer, layer.active_adapters, layer.disable_adapters) for layer in layers]
    try:
        yield layers
    finally:
        for layer, names, is_disabled in before:
            layer.set_adapter(names)
            layer.enable_adapters(not is_disabled)


def _match_layers(module: nn.Module, targets: Sequence[str] | str) -> list[str]:
    """Return the names of the linear layers that match `targets`; raise ValueError unless each target matches one."""
    patterns = {targets: targets} if isinstance(targets, str) else {t: rf"(.*\.)?{re.escape(t)}" for t in targets}
    whole = re.compile("|".join(patterns.values()))
    inside = tuple(f"{name}." for name, layer in lora_layers(module).items() if isinstance(layer, LoraLinear))
    matches = {
        name: layer for name, layer in module.named_modules() if whole.fullmatch(name) and not name.startswith(inside)
    }
    missing = [target for target, pattern in patterns.items() if not any(re.fullmatch(pattern, n) for n in matches)]
    if missing or not patterns:
        linear = [name for name, layer in module.named_modules() if type(layer) in (nn.Linear, LoraLinear)]
        ends = sorted({re.sub(r"^.*\.(?=\D)", "", name) for name in linear})
        detail = f"found none named {missing}; it has the linear layers {', '.join(ends[:20])}"
        raise ValueError(f"targets must all name layers of {type(module).__name__}, {detail}")
    if others := [name for name, layer in matches.items() if type(layer) not in (nn.Linear, LoraLinear)]:
        raise ValueError(f"targets must name linear layers, got {others[0]}, a {type(matches[others[0]]).__name__}")
    return list(matches)


def _match_parameters(module: nn.Module, endings: Sequence[str]) -> list[str]:
    """Return the names of the parameters with these endings; raise ValueError unless each matches expert parameters."""
    adapters = all_factors(module)
    params = {base_name(name): param for name, param in module.named_parameters() if param not in adapters}
    matches = {ending: [name for name in params if f".{name}".endswith(f".{ending}")] for ending in endings}
    matched = [name for names in matches.values() for name in names]
    if missing := [ending for ending, names in matches.items() if not names]:
        raise ValueError(f"parameters must all name some of {type(module).__name__}, found none named {missing}")
    if others := [name for name in matched if params[name].ndim != 3]:
        raise ValueError(f"parameters must be [experts, out, in], got {others[0]}, {list(params[others[0]].shape)}")
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in matched}
    if others := [name for name, owner in owners.items() if getattr(owner, "is_transposed", False)]:
        raise ValueError(f"parameters must be [experts, out, in], got {others[0]}, whose module has [experts, in, out]")
    return matched


def _check_pissa(shapes: Mapping[str, tuple[int, ...]], rank: int, parameters: Sequence[str]) -> None:
    """Raise ValueError unless each layer's weight has at least `rank` singular values and there are no parameters."""
    if parameters:
        raise ValueError(f"init pissa is of linear layers, got parameters {list(parameters)}")
    for name, shape in shapes.items():
        if rank > min(shape):
            raise ValueError(
                f"rank must be at most {min(shape)} for init pissa, the smaller side of {name}, got {rank}"
            )


def _exclude_layers(layers: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the names without any of the endings; raise ValueError unless each ending matches and some remain."""
    endings = {name: re.compile(rf"(.*\.)?{re.escape(name)}") for name in exclude}
    missing = [name for name, ending in endings.items() if not any(map(ending.fullmatch, layers))]
    left = [name for name in layers if not any(ending.fullmatch(name) for ending in endings.values())]
    if missing or not left:
        raise ValueError(f"exclude must name some of the layers that targets name, got {list(exclude)}")
    return left
