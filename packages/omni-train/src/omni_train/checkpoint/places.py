"""The two kinds of places of complete checkpoints: a folder that all ranks share, and a URL.

Every rank writes its files into a draft, a folder on its own machine's disk, and then hands them over. In a shared
folder that is all, and the first rank gives the draft its name. To a URL the files are sent; there the index, sent
last, makes a checkpoint complete, and is deleted first. A start fetches the files that it needs.
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
    read_index,
    saved_steps,
    step_folder,
    step_name,
    step_of,
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
NUM_THREADS = 4  # of a rank, each writes, sends or fetches one file at a time


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

    @contextmanager
    def file(self, step: int, name: str) -> Iterator[Path]:
        """Yield a file."""
        yield step_folder(self.folder, step) / name

    def beside(self, draft: Path) -> dict[str, Path]:
        """Return nothing: what a run keeps beside is in a folder of its own."""
        return {}

    def hand_over(self, draft: Path, files: Mapping[str, Path]) -> None:
        """Do nothing: all ranks see the draft."""

    def part(self, draft: Path, rank: int) -> bytes | None:
        """Return and delete the index of a rank's part; None if it is not there yet."""
        path = draft / part_name(rank)
        if not path.is_file():
            return None
        data = read_regular(path)
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

    def begin(self, draft: Path) -> None:
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

    A checkpoint holds beside its own files those that a run keeps in `beside`, which are files and folders.
    """

    pause_s = 1.0

    def __init__(
        self, remote: Remote, folder: Path, beside: Sequence[Path] = (), wait_for: Callable[[], object] = lambda: None
    ) -> None:
        """Note the URL.

        Args:
            remote: the URL.
            folder: on this machine's disk, for what is fetched.
            beside: as `Checkpoint` has it.
            wait_for: called before that is read, and before anything is deleted.
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

    @contextmanager
    def file(self, step: int, name: str) -> Iterator[Path]:
        """Fetch an object for the `with` block; yield its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="fetched-") as folder:
            self.remote.fetch(f"{step_name(step)}/{name}", path := Path(folder) / name)
            yield path

    def beside(self, draft: Path) -> dict[str, Path]:
        """Return the files that the run keeps beside, by their names in a checkpoint; of those that may grow copies."""
        self._wait_for()
        found: dict[str, Path] = {}
        for path in self._beside:
            if path.is_dir():
                own = sorted(each for each in path.rglob("*") if each.is_file())
                found |= {each.relative_to(path.parent).as_posix(): each for each in own}
            elif path.is_file():
                found[path.name] = Path(shutil.copy(path, draft))
        return found

    def hand_over(self, draft: Path, files: Mapping[str, Path]) -> None:
        """Send files by their names in the checkpoint, the last one last. Raises OSError."""
        *first, last = files
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda name: self.remote.send(files[name], f"{draft.stem}/{name}"), first))
        self.remote.send(files[last], f"{draft.stem}/{last}")

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

    def begin(self, draft: Path) -> None:
        """Delete what unfinished saves have left."""
        self._wait_for()
        self._parts = set()
        complete = set(map(step_name, self.steps()))
        for folder in {name.partition("/")[0] for name in self.remote.sizes()} - complete:
            if step_of(folder) is not None:
                self.remote.delete_folder(folder)

    def delete(self, step: int) -> None:
        """Delete the index of a checkpoint, which is complete no longer, and then the rest."""
        self.remote.delete(f"{step_name(step)}/{INDEX_FILE}")
        self.remote.delete_folder(step_name(step))

    def read_beside(self, step: int, name: str) -> bytes | None:
        """Return a file that the run kept beside a checkpoint; None if there was none. Raises as `fetch_beside`."""
        expected = self.open(step).files.get(name)
        if expected is None:  # the checkpoint was copied from a folder
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
        kept = {own: about for own, about in self.open(step).files.items() if own.startswith(f"{name}/")}
        if not kept:
            return
        with new_folder(path) as folder:
            for own, expected in kept.items():
                target = folder / own.removeprefix(f"{name}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                self.remote.fetch(f"{step_name(step)}/{own}", target)
                check_digest(f"{self.at(step)}/{own}", file_digest(target), expected)

    def _check_sizes(self, folder: str, files: Files) -> None:
        found = self.remote.sizes(folder)
        for name, expected in files.items():
            check_bytes(name, found.get(name), expected)


Place = SharedFolder | RemoteFolder
