"""Progress of this process: nested phases, and how much of their work is done.

    begin("step 1")
    with doing("rollout"):
        for batch in over(batches, "samples"):
            ...
    describe()  # "step 1: rollout 12 of 64 samples, 0:41 left"

Only the main thread counts work, by writing a few attributes. `omni_train.display` shows it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

SizedT = TypeVar("SizedT", bound=Sequence[Any])
GB, MB = 1e9, 1e6


class Work:
    """A phase: `done` of `total` in some unit, 0 where it is unknown, since `begun`, after so many forwards of nets."""

    def __init__(self, label: str, total: float = 0, unit: str = "") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.forwards, self.begun = 0.0, 0, time.monotonic()
        self.within: dict[str, Work] = {}  # phases that come again and again, by their labels


_works: list[Work] = []  # the outermost first
_signs = [time.monotonic()]  # of life, of which only the last one counts


def live() -> None:
    """Record that the program is still running."""
    _signs[0] = time.monotonic()


def silent_s() -> float:
    """Return the seconds since the program last counted work, or spoke with other ranks."""
    return time.monotonic() - _signs[0]


def begin(label: str, total: float = 0, unit: str = "") -> None:
    """Begin the outermost phase; without a label there is none. The one before ends, and all that are within it."""
    live()
    _works[:] = [Work(label, total, unit)] if label else []


@contextmanager
def doing(label: str, total: float = 0, unit: str = "") -> Iterator[None]:
    """Make the `with` block a nested phase; an expected phase continues at its count."""
    work = (_works[-1].within.get(label) if _works else None) or Work(label, total, unit)
    _works.append(work)
    try:
        yield
    finally:
        if work in _works:
            _works.remove(work)


def advance(count: float = 1, *, total: float = 0, unit: str = "") -> None:
    """Count work of the innermost phase. total, unit: of all its work, where they become known with it."""
    live()
    if _works:
        work = _works[-1]
        work.total, work.unit = total or work.total, unit or work.unit
        work.done += count


def expect(label: str, total: float, unit: str) -> None:
    """Add a repeated phase to the innermost one, with its total work."""
    if _works:
        _works[-1].within[label] = Work(label, total, unit)


def beat() -> None:
    """Count a forward of a net in the innermost phase."""
    live()
    if _works:
        _works[-1].forwards += 1


def over(items: Sequence[SizedT], unit: str) -> Iterator[SizedT]:
    """Yield the items, and count what is in each as work of the innermost phase once the next one is asked for."""
    if _works:
        work = _works[-1]
        work.done, work.total, work.unit, work.begun = 0, sum(map(len, items)), unit, time.monotonic()
    for item in items:
        yield item
        advance(len(item))


def current() -> Work | None:
    """Return the innermost phase, if there is any."""
    return _works[-1] if _works else None


def describe() -> str:
    """Return a line that says what is done of what, and the time left by the work so far, if any; "" for no phase."""
    works = [*_works]  # another thread reads it
    if not works:
        return ""
    work, past_s = works[-1], time.monotonic() - works[-1].begun
    count = amount(work.done, work.total, work.unit)
    text = ": ".join(each.label for each in works if each.label) + (f" {count}" if count else "")
    if 0 < work.done < work.total:
        return f"{text}, {clock(past_s / work.done * (work.total - work.done))} left"
    forward = f", forward {work.forwards}" if work.forwards else ""
    return f"{text}{forward}, for {clock(past_s)}"


def amount(done: float, total: float, unit: str) -> str:
    """Return how much is done of the total; "" where nothing is known."""
    if unit == "bytes":
        size, unit = (GB, "GB") if max(done, total) >= GB / 10 else (MB, "MB")
        done, total = round(done / size, 1), round(total / size, 1)
    return f"{done:g} of {max(done, total):g} {unit}" if total else f"{done:g} {unit}" if done else ""


def clock(seconds: float) -> str:
    """Return hours if there are any, minutes and seconds, such as 0:41."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
