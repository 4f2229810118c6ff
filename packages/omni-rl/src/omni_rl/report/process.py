"""The process beside a run that draws its pictures and its report and feeds its tracker, so that no step waits for it.

    python -m omni_rl.report.process FOLDER TRACKERS PROJECT FD     what ReportProcess starts

Each message is JSON, followed by the arrays that it names. The process answers when the tracker is open, or why it is
not, and each time that it has written an evaluation. When the connection breaks off before the message "end", the run
has died: the process finishes what it was sent, and ends. It is in a session of its own, as Ctrl-C and torchrun speak
to the run alone. It is no `multiprocessing.Process`, which would import the trainer's own file, and torch with it.
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
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from omni_rl.report.folder import (
    MAX_SHEET,
    Sample,
    best_and_worst,
    first_groups,
    host_media,
    host_references,
    plain,
    write_eval,
    write_samples,
)
from omni_rl.report.media import Media, few_frames
from omni_rl.report.page import write_report
from omni_rl.run.sinks import Sink, tracker
from omni_rl.settings.cli import printable

if TYPE_CHECKING:
    from omni_rl.report.folder import AllMedia

MAX_SHARE = 0.25  # of the process's time that goes into the page
WAIT_S = 60.0  # for images of evaluations that are being written
MAX_WAITING = 3  # steps whose samples wait to be written; those of older ones would be deleted soon anyway
GROUPS = 4  # of a step, that are shown
Message = tuple[dict[str, Any], Sequence[np.ndarray]]  # the second holds what the first names by number


class ReportProcess:
    """A sink of `omni_train.log.RunLog` that hands on each line, and samples where there are any; it never waits.

    Media that it is given must not be written to afterwards. If the process ends before its time, that is said once,
    and the run goes on without. To be closed, as the log does.
    """

    def __init__(self, folder: str | Path, track: str = "none", project: str = "omni-rl") -> None:
        """Start the process.

        Args:
            folder: of the run.
            track: the trackers that get the metrics, and the pictures of evaluations, with commas between.
            project: what gathers runs in some trackers.

        Raises:
            ValueError: a tracker could not be opened.
        """
        self._folder = folder
        self._waiting: deque[Message] = deque()
        self._change = threading.Condition()
        self._is_lost = self._has_told = False
        self._due = 0  # evaluations that may not be on the disk yet
        self._connection, theirs = Pipe()
        with theirs:
            module, number = [sys.executable, "-P", "-m", "omni_rl.report.process"], theirs.fileno()
            command = [*module, str(folder), track, project, str(number)]
            self._process = subprocess.Popen(command, stdout=2, pass_fds=[number], start_new_session=True)
        if track != "none" and (answer := self._answer()):
            raise ValueError(f"track must be a tracker that opens, got {track}: {answer}")
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of a step."""
        self._put({"kind": "log", "step": step, "metrics": dict(metrics)})

    def show_eval(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Hand on the samples of an evaluation, of which `omni_rl.report.write_eval` keeps some."""
        self._tell_abstention(f"the evaluation after step {step}", samples)
        shown = host_media(media, samples, range(min(MAX_SHEET, len(samples))))
        self._due += 1
        self._put(*_about("eval", step, samples[:MAX_SHEET], shown))

    def show_samples(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Hand on the samples of a step that `omni_rl.report.write_samples` shows."""
        self._tell_abstention(f"step {step}", samples)
        groups = first_groups(samples, GROUPS).values()
        places = {i: place for place, i in enumerate(i for indices in groups for i in indices)}
        shown = host_media(media, samples, [i for indices in groups for i in best_and_worst(samples, indices)])
        self._put(*_about("samples", step, [samples[i] for i in places], {places[i]: own for i, own in shown.items()}))

    def wait(self) -> None:
        """Wait until the samples of all evaluations are on the disk or the process has ended, at most `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while self._due:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                _say(f"an evaluation is not in {self._folder} after {WAIT_S:g} s: if the run is killed, it may be lost")
                return
            if self._answer():
                return
            self._due -= 1

    def close(self) -> None:
        """Wait until all is written and the process has ended."""
        self._put({"kind": "end"})
        self._thread.join()
        if self._process.wait():
            self._say_lost()
        self._connection.close()  # not before: a connection that closes means a run that died

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self) -> str:
        """What the process answers next: nothing where all is well."""
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            return "the process has ended"

    def _put(self, about: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        with self._change:
            if self._is_lost:
                return
            self._waiting.append((about, arrays))
            late = [message for message in self._waiting if message[0]["kind"] == "samples"][:-MAX_WAITING]
            for message in late:
                self._waiting.remove(message)
            self._change.notify()

    def _send_all(self) -> None:
        kind = ""
        while kind != "end":
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                about, arrays = self._waiting.popleft()
            try:
                _send(self._connection, about, arrays)
            except OSError:
                self._say_lost()
                return
            kind = about["kind"]

    def _tell_abstention(self, place: str, samples: Sequence[Sample]) -> None:
        """Say once in a run why a sample has no score; the page has the reason of each that it shows."""
        reasons = [sample.abstained for sample in samples if sample.abstained]
        if reasons and not self._has_told:
            self._has_told = True
            first = printable(reasons[0])
            _say(f"{len(reasons)} of {len(samples)} samples of {place} have no score; the first, as {first}")

    def _say_lost(self) -> None:
        """Say once that the process has ended, and keep nothing for it any more."""
        with self._change:
            self._waiting.clear()
            if not self._is_lost:
                self._is_lost, code = True, self._process.wait()
                ended = f"the process that writes the report of {self._folder} has ended (exit code {code})"
                remedy = f"this writes the rest anew: python -m omni_rl.report {self._folder}"
                _say(f"{ended}: training goes on without new pictures; {remedy}")


def _about(kind: str, step: int, samples: Sequence[Sample], shown: Mapping[int, Media]) -> Message:
    """The message: rows that name the arrays of their media and references by number, and the arrays, each once."""
    sent: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}  # where an array lies -> its number, and itself

    def number(array: np.ndarray) -> int:
        return sent.setdefault((array.ctypes.data, *array.shape, *array.strides), (len(sent), array))[0]

    rows = []
    for i, sample in enumerate(samples):
        own, rates = shown.get(i, {}), sample.rates
        own, rates = few_frames(own, rates) if "video" in own else (own, rates)
        details = {str(name): plain(value) for name, value in sample.details.items()}
        references = [number(array) for array in host_references(sample)] if own else []
        media = {kind: number(array) for kind, array in own.items()}
        rows.append(vars(sample) | {"details": details, "references": references, "media": media, "rates": rates})
    return {"kind": kind, "step": step, "samples": rows}, [array for _, array in sent.values()]


def _send(connection: Connection, about: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    forms = [(str(array.dtype), array.shape) for array in arrays]
    connection.send_bytes(json.dumps(about | {"arrays": forms}, default=str).encode())
    for array in arrays:
        connection.send_bytes(np.ascontiguousarray(array).data.cast("B"))


def _receive(connection: Connection) -> Message:
    about = json.loads(connection.recv_bytes())
    forms = about.pop("arrays")
    return about, [np.frombuffer(connection.recv_bytes(), dtype).reshape(shape) for dtype, shape in forms]


class _Pages:
    """What the process does with the messages; whatever fails is said once for the same words, and no more."""

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self._folder, self._sinks = folder, sinks
        self._told: set[str] = set()

    def take(self, about: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Write the samples of a message, or tell its metrics to the tracker."""
        kind, step = about["kind"], about["step"]
        if kind == "log":
            for sink in self._sinks:
                with self._guarded("the tracker failed"):
                    sink(step, about["metrics"])
            return
        write = write_eval if kind == "eval" else write_samples
        with self._guarded(f"the samples of step {step} could not be written"):
            rows = [row | {"references": [arrays[i] for i in row["references"]]} for row in about["samples"]]
            media = {i: {kind: arrays[n] for kind, n in row.pop("media").items()} for i, row in enumerate(rows)}
            write(self._folder, step, media, [Sample(**row) for row in rows])

    def write(self) -> None:
        """Write the page."""
        with self._guarded(f"the report of {self._folder} could not be written"):
            write_report(self._folder)

    def close(self) -> None:
        """Write the page a last time, and close the tracker."""
        self.write()
        for sink in self._sinks:
            with self._guarded("the tracker failed"):
                sink.close()

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # of any library
            text = f"{what}: {exc if isinstance(exc, OSError | ValueError) else f'{type(exc).__name__}: {exc}'}"
            if text not in self._told:
                self._told.add(text)
                _say(text)


def _say(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _follow(connection: Connection, pages: _Pages) -> None:
    """Do what the messages say until the last one, and write the page in between."""
    is_old, due = False, 0.0
    while True:
        now = time.monotonic()
        if is_old and now >= due:
            pages.write()
            is_old, end = False, time.monotonic()
            due = end + (end - now) * (1 / MAX_SHARE - 1)
        elif connection.poll(due - now if is_old else None):
            about, arrays = _receive(connection)
            if about["kind"] == "end":
                return
            pages.take(about, arrays)
            if about["kind"] == "eval":
                connection.send_bytes(b"")
            is_old = is_old or about["kind"] == "log"  # samples come before the line of their step


def main(folder: str, track: str, project: str, fd: str) -> None:
    """Open the tracker, and follow the run to its end."""
    os.nice(5)  # training comes first
    connection = Connection(int(fd))
    try:
        sinks = tracker(track, folder, project)
    except Exception as exc:  # of any library
        connection.send_bytes(" ".join(f"{type(exc).__name__}: {exc}".split()).encode())
        return
    if track != "none":
        connection.send_bytes(b"")
    pages = _Pages(Path(folder), sinks)
    try:
        _follow(connection, pages)
    except (EOFError, OSError):  # the run has died, and its tracker is to know
        os._exit(0)
    pages.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
