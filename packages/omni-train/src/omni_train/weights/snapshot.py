"""Copies of the trained weights that can replace them temporarily: a fixed snapshot, and a moving average."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Snapshot:
    """A copy of the current values of `params`, with the same dtype and sharding.

    name: name of the copy in a checkpoint; two snapshots of one module need different names.
    """

    def __init__(self, params: Sequence[Tensor], *, name: str = "snapshot") -> None:
        self.name = name
        self._params = list(params)
        self._copies = [p.detach().clone() for p in self._params]
        self._is_applied = False

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with its copy, which may be modified.

        Raises:
            RuntimeError: called inside `applied`, where the two are exchanged.
        """
        if self._is_applied:
            raise RuntimeError("the copies must not be read inside applied(), where the parameters have their values")
        return list(zip(self._params, self._copies, strict=True))

    def move(self, decay: float) -> None:
        """Move each copy towards its parameter: `copy = decay * copy + (1 - decay) * param`."""
        pairs = self.pairs()
        ema_update_params([param for param, _ in pairs], [copy for _, copy in pairs], decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the copies into the parameters for the `with` block, and restore the values bit for bit afterwards."""
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
    """An exponential moving average of `params`, sharded or not. With decay 0, it is empty and does nothing.

    RL gradients are mostly noise, and an average over recent steps has far less of it than the last iterate: evaluate
    and save the average.

    It is float32. If the weights stand still, it stops at a relative distance of up to 2^-24 / (1 - decay) from them,
    because smaller steps round to zero: 6e-5 for 0.999, 6e-4 for 0.9999. A compensated sum would double its memory.

    params: the trained parameters. decay: share of the average kept by one update, in [0, 1).
    """

    def __init__(self, params: Sequence[Tensor], *, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        super().__init__(params if decay else (), name="ema")
        self.decay = decay

    def update(self, step: int) -> None:
        """Move the average towards the current weights, after step number `step`, counted from 0.

        The first steps keep less, at most `(1 + step) / (10 + step)`, so that the initial weights lose their share.
        """
        if self.decay:
            self.move(min(self.decay, (1 + step) / (10 + step)))


@torch.no_grad()
def ema_update_params(src: Sequence[Tensor], dst: Sequence[Tensor], decay: float) -> None:
    """Move each tensor of `dst` towards that of `src`: `dst = decay * dst + (1 - decay) * src`; sharded or not.

    Tensors must be sharded in the same way.

    Raises:
        ValueError: `decay` is outside [0, 1], or the lists differ in length or shapes.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    if [p.shape for p in src] != [p.shape for p in dst]:
        raise ValueError(f"src and dst must have the same shapes, got {len(src)} and {len(dst)} tensors that differ")
    if decay == 0.0:  # an exact copy, which interpolation does not guarantee
        for old, new in zip(dst, src, strict=True):  # sharded tensors have no _foreach_copy_
            old.copy_(new)
    else:
        rows, new_rows = ([p.to_local() if isinstance(p, DTensor) else p for p in params] for params in (dst, src))
        torch._foreach_lerp_(rows, new_rows, 1.0 - decay)
