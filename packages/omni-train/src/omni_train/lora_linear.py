"""A frozen linear layer with adapters, which peft injects in place of its default one.

It computes `W x + (alpha / rank) * B A x`; W is frozen, A is [rank, in], B is [out, rank] (LoRA, arXiv 2106.09685). A
and B are float32 for any dtype of W. For a float32 input it computes the formula literally. For a lower precision it
rounds A and B to the dtype of its input and adds their product into the output of W: only matrix products, and no other
pass over activations.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear


class LoraLinear(Linear):
    """A frozen linear layer, `base_layer`, with adapters of peft."""

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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output [..., out] for `x` [..., in]."""
        name = self.active
        if not name:
            return self.base_layer(x)
        (down, up), scale = factors(self, name), self.scaling[name]
        if x.dtype == torch.float32:
            return self.base_layer(x) + linear(linear(x, down), up) * scale
        output: Tensor = _LowRank.apply(x, (self.base_layer.weight, self.base_layer.bias), down, up, scale)
        return output


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


def factors(layer: LoraLinear, name: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A [rank, in] and B [out, rank] of one layer's adapter."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight  # type: ignore[return-value]
