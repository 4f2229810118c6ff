"""The log of a run: one JSON line per step, seconds per phase, and progress on the terminal."""

import json
import math
import os
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Self

from torch import Tensor

from omni_train.breaker import Breaker
from omni_train.display import Display
from omni_train.dist import Dist, Moment, now, same_error, seconds
from omni_train.files import load_metrics, open_regular, read_regular, read_steps, write_atomically

Sink = Callable[[int, Mapping[str, float]], None]


class RunLog:
    """Writes `<folder>/metrics.jsonl`, passes metrics to sinks and shows progress; a no-op unless `is_main`.

    A line is `{"step": 3, "reward/mean": 0.5, ..., "time/rollout_s": 12.1, "time/step_s": 30.0}`. The caller chooses
    the names; the log adds only times, images per second and TFLOP/s. A resumed run appends; an incomplete last line,
    left by a crash, is dropped first.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        is_main: bool,
        total_steps: int,
        sinks: Sequence[Sink] = (),
        display: Display | None = None,
        columns: Sequence[str] = (),
        resume_step: int | None = None,
        eval_every: int = 0,
    ) -> None:
        """Open the log.

        Args:
            folder: created if missing.
            is_main: True on the rank that reports; False makes every method a no-op.
            total_steps: number of steps of the whole run, for the estimate of the remaining time.
            sinks: called as `sink(step, metrics)` after each line, with the numbers in the file, including non-finite
                ones. A sink with a `close` method is closed with the log. A sink that fails only causes a warning, and
                is called again at the next step: its numbers are in the file. See `omni_rl.run.sinks`.
            display: shows the progress, closed with the log; None opens one.
            columns: metrics shown as progress, in this order; empty shows the first six.
            resume_step: number of finished steps from which the run continues. Lines of later steps are dropped, as
                these steps are repeated: -1 drops all, None keeps all. Missing earlier lines cause a warning.
            eval_every: steps between two "eval" phases, for the estimate; the last step is also evaluated.

        Raises:
            ValueError: the file has a damaged line.
        """
        self.last_phase = "none"  # the phase entered last, or its outer phase after a nested one; on every rank
        self._current_phase: str | None = None  # the phase whose block is running; on every rank
        self._is_main = is_main
        self._total_steps = total_steps
        self._sinks = [(sink, Breaker("a sink of the log", keeps_going=True)) for sink in sinks]
        self._clock = Breaker("the clock of phases")
        self._columns = tuple(columns)
        self._phases: list[tuple[str, str | None, Moment, Moment]] = []  # phases of this step: name, outer, start, end
        self._warned: set[str] = set()
        self._eval_every = eval_every
        self._eval_s = 0.0
        self._train_s: deque[float] = deque(maxlen=20)  # of the last steps, the best estimate for the next ones
        self._step_start = time.perf_counter()
        if is_main:
            self._path = Path(folder) / "metrics.jsonl"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(self._open())
            last = _truncate_lines(self._path, resume_step)
            if resume_step is not None and last < resume_step:
                warnings.warn(f"{self._path} lacks the steps {last + 1} to {resume_step}: they were lost", stacklevel=2)
            self._display = display or Display()
            self._display.begin(total_steps, self._path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block, on host and device, to this step's `time/<name>_s`.

        The time of a nested phase counts only for that phase.
        """
        outer, self._current_phase, self.last_phase = self._current_phase, name, name
        start = self._clock(now) if self._is_main else None
        try:
            yield
            self.last_phase = outer or name
        finally:
            self._current_phase = outer
            end = self._clock(now) if start else None
            self._phases += [(name, outer, start, end)] if start and end else []

    def log(
        self,
        step: int,
        metrics: Mapping[str, float | Tensor],
        *,
        num_samples: float = 0,
        flops: Mapping[str, float] = MappingProxyType({}),
        peak_tflops: float | None = None,
    ) -> None:
        """Report after `step` finished steps: write the line, call the sinks, update the progress.

        Line 0 describes the model before training.

        Args:
            step: number of finished steps.
            metrics: values by name.
            num_samples: samples of this rank's step, for ms per sample of each phase and samples per second.
            flops: operations of this rank, by phase, for TFLOP/s.
            peak_tflops: peak rate of the device, for its utilization (mfu).

        Raises:
            ValueError: a metric has the name of a metric that the log adds.
        """
        if not self._is_main:
            return
        phases = self._clock(self._seconds_by_phase) or {}
        step_end = time.perf_counter()
        times = {f"time/{name}_s": s for name, s in phases.items()}
        times["time/step_s"] = step_end - self._step_start
        if num_samples:
            per_sample = {f"time/{name}_ms_per_sample": 1000 * s / num_samples for name, s in phases.items()}
            times |= per_sample | {"perf/samples_per_s": num_samples / times["time/step_s"]}
        for name in [name for name in flops if name in phases]:
            times[f"perf/{name}_tflops"] = tflops = flops[name] / phases[name] / 1e12
            times |= {f"perf/{name}_mfu": tflops / peak_tflops} if peak_tflops else {}
        left_s = self._clock(self._left_s, step, times["time/step_s"], phases.get("eval"))
        self._phases, self._step_start = [], step_end
        values = {name: float(value) for name, value in metrics.items()}
        if taken := sorted({"step", *times} & values.keys()):
            raise ValueError(f"metrics must not use the names the log adds itself, got {taken}")
        values |= times
        self._write(step, values)
        for sink, guard in self._sinks:
            guard(sink, step, values)
        displayed = {name: values[name] for name in self._columns or tuple(metrics)[:6] if name in values}
        self._display.update(step, displayed, times["time/step_s"], left_s)

    def close(self) -> None:
        """Close the display and the sinks."""
        if self._is_main:
            self._display.close()
            for sink, guard in self._sinks:
                guard(getattr(sink, "close", lambda: None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds of this step's phases, each without its nested phases."""
        phases: defaultdict[str, float] = defaultdict(float)
        for name, outer, start, end in self._phases:
            phases[name] += (block_s := seconds(start, end))
            if outer:
                phases[outer] -= block_s
        return phases

    def _left_s(self, step: int, step_s: float, eval_s: float | None) -> float | None:
        """Return the remaining seconds of the run from the median training step and last evaluation; None at first."""
        self._eval_s = self._eval_s if eval_s is None else eval_s
        if step > 0:
            self._train_s.append(step_s - (eval_s or 0.0))
        if not self._train_s:
            return None
        total, eval_every = self._total_steps, self._eval_every
        num_evals = math.ceil(total / eval_every) - step // eval_every if eval_every and step < total else 0
        return (total - step) * median(self._train_s) + num_evals * self._eval_s

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line; NaN and infinity, which JSON cannot represent, become null, with one warning per name."""
        for name, value in values.items():
            if not math.isfinite(value) and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"metric {name} is {value} at step {step}; written as null", stacklevel=3)
        entry = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with open(self._open(), "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | entry, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # before a checkpoint of this step, as its lines must not be lost

    def _open(self) -> int:
        return open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def is_log_field(name: str) -> bool:
    """Return True for a name in a line that the log itself has added."""
    return name == "step" or name.startswith("time/") or name.endswith(("samples_per_s", "_tflops", "_mfu"))


def claim_folder(dist: Dist, folder: Path, *, has_checkpoint: bool | None = None, hint: str = "") -> None:
    """Raise on every rank if a folder belongs to another run. Take the `omni_train.lock.RunLock` first.

    Args:
        dist: every rank calls it.
        folder: folder of the run.
        has_checkpoint: True if the run continues from a checkpoint: the metrics are its own. False if it has none yet:
            a failed start may have left a line of step 0. None for a run that saves no checkpoints: its folder must be
            new.
        hint: how to continue the run in the folder, if its checkpoints are elsewhere.

    Raises:
        ValueError: `folder` has metrics of another run, damaged metrics, or a link in their place.
    """
    with same_error(dist):
        if dist.is_main:
            path, lines = folder / "metrics.jsonl", []
            if os.path.lexists(path):
                os.close(open_regular(path, os.O_RDWR))
                lines = load_metrics(path)
            if not has_checkpoint and any(line["step"] > 0 or has_checkpoint is None for line in lines):
                raise ValueError(f"{folder} holds a run already: {hint or 'give another --name, or move it away'}")


def _truncate_lines(path: Path, last_step: int | None) -> int:
    """Drop an incomplete last line and the lines of steps after `last_step`; return the last step kept, -1 for none."""
    data = read_regular(path)
    lines = zip(data.split(b"\n"), [int(entry["step"]) for entry in read_steps(path)], strict=False)
    kept = [(line, step) for line, step in lines if last_step is None or step <= last_step]
    if (text := b"".join(line + b"\n" for line, _ in kept)) != data:
        write_atomically(path, text)
    return max((step for _, step in kept), default=-1)
