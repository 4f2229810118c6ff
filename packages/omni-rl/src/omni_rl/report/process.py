"""A process beside a run that writes its images and its report and feeds its trackers, so that no step waits for them.

    python -m omni_rl.report.process FOLDER TRACKERS PROJECT FD     the command of ReportProcess

A message is JSON and the arrays that it names. The process answers after it has opened the tracker or failed to, and
after it has written an evaluation. If the connection ends before the message "end", the run has died: the process
handles the messages that it has, and ends. It has its own session, so that Ctrl-C and torchrun signal only the run. A
`multiprocessing.Process` would import the trainer's file, and torch with it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from omni_rl.media.write import Media, few_frames
from omni_rl.report.folder import (
    MAX_SHEET,
    Sample,
    best_and_worst,
    first_groups,
    host_media,
    host_references,
    write_eval,
    write_samples,
)
from omni_rl.report.page import write_report
from omni_rl.run.sinks import Sink, tracker
from omni_rl.settings.cli import printable

if TYPE_CHECKING:
    from omni_rl.report.folder import AllMedia

MAX_SHARE = 0.25  # of the process's time for the page
WAIT_S = 60.0  # for evaluations that are being written
MAX_WAITING = 3  # steps whose samples wait to be sent; older ones would soon be deleted anyway
Arrays = dict[str, np.ndarray]
Message = tuple[dict[str, Any], Arrays]


class ReportProcess:
    """A sink of `omni_train.log.RunLog` that sends lines and samples to the report process, without waiting.

    Media must not be modified afterwards. If the process ends early, it warns once, and the run goes on without it.
    The log closes it.
    """

    def __init__(self, folder: str | Path, track: str = "none", project: str = "omni-rl") -> None:
        """Start the process.

        Args:
            folder: of the run.
            track: the trackers, separated by commas, that get the metrics and the images of evaluations.
            project: name under which trackers group runs.

        Raises:
            ValueError: a tracker could not be opened.
        """
        self._folder = folder
        self._waiting: deque[Message] = deque()
        self._change = threading.Condition()
        self._has_warned = False
        self._due = 0  # evaluations that may not be on the disk yet
        self._connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            words = [sys.executable, "-P", "-m", "omni_rl.report.process", str(folder), track, project, str(fd)]
            self._process = subprocess.Popen(words, stdout=2, pass_fds=[fd], start_new_session=True)
        if track != "none" and (error := self._answer()):
            raise ValueError(f"--tracking.to must be a tracker that opens, got {track}: {error}")
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._put("log", step, metrics=dict(metrics))

    def show_eval(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of an evaluation, of which `omni_rl.report.write_eval` writes some."""
        self._warn_of_abstention(f"the evaluation after step {step}", samples)
        sent = range(min(MAX_SHEET, len(samples)))
        self._due += 1
        self._put_samples("eval", step, samples, sent, host_media(media, samples, sent))

    def show_samples(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of a step that `omni_rl.report.write_samples` writes."""
        self._warn_of_abstention(f"step {step}", samples)
        groups = first_groups(samples).values()
        shown = [i for indices in groups for i in best_and_worst(samples, indices)]
        sent = [i for indices in groups for i in indices]
        self._put_samples("samples", step, samples, sent, host_media(media, samples, shown))

    def wait(self) -> None:
        """Wait until the samples of all evaluations are on the disk or the process has ended, at most `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while self._due:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                _warn(f"an evaluation is not in {self._folder} after {WAIT_S:g} s: it is lost if the run is killed")
                return
            if self._answer():
                return
            self._due -= 1

    def close(self) -> None:
        """Wait until everything is written and the process has ended."""
        self._put("end")
        self._thread.join()
        if self._process.wait():
            self._warn_of_loss()
        self._connection.close()  # not before: the end of the connection means that the run has died

    def _answer(self) -> str:
        """Return the next answer of the process: empty without an error."""
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            return "the process has ended"

    def _put_samples(
        self, kind: str, step: int, samples: Sequence[Sample], sent: Sequence[int], shown: Mapping[int, Media]
    ) -> None:
        """Send the samples at `sent`: rows, which name the arrays of their media and references."""
        rows, arrays = [], Arrays()
        for row, i in enumerate(sent):
            media, rates = shown.get(i, {}), samples[i].rates
            if "video" in media:
                media, rates = few_frames(media, rates)
            names = {name: f"{row} {name}" for name in media}
            references = enumerate(host_references(samples[i]) if media else ())
            others = {f"{row} reference {n}": image for n, image in references}
            rows.append(vars(samples[i]) | {"rates": rates, "media": names, "references": list(others)})
            arrays |= {names[name]: array for name, array in media.items()} | others
        self._put(kind, step, arrays, samples=rows)

    def _put(self, kind: str, step: int = 0, arrays: Arrays | None = None, **content: object) -> None:
        with self._change:
            self._waiting.append(({"kind": kind, "step": step, **content}, arrays or {}))
            samples = [i for i, (waiting, _) in enumerate(self._waiting) if waiting["kind"] == "samples"]
            if len(samples) > MAX_WAITING:
                del self._waiting[samples[0]]
            self._change.notify()

    def _send_all(self) -> None:
        kind = ""
        while kind != "end":
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                message, arrays = self._waiting.popleft()
            try:
                self._connection.send_bytes(json.dumps(message, default=str).encode())
                self._connection.send_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
            except OSError:
                self._warn_of_loss()
            kind = message["kind"]

    def _warn_of_abstention(self, place: str, samples: Sequence[Sample]) -> None:
        """Print once in a run why a sample has no score; the page has the reasons of its samples."""
        reasons = [sample.abstained for sample in samples if sample.abstained]
        if reasons and not self._has_warned:
            self._has_warned = True
            _warn(f"{len(reasons)} of {len(samples)} samples of {place} have no score; first: {printable(reasons[0])}")

    def _warn_of_loss(self) -> None:
        """Print once that the process has ended."""
        ended = f"the process that writes the report of {self._folder} has ended (exit code {self._process.wait()})"
        remedy = f"to write the rest again: python -m omni_rl.report {self._folder}"
        _warn_once(f"{ended}: training continues without new images; {remedy}")


def main(folder: str, track: str, project: str, fd: str) -> None:
    """Open the trackers, and follow the run to its end."""
    os.nice(5)  # training comes first
    connection = Connection(int(fd))
    try:
        sinks = tracker(track, folder, project)
    except Exception as exc:  # of any library
        connection.send_bytes(" ".join(f"{type(exc).__name__}: {exc}".split()).encode())
        return
    if track != "none":
        connection.send_bytes(b"")
    try:
        _follow(connection, Path(folder), sinks)
    except (EOFError, OSError):  # the run has died; its trackers see that it did not finish
        os._exit(0)
    _write_page(Path(folder))
    for sink in sinks:
        with _guarded("the tracker failed"):
            sink.close()


def _follow(connection: Connection, folder: Path, sinks: Sequence[Sink]) -> None:
    """Handle messages until the last one, and write the page in between."""
    is_stale, due = False, 0.0
    while True:
        now = time.monotonic()
        if is_stale and now >= due:
            _write_page(folder)
            is_stale, end = False, time.monotonic()
            due = end + (end - now) * (1 / MAX_SHARE - 1)
        elif connection.poll(due - now if is_stale else None):
            message, arrays = json.loads(connection.recv_bytes()), load(connection.recv_bytes())
            kind, step = message["kind"], message["step"]
            if kind == "end":
                return
            if kind == "log":
                is_stale = True  # samples come before the line of their step
                for sink in sinks:
                    with _guarded("the tracker failed"):
                        sink(step, message["metrics"])
            else:
                with _guarded(f"the samples of step {step} could not be written"):
                    _write_images(folder, step, kind, message["samples"], arrays)
            if kind == "eval":
                connection.send_bytes(b"")


def _write_images(folder: Path, step: int, kind: str, rows: Sequence[dict[str, Any]], arrays: Arrays) -> None:
    media = {i: {name: arrays[key] for name, key in row.pop("media").items()} for i, row in enumerate(rows)}
    samples = [Sample(**row | {"references": [arrays[key] for key in row["references"]]}) for row in rows]
    write = write_eval if kind == "eval" else write_samples
    write(folder, step, media, samples)


def _write_page(folder: Path) -> None:
    with _guarded(f"the report of {folder} could not be written"):
        write_report(folder)


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Print an error in the block, each distinct one once, and go on."""
    try:
        yield
    except Exception as exc:  # of any library
        _warn_once(f"{what}: {exc if isinstance(exc, OSError | ValueError) else f'{type(exc).__name__}: {exc}'}")


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


_warn_once = cache(_warn)


if __name__ == "__main__":
    main(*sys.argv[1:])
