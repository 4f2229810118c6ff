"""What a run reports: one JSON line a step, seconds per phase, and progress on the terminal."""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import Tensor

from omni_train.device import synchronize
from omni_train.dist import Dist, same_error
from omni_train.files import sync_folder, write_file

Sink = Callable[[int, Mapping[str, float]], None]


class RunLog:
    """Writes `<folder>/metrics.jsonl`, passes metrics on to sinks, shows progress; does nothing unless `is_main`.

    A line is `{"step": 3, "reward/mean": 0.5, ..., "time/rollout_s": 12.1, "time/step_s": 30.0}`. Names are the
    caller's; the log adds only times and `perf/images_per_s_per_device`. A run that resumes appends; a line torn by a
    crash is dropped first.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        is_main: bool,
        total_steps: int,
        sinks: Sequence[Sink] = (),
        tty: bool | None = None,
        columns: Sequence[str] = (),
        resume_step: int | None = None,
    ) -> None:
        """Open the log.

        Args:
            folder: made if missing.
            is_main: whether this rank reports; False makes every method a no-op.
            total_steps: steps of the whole run, for the estimate of the time left.
            sinks: called as `sink(step, metrics)` after each line; numbers as in the file, non-finite ones included.
                One that has a `close` is closed with the log. See `omni_rl.sinks`.
            tty: whether to draw a progress bar instead of lines; None asks the terminal.
            columns: metrics shown as progress, in this order; empty shows the first six.
            resume_step: finished steps from which the run continues. Lines of later steps are dropped, as these steps
                will come again: -1 drops all, None keeps all.
        """
        self.last_phase = "none"  # the phase entered last, on every rank
        self._is_main = is_main
        self._total_steps = total_steps
        self._sinks = tuple(sinks)
        self._columns = tuple(columns)
        self._phases: dict[str, float] = {}
        self._warned: set[str] = set()
        self._step_start = time.perf_counter()
        if is_main:
            path = Path(folder) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_lines(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
            self._show = _progress(total_steps, sys.stdout.isatty() if tty is None else tty)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to this step's `time/<name>_s`; waits for the device at both ends."""
        self.last_phase = name
        if not self._is_main:
            yield
            return
        synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def log(self, step: int, metrics: Mapping[str, float | Tensor], *, num_images: int = 0) -> None:
        """Report after `step` finished steps: write the line, call the sinks, move the progress on.

        Line 0 speaks of the model as it was given. With `num_images`, the images of this rank's step, every phase is
        also given in ms per image, and the step in images per second and device.
        """
        if not self._is_main:
            return
        now = time.perf_counter()
        times = {f"time/{name}_s": seconds for name, seconds in self._phases.items()}
        times["time/step_s"] = now - self._step_start
        if num_images:
            per_image = {f"time/{name}_ms_per_image": 1000 * s / num_images for name, s in self._phases.items()}
            times |= per_image | {"perf/images_per_s_per_device": num_images / times["time/step_s"]}
        self._phases, self._step_start = {}, now
        values = {name: _number(value) for name, value in metrics.items()}
        taken = sorted(({"step"} | set(times)) & set(values))
        if taken:
            raise ValueError(f"metrics must not use the names the log adds itself, got {taken}")
        values |= times
        self._write(step, values)
        for sink in self._sinks:
            sink(step, values)
        shown = self._columns or tuple(metrics)[:6]
        self._show.update(step, {name: values[name] for name in shown if name in values}, times["time/step_s"])

    def close(self) -> None:
        """Close the file, end the progress bar, close the sinks."""
        if self._is_main:
            self._show.close()
            self._file.close()
            for sink in self._sinks:
                if hasattr(sink, "close"):
                    sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        """JSON knows no NaN or infinity: they become null, with one warning for each name."""
        for name, value in values.items():
            if not math.isfinite(value) and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"metric {name} is {value} at step {step}; written as null", stacklevel=3)
        entry = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step} | entry, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint that the disk has must not outlive the lines before it


class _Lines:
    """Progress as one `key=value` line a step."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seconds: list[float] = []

    def update(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._seconds = [*self._seconds[-19:], seconds]  # the last 20 steps tell more about the next than the first did
        left_s = (self._total_steps - step) * sum(self._seconds) / len(self._seconds)
        parts = [f"step={step}/{self._total_steps}", *(f"{name}={value:.4g}" for name, value in values.items())]
        print(*parts, f"step_s={seconds:.1f}", f"eta={_clock(left_s)}", flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """Progress as a bar with the same numbers behind it; needs rich."""

    def __init__(self, total_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[values]}")
        )
        self._task = self._bar.add_task("", total=total_steps, values="")
        self._bar.start()

    def update(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        text = " ".join(f"{name}={value:.4g}" for name, value in values.items())
        self._bar.update(self._task, completed=step, values=text)

    def close(self) -> None:
        self._bar.stop()


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _progress(total_steps: int, tty: bool) -> _Lines | _Bar:
    if not tty:
        return _Lines(total_steps)
    try:
        return _Bar(total_steps)
    except ModuleNotFoundError:
        return _Lines(total_steps)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def claim_folder(dist: Dist, folder: Path, *, has_checkpoint: bool | None = None) -> None:
    """Refuse, on every rank, the folder of another run; after `omni_train.lock.RunLock`, which keeps it to this one.

    Args:
        dist: every rank calls it.
        folder: where the run writes.
        has_checkpoint: whether the run has a checkpoint to continue from, so that the metrics are its own. False where
            it has none yet: a line of step 0 may then be left from a start that came to nothing. None for a run that
            saves no checkpoints, whose folder must be new.

    Raises:
        ValueError: `folder` has metrics, which the run would continue as if they were its own.
    """
    with same_error(dist):
        if dist.is_main:
            path = folder / "metrics.jsonl"
            lines = load_metrics(path) if path.exists() and not has_checkpoint else []
            if any(line["step"] > 0 or has_checkpoint is None for line in lines):
                raise ValueError(f"{folder} holds a run already: give another --name, or move it away")


def load_metrics(path: str | Path) -> list[dict[str, float]]:
    """The steps of a `metrics.jsonl`, in step order; null becomes NaN.

    A step that was logged again after a resume counts once, as logged last. A last line torn by a crash is left out.

    Raises:
        ValueError: any other line is not valid JSON.
    """
    steps: dict[float, dict[str, float]] = {}
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or torn
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as exc:
            raise ValueError(f"{path}, line {number}: not valid JSON: {exc.msg}") from exc
        steps[entry["step"]] = {name: math.nan if value is None else value for name, value in entry.items()}
    return [steps[step] for step in sorted(steps)]


def _keep_lines(path: Path, last_step: int | None) -> None:
    """Drop a last line torn by a crash, and the lines of steps after `last_step`; a crash now leaves old or new."""
    if not path.exists():
        return
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    kept = b"".join(line for line in lines if last_step is None or json.loads(line)["step"] <= last_step)
    if kept != data:
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        write_file(temporary, kept)
        temporary.replace(path)
        sync_folder(path.parent)
