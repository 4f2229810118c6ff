"""Where metrics may go besides `metrics.jsonl`: the run's own report, TensorBoard, Weights & Biases, Trackio.

    RunLog(folder, is_main=..., total_steps=..., sinks=[report(folder), tensorboard(folder)])

A sink is called as `sink(step, metrics)` after each line of the log. A library is imported when its sink is made; each
is an extra of this package. Nothing leaves the machine unless `mode="online"` or a setting of the library says so.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHARE = 0.05  # of the run's time that goes into writing its report


@dataclass(frozen=True)
class Sink:
    """Called with a step and its metrics; `RunLog` closes it when it is closed itself."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics of a step on."""
        self.write(step, metrics)


def report(folder: str | Path) -> Sink:
    """Write `folder`/report.html anew after a step, and when the log is closed.

    A step is left out where writing would take more than a twentieth of the time. A report that cannot be written, on a
    full disk or with a damaged file, is told once: the run goes on.
    """
    from omni_rl.report import write_report

    due, told = 0.0, set()

    def write(*_: object) -> None:
        nonlocal due
        start = time.monotonic()
        if start < due:
            return
        rewrite()
        end = time.monotonic()
        due = end + (end - start) * (1 / MAX_SHARE - 1)

    def rewrite() -> None:
        try:
            write_report(folder)
        except (OSError, ValueError) as exc:
            if str(exc) not in told:
                warnings.warn(f"the report of {folder} could not be written: {exc}", stacklevel=2)
            told.add(str(exc))

    return Sink(write, rewrite)


def tensorboard(folder: str | Path) -> Sink:
    """Writes TensorBoard event files into `folder`. Needs tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a run that is killed has written what it logged

    return Sink(write, writer.close)


def wandb(project: str, *, mode: str = "offline", **options: Any) -> Sink:
    """Logs to a Weights & Biases run; `wandb sync` uploads what `mode="offline"` has kept in a folder. Needs wandb.

    options: of `wandb.init`, as name, dir, config.
    """
    import wandb as library

    run = library.init(project=project, mode=mode, **options)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return Sink(write, run.finish)


def trackio(project: str, **options: Any) -> Sink:
    """Logs to a Trackio run, kept in a local database below TRACKIO_DIR; `trackio show` draws it. Needs trackio.

    options: of `trackio.init`, as name, config.
    """
    import trackio as library

    run = library.init(project=project, **{"embed": False, "auto_log_cpu": False, "auto_log_gpu": False} | options)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return Sink(write, run.finish)
