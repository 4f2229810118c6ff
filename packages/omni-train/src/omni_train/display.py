"""Show the progress of a run: a bar in a terminal, otherwise lines; between steps, the state of `omni_train.progress`.

A thread updates the display, so that a long forward pass is not silent. Without a terminal, it prints a line if none
was printed for `LINE_S`.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from omni_train import progress
from omni_train.breaker import Breaker
from omni_train.files import load_metrics

LINE_S = 30.0  # silence before a line is printed
BAR_S, LINES_S = 2.0, 5.0  # between two checks of the progress


class Display:
    """The display of a run on the rank that reports, until closed. An error in it prints a line and disables it.

    listeners: called with the progress every few seconds.
    """

    def __init__(self, *, tty: bool | None = None) -> None:
        """Open it. tty: True for a bar, False for lines; None checks the terminal."""
        self.listeners: list[Callable[[str], None]] = []
        self._breaker, self._pid = Breaker("the progress on the terminal"), os.getpid()
        self._view: _Lines | _Bar = self._breaker(_choose_view, tty) or _Lines()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, total_steps: int, metrics: Path) -> None:
        """Show steps from now on. metrics: the log file, with the lines of the steps already done."""
        self._breaker(self._view.begin, total_steps, metrics)

    def update(self, step: int, values: Mapping[str, float], seconds: float, left_s: float | None) -> None:
        """Show a finished step: some of its metrics, its duration, and the remaining seconds of the run."""
        self._breaker(self._view.update, step, values, seconds, left_s)

    def refresh(self) -> None:
        """Show the progress if it is time, and pass it to the listeners."""
        self._breaker(self._view.refresh)
        if text := progress.describe():
            for listener in self.listeners:
                listener(text)
        if self._breaker.is_off:
            self._view.close()  # so that other output does not go through it

    def close(self) -> None:
        """Close the display, once. A forked process has no display."""
        if os.getpid() == self._pid and not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._view.close()

    def _watch(self) -> None:
        while not self._closed.wait(self._view.pause_s):
            self.refresh()


def _choose_view(tty: bool | None) -> "_Lines | _Bar":
    """Return a bar for a terminal, else lines."""
    if sys.stdout.isatty() if tty is None else tty:
        with suppress(ModuleNotFoundError):  # rich is needed for the bar
            return _Bar()
    return _Lines()


class _Lines:
    """One `key=value` line per step; between steps, the progress if no line was printed for `LINE_S`."""

    pause_s = LINES_S

    def __init__(self) -> None:
        self._total_steps, self._printed = 0, time.monotonic()

    def begin(self, total_steps: int, metrics: Path) -> None:
        self._total_steps = total_steps

    def update(self, step: int, values: Mapping[str, float], seconds: float, left_s: float | None) -> None:
        parts = [f"step={step}/{self._total_steps}", *(f"{name}={value:.4g}" for name, value in values.items())]
        eta = [] if left_s is None else [f"eta={_clock(left_s)}"]
        self._print(*parts, f"step_s={seconds:.1f}", *eta)

    def refresh(self) -> None:
        if time.monotonic() - self._printed >= LINE_S and (text := progress.describe()):
            self._print(text)

    def close(self) -> None:
        pass

    def _print(self, *parts: str) -> None:
        self._printed = time.monotonic()
        print(*parts, flush=True)


class _Bar:
    """A bar of steps with the last logged value of each metric, and a bar of the progress; needs rich.

    Held-out metrics, `eval/...`, have a sparkline over the run, and sample metrics, `reward/...`, their change.
    """

    pause_s = BAR_S

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        self._console = Console(soft_wrap=True)
        self._bars = Progress(BarColumn(bar_width=12), text, expand=True, console=self._console)
        self._steps = self._bars.add_task("", visible=False)
        self._phase = self._bars.add_task("", visible=False)
        self._values, self._lines = dict[str, float](), list[Mapping[str, float]]()

        def render() -> Progress:
            work, text = progress.current_phase(), progress.describe()
            total, done = (work.total or None, work.done) if work else (None, 0)
            self._bars.update(self._phase, description=text, total=total, completed=done, visible=bool(text))
            return self._bars

        self._live = Live(get_renderable=render, console=self._console, auto_refresh=False)
        self._live.start()

    def begin(self, total_steps: int, metrics: Path) -> None:
        self._total_steps, self._lines = total_steps, list[Mapping[str, float]](load_metrics(metrics))
        self._bars.update(self._steps, total=total_steps, visible=True)

    def update(self, step: int, values: Mapping[str, float], seconds: float, left_s: float | None) -> None:
        self._values |= values
        self._lines.append(values)
        eta = [] if left_s is None else [f"eta {_clock(left_s)}"]
        values_text = (f"{name}={value:.4g}{self._trend(name)}" for name, value in self._values.items())
        text = " ".join([f"{step}/{self._total_steps}", *eta, *values_text])
        self._bars.update(self._steps, completed=step, description=text)
        self._live.refresh()

    def refresh(self) -> None:
        self._live.refresh()

    def close(self) -> None:
        with suppress(Exception):  # the terminal may be gone
            self._live.stop()

    def _trend(self, name: str) -> str:
        history = [line[name] for line in self._lines if math.isfinite(line.get(name, math.nan))]
        if len(history) > 1 and name.startswith("reward/"):
            return f" ({history[-1] - history[0]:+.2g})"
        has_line = len(history) > 1 and name.startswith("eval/") and not self._console.options.ascii_only
        return f" {_sparkline(history)}" if has_line else ""


def _sparkline(values: Sequence[float]) -> str:
    """Return at most ten values as block characters: the first, the last and others evenly spaced between them."""
    count = min(len(values), 10)
    samples = [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
    low, span = min(samples), max(samples) - min(samples)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span) if span else 0] for value in samples)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0.0))))
