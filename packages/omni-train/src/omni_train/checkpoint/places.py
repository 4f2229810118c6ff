"""The two places where complete checkpoints are stored: a folder shared by all ranks, and a URL.

Every rank writes its files into a draft, a folder on the disk of its machine, and then hands them over. With a shared
folder nothing more is needed, and the first rank renames the draft. With a URL the files are uploaded; there, the
index is uploaded last and makes a checkpoint complete, and is deleted first. A start downloads the files that it needs.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath

from omni_train.checkpoint.index import (
    INDEX_FILE,
    Saved,
    parse_index,
    parse_step,
    read_index,
    saved_steps,
    step_folder,
    step_name,
)
from omni_train.files import (
    check_bytes,
    check_digest,
    check_size,
    file_digest,
    new_folder,
    read_regular,
    sync_folder,
    write_file,
)
from omni_train.remote import Remote

Files = Mapping[str, Mapping[str, int | str]]  # size and SHA-256 by name
NUM_THREADS = 4  # per rank; each thread writes, uploads or downloads one file at a time


def part_name(rank: int) -> str:
    """Return the file name of the index of a rank's part."""
    return f"part-{rank:05}.json"


def draft_folders(folder: Path) -> list[Path]:
    """Return the folders of unfinished checkpoints; raise ValueError for a file or link, which no save leaves."""
    folders = list(folder.glob("step-*.tmp"))
    for path in folders:
        if path.is_symlink() or path.is_file():
            raise ValueError(f"{path} must be a folder, which an unfinished checkpoint is: move it away")
    return folders


class SharedFolder:
    """A folder shared by all ranks: a draft is renamed once all of it is on the disk."""

    pause_s = 0.02

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def location(self, step: int) -> str:
        """Return the path of a checkpoint."""
        return str(step_folder(self.folder, step))

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        draft_folders(self.folder)
        return saved_steps(self.folder)

    def open(self, step: int) -> Saved:
        """Return the index of a checkpoint; raise ValueError unless all files have the sizes in it."""
        saved = read_index(step_folder(self.folder, step))
        for name, expected in saved.files.items():
            check_size(step_folder(self.folder, step) / name, expected)
        return saved

    @contextmanager
    def file(self, step: int, name: str) -> Iterator[Path]:
        """Yield the path of a file."""
        yield step_folder(self.folder, step) / name

    def run_files(self, draft: Path) -> dict[str, Path]:
        """Return an empty dict: files that a run keeps next to its checkpoints are in their own folder."""
        return {}

    def upload(self, draft: Path, files: Mapping[str, Path]) -> None:
        """Do nothing: all ranks see the draft."""

    def part(self, draft: Path, rank: int) -> bytes | None:
        """Return the index of a rank's part and delete its file; None if it does not exist yet."""
        path = draft / part_name(rank)
        if not path.is_file():
            return None
        data = read_regular(path)
        path.unlink()
        return data

    def commit(self, draft: Path, files: Files, index: bytes) -> None:
        """Write the index and rename the draft; raise OSError unless all files are there."""
        for name, expected in files.items():
            try:
                check_size(draft / name, expected)
            except ValueError as exc:
                raise OSError(f"{draft}: {exc}; it must be a folder that all ranks share") from exc
        write_file(draft / INDEX_FILE, index)
        sync_folder(draft)
        os.rename(draft, draft.with_suffix(""))
        sync_folder(self.folder)

    def begin(self, draft: Path) -> None:
        """Delete the remains of unfinished saves, and create the draft of a new one."""
        for old in draft_folders(self.folder):
            shutil.rmtree(old)
        draft.mkdir(parents=True)

    def delete(self, step: int) -> None:
        """Rename a checkpoint, so that a partly deleted one is never taken for complete, and delete it."""
        draft = step_folder(self.folder, step, ".tmp")
        os.rename(step_folder(self.folder, step), draft)
        shutil.rmtree(draft)


class RemoteFolder:
    """The folder of a URL: a checkpoint is complete once it has an index.

    Besides its own files, a checkpoint holds the files and folders of the run listed in `run_files`.
    """

    pause_s = 1.0

    def __init__(
        self,
        remote: Remote,
        folder: Path,
        run_files: Sequence[Path] = (),
        wait_for: Callable[[], object] = lambda: None,
    ) -> None:
        """Store the arguments.

        Args:
            remote: the URL.
            folder: folder on this machine's disk for downloaded files.
            run_files: as in `Checkpoint`.
            wait_for: called before the files of `run_files` are read, and before anything is deleted.
        """
        self.remote, self._folder, self._run_files, self._wait_for = remote, folder, run_files, wait_for
        self._parts: set[str] = set()  # seen so far

    def location(self, step: int) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.remote.url}/{step_name(step)}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        paths = (PurePosixPath(name) for name in self.remote.sizes())
        steps = (parse_step(str(path.parent)) for path in paths if path.name == INDEX_FILE)
        return sorted(step for step in steps if step is not None)

    def open(self, step: int) -> Saved:
        """Return the index of a checkpoint; raise ValueError unless all objects have the sizes in it."""
        saved = parse_index(self.remote.read(f"{step_name(step)}/{INDEX_FILE}"))
        self._check_sizes(step_name(step), saved.files)
        return saved

    @contextmanager
    def file(self, step: int, name: str) -> Iterator[Path]:
        """Download an object for the `with` block; yield its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="fetched-") as folder:
            self.remote.fetch(f"{step_name(step)}/{name}", path := Path(folder) / name)
            yield path

    def run_files(self, draft: Path) -> dict[str, Path]:
        """Return the files of `run_files` by their names in a checkpoint; single files, which may grow, are copied."""
        self._wait_for()
        files: dict[str, Path] = {}
        for path in self._run_files:
            if path.is_dir():
                below = sorted(file for file in path.rglob("*") if file.is_file())
                files |= {file.relative_to(path.parent).as_posix(): file for file in below}
            elif path.is_file():
                files[path.name] = Path(shutil.copy(path, draft))
        return files

    def upload(self, draft: Path, files: Mapping[str, Path]) -> None:
        """Upload files under their names in the checkpoint, in any order except the last one. Raises OSError."""
        *first, last = files
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda name: self.remote.send(files[name], f"{draft.stem}/{name}"), first))
        self.remote.send(files[last], f"{draft.stem}/{last}")

    def part(self, draft: Path, rank: int) -> bytes | None:
        """Return the index of a rank's part; None if it is not in the list of objects yet."""
        if (name := part_name(rank)) not in self._parts:
            self._parts = set(self.remote.sizes(draft.stem))
        return self.remote.read(f"{draft.stem}/{name}") if name in self._parts else None

    def commit(self, draft: Path, files: Files, index: bytes) -> None:
        """Upload the index; raise OSError unless all files are there."""
        try:
            self._check_sizes(draft.stem, files)
        except ValueError as exc:
            raise OSError(f"{self.remote.url}/{draft.stem}: {exc}") from exc
        self.remote.write(f"{draft.stem}/{INDEX_FILE}", index)

    def begin(self, draft: Path) -> None:
        """Delete the remains of unfinished saves."""
        self._wait_for()
        self._parts = set()
        complete = set(map(step_name, self.steps()))
        for folder in {name.partition("/")[0] for name in self.remote.sizes()} - complete:
            if parse_step(folder) is not None:
                self.remote.delete_folder(folder)

    def delete(self, step: int) -> None:
        """Delete a checkpoint: first its index, after which it no longer counts as complete, then the rest."""
        self.remote.delete(f"{step_name(step)}/{INDEX_FILE}")
        self.remote.delete_folder(step_name(step))

    def read_run_file(self, step: int, name: str) -> bytes | None:
        """Return a file that the run stored with a checkpoint, if there was one. Raises like `fetch_run_folder`."""
        expected = self.open(step).files.get(name)
        if expected is None:  # the checkpoint was copied from a folder
            return None
        data = self.remote.read(f"{step_name(step)}/{name}")
        check_digest(f"{self.location(step)}/{name}", sha256(data).hexdigest(), expected)
        return data

    def fetch_run_folder(self, step: int, name: str, path: Path) -> None:
        """Replace a folder with the folder of this name stored with a checkpoint, if there is one.

        Raises:
            ValueError: an object differs from the one that was uploaded; the message names it.
            OSError: it could not be read or written.
        """
        kept = {file: digest for file, digest in self.open(step).files.items() if file.startswith(f"{name}/")}
        if not kept:
            return
        with new_folder(path) as folder:
            for file, expected in kept.items():
                target = folder / file.removeprefix(f"{name}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                self.remote.fetch(f"{step_name(step)}/{file}", target)
                check_digest(f"{self.location(step)}/{file}", file_digest(target), expected)

    def _check_sizes(self, folder: str, files: Files) -> None:
        sizes = self.remote.sizes(folder)
        for name, expected in files.items():
            check_bytes(name, sizes.get(name), expected)


Place = SharedFolder | RemoteFolder
