"""Copies of the trained weights, put in their place whenever they are wanted: one that stays, and a moving average."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Snapshot:
    """Copies of `params` as they are, in the same dtype and sharded alike.

    name: what a checkpoint keeps them under; two snapshots of one module need two names.
    """

    def __init__(self, params: Sequence[Tensor], *, name: str = "snapshot") -> None:
        self.name = name
        self._params = list(params)
        self._copies = [p.detach().clone() for p in self._params]
        self._is_applied = False

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its copy, the tensor itself, which may be written to.

        Raises:
            RuntimeError: inside `applied`, where the two have changed places.
        """
        if self._is_applied:
            raise RuntimeError("the copies cannot be had inside applied(), where the parameters hold them")
        return list(zip(self._params, self._copies, strict=True))

    def move(self, decay: float) -> None:
        """Move each copy towards its parameter; it keeps the share `decay` of itself."""
        pairs = self.pairs()
        ema_update_params([param for param, _ in pairs], [copy for _, copy in pairs], decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the `with` block the parameters hold the copies; afterwards, bit for bit, what they held before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for param, copy in zip(self._params, self._copies, strict=True):
            kept = param.detach().clone()
            param.copy_(copy)
            copy.copy_(kept)
        self._is_applied = not self._is_applied


class Ema(Snapshot):
    """An average that follows `params`; sharded or not. With decay 0 there is none, and nothing happens.

    RL gradients are mostly noise, and the last iterate carries all of it; an average over recent steps carries far
    less: evaluate and save that.

    params: what is trained. decay: share of the average that one update keeps, in [0, 1).
    """

    def __init__(self, params: Sequence[Tensor], *, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        super().__init__(params if decay else (), name="ema")
        self.decay = decay

    def update(self, step: int) -> None:
        """Move the average towards the weights of now, after step number `step`, counted from 0.

        The first steps keep less, `(1 + step) / (10 + step)` at most, so that the start is forgotten in time.
        """
        if self.decay:
            self.move(min(self.decay, (1 + step) / (10 + step)))


@torch.no_grad()
def ema_update_params(src: Sequence[Tensor], dst: Sequence[Tensor], decay: float) -> None:
    """Move each tensor of `dst` towards its partner in `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not.

    Raises:
        ValueError: `decay` is outside [0, 1], or the lists differ in length or shapes.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    if [p.shape for p in src] != [p.shape for p in dst]:
        raise ValueError(f"src and dst must have the same shapes, got {len(src)} and {len(dst)} tensors that differ")
    if decay == 0.0:  # a copy to the last bit, which the interpolation does not promise
        for old, new in zip(dst, src, strict=True):  # sharded tensors have no _foreach_copy_
            old.copy_(new)
    else:
        torch._foreach_lerp_(list(dst), list(src), 1.0 - decay)
