"""Call functions that only measure or show a run, so that their failure does not end it.

memory = Breaker("the memory in use")
metrics |= memory(read_memory, device) or {}

It stops at the first failure, or goes on after failures that may end: of a server, of a full disk.
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

    name: in the line. goes_on: True if it is called again after a failure. It then prints each message once, as it does
    messages that differ only in numbers, such as those of steps. remedy: what the line says at its end, such as how to
    get the result later.
    """

    def __init__(self, name: str, *, goes_on: bool = False, remedy: str = "") -> None:
        self.name, self.goes_on, self.remedy = name, goes_on, remedy
        self._warned: set[str] = set()

    @property
    def is_off(self) -> bool:
        """True if a failure has switched it off."""
        return bool(self._warned) and not self.goes_on

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what the function returns; None where it fails, and without a call once it is off."""
        if self.is_off:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # of any library
            self.fail(f"{type(exc).__name__}: {exc}")
            return None

    def around(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Return the function, called by way of this breaker, for hooks."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return self(function, *args, **kwargs)

        return guarded

    def fail(self, why: str) -> None:
        """Print one line that names the cause, unless it is off or has printed one like it."""
        kind = re.sub(r"0x[0-9a-f]+|\d+", "0", why)
        if not self.is_off and kind not in self._warned:
            self._warned.add(kind)
            _warn(f"{self.name} failed{'' if self.goes_on else ' and is switched off'}: {why}", self.remedy)


def _warn(text: str, remedy: str) -> None:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    line = " ".join(one_line(f"WARNING: {where}{text}").split())
    with suppress(OSError, ValueError):  # of a terminal that is gone
        print(f"{line}; {remedy}" if remedy else line, file=sys.stderr, flush=True)
