"""The moving average of trained weights, kept beside them and put in their place to evaluate or to save.

RL gradients are mostly noise, and the last iterate carries all of it; an average over recent steps carries far less.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from omni_train.lora import ema_update_params


class Ema:
    """A copy of `params` that follows them; sharded or not. With decay 0 there is no copy, and nothing happens.

    params: what is trained. decay: share of the average that one update keeps, in [0, 1). name: what a checkpoint keeps
    it under; two averages of one module need two names.
    """

    def __init__(self, params: Sequence[Tensor], *, decay: float, name: str = "ema") -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.name = name
        self._params = list(params) if decay else []
        self._average = [p.detach().clone() for p in self._params]
        self._is_applied = False

    def update(self, step: int) -> None:
        """Moves the average towards the weights of now, after step number `step`, counted from 0.

        The first steps keep less, `(1 + step) / (10 + step)` at most, so that the start is forgotten in time.
        """
        if self._params:
            ema_update_params(self._params, self._average, min(self.decay, (1 + step) / (10 + step)))

    def averages(self) -> list[tuple[Tensor, Tensor]]:
        """Each trained parameter with its average, the tensor itself; none with decay 0.

        Raises:
            RuntimeError: inside `applied`, where the two have changed places.
        """
        if self._is_applied:
            raise RuntimeError("the averages cannot be had inside applied(), where the parameters hold them")
        return list(zip(self._params, self._average, strict=True))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the `with` block the parameters hold the average; afterwards, bit for bit, what they held before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for param, average in zip(self._params, self._average, strict=True):
            kept = param.detach().clone()
            param.copy_(average)
            average.copy_(kept)
        self._is_applied = not self._is_applied
