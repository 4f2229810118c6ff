"""Gradient sums over ranks, AdamW, its learning rate, and an optimizer step that all ranks take or skip."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from omni_train.checkpoint.state import in_batches
from omni_train.dist import Dist, gather_json
from omni_train.memory.offload import HostAdamW
from omni_train.shard import Mode, sharded_backward

Schedule = Literal["constant", "linear", "cosine"]

_BUCKET_BYTES = 64 * 2**20  # one all-reduce per 64 MB: few calls, little extra memory


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    grad_norm: L2 norm of the gradient before clipping. skipped: True if skipped. eps_share: the optimizer's eps as a
    share of a step's denominator, if all elements of the clipped gradient equal its root mean square.

    A skipped step has norm 0 if there is no signal, and NaN or infinity after a numerical fault.
    """

    grad_norm: float
    skipped: bool
    eps_share: float = 0.0


def build_adamw(
    params: nn.Module | Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-4,
    eps: float = 1e-8,
    on_host: bool = False,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """Build AdamW over the trainable parameters, after sharding, so that its state is sharded too.

    on_host: True to offload its moments between steps. foreach: True to update all parameters with a few operators,
    whose temporaries are as large as the parameters; None for torch's default: on an accelerator, unless sharded.

    Raises:
        ValueError: nothing is trainable, or a trainable parameter is not float32: at RL learning rates, an update is
            smaller than bfloat16's spacing, and rounding would drop it.
    """
    params = params.parameters() if isinstance(params, nn.Module) else params
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        raise ValueError("params must hold at least one trainable parameter, got none")
    dtypes = {p.dtype for p in trainable}
    if dtypes != {torch.float32}:
        raise ValueError(f"trainable params must all be torch.float32, got {sorted(map(str, dtypes))}")
    return (HostAdamW if on_host else torch.optim.AdamW)(
        trainable, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps, foreach=foreach
    )


def scheduled_lr(step: int, num_steps: int, lr: float, kind: Schedule, warmup: int) -> float:
    """Return the learning rate of a step, counted from 0: `lr` times warm-up and decay.

    rise = (step + 1) / (warmup + 1), at most 1
    fall = 1 (constant), 1 - t (linear), or (1 + cos(pi t)) / 2 (cosine), with t = step / num_steps, at most 1
    """
    rise, t = min(1.0, (step + 1) / (warmup + 1)), 0.0 if kind == "constant" else min(1.0, step / max(1, num_steps))
    return lr * rise * ((1 + math.cos(math.pi * t)) / 2 if kind == "cosine" else 1 - t)


def plain_backward(loss: Tensor, *, of: int) -> None:
    """Add the gradient of a loss, one of `of` losses per optimizer step, on a single rank."""
    loss.backward()


def scaled_backward(backward: Callable[..., None], scaler: GradScaler) -> Callable[..., None]:
    """Return a function like `plain_backward` that scales the loss first, as small gradients underflow in float16."""
    return lambda loss, *, of: backward(scaler.scale(loss), of=of)


class SummedBackward:
    """Backward passes on several ranks; the last one before an optimizer step sums the gradients over ranks."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None, *, mode: Mode) -> None:
        """Store the arguments that were passed to `shard`."""
        self._module, self._mesh, self._mode, self._num_done = module, mesh, mode, 0

    def __call__(self, loss: Tensor, *, of: int) -> None:
        """Add the gradient of this rank's loss, one of `of` losses per optimizer step, on every rank."""
        self._num_done = (self._num_done + 1) % of
        is_last = not self._num_done
        if self._mode == "fsdp2":
            sharded_backward(self._module, loss, is_last=is_last)
        else:
            loss.backward()
        if is_last:
            reduce_gradients(self._module, self._mesh, mode=self._mode)


def reduce_gradients(params: nn.Module | Iterable[Tensor], mesh: DeviceMesh | None, *, mode: Mode) -> None:
    """Sum the gradients over copies, in place, once per optimizer step, after the last backward pass.

    In mode `ddp`, each rank has a copy; in mode `fsdp2`, each row of a 2-D mesh. If only some copies have a gradient
    for a parameter, the others count as zero, so ranks may have different work. If none has one, it stays None, and the
    optimizer skips the parameter, as on one rank.
    """
    copies = mesh["replicate"] if mesh is not None and mesh.ndim > 1 else mesh if mode == "ddp" else None
    if copies is None or copies.size() == 1:
        return
    params = params.parameters() if isinstance(params, nn.Module) else params
    trainable = [p for p in params if p.requires_grad]
    has_gradient = torch.tensor([p.grad is not None for p in trainable], dtype=torch.uint8)  # on the host
    torch_dist.all_reduce(has_gradient, torch_dist.ReduceOp.MAX, group=copies.get_group())
    reduced = [p for p, flag in zip(trainable, has_gradient.tolist(), strict=True) if flag]
    for p in reduced:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in reduced if p.grad is not None]
    for bucket in in_batches(grads, _BUCKET_BYTES, num_bytes=lambda g: g.nbytes):
        flat = torch.cat([grad.flatten() for grad in bucket])
        torch_dist.all_reduce(flat, group=copies.get_group())
        for grad, piece in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(piece.view_as(grad))


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    *,
    lr: float,
    max_grad_norm: float,
    dist: Dist,
    scaler: GradScaler | None = None,
) -> StepResult:
    """Clip to the global gradient norm, take a step and clear the gradients; or skip the step on every rank.

    A step is skipped if the norm is zero or not finite on any rank: without any signal, momentum and weight decay would
    still move the weights. A skipped step leaves parameters and optimizer state unchanged. Gradients must already be
    summed over ranks (`reduce_gradients`).

    Args:
        params: the trainable parameters; plain ones are equal on every rank, DTensors hold a slice each.
        lr: learning rate of this step; a parameter group with an `lr_scale` multiplies it.
        max_grad_norm: L2 norm above which gradients are scaled down; `math.inf` never clips.
        scaler: that of `scaled_backward`; it divides the gradients by its scale, and lowers the scale after an
            overflow.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}")
    grads = [p.grad for p in params if p.grad is not None]
    if scaler and grads:
        scaler.unscale_(optimizer)
        scaler.update()
    by_rank, num_elements = _norms(grads, dist), sum(grad.numel() for grad in grads)
    norm, skipped = by_rank[dist.rank], not all(math.isfinite(value) and value > 0 for value in by_rank)
    if not skipped:
        if norm > max_grad_norm:
            torch._foreach_mul_(grads, max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    eps, rms = optimizer.param_groups[0].get("eps", 0.0), min(norm, max_grad_norm) / math.sqrt(max(1, num_elements))
    return StepResult(norm, skipped, eps_share=0.0 if skipped else eps / (rms + eps))


def _norms(tensors: Sequence[Tensor], dist: Dist) -> list[float]:
    """Return the L2 norm over all tensors and ranks as seen by each rank, with one device sync and one message.

    Shards of DTensors are summed, plain tensors are counted once.

    The norms are equal unless plain tensors differ between ranks, which is a fault.
    """
    sharded = _sum_of_squares([t.to_local() for t in tensors if isinstance(t, DTensor)], dist)
    plain = _sum_of_squares([t for t in tensors if not isinstance(t, DTensor)], dist)
    by_rank = torch.tensor(gather_json(dist, torch.stack([sharded, plain]).tolist()))
    num_ranks = next((t.device_mesh.size() for t in tensors if isinstance(t, DTensor)), 0)  # of the first copy
    return [math.sqrt(square) for square in (by_rank[:num_ranks, 0].sum() + by_rank[:, 1]).tolist()]


def _sum_of_squares(tensors: list[Tensor], dist: Dist) -> Tensor:
    if not tensors:
        return torch.zeros((), device=dist.device)
    return torch.stack(torch._foreach_norm([t.float() for t in tensors])).square().sum()
