"""A copy of the trained weights that stays as it is, put in their place whenever they are wanted again."""

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
