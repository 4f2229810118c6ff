"""Noise levels as [B] vectors beside x, and the checks on shapes and values that all steps share."""

import torch
from torch import Tensor

Level = float | Tensor


def levels(x: Tensor, sigma: Level, sigma_next: Level) -> tuple[Tensor, Tensor]:
    """sigma and sigma_next as [B] float32 beside x; scalars and vectors then run through the same operations."""
    both = per_sample(x, "sigma", sigma), per_sample(x, "sigma_next", sigma_next)
    if on_host(sigma) and on_host(sigma_next):
        now, after = on_cpu(sigma), on_cpu(sigma_next)
        if not ((after >= 0) & (after < now) & (now <= 1)).all():
            rule = "sigma and sigma_next must satisfy 0 <= sigma_next < sigma <= 1"
            raise ValueError(f"{rule}, got sigma={now.tolist()}, sigma_next={after.tolist()}")
    return both


def per_sample(x: Tensor, name: str, level: Level) -> Tensor:
    """level as [B] float32 beside x."""
    if isinstance(level, Tensor) and level.shape not in (torch.Size(), x.shape[:1]):
        raise ValueError(f"{name} must be a scalar or [B] = [{x.shape[0]}], got shape {tuple(level.shape)}")
    if not isinstance(level, Tensor) or (level.ndim == 0 and on_host(level)):
        # A fill is queued like any kernel; a copy from ordinary host memory would wait for the queue to drain.
        return torch.full(x.shape[:1], float(level), dtype=torch.float32, device=x.device)
    return level.to(x.device, torch.float32).expand(x.shape[0])


def over(value: Tensor, x: Tensor) -> Tensor:
    """value [B], shaped to multiply x [B, ...]."""
    return value.view(-1, *[1] * (x.ndim - 1))


def check_shapes(x: Tensor, **others: Tensor | None) -> None:
    """Refuse x without an axis behind B, and others, where they are given, of another shape than x."""
    if x.ndim < 2:
        raise ValueError(f"x must be [B, ...] with at least one axis behind B, got shape {tuple(x.shape)}")
    for name, other in others.items():
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(other.shape)}")


def on_host(level: Level) -> bool:
    """True where the value of level can be read without waiting: a number, or a tensor on the CPU."""
    return not isinstance(level, Tensor) or level.device.type == "cpu"


def on_cpu(level: Level) -> Tensor:
    """level on the CPU, float32."""
    # Checked as float32, the precision the step computes in: two levels that round to one are no step.
    return torch.as_tensor(level, dtype=torch.float32, device="cpu")
