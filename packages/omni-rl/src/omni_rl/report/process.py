"""The process beside a run that draws its pictures and its report and feeds its tracker, so that no step waits for it.

    python -m omni_rl.report.process FOLDER TRACKER PROJECT      what ReportProcess starts

Each message on its standard input is a length, so many bytes of JSON, and the pixels of the pictures that it names.
When that input breaks off before the message "end", the run has died, and the process ends at once: whatever it writes,
it writes atomically. It is in a session of its own, as Ctrl-C and torchrun speak to the run alone.
"""

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
from omni_train.files import load_metrics

from omni_rl.report.folder import (
    MAX_SHEET,
    Sample,
    best_and_worst,
    first_groups,
    host_pictures,
    host_references,
    plain,
    write_eval,
    write_samples,
)
from omni_rl.report.page import write_report
from omni_rl.sinks import Sink, Tracker, tracker

if TYPE_CHECKING:
    from omni_rl.report.folder import Images

MAX_SHARE = 0.25  # of the process's time that goes into the page
MAX_WAITING = 3  # steps whose samples wait to be written; those of older ones would be deleted soon anyway
GROUPS = 4  # of a step, that are shown
Message = tuple[dict[str, Any], Mapping[int, np.ndarray]]


class ReportProcess:
    """A sink of `omni_train.log.RunLog` that hands on each line, and pictures where there are any; it never waits.

    Pictures that it is given must not be written to afterwards. If the process ends before its time, that is said once,
    and the run goes on without. To be closed, as the log does.
    """

    def __init__(self, folder: str | Path, track: Tracker = "none", project: str = "omni-rl") -> None:
        """Start the process.

        Args:
            folder: of the run.
            track: the tracker that gets the metrics, and the pictures of evaluations.
            project: what gathers runs in some trackers.

        Raises:
            ValueError: the tracker could not be opened.
        """
        self._folder = folder
        self._waiting: deque[Message] = deque()
        self._change = threading.Condition()
        self._is_lost = False
        command = [sys.executable, "-P", "-m", "omni_rl.report.process", str(folder), track, project]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        if track != "none" and (answer := _end(self._process.stdout).read().decode()):
            raise ValueError(f"track must be a tracker that opens, got {track}: {answer}")
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of a step."""
        self._put({"kind": "log", "step": step, "metrics": dict(metrics)})

    def show_eval(self, step: int, images: "Images", samples: Sequence[Sample]) -> None:
        """Hand on the pictures of an evaluation, of which `omni_rl.report.write_eval` keeps some."""
        pictures = host_pictures(images, samples, range(min(MAX_SHEET, len(samples))))
        self._put(*_about("eval", step, samples[:MAX_SHEET], pictures))

    def show_samples(self, step: int, images: "Images", samples: Sequence[Sample]) -> None:
        """Hand on the samples of a step that `omni_rl.report.write_samples` shows."""
        groups = first_groups(samples, GROUPS).values()
        places = {i: place for place, i in enumerate(i for indices in groups for i in indices)}
        shown = host_pictures(images, samples, [i for indices in groups for i in best_and_worst(samples, indices)])
        pictures = {places[i]: picture for i, picture in shown.items()}
        self._put(*_about("samples", step, [samples[i] for i in places], pictures))

    def close(self) -> None:
        """Wait until all is written and the process has ended."""
        self._put({"kind": "end"})
        self._thread.join()
        if self._process.wait():
            self._say_lost()
        for pipe in (self._process.stdin, self._process.stdout):  # not before: a pipe that closes means a run that died
            with suppress(OSError):
                _end(pipe).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _put(self, about: dict[str, Any], pictures: Mapping[int, np.ndarray] = {}) -> None:
        with self._change:
            if self._is_lost:
                return
            self._waiting.append((about, pictures))
            late = [message for message in self._waiting if message[0]["kind"] == "samples"][:-MAX_WAITING]
            for message in late:
                self._waiting.remove(message)
            self._change.notify()

    def _send_all(self) -> None:
        kind = ""
        while kind != "end":
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                about, pictures = self._waiting.popleft()
            try:
                _send(_end(self._process.stdin), about, pictures)
            except OSError:
                self._say_lost()
                return
            kind = about["kind"]

    def _say_lost(self) -> None:
        """Say once that the process has ended, and keep nothing for it any more."""
        with self._change:
            self._waiting.clear()
            if not self._is_lost:
                self._is_lost = True
                _say(
                    f"the process that writes the report of {self._folder} has ended (exit code "
                    f"{self._process.wait()}): training goes on without new pictures; this writes the rest anew: "
                    f"python -m omni_rl.report {self._folder}"
                )


def _about(kind: str, step: int, samples: Sequence[Sample], pictures: Mapping[int, np.ndarray]) -> Message:
    """The message: after the pictures, by their samples' places, come their references, each once."""
    rows, sent, found = [], dict(pictures), dict[tuple[int, ...], int]()  # where a reference lies -> its place
    for i, sample in enumerate(samples):
        references = host_references(sample) if i in pictures else []
        keys = [(array.ctypes.data, *array.shape, *array.strides) for array in references]
        for key, array in zip(keys, references, strict=True):
            sent[found.setdefault(key, len(samples) + len(found))] = array
        details = {str(name): plain(value) for name, value in sample.details.items()}
        rows.append(vars(sample) | {"details": details, "references": [found[key] for key in keys]})
    return {"kind": kind, "step": step, "samples": rows}, sent


def _send(stream: IO[bytes], about: dict[str, Any], pictures: Mapping[int, np.ndarray]) -> None:
    shapes = {str(place): picture.shape for place, picture in pictures.items()}
    head = json.dumps(about | {"shapes": shapes}, default=str).encode()
    for part in (len(head).to_bytes(8, "little") + head, *(picture.tobytes() for picture in pictures.values())):
        left = memoryview(part)
        while left:
            left = left[stream.write(left) :]


def _receive(stream: IO[bytes]) -> Message:
    about = json.loads(_read(stream, int.from_bytes(_read(stream, 8), "little")))
    pictures = {
        int(place): np.frombuffer(_read(stream, math.prod(shape)), np.uint8).reshape(shape)
        for place, shape in about.pop("shapes").items()
    }
    return about, pictures


def _read(stream: IO[bytes], size: int) -> bytes:
    parts = []
    while size:
        part = stream.read(min(size, 2**20))
        if not part:
            os._exit(0)  # the run has died
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _end(pipe: IO[bytes] | None) -> IO[bytes]:
    """This side's end of a pipe that was asked for."""
    assert pipe is not None
    return pipe


class _Pages:
    """What the process does with the messages; whatever fails is said once for the same words, and no more."""

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self._folder, self._sinks = folder, sinks
        self._lines: dict[float, Mapping[str, float]] | None = None
        self._told: set[str] = set()

    def take(self, about: dict[str, Any], pictures: Mapping[int, np.ndarray]) -> None:
        """Write the pictures of a message; remember its metrics, and tell them to the tracker."""
        kind, step = about["kind"], about["step"]
        if kind == "log":
            self._add(step, about["metrics"])
            return
        write = write_eval if kind == "eval" else write_samples
        with self._guarded(f"the pictures of step {step} could not be written"):
            rows = [row | {"references": [pictures[i] for i in row["references"]]} for row in about["samples"]]
            write(self._folder, step, pictures, [Sample(**row) for row in rows])

    def write(self) -> None:
        """Write the page."""
        with self._guarded(f"the report of {self._folder} could not be written"):
            write_report(self._folder, None if self._lines is None else list(self._lines.values()))

    def close(self) -> None:
        """Write the page a last time, and close the tracker."""
        self.write()
        for sink in self._sinks:
            with self._guarded("the tracker failed"):
                sink.close()

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guarded("the report has no older lines"):
            if self._lines is None:  # now the log has dropped those that a run which resumes will write anew
                self._lines = {}
                older = load_metrics(self._folder / "metrics.jsonl")
                self._lines = {line["step"]: line for line in older if line["step"] < step}
        assert self._lines is not None
        self._lines[step] = {"step": step, **metrics}
        for sink in self._sinks:
            with self._guarded("the tracker failed"):
                sink(step, metrics)

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


def _end_with(stream: IO[bytes]) -> None:
    """End this process as soon as nobody can write to the stream any more."""
    poll = select.poll()
    poll.register(stream, 0)
    poll.poll()
    os._exit(0)


def main(folder: str, track: Tracker, project: str) -> None:
    """Open the tracker, and do what the messages say until the last one."""
    os.nice(5)  # training comes first
    stream = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  # to the end of the process
    threading.Thread(target=_end_with, args=(stream,), daemon=True).start()
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            sinks = tracker(track, folder, project)
        except Exception as exc:  # of any library
            answer.write(f"{type(exc).__name__}: {exc}")
            return
    pages, is_old, due = _Pages(Path(folder), sinks), False, 0.0
    while True:
        now = time.monotonic()
        if is_old and now >= due:
            pages.write()
            is_old, end = False, time.monotonic()
            due = end + (end - now) * (1 / MAX_SHARE - 1)
        elif select.select([stream], [], [], due - now if is_old else None)[0]:
            about, pictures = _receive(stream)
            if about["kind"] == "end":
                break
            pages.take(about, pictures)
            is_old = is_old or about["kind"] == "log"  # pictures come before the line of their step
    pages.close()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the tracker's kind was checked before
