"""A save in progress: the threads of a rank, which call no collective, and waiting for them.

Each rank's thread writes its files into a draft, and their index as `part-00001.json`, and hands them over to the
place of the checkpoints. The first rank's thread reads these indices as they appear there, and completes the
checkpoint when it has all of them.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from omni_train.checkpoint.index import parse_part
from omni_train.checkpoint.parts import Index, PartFile
from omni_train.checkpoint.places import Place, part_name
from omni_train.dist import Dist
from omni_train.files import file_digest, write_atomically

SHARED_DISK_S = 60.0  # maximum time until another rank's file is visible in the shared folder
LOST_RANKS_S = 20.0  # time that the first rank of a failed run waits for the parts of the others


class Saving:
    """This rank's part of a save, which starts immediately."""

    def __init__(
        self,
        draft: Path,
        place: Place,
        dist: Dist,
        files: Iterable[PartFile],
        metadata: Mapping[str, Any],
        finish: Callable[[Sequence[Index]], None],
        *,
        num_threads: int,
    ) -> None:
        """Start writing.

        Args:
            draft: folder to write into.
            place: place of the checkpoints.
            dist: the ranks.
            files: the files of this rank; an iterator advances only when the previous file is written.
            metadata: entries of the part's index other than the files and their tensors, including the id of the save.
            finish: called on the first rank with the indices of all parts.
            num_threads: number of files written at the same time; if more than one, `files` must be in memory.
        """
        self._draft, self._place, self._dist, self._files = draft, place, dist, files
        self._metadata, self._finish = metadata, finish
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

    def wait_written(self, limit_s: float) -> bool:
        """Wait for this rank's part; return False on timeout."""
        return bool(wait([self._written], limit_s).done)

    def wait_finished(self, limit_s: float) -> bool:
        """Once all parts are written, wait on the first rank for the checkpoint; return False on timeout."""
        self._all_written.set()
        return not self._dist.is_main or bool(wait([self._ended], limit_s).done)

    def check(self) -> None:
        """Raise the error of a save that has failed.

        Raises:
            OSError, ValueError, RuntimeError: a file could not be written, or holds NaN or infinity.
        """
        for future in (self._written, self._ended):
            if future.done():
                future.result()

    def wait_alone(self) -> None:
        """Wait for this rank's part; the first rank also waits up to LOST_RANKS_S for ranks that may have ended."""
        wait([self._written])
        if self._dist.is_main:
            wait([self._ended], LOST_RANKS_S)

    def give_up(self) -> None:
        """Stop waiting for other ranks, and join this rank's threads."""
        self._is_given_up.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._place.upload(self._draft, self._write())
            self._written.set_result(None)
            if self._dist.is_main:
                self._finish([self._take_part(rank) for rank in range(self._dist.world_size)])
            self._ended.set_result(None)
        except Exception as exc:
            is_sent = isinstance(exc, OSError | ValueError | RuntimeError)  # passed on by `same_error`
            error = exc if is_sent else RuntimeError(f"{type(exc).__name__}: {exc}")
            for future in (self._written, self._ended):
                if not future.done():
                    future.set_exception(error)

    def _write(self) -> dict[str, Path]:
        """Write this rank's files and, last, their index; return them by name, on the first rank with `run_files`."""
        index: Index = {"files": {}, "tensors": {}}

        def write(file: PartFile) -> tuple[PartFile, dict[str, int | str]]:
            return file, file.write(self._draft)

        with ThreadPoolExecutor(self._num_threads) as pool:
            for file, entry in (pool.map if self._num_threads > 1 else map)(write, self._files):
                index["files"][file.name] = entry
                index["tensors"] |= file.index()
        files = {name: self._draft / name for name in index["files"]}
        if self._dist.is_main:
            run_files = self._place.run_files(self._draft)
            index["files"] |= {
                name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for name, path in run_files.items()
            }
            files |= run_files
        index_name = part_name(self._dist.rank)
        write_atomically(self._draft / index_name, json.dumps({**index, **self._metadata}))
        return files | {index_name: self._draft / index_name}

    def _take_part(self, rank: int) -> Index:
        """Wait for the index of a rank and return it; ignore those of other saves, from ranks that end late."""
        deadline, index = float("inf"), Index()
        while index.get("attempt") != self._metadata["attempt"]:
            if data := self._place.part(self._draft, rank):
                index = parse_part(data, part_name(rank), is_first=rank == 0)
                continue
            if self._all_written.is_set():
                deadline = min(deadline, time.monotonic() + SHARED_DISK_S)
            if self._is_given_up.wait(self._place.pause_s) or time.monotonic() > deadline:
                fault = f"{part_name(rank)} is missing in {self._draft}; it must be a folder that all ranks share"
                raise OSError(f"{fault}, or --checkpoint-url must be given")
        return index
