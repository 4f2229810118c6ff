"""The moving average of trained weights, kept beside them and put in their place to evaluate or to save.

RL gradients are mostly noise, and the last iterate carries all of it; an average over recent steps carries far less.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from omni_train.lora import ema_update_params
from omni_train.snapshot import Snapshot


class Ema:
    """An average that follows `params`; sharded or not. With decay 0 there is none, and nothing happens.

    params: what is trained. decay: share of the average that one update keeps, in [0, 1).
    """

    name = "ema"  # what a checkpoint keeps it under

    def __init__(self, params: Sequence[Tensor], *, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        self.decay = decay
        self._averages = Snapshot(params if decay else ())

    def update(self, step: int) -> None:
        """Move the average towards the weights of now, after step number `step`, counted from 0.

        The first steps keep less, `(1 + step) / (10 + step)` at most, so that the start is forgotten in time.
        """
        params, averages = [p for p, _ in self.pairs()], [average for _, average in self.pairs()]
        if params:
            ema_update_params(params, averages, min(self.decay, (1 + step) / (10 + step)))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each trained parameter with its average, the tensor itself; none with decay 0.

        Raises:
            RuntimeError: inside `applied`, where the two have changed places.
        """
        return self._averages.pairs()

    def applied(self) -> AbstractContextManager[None]:
        """Within the `with` block the parameters hold the average; afterwards, bit for bit, what they held before."""
        return self._averages.applied()
