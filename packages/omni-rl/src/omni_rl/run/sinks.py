"""Trackers of metrics: TensorBoard, Weights & Biases, Trackio, SwanLab, MLflow.

    RunLog(folder, is_main=..., total_steps=..., sinks=tracker("wandb,tensorboard", folder, "my-project"))

A sink is called as `sink(step, metrics)` after each line of the log. Trackers also get the contact sheet of each
evaluation, written by `omni_rl.report.write_eval`, and the settings of config.toml. A folder that was tracked before
continues its run in the tracker. A library is imported when its sink is created; each is an extra of this package.
Nothing is uploaded unless the user has logged in to W&B or SwanLab, or has configured a library to upload.
"""

import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PICTURES = "eval/pictures"  # name of an evaluation's contact sheet in trackers
TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab", "mlflow")  # modules, and extras of this package


@dataclass(frozen=True)
class Sink:
    """A function of a step and its metrics, closed together with its `RunLog`."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self.write(step, metrics)


def tracker(kind: str, folder: str | Path, project: str) -> list[Sink]:
    """Open trackers.

    Args:
        kind: names of libraries, separated by commas, or "none".
        folder: the run folder. The run of runs/seeds/1 is named seeds-1.
        project: the project, or experiment in MLflow. TensorBoard has none.

    Raises:
        ValueError: as in `check_tracker`.
    """
    check_tracker(kind, project)
    openers = {
        "tensorboard": lambda _, path: tensorboard(path),
        "wandb": wandb,
        "trackio": trackio,
        "swanlab": swanlab,
        "mlflow": mlflow,
    }
    return [openers[name](project, Path(folder)) for name in kind.split(",") if name in openers]


def check_tracker(kind: str, project: str) -> None:
    """Check that the trackers can be opened, without importing them.

    Raises:
        ValueError: a tracker does not exist or is not installed, or the project's name is empty or not printable.
    """
    names = kind.split(",")
    for name in names if kind != "none" else ():
        if name not in TRACKERS or names.count(name) > 1:
            rule = f"--tracking.to must be none, or of {', '.join(TRACKERS)}, each once, separated by commas"
            raise ValueError(f"{rule}, got {kind!r}")
        if find_spec(name) is None:
            raise ValueError(f"--tracking.to must be an installed package, got {name!r}: pip install 'omni-rl[{name}]'")
        if name != "tensorboard" and not (project and project.isprintable()):
            raise ValueError(f"--tracking.project must be a printable name with {name}, got {project!r}")


def tensorboard(folder: str | Path) -> Sink:
    """Write TensorBoard event files into `folder`/tensorboard. Needs tensorboard and pillow."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(Path(folder) / "tensorboard"))
    writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in _config(folder).items()))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        if sheet := _sheet(Path(folder), step, metrics):
            writer.add_image(PICTURES, np.asarray(Image.open(sheet)), step, dataformats="HWC")
        writer.flush()  # so that a killed run loses no metrics

    return Sink(write, writer.close)


def wandb(project: str, folder: str | Path) -> Sink:
    """Log to a Weights & Biases run, online after a login, else in `folder`/wandb for `wandb sync`.

    WANDB_MODE overrides this.
    """
    import wandb as library

    folder, mode = Path(folder), os.environ.get("WANDB_MODE") or ("online" if _has_login() else "offline")
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"project": project, "name": _name(folder), "id": _run_id(folder, "wandb")[0], "dir": folder}
    resume = None if mode == "offline" else "allow"
    run = library.init(**identity, resume=resume, config=_config(folder), mode=mode)
    return _run_sink(run, library.Image, folder)


def trackio(project: str, folder: str | Path) -> Sink:
    """Log to a Trackio run in a local database below TRACKIO_DIR, for `trackio show`. Needs trackio."""
    import trackio as library

    folder = Path(folder)
    disabled = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    resume = "allow" if _run_id(folder, "trackio")[1] else "never"
    run = library.init(project=project, name=_name(folder), config=_config(folder), resume=resume, **disabled)
    return _run_sink(run, library.Image, folder)


def swanlab(project: str, folder: str | Path) -> Sink:
    """Log to a SwanLab run, online after a login, else in `folder`/swanlab for `swanlab sync`. Needs swanlab.

    SWANLAB_MODE overrides this.
    """
    import swanlab as library

    folder, mode = Path(folder), os.environ.get("SWANLAB_MODE")
    mode = mode or ("online" if library.Settings().api_key else "offline")
    identity = {"project": project, "name": _name(folder), "id": _run_id(folder, "swanlab")[0]}
    resume = "allow" if mode == "online" else None  # a local run is new at each start, in its own folder
    logs = folder / "swanlab"
    logs.mkdir(parents=True, exist_ok=True)
    run = library.init(**identity, resume=resume, config=_config(folder), mode=mode, log_dir=str(logs))
    return _run_sink(run, library.Image, folder)


def mlflow(project: str, folder: str | Path) -> Sink:
    """Log to a run of an MLflow server, or in `folder`/mlflow.db for `mlflow ui`. Needs mlflow or mlflow-skinny.

    MLFLOW_TRACKING_URI names the server. MLflow stores infinity as the largest float.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    root, is_local = folder.resolve(), not os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}" if is_local else None)
    id_file = folder / "mlflow-run.txt"
    if id_file.is_file():
        run = id_file.read_text("utf-8").strip()
        client.update_run(run, status="RUNNING")
    else:
        existing = client.get_experiment_by_name(project)
        artifacts = (root / "mlflow").as_uri() if is_local else None
        experiment = (
            existing.experiment_id if existing else client.create_experiment(project, artifact_location=artifacts)
        )
        run = client.create_run(experiment, run_name=_name(folder)).info.run_id
        client.log_batch(run, params=[Param(name, str(value)) for name, value in _config(folder).items()])
        id_file.write_text(run, "utf-8")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        ms = int(time.time() * 1000)
        safe_metrics = ((re.sub(r"[^\w\-. :/]", "_", name), value) for name, value in metrics.items())
        client.log_batch(run, metrics=[Metric(name, value, ms, step) for name, value in safe_metrics])
        if sheet := _sheet(folder, step, metrics):
            client.log_artifact(run, str(sheet), PICTURES)

    return Sink(write, lambda: client.set_terminated(run))


def _name(folder: Path) -> str:
    """Return the run's name, its path below runs/, because Trackio identifies runs by name."""
    return "-".join(folder.parts[1:]) if folder.parts[0] == "runs" else folder.name


def _run_id(folder: Path, kind: str) -> tuple[str, bool]:
    """Return the id of the folder's run in a tracker, and True if an earlier start created it."""
    path = folder / f"{kind}-run.txt"
    if path.is_file():
        return path.read_text("utf-8").strip(), True
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(secrets.token_hex(8), "utf-8")
    return path.read_text("utf-8"), False


def _has_login() -> bool:
    """Return True if the user has logged in to W&B, with WANDB_API_KEY or `wandb login`."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc(os.environ.get("NETRC")).authenticators(host))
    return False


def _config(folder: str | Path) -> dict[str, Any]:
    """Return the settings of the run."""
    from omni_rl.report.data import read_config  # not at the top: settings are checked before torch is imported

    return read_config(Path(folder))


def _run_sink(run: Any, image: Callable[[str], object], folder: Path) -> Sink:
    """Return the sink of a library whose runs have `log` and `finish`. image: the library's image class."""

    def write(step: int, metrics: Mapping[str, float]) -> None:
        sheet = _sheet(folder, step, metrics)
        run.log({**metrics, **({PICTURES: image(str(sheet))} if sheet else {})}, step=step)

    return Sink(write, run.finish)


def _sheet(folder: Path, step: int, metrics: Mapping[str, float]) -> Path | None:
    """Return the contact sheet of the step's evaluation, or None."""
    sheet = folder / "eval" / f"{step:06}.png"
    return sheet if "eval/reward" in metrics and sheet.is_file() else None
