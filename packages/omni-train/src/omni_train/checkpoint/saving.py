"""A save in progress: the threads of a rank, which call no collective, and the waits for them.

Each rank's thread writes its files, and their index as `part-00001.json`. The first rank's thread reads these indices
as they appear, and completes the checkpoint when it has all of them.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from omni_train.checkpoint.parts import Index, PartFile, merge_parts
from omni_train.dist import Dist
from omni_train.files import write_atomically

NUM_THREADS = 4  # of a rank, each writes one file at a time
SHARED_S = 60.0  # until a file of another rank must be visible in the shared folder
LONELY_S = 20.0  # the first rank of a failed run waits this long for the parts of the others


class Saving:
    """This rank's part of a save, which starts immediately."""

    def __init__(
        self, folder: Path, dist: Dist, files: Iterable[PartFile], finish: Callable[[Index], None], *, num_threads: int
    ) -> None:
        """Start to write.

        Args:
            folder: where all ranks write.
            dist: this rank's place.
            files: its files; an iterator is advanced when the last one is written.
            finish: called by the first rank with the index of all parts.
            num_threads: files written at the same time; if several, `files` must be in memory.
        """
        self._folder, self._dist, self._files, self._finish = folder, dist, files, finish
        self._num_threads = num_threads
        self._written: Future[None] = Future()  # this rank's part
        self._ended: Future[None] = Future()  # on the first rank, the checkpoint
        self._all_written, self._is_given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """This rank's state: "writing", "done" or "failed"."""
        if not self._ended.done():
            return "writing"
        return "failed" if self._ended.exception() else "done"

    def wait_written(self) -> None:
        """Wait for this rank's part.

        Raises:
            OSError, ValueError, RuntimeError: it could not be written, or holds NaN or infinity.
        """
        self._written.result()

    def wait_finished(self) -> None:
        """Wait, on the first rank, for the checkpoint; all parts are written. Raises as `wait_written`."""
        self._all_written.set()
        if self._dist.is_main:
            self._ended.result()

    def wait_alone(self) -> None:
        """Wait for this rank's part; on the first rank wait up to LONELY_S for those of ranks that may have ended."""
        wait([self._written])
        if self._dist.is_main:
            wait([self._ended], LONELY_S)

    def give_up(self) -> None:
        """End the wait for other ranks, and wait until this rank's threads have ended."""
        self._is_given_up.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            part = self._write()
            self._written.set_result(None)
            if self._dist.is_main:
                others = [self._take_part(rank) for rank in range(1, self._dist.world_size)]
                self._finish(merge_parts([part, *others]))
            self._ended.set_result(None)
        except Exception as exc:
            is_sent = isinstance(exc, OSError | ValueError | RuntimeError)  # to the other ranks by `same_error`
            error = exc if is_sent else RuntimeError(f"{type(exc).__name__}: {exc}")
            for future in (self._written, self._ended):
                if not future.done():
                    future.set_exception(error)

    def _write(self) -> Index:
        index: Index = {"files": {}, "tensors": {}}

        def write(file: PartFile) -> tuple[PartFile, dict[str, int | str]]:
            return file, file.write(self._folder)

        with ThreadPoolExecutor(self._num_threads) as pool:
            for file, about in (pool.map if self._num_threads > 1 else map)(write, self._files):
                index["files"][file.name] = about
                index["tensors"] |= file.index()
        if not self._dist.is_main:
            write_atomically(self._part(self._dist.rank), json.dumps(index))
        return index

    def _take_part(self, rank: int) -> Index:
        """Wait for the index of another rank; return and delete it."""
        path, deadline = self._part(rank), float("inf")
        while not path.is_file():
            if self._all_written.is_set():
                deadline = min(deadline, time.monotonic() + SHARED_S)
            if self._is_given_up.wait(0.02) or time.monotonic() > deadline:
                raise OSError(f"{path.name} is missing in {self._folder}; it must be a folder that all ranks share")
        index: Index = json.loads(path.read_bytes())
        path.unlink()
        return index

    def _part(self, rank: int) -> Path:
        return self._folder / f"part-{rank:05}.json"
