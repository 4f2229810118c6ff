"""The result of every loss, and the shapes, means and metrics that losses share."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss to call `.backward()` on, and its metrics.

    Attributes:
        loss: scalar, float32, the mean over the batch.
        metrics: 0-d detached tensors by name; left on their device, so that only logging waits.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Scalar: the sum of losses [B] times weights [B], over B whatever the weights; None weighs each 1."""
    return losses.mean() if weights is None else (losses * weights.detach().float()).mean()


def element_mean(x: Tensor) -> Tensor:
    """[B]: the mean of x [B, ...] over all but the first axis."""
    return x.flatten(1).mean(dim=1)


def over(value: Tensor, x: Tensor) -> Tensor:
    """value [B], shaped to multiply x [B, ...]."""
    return value.view(-1, *[1] * (x.ndim - 1))


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """`ratio_mean`, `ratio_std`, `ratio_max_dev`, `approx_kl` and `ppo_kl` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_max_dev": (ratio - 1).abs().max(),
        "approx_kl": 0.5 * log_ratio.square().mean(),
        "ppo_kl": -log_ratio.mean(),
    }


def clip_metrics(log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """`clip_fraction`, `clip_fraction_low` and `clip_fraction_high` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    below, above = (ratio < 1 - low).float().mean(), (ratio > 1 + high).float().mean()
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}
