"""Trackers, places for metrics besides `metrics.jsonl` and the report: TensorBoard, Weights & Biases, Trackio.

    RunLog(folder, is_main=..., total_steps=..., sinks=tracker("wandb", folder, "my-project"))

A sink is called as `sink(step, metrics)` after each line of the log. Trackers also get the sheet of an evaluation's
pictures, which `omni_rl.report.write_eval` leaves in the run folder, and the settings of its config.toml. A library is
imported when its sink is made; each is an extra of this package. Nothing leaves the machine unless a setting of the
library, such as WANDB_MODE=online, says so.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from omni_rl.report.data import read_config

Tracker = Literal["none", "tensorboard", "wandb", "trackio"]
PICTURES = "eval/pictures"  # the name under which trackers show an evaluation's sheet


@dataclass(frozen=True)
class Sink:
    """A function of a step and its metrics; `RunLog` closes it when it is closed itself."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step on."""
        self.write(step, metrics)


def tracker(kind: Tracker, folder: str | Path, project: str) -> list[Sink]:
    """Open the tracker that a setting names: one sink, or none.

    Args:
        kind: the library.
        folder: the run folder, whose name is the run's in the tracker.
        project: what gathers runs in W&B and Trackio.

    Raises:
        ValueError: as `check_tracker`.
    """
    check_tracker(kind, project)
    if kind == "none":
        return []
    if kind == "tensorboard":
        return [tensorboard(folder)]
    return [wandb(project, folder) if kind == "wandb" else trackio(project, folder)]


def check_tracker(kind: Tracker, project: str) -> None:
    """Return when the tracker can be opened. Imports nothing.

    Raises:
        ValueError: its package is not installed, or the project's name is empty or no printable text.
    """
    if kind != "none" and find_spec(kind) is None:
        raise ValueError(f"track must be an installed package, got {kind!r}: pip install 'omni-rl[{kind}]'")
    if kind in ("wandb", "trackio") and not (project and project.isprintable()):
        raise ValueError(f"project must be a printable name with {kind}, got {project!r}")


def tensorboard(folder: str | Path) -> Sink:
    """Write TensorBoard event files into `folder`/tensorboard. Needs tensorboard and pillow."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(Path(folder) / "tensorboard"))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        if sheet := _sheet(Path(folder), step, metrics):
            writer.add_image(PICTURES, np.asarray(Image.open(sheet)), step, dataformats="HWC")
        writer.flush()  # a run that is killed has written what it logged

    return Sink(write, writer.close)


def wandb(project: str, folder: str | Path) -> Sink:
    """Log to a Weights & Biases run, offline in `folder`/wandb for `wandb sync` unless WANDB_MODE says online."""
    import wandb as library

    folder, mode = Path(folder), os.environ.get("WANDB_MODE", "offline")
    folder.mkdir(parents=True, exist_ok=True)
    run = library.init(project=project, name=folder.name, dir=folder, config=read_config(folder), mode=mode)
    return _run_sink(run, library.Image, folder)


def trackio(project: str, folder: str | Path) -> Sink:
    """Log to a Trackio run, kept in a local database below TRACKIO_DIR; `trackio show` draws it. Needs trackio."""
    import trackio as library

    folder = Path(folder)
    off = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = library.init(project=project, name=folder.name, config=read_config(folder), **off)
    return _run_sink(run, library.Image, folder)


def _run_sink(run: Any, image: Callable[[str], object], folder: Path) -> Sink:
    """The sink of a library whose runs have `log` and `finish`; image: makes a file's picture one of the library."""

    def write(step: int, metrics: Mapping[str, float]) -> None:
        sheet = _sheet(folder, step, metrics)
        run.log({**metrics, **({PICTURES: image(str(sheet))} if sheet else {})}, step=step)

    return Sink(write, run.finish)


def _sheet(folder: Path, step: int, metrics: Mapping[str, float]) -> Path | None:
    """The sheet of the step's evaluation, if there was one."""
    sheet = folder / "eval" / f"{step:06}.png"
    return sheet if "eval/reward" in metrics and sheet.is_file() else None
