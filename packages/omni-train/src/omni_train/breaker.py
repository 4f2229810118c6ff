"""Call functions that only measure or show a run, so that their failure does not end it.

memory = Breaker("the memory in use")
metrics |= memory(read_memory, device) or {}

A Breaker stops at the first failure. A Guard retries, for failures that may end: a server, a full disk.
"""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from omni_train.terminal import one_line

P = ParamSpec("P")
T = TypeVar("T")


class Breaker:
    """A switch of what only measures or shows, which its first failure switches off, with one line.

    Use it for nothing that samples, weights, checkpoints or the lines of the log depend on, and around no collective:
    other ranks would wait for this one.

    name: in the line. remedy: what the line says at its end, such as how to get the result later.
    """

    def __init__(self, name: str, *, remedy: str = "") -> None:
        self.name, self.remedy, self.has_failed = name, remedy, False

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what the function returns; None where it fails, and from then on, without a call."""
        if self.has_failed:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # of any library
            self.switch_off(f"{type(exc).__name__}: {exc}")
            return None

    def around(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Return the function, called by way of this breaker, for hooks."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return self(function, *args, **kwargs)

        return guarded

    def switch_off(self, why: str) -> None:
        """Make no further call, and print one line that names the cause."""
        if self.has_failed:
            return
        self.has_failed = True
        _warn(f"{self.name} failed and is switched off: {why}", self.remedy)


class Guard:
    """A guard of what only shows a run, which calls it again after a failure.

    It prints each message once, as it does messages that differ only in numbers, such as those of steps. Use it for
    what a `Breaker` may be used for. name, remedy: as there.
    """

    def __init__(self, name: str, *, remedy: str = "") -> None:
        self.name, self.remedy = name, remedy
        self._warned: set[str] = set()

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what the function returns; None where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # of any library
            self.warn(f"{type(exc).__name__}: {exc}")
            return None

    def warn(self, why: str) -> None:
        """Print one line that names the cause, unless one like it has been printed."""
        if (kind := re.sub(r"0x[0-9a-f]+|\d+", "0", why)) not in self._warned:
            self._warned.add(kind)
            _warn(f"{self.name} failed: {why}", self.remedy)


def _warn(text: str, remedy: str) -> None:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    line = " ".join(one_line(f"WARNING: {where}{text}").split())
    with suppress(OSError, ValueError):  # of a terminal that is gone
        print(f"{line}; {remedy}" if remedy else line, file=sys.stderr, flush=True)
