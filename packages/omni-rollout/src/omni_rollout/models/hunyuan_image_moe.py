"""HunyuanImage-3.0's mixture of experts: every token is routed to its k best experts, and none is dropped.

An expert's capacity is unlimited, so that a sample does not depend on its batch. All sizes are static, except each
expert's number of rows: one operator multiplies the rows of all experts, and a block remains one graph.

Shapes: R tokens of a batch, k experts of a token, S = R k rows, E experts, D width, M inner width.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("omni_rollout::mm_experts", mutates_args=())
def mm_experts(rows: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    """Return rows [S, in] times their expert's weight [out, in]: [S, out]. ends: ends of the rows [E], on the host."""
    out, start = rows.new_empty(len(rows), len(weights[0])), 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        torch.mm(rows[start:end], weight.t(), out=out[start:end])
        start = end
    return out


@torch.library.custom_op("omni_rollout::mm_experts_weights", mutates_args=())
def mm_experts_weights(grad: Tensor, rows: Tensor, ends: Tensor) -> list[Tensor]:
    """Return the gradients [out, in] of the experts' weights; zeros for an expert without rows."""
    return [grad[start:end].t() @ rows[start:end] for start, end in pairwise([0, *ends.tolist()])]


@mm_experts.register_fake
def _(rows: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    return rows.new_empty(len(rows), len(weights[0]))


@mm_experts_weights.register_fake
def _(grad: Tensor, rows: Tensor, ends: Tensor) -> list[Tensor]:
    return [grad.new_empty(grad.shape[1], rows.shape[1]) for _ in range(len(ends))]


@register_flop_formula([torch.ops.omni_rollout.mm_experts])
def _flops(rows: tuple[int, int], ends: tuple[int], weights: list[tuple[int, int]], **others: object) -> int:
    return 2 * rows[0] * rows[1] * weights[0][0]


@register_flop_formula([torch.ops.omni_rollout.mm_experts_weights])
def _flops_of_weights(grad: tuple[int, int], rows: tuple[int, int], ends: tuple[int], **others: object) -> int:
    return 2 * grad[0] * grad[1] * rows[1]


def _save_inputs(ctx, inputs, output):  # type: ignore[no-untyped-def]
    rows, ends, weights = inputs
    ctx.trains = weights[0].requires_grad
    ctx.save_for_backward(rows, ends, *weights)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    rows, ends, *weights = ctx.saved_tensors
    grad = grad.contiguous()
    back = mm_experts(grad, ends, [weight.t() for weight in weights]) if ctx.needs_input_grad[0] else None
    return back, None, mm_experts_weights(grad, rows, ends) if ctx.trains else [None] * len(weights)


mm_experts.register_autograd(_backward, setup_context=_save_inputs)


class GatedMLP(nn.Module):
    """Gated MLP with the weight order of the released files: the up projection's linear half, then its gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the output [..., D] for states [..., D]."""
        out: Tensor = self.down_proj(apply_gate(self.gate_and_up_proj(states)))
        return out


class Expert(nn.Module):
    """Weights of one expert under their released names; used by `HunyuanImageExperts`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2 * inner, width))})
        self.down_proj = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(width, inner))})


class Router(nn.Module):
    """Router in float32; its weight has the released name."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.wg = nn.Linear(width, num_experts, bias=False)

    def forward(self, states: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the experts [R, k] of states [R, D] and their weights [R, k], which sum to 1.

        routes: experts [R, k] to use instead of the best ones.
        """
        exact = torch.promote_types(states.dtype, torch.float32)
        scores = linear(states.to(exact), self.wg.weight.to(exact)).softmax(dim=-1)
        experts = scores.topk(self.top_k, dim=-1).indices if routes is None else routes.long()
        chosen = scores.gather(-1, experts)
        return experts, chosen / chosen.sum(dim=-1, keepdim=True)


class HunyuanImageExperts(nn.ModuleList):
    """All experts."""

    def forward(self, states: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Return the output [R, D] for states [R, D], the experts [R, k] of each, and their weights [R, k]."""
        chosen, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(len(self), device=states.device), right=True)
        ends = ends if ends.is_meta else ends.cpu()  # the only synchronization besides that of the backward pass
        rows = states[order // experts.shape[1]]
        up, down = ([getattr(expert, name)["weight"] for expert in self] for name in ("gate_and_up_proj", "down_proj"))
        rows = mm_experts(apply_gate(mm_experts(rows, ends, up)), ends, down)
        by_token = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, experts.shape)
        return (by_token * shares[..., None]).sum(dim=1).to(states.dtype)


class Mixture(nn.Module):
    """A shared MLP and the routed experts."""

    def __init__(self, width: int, inner: int, *, shared: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = Router(width, num_experts, top_k)
        self.shared_mlp = GatedMLP(width, shared)
        self.experts = HunyuanImageExperts(Expert(width, inner) for _ in range(num_experts))

    def forward(self, states: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [B, L, D] for states [B, L, D], and the experts [B, L, k]. routes: Router's, [B, L, k]."""
        flat = states.flatten(0, 1)
        experts, shares = self.gate(flat, None if routes is None else routes.flatten(0, 1))
        mixed = self.experts(flat, experts, shares)
        return self.shared_mlp(states) + mixed.view_as(states), experts.view(*states.shape[:2], -1)


def apply_gate(states: Tensor) -> Tensor:
    """Return the linear half [..., M] of states [..., 2M] times SiLU of the other half."""
    up, gate = states.chunk(2, dim=-1)
    return up * silu(gate)
