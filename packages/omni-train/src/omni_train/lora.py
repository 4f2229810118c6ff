"""Low-rank adapters by name, the frozen reference under them, and moving averages.

A LoRA layer computes `W x + (alpha / rank) * B A x`; W is frozen, A is [rank, in], B is [out, rank] (LoRA,
arXiv 2106.09685). The first adapter is the policy. Further adapters, such as "old", are frozen copies: `ema_update`
writes them, `with adapter(module, "old")` uses them.

A and B are float32 whatever W is. In float32 a layer computes the formula as it stands. Below that it takes A and B
rounded to the dtype of W and adds their product into the output of W: matrix products alone, no other pass over the
activations. What is rounded is kept until A or B changes, which is once per optimizer step.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear

Pair = tuple[Tensor, Tensor]
Init = Literal["default", "gaussian"]


class LoraLinear(nn.Linear):
    """A frozen linear layer with adapters. `add_lora` makes it of a linear layer, whose parameters keep their names.

    lora_A, lora_B: A and B of each adapter, as the weights of layers. scaling: alpha / rank of each. active: the
    adapter that takes part if the layer has it, "" for none. rounded: A and B in the dtype of W, and the versions that
    they were made of.
    """

    lora_A: nn.ModuleDict  # noqa: N815 - the names in files
    lora_B: nn.ModuleDict  # noqa: N815
    scaling: dict[str, float]
    active: str
    rounded: dict[str, tuple[Pair, tuple[int, int]]]

    @property
    def dtype(self) -> torch.dtype:
        """That of W as it is used."""
        return self.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        """The output [..., out] for `input` [..., in]."""
        name = self.active
        if name not in self.lora_A:
            return super().forward(input)
        (down, up), scale = factors(self, name), self.scaling[name]
        if input.dtype == torch.float32:
            return super().forward(input) + linear(linear(input, down), up) * scale
        kept = self.rounded.get(name) if input.dtype != down.dtype else None
        pair = kept[0] if kept else (down.detach().to(input.dtype), up.detach().to(input.dtype))
        output: Tensor = _LowRank.apply(input, (self.weight, self.bias), down, up, pair, scale)
        return output


class _LowRank(torch.autograd.Function):
    """`W x + b + scale * B A x` with A and B rounded; gradients for x, and for A and B as they were before that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: tuple[Tensor, Tensor | None], down: Tensor, up: Tensor, rounded: Pair, scale: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ rounded[0].t()
        ctx.save_for_backward(rows, inner, layer[0], *rounded)
        ctx.scale, ctx.dtype, ctx.shape = scale, down.dtype, x.shape
        out = _add_product(linear(rows, *layer), inner, rounded[1].t(), scale)
        return out.view(*x.shape[:-1], out.shape[-1])  # of no rows too

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, down, up = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_inner = grad @ up
        grad_x = grad_down = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_x = _add_product(grad @ weight, grad_inner, down, ctx.scale).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            grad_down = (grad_inner.t() @ rows).mul_(ctx.scale).to(ctx.dtype)
            grad_up = (grad.t() @ inner).mul_(ctx.scale).to(ctx.dtype)
        return grad_x, None, grad_down, grad_up, None, None


def _add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Add `scale * a @ b` into `out`; where the compiler has only `addmm_`, it adds into a copy of `out`."""
    if torch.compiler.is_compiling():
        torch.ops.omni_train.add_product_(out, a, b, scale)
        return out
    return out.addmm_(a, b, alpha=scale)


_OPS = torch.library.Library("omni_train", "FRAGMENT")
_OPS.define("add_product_(Tensor(a!) out, Tensor a, Tensor b, float scale) -> ()")


@torch.library.impl(_OPS, "add_product_", "CompositeExplicitAutograd")
def _(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    out.addmm_(a, b, alpha=scale)


def add_lora(
    module: nn.Module,
    targets: Sequence[str] | str,
    *,
    rank: int,
    alpha: float,
    adapter: str = "default",
    seed: int,
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
        init: of A: uniform within sqrt(1 / in) ("default", the layer's own), or normal with standard deviation
            1 / rank ("gaussian").

    Raises:
        ValueError: the module is sharded or has an adapter of that name, a target names no layer or one that is not
            linear, or `rank` is below 1.
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
    active = next((layer.active for layer in before.values()), adapter)
    named = _named(module, targets)
    if not before:
        module.requires_grad_(False)
    for layer in [_as_lora(each, active) for each in named]:
        for side, shape in ((layer.lora_A, (rank, layer.in_features)), (layer.lora_B, (layer.out_features, rank))):
            factor = torch.empty(shape, dtype=torch.float32, device=layer.weight.device)
            side[adapter] = nn.ParameterDict({"weight": nn.Parameter(factor, requires_grad=not before)})
        layer.scaling[adapter] = alpha / rank
    draw_adapter(module, adapter, seed=seed, init=init)
    module.register_forward_pre_hook(partial(_round, list(adapter_layers(module, adapter).values()), adapter))
    return len(named)


@torch.no_grad()
def draw_adapter(module: nn.Module, adapter: str = "default", *, seed: int, init: Init = "default") -> None:
    """Give an adapter the values of a fresh one, as `add_lora` does; sharded or not, and on the meta device not at all.

    Args:
        module: with the adapter.
        adapter: its name.
        seed: as for `add_lora`.
        init: as for `add_lora`.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(module, adapter).values():
        down, up = factors(layer, adapter)
        if down.is_meta:
            continue
        drawn = torch.empty(down.shape)  # in float32 on the CPU, so that the kind of device does not matter
        if init == "gaussian":
            drawn.normal_(std=1 / len(drawn), generator=generator)
        else:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        if isinstance(down, DTensor):
            drawn = distribute_tensor(drawn, down.device_mesh, down.placements, src_data_rank=None)  # nothing is sent
        down.copy_(drawn)
        up.zero_()


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """The layers that carry adapters, by module name; empty without LoRA."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def unadapted_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that count as they are; all of them without LoRA.

    Left out are the adapters and the weights below them, for which a receiver of weights needs the merged value.
    """
    left_out = tuple(f"{name}.{piece}" for name in lora_layers(module) for piece in ("lora_", "weight"))
    for name, param in module.named_parameters():
        if not name.startswith(left_out):
            yield name, param


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
    with _switched(module, ""):
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


def adapter_layers(module: nn.Module, name: str) -> dict[str, LoraLinear]:
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


def all_factors(module: nn.Module) -> set[nn.Parameter]:
    """A and B of every layer and adapter."""
    return {p for layer in lora_layers(module).values() for name in layer.lora_A for p in factors(layer, name)}


def factors(layer: LoraLinear, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank, in] and B [out, rank] of one layer's adapter."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight  # type: ignore[return-value]


@contextmanager
def _switched(module: nn.Module, name: str) -> Iterator[None]:
    """Within the `with` block adapter `name` runs, or none with ""; afterwards what ran before."""
    before = [(layer, layer.active) for layer in lora_layers(module).values()]
    for layer, _ in before:
        layer.active = name
    try:
        yield
    finally:
        for layer, active in before:
            layer.active = active


def _named(module: nn.Module, targets: Sequence[str] | str) -> list[nn.Linear]:
    """The linear layers that `targets` names, in the module's order; raises ValueError unless each names one."""
    patterns = {targets: targets} if isinstance(targets, str) else {t: rf"(.*\.)?{re.escape(t)}" for t in targets}
    whole = re.compile("|".join(patterns.values()))
    named = {n: layer for n, layer in module.named_modules() if whole.fullmatch(n) and ".lora_" not in n}
    missing = [target for target, pattern in patterns.items() if not any(re.fullmatch(pattern, n) for n in named)]
    if missing or not patterns:
        raise ValueError(f"targets must all name layers of {type(module).__name__}, found none named {missing}")
    if others := [name for name, layer in named.items() if type(layer) not in (nn.Linear, LoraLinear)]:
        raise ValueError(f"targets must name linear layers, got {others[0]}, a {type(named[others[0]]).__name__}")
    return [layer for layer in named.values() if isinstance(layer, nn.Linear)]


def _as_lora(layer: nn.Linear, active: str) -> LoraLinear:
    """The same object as a LoRA layer: whoever holds it, hooks included, need not know."""
    if not isinstance(layer, LoraLinear):
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.lora_A, layer.lora_B, layer.scaling, layer.rounded = nn.ModuleDict(), nn.ModuleDict(), {}, {}
        layer.active = active
    return layer


@torch.compiler.disable  # versions are no part of a graph; blocks, which lie below, compile whole
def _round(layers: Sequence[LoraLinear], name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Before a forward, round anew what has changed of an active adapter; a sharded module gathers it rounded."""
    if layers[0].active != name or isinstance(module, FSDPModule):
        return
    for layer in layers:
        down, up = factors(layer, name)
        versions, dtype = (down._version, up._version), layer.dtype
        if dtype != torch.float32 and layer.rounded.get(name, ((), ()))[1] != versions:
            layer.rounded[name] = (down.detach().to(dtype), up.detach().to(dtype)), versions
