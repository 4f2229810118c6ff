"""The two kinds of places of complete checkpoints: a folder that all ranks share, and a URL.

Every rank writes its files into a draft, a folder on its own machine's disk, and then hands them over. In a shared
folder that is all, and the first rank gives the draft its name. To a URL the files are sent; there the index, sent
last, makes a checkpoint complete, and is deleted first. The draft of a checkpoint that could not be sent stays.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from omni_train.checkpoint.index import (
    INDEX_FILE,
    Saved,
    parse_index,
    read_index,
    saved_steps,
    step_folder,
    step_name,
    step_of,
)
from omni_train.checkpoint.parts import DTYPES, Index, merge_parts
from omni_train.files import (
    check_bytes,
    check_digest,
    check_file,
    check_size,
    file_digest,
    sync_folder,
    write_file,
    write_folder_atomically,
)
from omni_train.remote import Remote

Files = Mapping[str, Mapping[str, int | str]]  # size and SHA-256 by name
NUM_THREADS = 4  # of a rank, each writes, sends or fetches one file at a time
BESIDE_FILE = "run.json"  # the sizes and SHA-256 of what a run keeps beside its checkpoints
ATTEMPT_FILE = "attempt"  # the id of the save whose objects are in a folder of a URL


class MappedRows:
    """The rows of a file on a disk; only those that are used are read."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def count(self, name: str) -> int:
        """Return the number of a tensor's rows."""
        return int(self._file.get_slice(name).get_shape()[0])

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[Tensor]:
        """Yield the rows of each tensor from the first number to before the second."""
        for name, first, end in wanted:
            yield self._file.get_slice(name)[first:end]


class RemoteRows:
    """The rows of an object, of which only the header and the ranges that are used are read, all ranges at a time."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name
        (size,) = remote.read_ranges(name, [(0, 8)])
        self._begin = 8 + int.from_bytes(size, "little")
        (header,) = remote.read_ranges(name, [(8, self._begin)])
        self._header = json.loads(header)

    def count(self, name: str) -> int:
        """Return the number of a tensor's rows."""
        return int(self._header[name]["shape"][0])

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[Tensor]:
        """Yield the rows of each tensor from the first number to before the second."""
        dtypes = {text: dtype for dtype, text in DTYPES.items()}
        ranges = []
        for name, first, end in wanted:
            low, high = self._header[name]["data_offsets"]
            row = (high - low) // self.count(name)
            ranges.append((self._begin + low + first * row, self._begin + low + end * row))
        for (name, first, end), data in zip(wanted, self._remote.read_ranges(self._name, ranges), strict=True):
            shape = end - first, *self._header[name]["shape"][1:]
            yield torch.frombuffer(bytearray(data), dtype=dtypes[self._header[name]["dtype"]]).view(shape)


def part_name(rank: int) -> str:
    """Return the name of the index of a rank's part."""
    return f"part-{rank:05}.json"


def drafts(folder: Path) -> list[Path]:
    """Return the folders of unfinished checkpoints; raise ValueError for a file or link, which no save leaves."""
    found = list(folder.glob("step-*.tmp"))
    for path in found:
        if path.is_symlink() or path.is_file():
            raise ValueError(f"{path} must be a folder, which an unfinished checkpoint is: move it away")
    return found


class SharedFolder:
    """A folder that all ranks see: a draft gets its name when all of it is on the disk."""

    pause_s = 0.02

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, step: int) -> str:
        """Return the path of a checkpoint."""
        return str(step_folder(self.folder, step))

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        drafts(self.folder)
        return saved_steps(self.folder)

    def open(self, step: int) -> Saved:
        """Return an index; raise ValueError unless all files have its sizes."""
        saved = read_index(step_folder(self.folder, step))
        for name, expected in saved.files.items():
            check_size(step_folder(self.folder, step) / name, expected)
        return saved

    def check(self, step: int, name: str, expected: Mapping[str, int | str], check: Callable[[Path], object]) -> None:
        """Raise ValueError unless all bytes of a file are as expected and `check(path)` passes."""
        path = step_folder(self.folder, step) / name
        check_file(path, expected)
        check(path)

    @contextmanager
    def rows(self, step: int, name: str) -> Iterator[MappedRows]:
        """Open the rows of a file."""
        with safe_open(step_folder(self.folder, step) / name, framework="pt") as file:
            yield MappedRows(file)

    def hand_over(self, draft: Path, names: Sequence[str]) -> None:
        """Do nothing: all ranks see the draft."""

    def part(self, draft: Path, rank: int) -> bytes | None:
        """Return and delete the index of a rank's part; None if it is not there yet."""
        path = draft / part_name(rank)
        if not path.is_file():
            return None
        data = path.read_bytes()
        path.unlink()
        return data

    def seal(self, draft: Path, files: Files, index: bytes) -> None:
        """Write the index and give the draft its name; raise OSError unless all files are there."""
        for name, expected in files.items():
            try:
                check_size(draft / name, expected)
            except ValueError as exc:
                raise OSError(f"{draft}: {exc}; it must be a folder that all ranks share") from exc
        write_file(draft / INDEX_FILE, index)
        sync_folder(draft)
        os.rename(draft, draft.with_suffix(""))
        sync_folder(self.folder)

    def begin(self, draft: Path, attempt: str) -> None:
        """Delete what unfinished saves have left, and make the draft of a new one."""
        for old in drafts(self.folder):
            shutil.rmtree(old)
        draft.mkdir(parents=True)

    def delete(self, step: int) -> None:
        """Rename a checkpoint, which is no longer one when its first file is deleted, and delete it."""
        draft = step_folder(self.folder, step, ".tmp")
        os.rename(step_folder(self.folder, step), draft)
        shutil.rmtree(draft)


class RemoteFolder:
    """The folder of a URL: a checkpoint is complete once it has an index.

    A checkpoint holds beside its own files those that a run keeps in `beside`, which are files and folders. They are
    sent before the first rank's part. Every save has an id, and no objects of two saves are ever put together: the
    folder names the save that may fill it, and a part of any other save is dropped.
    """

    pause_s = 1.0

    def __init__(
        self, remote: Remote, folder: Path, beside: Sequence[Path] = (), wait_for: Callable[[], object] = lambda: None
    ) -> None:
        """Note the URL.

        Args:
            remote: the URL.
            folder: on this machine's disk, for what is checked.
            beside: as `Checkpoint` has it.
            wait_for: called before that is sent, and before anything is deleted.
        """
        self.remote, self._folder, self._beside, self._wait_for = remote, folder, beside, wait_for
        self._parts: set[str] = set()  # seen so far

    def at(self, step: int) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.remote.url}/{step_name(step)}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        found = (PurePosixPath(name) for name in self.remote.sizes())
        steps = (step_of(str(path.parent)) for path in found if path.name == INDEX_FILE)
        return sorted(step for step in steps if step is not None)

    def open(self, step: int) -> Saved:
        """Return an index; raise ValueError unless all objects have its sizes."""
        saved = parse_index(self.remote.read(f"{step_name(step)}/{INDEX_FILE}"))
        self._check_sizes(step_name(step), saved.files)
        return saved

    def check(self, step: int, name: str, expected: Mapping[str, int | str], check: Callable[[Path], object]) -> None:
        """Raise ValueError unless all bytes of an object are as expected and `check(path)` passes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="check-") as folder:
            self.remote.fetch(f"{step_name(step)}/{name}", path := Path(folder) / name)
            check_file(path, expected)
            check(path)

    @contextmanager
    def rows(self, step: int, name: str) -> Iterator[RemoteRows]:
        """Open the rows of an object."""
        yield RemoteRows(self.remote, f"{step_name(step)}/{name}")

    def hand_over(self, draft: Path, names: Sequence[str]) -> None:
        """Send files of a draft, the last name last; before the index of the first part what the run keeps beside.

        Raises:
            OSError: one could not be sent. The message says where the draft is.
        """

        def send(name: str) -> None:
            self.remote.send(draft / name, f"{draft.stem}/{name}")

        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                list(pool.map(send, names[:-1]))
            if names[-1] == part_name(0):
                self._send_beside(draft.stem)
            send(names[-1])
        except OSError as exc:
            raise OSError(f"{exc}. What was not sent stays in {draft}: the same command sends it first") from exc

    def part(self, draft: Path, rank: int) -> bytes | None:
        """Return the index of a rank's part; None if the list of objects does not have it yet."""
        if (name := part_name(rank)) not in self._parts:
            self._parts = set(self.remote.sizes(draft.stem))
        return self.remote.read(f"{draft.stem}/{name}") if name in self._parts else None

    def seal(self, draft: Path, files: Files, index: bytes) -> None:
        """Send the index; raise OSError unless all files are there."""
        try:
            self._check_sizes(draft.stem, files)
        except ValueError as exc:
            raise OSError(f"{self.remote.url}/{draft.stem}: {exc}") from exc
        self.remote.write(f"{draft.stem}/{INDEX_FILE}", index)

    def begin(self, draft: Path, attempt: str) -> None:
        """Delete what unfinished saves have left, and name the one that fills the folder."""
        self._wait_for()
        self._parts = set()
        complete = set(map(step_name, self.steps()))
        for folder in {name.partition("/")[0] for name in self.remote.sizes()} - complete:
            if step_of(folder) is not None:
                self.remote.delete_folder(folder)
        self.remote.write(f"{draft.stem}/{ATTEMPT_FILE}", attempt.encode())

    def delete(self, step: int) -> None:
        """Delete the index of a checkpoint, which is complete no longer, and then the rest."""
        self.remote.delete(f"{step_name(step)}/{INDEX_FILE}")
        self.remote.delete_folder(step_name(step))

    def send_rest(self, draft: Path) -> None:
        """Send what is missing of the whole parts in a draft, if its save is the one that fills the newest folder."""
        if not self._is_new(draft.stem):
            return
        found, attempt = self.remote.sizes(draft.stem), self._attempt(draft.stem)
        for path in sorted(draft.glob("part-*.json")):
            part: Index = json.loads(path.read_bytes())
            sizes = {name: about["bytes"] for name, about in part["files"].items()} | {path.name: path.stat().st_size}
            is_whole = all((draft / name).is_file() and (draft / name).stat().st_size == sizes[name] for name in sizes)
            missing = [name for name in sizes if found.get(name) != sizes[name]]
            if is_whole and missing and part.get("attempt") == attempt:
                self.hand_over(draft, missing)

    def unfinished(self) -> Iterator[list[Index]]:
        """Yield the indices of all parts of each newer checkpoint that lacks only its own index, in ascending order."""
        for folder in sorted({name.partition("/")[0] for name in self.remote.sizes()}):
            found = self.remote.sizes(folder)
            if not {part_name(0), BESIDE_FILE} <= found.keys() or not self._is_new(folder):
                continue
            first = json.loads(self.remote.read(f"{folder}/{part_name(0)}"))
            others = [part_name(rank) for rank in range(1, first["about"]["world_size"])]
            if set(others) <= found.keys():
                parts = [first, *(json.loads(self.remote.read(f"{folder}/{name}")) for name in others)]
                is_whole = all(found.get(name) == about["bytes"] for name, about in merge_parts(parts)["files"].items())
                if is_whole and {part.get("attempt") for part in parts} == {self._attempt(folder)}:
                    yield parts

    def read_beside(self, step: int, name: str) -> bytes | None:
        """Return a file that the run kept beside a checkpoint; None if there was none. Raises as `fetch_beside`."""
        expected = self._kept(step).get(name)
        if expected is None:
            return None
        data = self.remote.read(f"{step_name(step)}/{name}")
        check_digest(f"{self.at(step)}/{name}", sha256(data).hexdigest(), expected)
        return data

    def fetch_beside(self, step: int, name: str, path: Path) -> None:
        """Replace a folder by that of this name which the run kept beside a checkpoint, if there was one.

        Raises:
            ValueError: an object is not the one that was sent; it is named.
            OSError: it could not be read or written.
        """
        kept = {own: about for own, about in self._kept(step).items() if own.startswith(f"{name}/")}

        def fetch(folder: Path) -> None:
            for own, expected in kept.items():
                target = folder / own.removeprefix(f"{name}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                self.remote.fetch(f"{step_name(step)}/{own}", target)
                check_digest(f"{self.at(step)}/{own}", file_digest(target), expected)

        if kept:
            write_folder_atomically(path, fetch)

    def _kept(self, step: int) -> dict[str, dict[str, int | str]]:
        try:
            kept = json.loads(self.remote.read(f"{step_name(step)}/{BESIDE_FILE}"))
        except FileNotFoundError:  # copied from a folder
            return {}
        if wrong := [name for name in kept if name.startswith("/") or ".." in PurePosixPath(name).parts]:
            raise ValueError(f"{self.at(step)}/{BESIDE_FILE} must name files below it, got {wrong[0]!r:.100}")
        return dict(kept)

    def _attempt(self, folder: str) -> str:
        """Return the id of the save that fills a folder; nothing if there is none."""
        try:
            return self.remote.read(f"{folder}/{ATTEMPT_FILE}").decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _is_new(self, name: str) -> bool:
        """True if it is the name of a checkpoint that is newer than all complete ones."""
        step = step_of(name)
        return step is not None and step > max(self.steps(), default=-1)

    def _send_beside(self, folder: str) -> None:
        """Send what the run keeps beside, and then its sizes and digests."""
        self._wait_for()
        sent: dict[str, dict[str, int | str]] = {}
        for path in self._beside:
            if path.is_dir():
                for own in sorted(each for each in path.rglob("*") if each.is_file()):
                    name = own.relative_to(path.parent).as_posix()
                    sent[name] = {"bytes": own.stat().st_size, "sha256": file_digest(own)}
                    self.remote.send(own, f"{folder}/{name}")
            elif path.is_file():  # which may grow
                data = path.read_bytes()
                sent[path.name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
                self.remote.write(f"{folder}/{path.name}", data)
        self.remote.write(f"{folder}/{BESIDE_FILE}", json.dumps(sent).encode())

    def _check_sizes(self, folder: str, files: Files) -> None:
        found = self.remote.sizes(folder)
        for name, expected in files.items():
            check_bytes(name, found.get(name), expected)


Place = SharedFolder | RemoteFolder
