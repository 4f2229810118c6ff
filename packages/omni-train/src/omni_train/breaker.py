"""Call functions that only measure or display a run, so that their failure does not end it.

memory = Breaker("the memory in use")
metrics |= memory(read_memory, device) or {}

It stops calling after the first failure, or continues after failures that may be temporary, as of a server or a full
disk.
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
    """A wrapper for functions that only measure or display; the first failure disables it and prints one line.

    Do not use it for anything that samples, weights, checkpoints or log lines depend on, nor around a collective: other
    ranks would wait for this one.

    name: named in the line. keeps_going: True to keep calling after a failure. Each message is then printed once, and
    so are messages that differ only in numbers, such as step numbers. hint: end of the line, for example how to get
    the result later.
    """

    def __init__(self, name: str, *, keeps_going: bool = False, hint: str = "") -> None:
        self.name, self.keeps_going, self.hint = name, keeps_going, hint
        self._warned: set[str] = set()

    @property
    def is_off(self) -> bool:
        """True if a failure has disabled it."""
        return bool(self._warned) and not self.keeps_going

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the function's result, or None if it fails or the breaker is off."""
        if self.is_off:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # from any library
            self.fail(f"{type(exc).__name__}: {exc}")
            return None

    def wrap(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Return the function wrapped by this breaker, for hooks."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return self(function, *args, **kwargs)

        return guarded

    def fail(self, why: str) -> None:
        """Print one line with the cause, unless the breaker is off or has printed a similar line."""
        kind = re.sub(r"0x[0-9a-f]+|\d+", "0", why)
        if not self.is_off and kind not in self._warned:
            self._warned.add(kind)
            _warn(f"{self.name} failed{'' if self.keeps_going else ' and is switched off'}: {why}", self.hint)


def _warn(text: str, hint: str) -> None:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank}: "
    line = " ".join(one_line(f"WARNING: {where}{text}").split())
    with suppress(OSError, ValueError):  # the terminal may be gone
        print(f"{line}; {hint}" if hint else line, file=sys.stderr, flush=True)
