"""A separate process that writes a run's images and report and feeds its trackers, so that no step waits for them.

    python -m omni_rl.report.process FOLDER TRACKERS PROJECT FD     the command of ReportProcess

A message is JSON and the arrays that it names. The process answers after it has opened the trackers, or failed to, and
after it has written an evaluation. If the connection ends before the message "end", the run has died: the process
handles the messages that it has, and exits. It has its own session, so that Ctrl-C and torchrun signal only the run. A
`multiprocessing.Process` would import the trainer's file, and torch with it.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omni_train.breaker import Breaker
from omni_train.terminal import one_line
from safetensors.numpy import load, save

from omni_rl.media.write import Media, thin_frames
from omni_rl.report.folder import (
    MAX_SHEET,
    Sample,
    best_and_worst,
    first_groups,
    host_media,
    host_references,
    write_eval,
    write_now,
    write_samples,
)
from omni_rl.report.page import write_report
from omni_rl.run.sinks import Sink, tracker

if TYPE_CHECKING:
    from omni_rl.report.folder import AllMedia

MAX_SHARE = 0.25  # of the process's time, to write the page after new lines
NOW_S, NOW_SHARE = 10.0, 0.01  # least seconds between pages without new lines, and their maximum share of the time
WAIT_S = 60.0  # for evaluations that are being written
POLL_S = 1.0  # interval to check for an evaluation that could not be sent
MAX_WAITING = {"samples": 3, "now": 1}  # unsent messages; older ones are dropped, as new ones would replace them
Arrays = dict[str, np.ndarray]
Message = tuple[dict[str, Any], Arrays]


class ReportProcess:
    """A sink of `omni_train.log.RunLog` that sends lines and samples to the report process, without waiting.

    Media must not be modified afterwards. If the process ends early, it warns once, and the run continues without it.
    A failure in the process is a warning, and is retried at the next step. The log closes the sink.

    tracker_error: why a tracker could not be opened, or "".
    """

    def __init__(self, folder: str | Path, track: str = "none", project: str = "omni-rl") -> None:
        """Start the process.

        Args:
            folder: the run folder.
            track: trackers for the metrics and the images of evaluations, separated by commas.
            project: project name in the trackers.
        """
        self._folder = folder
        self._waiting: deque[Message] = deque()
        self._change = threading.Condition()
        self._has_warned = False
        self._due = 0  # evaluations that may not be on disk yet
        self._connection, child_connection = Pipe()
        with child_connection:
            fd = child_connection.fileno()
            command = [sys.executable, "-P", "-m", "omni_rl.report.process", str(folder), track, project, str(fd)]
            self._process = subprocess.Popen(command, stdout=2, pass_fds=[fd], start_new_session=True)
        self.tracker_error = "" if track == "none" else self._answer()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._put("log", step, metrics=dict(metrics))

    def show_eval(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of an evaluation, to be written by `omni_rl.report.write_eval`."""
        self._warn_of_abstention(f"the evaluation after step {step}", samples)
        sent = range(min(MAX_SHEET, len(samples)))
        self._put_samples("eval", step, samples, sent, host_media(media, samples, sent))
        with self._change:
            self._due += 1

    def show_samples(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of a step, to be written by `omni_rl.report.write_samples`."""
        self._warn_of_abstention(f"step {step}", samples)
        groups = first_groups(samples).values()
        shown = [i for indices in groups for i in best_and_worst(samples, indices)]
        sent = [i for indices in groups for i in indices]
        self._put_samples("samples", step, samples, sent, host_media(media, samples, shown))

    def show_now(self, text: str) -> None:
        """Send the current activity of the run."""
        self._put("now", text=text)

    def wait(self) -> None:
        """Wait, at most `WAIT_S`, until the samples of all evaluations are on disk or the process has ended."""
        deadline = time.monotonic() + WAIT_S
        while self._due:
            left_s = deadline - time.monotonic()
            if self._connection.poll(max(0.0, min(left_s, POLL_S))):
                if self._answer():
                    return
                with self._change:
                    self._due -= 1
            elif left_s <= 0:
                _warn(f"an evaluation is not in {self._folder} after {WAIT_S:g} s: it is lost if the run is killed")
                return

    def close(self) -> None:
        """Wait until everything is written and the process has ended."""
        self._put("end")
        self._thread.join()
        if self._process.wait():
            self._warn_of_loss()
        self._connection.close()  # not before: the end of the connection means that the run has died

    def _answer(self) -> str:
        """Return the next answer of the process, "" for success."""
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            return "the process has ended"

    def _put_samples(
        self, kind: str, step: int, samples: Sequence[Sample], sent: Sequence[int], shown: Mapping[int, Media]
    ) -> None:
        """Send the samples at `sent` as rows that name the arrays of their media and references."""
        rows, arrays = [], Arrays()
        for row, i in enumerate(sent):
            media, rates = shown.get(i, {}), samples[i].rates
            if "video" in media:
                media, rates = thin_frames(media, rates)
            names = {name: f"{row} {name}" for name in media}
            references = enumerate(host_references(samples[i]) if media else ())
            reference_arrays = {f"{row} reference {n}": image for n, image in references}
            rows.append(vars(samples[i]) | {"rates": rates, "media": names, "references": list(reference_arrays)})
            arrays |= {names[name]: array for name, array in media.items()} | reference_arrays
        self._put(kind, step, arrays, samples=rows)

    def _put(self, kind: str, step: int = 0, arrays: Arrays | None = None, **content: object) -> None:
        with self._change:
            self._waiting.append(({"kind": kind, "step": step, **content}, arrays or {}))
            same_kind = [i for i, (waiting, _) in enumerate(self._waiting) if waiting["kind"] == kind]
            if len(same_kind) > MAX_WAITING.get(kind, math.inf):
                del self._waiting[same_kind[0]]
            self._change.notify()

    def _send_all(self) -> None:
        kind, pictures = "", Breaker("the samples of the report", keeps_going=True)
        while kind != "end":
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                message, arrays = self._waiting.popleft()
            kind = message["kind"]
            try:
                text = json.dumps(message, default=str).encode()
                binary = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
                self._connection.send_bytes(text)
                self._connection.send_bytes(binary)
            except OSError:
                self._warn_of_loss()
            except Exception as exc:  # a scorer's details may be anything
                pictures.fail(f"{type(exc).__name__}: {exc}")
                with self._change:
                    self._due -= kind == "eval"

    def _warn_of_abstention(self, place: str, samples: Sequence[Sample]) -> None:
        """Print, once per run, why a sample has no score. The page shows the reasons of its samples."""
        reasons = [sample.abstained for sample in samples if sample.abstained]
        if reasons and not self._has_warned:
            self._has_warned = True
            _warn(f"{len(reasons)} of {len(samples)} samples of {place} have no score; first: {reasons[0]}")

    def _warn_of_loss(self) -> None:
        """Print once that the process has ended."""
        reason = f"the process that writes the report of {self._folder} has ended (exit code {self._process.wait()})"
        remedy = f"to write the rest again: python -m omni_rl.report {self._folder}"
        _warn_once(f"{reason}: training continues without new images; {remedy}")


def main(folder: str, track: str, project: str, fd: str) -> None:
    """Open the trackers, and handle the messages of the run until it ends."""
    os.nice(5)  # training comes first
    connection, sinks, errors = Connection(int(fd)), list[tuple[Sink, Breaker]](), list[str]()
    for name in track.split(","):
        try:
            sinks += [
                (sink, Breaker(f"the tracker {name}", keeps_going=True)) for sink in tracker(name, folder, project)
            ]
        except Exception as exc:  # any library may fail
            errors.append(" ".join(f"{type(exc).__name__}: {exc}".split()))
    if track != "none":
        connection.send_bytes("; ".join(errors).encode())
    page = Breaker("the page of the report", keeps_going=True, hint=f"to write it again: omni-rl report {folder}")
    try:
        _follow(connection, Path(folder), sinks, page)
    except (EOFError, OSError):  # the run died; its trackers notice that it did not finish
        os._exit(0)
    page(write_report, Path(folder))
    for sink, guard in sinks:
        guard(sink.close)


def _follow(connection: Connection, folder: Path, sinks: Sequence[tuple[Sink, Breaker]], page: Breaker) -> None:
    """Handle messages until the last one, and write the page in between."""
    # when the page is due, and the earliest time after a line or without one
    due_s, next_s, idle_s = math.inf, 0.0, 0.0
    pictures, progress = (
        Breaker("the samples of the report", keeps_going=True),
        Breaker("the progress in the report", keeps_going=True),
    )
    while True:
        start = time.monotonic()
        if start >= due_s:
            page(write_report, folder)
            due_s, end = math.inf, time.monotonic()
            next_s, idle_s = end + (end - start) / MAX_SHARE, end + max(NOW_S, (end - start) / NOW_SHARE)
        elif connection.poll(None if due_s == math.inf else due_s - start):
            message, arrays = json.loads(connection.recv_bytes()), load(connection.recv_bytes())
            kind, step = message["kind"], message["step"]
            if kind == "end":
                progress((folder / "now.json").unlink, missing_ok=True)
                return
            if kind == "now":
                due_s = min(due_s, idle_s)
                progress(write_now, folder, message["text"])
            elif kind == "log":
                due_s = next_s  # samples come before the line of their step
                for sink, guard in sinks:
                    guard(sink, step, message["metrics"])
            else:
                pictures(_write_images, folder, step, kind, message["samples"], arrays)
            if kind == "eval":
                connection.send_bytes(b"")


def _write_images(folder: Path, step: int, kind: str, rows: Sequence[dict[str, Any]], arrays: Arrays) -> None:
    media = {i: {name: arrays[key] for name, key in row.pop("media").items()} for i, row in enumerate(rows)}
    samples = [Sample(**row | {"references": [arrays[key] for key in row["references"]]}) for row in rows]
    write = write_eval if kind == "eval" else write_samples
    write(folder, step, media, samples)


def _warn(text: str) -> None:
    print(f"WARNING: {one_line(text)}", file=sys.stderr, flush=True)


_warn_once = cache(_warn)


if __name__ == "__main__":
    main(*sys.argv[1:])
