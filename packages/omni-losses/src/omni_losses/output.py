"""The result type of all losses, and the checks, shapes, means and metrics that they share."""

from dataclasses import dataclass

from torch import Tensor

MIN_CLIP_WIDTH = 1e-6  # float32 near 1 has a spacing of 1.2e-7, so a width is off by up to half of that


@dataclass(frozen=True)
class LossOutput:
    """A loss to call `.backward()` on, and its metrics.

    Attributes:
        loss: scalar, float32, the mean over the batch.
        metrics: 0-d detached tensors by name; they stay on their device, so that only logging synchronizes.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of losses [B] times weights [B], divided by B for any weights; None means weight 1."""
    return losses.mean() if weights is None else (losses * weights.detach().float()).mean()


def element_mean(x: Tensor) -> Tensor:
    """Return the mean of x [B, ...] over all axes but the first, [B]."""
    return x.flatten(1).mean(dim=1)


def expand_like(value: Tensor, x: Tensor) -> Tensor:
    """Return value [B] reshaped to broadcast with x [B, ...]."""
    return value.view(-1, *[1] * (x.ndim - 1))


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return `ratio_mean`, `ratio_std`, `ratio_max_dev`, `approx_kl` and `ppo_kl` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_max_dev": (ratio - 1).abs().max(),
        "approx_kl": 0.5 * log_ratio.square().mean(),
        "ppo_kl": -log_ratio.mean(),
    }


def clip_metrics(log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Return `clip_fraction`, `clip_fraction_low` and `clip_fraction_high` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    below, above = (ratio < 1 - low).float().mean(), (ratio > 1 + high).float().mean()
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}


def require_batch(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if tensor is not [B] with B >= 1, or others have a different shape."""
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B] with B >= 1, got shape {tuple(tensor.shape)}")
    require_shape_of(name, tensor, **others)


def require_latents(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless tensor is [B, ...] with B >= 1 and at least two axes, and others have its shape."""
    if tensor.ndim < 2 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B, ...] with B >= 1, got shape {tuple(tensor.shape)}")
    require_shape_of(name, tensor, **others)


def require_shape_of(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if others differ in shape from tensor, which the message calls `name`; None is skipped."""
    for other_name, other in others.items():
        if other is not None and other.shape != tensor.shape:
            raise ValueError(f"{other_name} must have {name}'s shape {tuple(tensor.shape)}, got {tuple(other.shape)}")


def require_per_sample(latents: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if others are not [B], where B is the first size of latents; None is skipped."""
    for name, other in others.items():
        if other is not None and other.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [B] = {tuple(latents.shape[:1])}, got shape {tuple(other.shape)}")


def require_positive(**numbers: float) -> None:
    """Raise ValueError if a number is not > 0 or is NaN."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be > 0, got {number}")


def require_clip_width(**widths: float) -> None:
    """Raise ValueError if float32 cannot represent a width around 1 with useful precision."""
    for name, width in widths.items():
        if not width >= MIN_CLIP_WIDTH:
            raise ValueError(f"{name} must be >= {MIN_CLIP_WIDTH:g}, as float32 has steps of 1.2e-07 at 1, got {width}")
