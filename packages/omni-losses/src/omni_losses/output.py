"""What every loss returns."""

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
