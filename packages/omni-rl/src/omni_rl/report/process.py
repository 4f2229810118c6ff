"""A process beside a run that writes its images and its report and feeds its trackers, so that no step waits for them.

    python -m omni_rl.report.process FOLDER TRACKERS PROJECT FD     the command of ReportProcess

A message is JSON, followed by its arrays. The process answers when the tracker is open or could not be opened, and
after each evaluation that it has written. If the connection ends before the message "end", the run has died: the
process handles what it was sent, and ends. It has its own session, as signals of Ctrl-C and torchrun are for the run.
A `multiprocessing.Process` would import the trainer's file, and torch with it.
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

from omni_rl.media.write import Media, few_frames
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
from omni_rl.report.page import write_report
from omni_rl.run.sinks import Sink, tracker
from omni_rl.settings.cli import printable

if TYPE_CHECKING:
    from omni_rl.report.folder import AllMedia

MAX_SHARE = 0.25  # of the process's time for the page
WAIT_S = 60.0  # for evaluations that are being written
MAX_WAITING = 3  # steps whose samples wait to be sent; older ones would soon be deleted anyway
GROUPS = 4  # groups of a step that are shown
Message = tuple[dict[str, Any], Sequence[np.ndarray]]  # the first refers to the arrays by index


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
        self._is_lost = self._has_warned = False
        self._due = 0  # evaluations that may not be on the disk yet
        self._connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            words = [sys.executable, "-P", "-m", "omni_rl.report.process", str(folder), track, project, str(fd)]
            self._process = subprocess.Popen(words, stdout=2, pass_fds=[fd], start_new_session=True)
        if track != "none" and (answer := self._answer()):
            raise ValueError(f"track must be a tracker that opens, got {track}: {answer}")
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._put({"kind": "log", "step": step, "metrics": dict(metrics)})

    def show_eval(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of an evaluation, of which `omni_rl.report.write_eval` writes some."""
        self._warn_of_abstention(f"the evaluation after step {step}", samples)
        shown = host_media(media, samples, range(min(MAX_SHEET, len(samples))))
        self._due += 1
        self._put(*_about("eval", step, samples[:MAX_SHEET], shown))

    def show_samples(self, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
        """Send the samples of a step that `omni_rl.report.write_samples` writes."""
        self._warn_of_abstention(f"step {step}", samples)
        groups = first_groups(samples, GROUPS).values()
        sent = [i for indices in groups for i in indices]
        shown = host_media(media, samples, [i for indices in groups for i in best_and_worst(samples, indices)])
        self._put(*_about("samples", step, [samples[i] for i in sent], {sent.index(i): shown[i] for i in shown}))

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
        self._put({"kind": "end"})
        self._thread.join()
        if self._process.wait():
            self._warn_of_loss()
        self._connection.close()  # not before: the end of the connection means that the run has died

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self) -> str:
        """Return the next answer of the process: empty without an error."""
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            return "the process has ended"

    def _put(self, about: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        with self._change:
            if self._is_lost:
                return
            self._waiting.append((about, arrays))
            samples = [i for i, (waiting, _) in enumerate(self._waiting) if waiting["kind"] == "samples"]
            if len(samples) > MAX_WAITING:
                del self._waiting[samples[0]]
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
                self._warn_of_loss()
                return
            kind = about["kind"]

    def _warn_of_abstention(self, place: str, samples: Sequence[Sample]) -> None:
        """Print once in a run why a sample has no score; the page has the reason of each that it shows."""
        reasons = [sample.abstained for sample in samples if sample.abstained]
        if reasons and not self._has_warned:
            self._has_warned = True
            _warn(f"{len(reasons)} of {len(samples)} samples of {place} have no score; first: {printable(reasons[0])}")

    def _warn_of_loss(self) -> None:
        """Print once that the process has ended, and drop what waits for it."""
        with self._change:
            self._waiting.clear()
            if not self._is_lost:
                self._is_lost, code = True, self._process.wait()
                ended = f"the process that writes the report of {self._folder} has ended (exit code {code})"
                remedy = f"to write the rest again: python -m omni_rl.report {self._folder}"
                _warn(f"{ended}: training continues without new images; {remedy}")


def _about(kind: str, step: int, samples: Sequence[Sample], shown: Mapping[int, Media]) -> Message:
    """Return a message: rows with the indices of their media's and references' arrays, and each array once."""
    sent: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}  # memory of an array -> its index, and itself

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
    """The files and trackers that the process feeds; it prints each distinct error once, and goes on."""

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self._folder, self._sinks = folder, sinks
        self._printed: set[str] = set()

    def take(self, about: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Write the samples of a message, or log its metrics."""
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
        """Write the page a last time, and close the trackers."""
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
            if text not in self._printed:
                self._printed.add(text)
                _warn(text)


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _follow(connection: Connection, pages: _Pages) -> None:
    """Handle messages until the last one, and write the page in between."""
    is_stale, due = False, 0.0
    while True:
        now = time.monotonic()
        if is_stale and now >= due:
            pages.write()
            is_stale, end = False, time.monotonic()
            due = end + (end - now) * (1 / MAX_SHARE - 1)
        elif connection.poll(due - now if is_stale else None):
            about, arrays = _receive(connection)
            if about["kind"] == "end":
                return
            pages.take(about, arrays)
            if about["kind"] == "eval":
                connection.send_bytes(b"")
            is_stale = is_stale or about["kind"] == "log"  # samples come before the line of their step


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
    except (EOFError, OSError):  # the run has died; its trackers see that it did not finish
        os._exit(0)
    pages.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
