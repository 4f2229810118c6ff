"""Progress of this process: nested phases and the work done in them.

    start_phase("step 1")
    with phase("rollout"):
        for batch in track(batches, "samples"):
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
    """A phase: `done` of `total` in some unit (0 if unknown) since `begun`, and the number of forward passes so far."""

    def __init__(self, label: str, total: float = 0, unit: str = "") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.forwards, self.begun = 0.0, 0, time.monotonic()
        self.repeated: dict[str, Work] = {}  # repeated phases, by label


_works: list[Work] = []  # outermost first
_last_sign = [time.monotonic()]  # times of activity; only the last one counts


def mark_alive() -> None:
    """Record that the program is still running."""
    _last_sign[0] = time.monotonic()


def seconds_silent() -> float:
    """Return the seconds since the program last counted work or communicated with other ranks."""
    return time.monotonic() - _last_sign[0]


def start_phase(label: str, total: float = 0, unit: str = "") -> None:
    """Start the outermost phase, or none without a label; all earlier phases end."""
    mark_alive()
    _works[:] = [Work(label, total, unit)] if label else []


@contextmanager
def phase(label: str, total: float = 0, unit: str = "") -> Iterator[None]:
    """Make the `with` block a nested phase; a phase added by `add_phase` continues from its count."""
    work = (_works[-1].repeated.get(label) if _works else None) or Work(label, total, unit)
    _works.append(work)
    try:
        yield
    finally:
        if work in _works:
            _works.remove(work)


def advance(count: float = 1, *, total: float = 0, unit: str = "") -> None:
    """Count work of the innermost phase. total, unit: those of all its work, if they become known only now."""
    mark_alive()
    if _works:
        work = _works[-1]
        work.total, work.unit = total or work.total, unit or work.unit
        work.done += count


def add_phase(label: str, total: float, unit: str) -> None:
    """Add a repeated phase to the innermost phase, with its total work."""
    if _works:
        _works[-1].repeated[label] = Work(label, total, unit)


def count_forward() -> None:
    """Count a forward pass of a net in the innermost phase."""
    mark_alive()
    if _works:
        _works[-1].forwards += 1


def track(items: Sequence[SizedT], unit: str) -> Iterator[SizedT]:
    """Yield the items; count the size of each as work of the innermost phase when the next one is requested."""
    if _works:
        work = _works[-1]
        work.done, work.total, work.unit, work.begun = 0, sum(map(len, items)), unit, time.monotonic()
    for item in items:
        yield item
        advance(len(item))


def current_phase() -> Work | None:
    """Return the innermost phase, if there is any."""
    return _works[-1] if _works else None


def describe() -> str:
    """Return a line with the work done and an estimate of the time left; "" if there is no phase."""
    works = [*_works]  # read by another thread
    if not works:
        return ""
    work, past_s = works[-1], time.monotonic() - works[-1].begun
    count = amount(work.done, work.total, work.unit)
    text = ": ".join(phase.label for phase in works if phase.label) + (f" {count}" if count else "")
    if 0 < work.done < work.total:
        return f"{text}, {clock(past_s / work.done * (work.total - work.done))} left"
    forward = f", forward {work.forwards}" if work.forwards else ""
    return f"{text}{forward}, for {clock(past_s)}"


def amount(done: float, total: float, unit: str) -> str:
    """Return the work done and the total; "" if both are unknown."""
    if unit == "bytes":
        size, unit = (GB, "GB") if max(done, total) >= GB / 10 else (MB, "MB")
        done, total = round(done / size, 1), round(total / size, 1)
    return f"{done:g} of {max(done, total):g} {unit}" if total else f"{done:g} {unit}" if done else ""


def clock(seconds: float) -> str:
    """Return the hours, if any, minutes and seconds, such as 0:41."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
