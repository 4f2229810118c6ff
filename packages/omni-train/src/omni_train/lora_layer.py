"""Frozen layers with adapters, which peft injects in place of its own: a linear one, and one of experts.

The linear layer computes `W x + (alpha / rank) * B A x`; W is frozen, A is [rank, in], B is [out, rank] (LoRA, arXiv
2106.09685). A and B are float32 for any dtype of W. For a float32 input it computes the formula literally. For a lower
precision it rounds A and B to the dtype of its input and adds their product into the output of W: only matrix products,
and no other pass over activations. Or, as peft does, it computes that product in float32 and rounds the sum.

With DoRA (arXiv 2402.09353) each row of `W + (alpha / rank) * B A` is divided by its norm, a constant for gradients,
and multiplied by a trained magnitude. Magnitudes begin as the norms of W, and the output gets their relative change
times itself: at the start that is 0, and in a lower precision it is not rounded as a number near 1.

With PiSSA (arXiv 2404.02948) A and B begin as the largest part of W. W stays as it is: what they began with, A' and B'
of the adapter "initial", is subtracted. `B A - B' A'` is computed as `(B - B') A + B' (A - A')`, of twice the rank: the
differences are float32, or rounding to a lower precision would drop small steps. At the start it is 0.

A parameter of E experts, [E, out, in], has A [rank * E, in] and B [out, rank * E], in peft's order: A by expert, B by
rank. As in peft, its module computes with `W + (alpha / rank) * B A`, rounded to the dtype of W.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

INITIAL = "initial"  # adapter that is subtracted from the others of a layer
AT_ONCE = 2**22  # numbers of a weight whose rows' norms are computed together, in float32
SMALLEST = 1e-12  # norm: a row of zeros stays one


class AdaptedLayer(lora.LoraLayer):
    """A frozen layer with adapters of peft, one of which is active, or none."""

    parameter_name = "weight"  # what the adapters change
    in_float32 = False  # True where products of a linear layer's adapters are float32 for any input

    @property
    def frozen(self) -> nn.Parameter:
        """The parameter without adapters."""
        param: nn.Parameter = getattr(self.get_base_layer(), self.parameter_name)
        return param

    @property
    def active(self) -> str:
        """The active adapter, "" for none."""
        name = self.active_adapters[0]
        return name if name in self.lora_A and not self.disable_adapters else ""

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapter; parameters keep `requires_grad`, since a shard or a graph may refer to them."""
        self._active_adapter = adapter_names

    def enable_adapters(self, enabled: bool) -> None:
        """Switch all adapters on or off; parameters keep `requires_grad`, as in `set_adapter`."""
        self._disable_adapters = not enabled


class LoraLinear(AdaptedLayer, lora.Linear):
    """A frozen linear layer, `base_layer`, with adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output [..., out] for `x` [..., in]."""
        name = self.active
        if not name:
            return self.base_layer(x)
        (down, up), scale = minus(*factors_with_initial(self, name)), self.scaling[name]
        change = self._change_of_magnitudes(name) if has_dora(self, name) else None
        output: Tensor
        if x.dtype == torch.float32 or self.in_float32:
            output = self.base_layer(x) + linear(linear(x.float(), down), up) * scale
        else:
            output = _LowRank.apply(x, (self.base_layer.weight, self.base_layer.bias), down, up, scale)
        if change is not None:  # which the bias does not have
            bias: Tensor | None = self.base_layer.bias  # type: ignore[assignment]
            output = output + (output if bias is None else output - bias) * change.to(output.dtype)
        return output.to(x.dtype)

    def _change_of_magnitudes(self, name: str) -> Tensor:
        """Return the relative change [out], float32, of the magnitudes of the rows."""
        down, up, magnitudes = own_tensors(self, name)
        norms = torch.ops.omni_train.row_norms(self.frozen.detach(), down.detach(), up.detach(), self.scaling[name])
        return (magnitudes - norms) / norms


class ParamWrapper(AdaptedLayer, lora.ParamWrapper):  # peft finds a wrapper around another by this name
    """A module, `base_layer`, with adapters of a parameter [E, out, in]; or a wrapper of another parameter of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does with the changed parameter."""
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
        return out.view(*x.shape[:-1], out.shape[-1])  # also without rows

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
    """Add `scale * a @ b` into `out`; the compiler would turn `addmm_` into an addition to a copy of `out`."""
    if torch.compiler.is_compiling():
        torch.ops.omni_train.add_product_(out, a, b, scale)
        return out
    return out.addmm_(a, b, alpha=scale)


_OPS = torch.library.Library("omni_train", "FRAGMENT")
_OPS.define("add_product_(Tensor(a!) out, Tensor a, Tensor b, float scale) -> ()")


@torch.library.impl(_OPS, "add_product_", "CompositeExplicitAutograd")
def _(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    out.addmm_(a, b, alpha=scale)


_OPS.define("row_norms(Tensor weight, Tensor down, Tensor up, float scale) -> Tensor")  # so that no product is kept


@torch.library.impl(_OPS, "row_norms", "CompositeExplicitAutograd")
@torch.no_grad()
def row_norms(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the norms [out], float32, of the rows of a weight [out, in] with the product of its factors."""
    rows = max(1, AT_ONCE // weight.shape[1])
    parts = zip(weight.split(rows), up.split(rows), strict=True)
    norms = torch.cat([add_product(some.float(), down, ups, scale).norm(dim=1) for some, ups in parts])
    return norms.clamp(min=SMALLEST)


@register_flop_formula(torch.ops.omni_train.row_norms)
def _(weight: Sequence[int], down: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Return the operations of the product, from shapes."""
    return 2 * weight[0] * weight[1] * down[0]


def merged(layer: AdaptedLayer, name: str, weight: Tensor, *tensors: Tensor) -> Tensor:
    """Return a layer's weight with an adapter in it, in its dtype. tensors: those of `tensors_with_initial`."""
    factors, magnitudes = (tensors[:-1], tensors[-1]) if has_dora(layer, name) else (tensors, None)
    changed = add_product(weight.float(), *minus(*factors), layer.scaling[name])
    if magnitudes is not None:
        changed *= (magnitudes / changed.norm(dim=1).clamp(min=SMALLEST))[:, None]
    return changed.to(weight.dtype)


def has_dora(layer: AdaptedLayer, name: str) -> bool:
    """True if an adapter of a layer has magnitudes."""
    return name in layer.lora_magnitude_vector


def own_tensors(layer: AdaptedLayer, name: str) -> list[nn.Parameter]:
    """Return A, B and any magnitudes [out] of one layer's adapter."""
    magnitudes = [layer.lora_magnitude_vector[name].weight] if has_dora(layer, name) else []
    return [*factors(layer, name), *magnitudes]  # type: ignore[list-item]


def tensors_with_initial(layer: AdaptedLayer, name: str) -> list[nn.Parameter]:
    """Return A and B of one layer's adapter, those that are subtracted, if any, and any magnitudes."""
    return [*factors_with_initial(layer, name), *own_tensors(layer, name)[2:]]


def factors_with_initial(layer: AdaptedLayer, name: str) -> list[nn.Parameter]:
    """Return A and B of one layer's adapter, and those that are subtracted, if any."""
    return [factor for each in (name, INITIAL) if each in layer.lora_A for factor in factors(layer, each)]


def minus(down: Tensor, up: Tensor, *initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B; or with the initial ones, the factors of the difference of both products, of twice the rank."""
    if not initial:
        return down, up
    return torch.cat([down, down - initial[0]]), torch.cat([up - initial[1], initial[1]], dim=1)


def factors(layer: AdaptedLayer, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of one layer's adapter."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight  # type: ignore[return-value]
