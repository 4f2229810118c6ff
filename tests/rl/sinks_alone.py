"""Print what trackers stored; run by test_rl_sinks.py where only omni-rl and its tracker extras are installed.

python sinks_alone.py FOLDER    with TRACKIO_DIR set
"""

import json
import math
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omni_rl.report import Sample, write_eval
from omni_rl.run.sinks import tracker
from omni_train.log import RunLog

LINES = [(0, {"eval/reward": 0.5}), (1, {"loss": 0.25, "bad": math.nan}), (5, {"loss": -1.5, "bad": math.inf})]


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return {name: [(step, value)]} from the event files, with sizes as the values of images."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    scalars = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    return scalars | {n: [(e.step, [e.width, e.height]) for e in events.Images(n)] for n in events.Tags()["images"]}


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: 32 KiB blocks with parts of records, each with checksum, length and kind."""
    whole, place = b"", 7  # the file has a header of seven bytes
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0:  # padding: continue in the next block
            place = (place // 32768 + 1) * 32768
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if 32768 - place % 32768 < 7:
            place = (place // 32768 + 1) * 32768
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def read_wandb(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, metrics) of the only run in the folder, for which each start has written a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.stem for path in paths} == {f"run-{(folder / 'wandb-run.txt').read_text()}"}
    found = []
    for data in (data for path in paths for data in records(path.read_bytes())):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((record.history.step.num, {n: v for n, v in items.items() if n[0] != "_"}))
    return found


def read_trackio(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, metrics) of the only project in the folder."""
    (path,) = folder.glob("*.db")
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics WHERE run_name = 'run' ORDER BY step").fetchall()
    return [(step, json.loads(metrics)) for step, metrics in rows]


def read_swanlab(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, metrics) of the folder's runs, one per start, with the number of files as the values of sheets."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record.FromString(data)
            if record.scalar.key.startswith("__swanlab__"):  # metrics of the machine, every ten seconds
                continue
            if record.HasField("scalar"):
                found.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
            if record.HasField("media"):
                found.setdefault(record.media.step, {})[record.media.key] = len(record.media.value.items)
    return sorted(found.items())


def read_mlflow(folder: Path) -> dict[str, Any]:
    """Return parameters, status, sheets and {name: [(step, value)]} of the only run in the folder."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    names = [name for metrics in dict(LINES).values() for name in metrics]
    history = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}
    sheets = sorted(path.name for path in (folder / "mlflow").glob("*/artifacts/eval/pictures/*"))
    return history | {"params": run.data.params, "status": run.info.status, "sheets": sheets}


def main() -> None:
    folder = Path(sys.argv[1])
    run = folder / "run"
    write_eval(run, 0, np.zeros((2, 32, 96, 3), np.uint8), [Sample("a cat", 0.5)] * 2)
    (run / "config.toml").write_text("lr = 0.5\n")
    for start in (LINES[:2], LINES[2:]):
        sinks = tracker("tensorboard,wandb,trackio,swanlab,mlflow", run, "project")
        with RunLog(run, is_main=True, total_steps=5, sinks=sinks, resume_step=start[0][0] - 1) as log:
            for step, metrics in start:
                log.log(step, metrics)
    stored = {
        "tensorboard": read_tensorboard(run / "tensorboard"),
        "wandb": read_wandb(run),
        "trackio": read_trackio(Path(os.environ["TRACKIO_DIR"])),
        "swanlab": read_swanlab(run),
        "mlflow": read_mlflow(run),
    }
    (folder / "stored.json").write_text(json.dumps(stored))


if __name__ == "__main__":
    main()
