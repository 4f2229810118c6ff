"""The result of every loss, and the shapes and means that losses share."""

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
