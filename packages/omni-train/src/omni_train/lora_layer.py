"""Frozen layers with adapters, which peft injects instead of its own: for linear layers and for experts.

The linear layer computes `W x + (alpha / rank) * B A x`; W is frozen, A is [rank, in], B is [out, rank] (LoRA, arXiv
2106.09685). A and B are float32 for any dtype of W. For a float32 input, or with `in_float32`, this is peft's own
layer, which also computes peft's other kinds of adapters. For a lower precision, it rounds A and B to the dtype of the
input and adds their product to the output of W: only matrix products, and no other pass over activations.

A parameter of E experts, [E, out, in], has A [rank * E, in] and B [out, rank * E], in peft's order: A by expert, B by
rank. As in peft, its module computes with `W + (alpha / rank) * B A`, rounded to the dtype of W.
"""

from typing import Any

import torch
from peft.tuners import lora
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

INITIAL = "initial"  # frozen adapter with the part that PiSSA has subtracted from the weights


class AdaptedLayer(lora.LoraLayer):
    """A frozen layer with peft adapters, of which at most one is active."""

    parameter_name = "weight"  # the parameter that the adapters change
    in_float32 = False  # True if peft computes a linear layer's adapters, in float32 for any input

    @property
    def frozen(self) -> nn.Parameter:
        """The parameter without adapters."""
        param: nn.Parameter = getattr(self.get_base_layer(), self.parameter_name)
        return param

    @property
    def active(self) -> str:
        """The name of the active adapter, "" if there is none."""
        name = self.active_adapters[0]
        return name if name in self.lora_A and not self.disable_adapters else ""

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapter; parameters keep `requires_grad`, since a shard or a graph may refer to them."""
        self._active_adapter = adapter_names

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable all adapters; parameters keep `requires_grad`, as in `set_adapter`."""
        self._disable_adapters = not enabled


class LoraLinear(AdaptedLayer, lora.Linear):
    """A frozen linear layer, `base_layer`, with adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output [..., out] for `x` [..., in]."""
        name = self.active
        output: Tensor
        if not name or self.in_float32 or x.dtype == torch.float32:
            output = super().forward(x, *args, **kwargs)
        else:
            layer = self.base_layer.weight, self.base_layer.bias
            output = _LowRank.apply(x, layer, *factors(self, name), self.scaling[name])
        return output


@torch.compiler.substitute_in_graph(dequantize_module_weight)  # the compiler cannot trace its class check
def _(module: nn.Module) -> nn.Parameter:
    """Return the weight of a layer with DoRA's magnitudes: its own, or as dequantized by its class."""
    return module.weight  # type: ignore[return-value]


class ParamWrapper(AdaptedLayer, lora.ParamWrapper):  # peft finds nested wrappers by this name
    """A module, `base_layer`, with adapters on a parameter [E, out, in]; or a wrapper of another of its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output with the adapted parameter."""
        name = self.active
        if not name:
            return self.base_layer(*args, **kwargs)
        inside, place = self.base_layer, self.parameter_name
        while isinstance(inside, ParamWrapper):
            inside, place = inside.base_layer, f"base_layer.{place}"
        changed = add_product(self.frozen, *factors(self, name), self.scaling[name])
        return functional_call(self.base_layer, {place: changed}, args, kwargs)


def add_product(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return a weight [out, in] or [E, out, in] plus `scale` times the product of its factors, in its dtype."""
    down, up = down.to(weight.dtype), up.to(weight.dtype)
    if weight.ndim == 2:
        return torch.addmm(weight, up, down, alpha=scale)
    ups = up.unflatten(1, (-1, len(weight))).permute(2, 0, 1)
    return torch.baddbmm(weight, ups, down.unflatten(0, (len(weight), -1)), alpha=scale)


class _LowRank(torch.autograd.Function):
    """`W x + b + scale * B A x` with A and B rounded; gradients for x, and for A and B before rounding."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: tuple[Tensor, Tensor | None], down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rounded_down, rounded_up = down.to(x.dtype), up.to(x.dtype)
        inner = rows @ rounded_down.t()
        ctx.save_for_backward(rows, inner, layer[0], rounded_down, rounded_up)
        ctx.scale, ctx.dtype, ctx.shape = scale, down.dtype, x.shape
        out = _add_product(linear(rows, *layer), inner, rounded_up.t(), scale)
        return out.view(*x.shape[:-1], out.shape[-1])  # also for zero rows

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
        return grad_x, None, grad_down, grad_up, None


def _add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Add `scale * a @ b` to `out`; the compiler would turn `addmm_` into an addition to a copy of `out`."""
    if torch.compiler.is_compiling():
        torch.ops.omni_train.add_product_(out, a, b, scale)
        return out
    return out.addmm_(a, b, alpha=scale)


_OPS = torch.library.Library("omni_train", "FRAGMENT")
_OPS.define("add_product_(Tensor(a!) out, Tensor a, Tensor b, float scale) -> ()")


@torch.library.impl(_OPS, "add_product_", "CompositeExplicitAutograd")
def _(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    out.addmm_(a, b, alpha=scale)


def merge_weight(
    layer: AdaptedLayer, name: str, weight: Tensor, down: Tensor, up: Tensor, *magnitudes: Tensor
) -> Tensor:
    """Return a layer's whole weight merged with an adapter, in its dtype. The tensors are `adapter_tensors`."""
    changed = add_product(weight.float(), down, up, layer.scaling[name])
    for magnitude in magnitudes:  # one tensor, with DoRA
        changed *= (magnitude / changed.norm(dim=1))[:, None]
    return changed.to(weight.dtype)


def has_dora(layer: AdaptedLayer, name: str) -> bool:
    """True if an adapter of the layer has magnitudes."""
    return name in layer.lora_magnitude_vector


def adapter_tensors(layer: AdaptedLayer, name: str) -> list[nn.Parameter]:
    """Return A, B and any magnitudes [out] of one layer's adapter."""
    magnitudes = [layer.lora_magnitude_vector[name].weight] if has_dora(layer, name) else []
    return [*factors(layer, name), *magnitudes]  # type: ignore[list-item]


def factors(layer: AdaptedLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of one layer's adapter."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight  # type: ignore[return-value]
