"""What every loss returns, and the means that losses take."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss to call `.backward()` on, and what to log about it.

    Attributes:
        loss: scalar, float32, the mean over the batch.
        metrics: 0-d detached tensors by name; left on their device, so that logging is the only place that waits.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Scalar: the sum of losses [B] times weights [B], over B whatever the weights; None weighs each 1."""
    return losses.mean() if weights is None else (losses * weights.detach().float()).mean()


def element_mean(x: Tensor) -> Tensor:
    """[B]: the mean of x [B, ...] over all but the first axis."""
    return x.flatten(1).mean(dim=1)
