"""Files and folders that are either old or complete after a crash or power failure."""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_native_id
from typing import Any

MAX_DEPTH = 64  # nesting depth of lists and objects in JSON
POINTER = b"version https://git-lfs"  # start of the pointer that Git LFS leaves for a file that is not fetched


def check_fetched(path: str | Path) -> None:
    """Raise ValueError if the file is a Git LFS pointer; OSError if it cannot be read."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(f"{path} must be the file itself, got its pointer of Git LFS: `git lfs pull` fetches it")


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that is not a link and, with O_RDWR, has no other hard link; return its descriptor.

    Raises:
        ValueError: it is something else: a pipe would hang, and a link may lead to another file.
        OSError: it cannot be opened.
    """
    if not os.path.islink(path):  # O_NOFOLLOW rejects a link created after this line
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode) and (status.st_nlink < 2 or not flags & os.O_RDWR):
            return number
        os.close(number)
    raise ValueError(f"{path} must be a regular file and no link, hard or symbolic: move it away")


def read_regular(path: str | Path, max_bytes: int = 2**30) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        ValueError: as in `open_regular`, or the file has more than `max_bytes`.
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise ValueError(f"{path} must have at most {max_bytes} bytes, got {size}: move it away")
        return file.read()


def read_linked(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file, following links, as the hub's cache has them.

    Raises:
        ValueError, OSError: as in `read_regular`.
    """
    return read_regular(os.path.realpath(path), max_bytes)


def write_file(path: Path, *parts: bytes | memoryview) -> dict[str, int | str]:
    """Write a new file and sync it to disk; return its size in bytes and its SHA-256.

    Raises:
        OSError: the file exists, or could not be written completely.
    """
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return {"bytes": sum(map(len, parts)), "sha256": digest.hexdigest()}


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Replace a file atomically: readers see the old or the new one, even after a crash."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{get_native_id()}")  # two threads or processes may write the same file
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Atomically replace a folder with the one filled in the `with` block, with all of its files on the disk.

    The files get the mode that the umask gives the folder. Only one process may replace a folder.

    Args:
        folder: missing parents are created.

    Raises:
        ValueError: as in `check_replaceable`.
        OSError: it could not be written. The old folder stays, as after any error in the block.
    """
    folder = Path(folder)
    check_replaceable(folder)
    temporary, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync_files(temporary)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        temporary.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():  # stopped between the two renames, this time or an earlier one
            old.rename(folder)


def check_replaceable(folder: Path) -> None:
    """Raise ValueError if a file or link is in the place of the folder or of one used to replace it."""
    for path in (folder, *(folder.with_name(f"{folder.name}.{end}") for end in ("tmp", "old"))):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ValueError(f"{path} must be a folder and no link: move it away")


def write_folder_atomically(folder: str | Path, files: Mapping[str, bytes | str]) -> None:
    """Replace a folder as in `new_folder`. files: the content of each file by its name."""
    with new_folder(folder) as temporary:
        for name, data in files.items():
            write_file(temporary / name, data.encode() if isinstance(data, str) else data)


def _sync_files(folder: Path) -> None:
    """Sync all files of the folder to disk: a rename may reach the disk before their content."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(folder.stat().st_mode & 0o666)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line. An incomplete last line, left by a crash, is skipped.

    Raises:
        ValueError: any other line is not a JSON object, or as in `read_regular`.
        OSError: the file cannot be read.
    """
    entries = []
    for number, line in enumerate(read_regular(path).split(b"\n")[:-1], start=1):
        try:
            entry = parse_json(line)
        except ValueError as exc:
            raise damaged_line_error(path, number, f"not valid JSON ({exc})") from exc
        if not isinstance(entry, dict):
            raise damaged_line_error(path, number, f"must be a JSON object, got {type(entry).__name__}")
        entries.append(entry)
    return entries


def int64(text: str) -> int:
    """Parse an integer; raise ValueError if it has more than 64 bits, which no tensor can hold."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(f"integers must fit into 64 bits, got {text:.20}...")
    return number


def parse_json(data: bytes | str, *, parse_int: Callable[[str], int] = int64) -> Any:
    """Parse JSON text from an untrusted source. parse_int: parser for its integers.

    Raises:
        ValueError: it is not UTF-8 JSON, is nested more than MAX_DEPTH deep, or has an integer that is too long.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        value = json.loads(text, parse_int=parse_int)
    except RecursionError as exc:
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep") from exc
    check_depth(value, text)
    return value


def parse_object(data: bytes | str, what: str, *, parse_int: Callable[[str], int] = int64) -> dict[str, Any]:
    """Parse JSON text to an object, as in `parse_json`. what: name of the text in the message."""
    try:
        value = parse_json(data, parse_int=parse_int)
    except ValueError as exc:
        raise ValueError(f"{what} is not valid JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def check_depth(value: object, text: str) -> None:
    """Raise ValueError if the value of a JSON text is nested more than MAX_DEPTH deep."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:  # with so few brackets, it cannot be deeper
        return
    inner = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in inner if isinstance(part, dict | list))
        inner = [item for part in parts for item in part]
    if any(isinstance(part, dict | list) for part in inner):
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep")


def damaged_line_error(path: str | Path, number: int, fault: str) -> ValueError:
    """Return the error for a damaged line, with its place, fault and remedy."""
    return ValueError(f"{path}, line {number}: {fault}. Delete the line, or move the file away")


def load_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the steps of a `metrics.jsonl`, in step order; null becomes NaN.

    If a step was logged again after a resume, its last line counts. An incomplete last line is skipped.

    Raises:
        ValueError: any other line, named in the message, is damaged.
    """
    steps = {entry["step"]: entry for entry in read_steps(path)}
    return [steps[step] for step in sorted(steps)]


def read_steps(path: str | Path) -> list[dict[str, float]]:
    """Return every line of a `metrics.jsonl`; null becomes NaN. Raises as in `load_metrics`."""
    entries = read_jsonl(path)
    for number, entry in enumerate(entries, start=1):
        if type(entry.get("step")) is not int or not all(isinstance(v, int | float | None) for v in entry.values()):
            raise damaged_line_error(path, number, "must be numbers, one of them the step")
    return [{name: math.nan if value is None else value for name, value in entry.items()} for entry in entries]


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a whole file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of one file, or for several files that of their names and SHA-256s."""
    if len(paths) == 1:
        return file_digest(paths[0])
    return hashlib.sha256("".join(f"{file_digest(path)}  {path.name}\n" for path in paths).encode()).hexdigest()


def probe_digest(paths: Iterable[str | Path], *, num_blocks: int = 64, block_bytes: int = 4096) -> str:
    """Return a SHA-256 that identifies large files by their sizes and evenly spaced blocks, without a full read.

    The first block of a safetensors file holds names and shapes, and other weights differ in nearly every block; a
    change of a few bytes may be missed.
    """
    digest = hashlib.sha256()
    for path in paths:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            for i in range(num_blocks):
                file.seek(max(size - block_bytes, 0) * i // max(num_blocks - 1, 1))
                digest.update(file.read(block_bytes))
    return digest.hexdigest()


def check_file(path: Path, expected: Mapping[str, int | str]) -> None:
    """Raise ValueError if the file is missing or its size or SHA-256 differs from that returned by `write_file`."""
    check_size(path, expected)
    check_digest(path.name, file_digest(path), expected)


def check_size(path: Path, expected: Mapping[str, int | str]) -> None:
    """Raise ValueError if the file is missing or its size differs from that returned by `write_file`."""
    check_bytes(path.name, path.stat().st_size if path.is_file() else None, expected)


def check_bytes(name: str, size: int | None, expected: Mapping[str, int | str]) -> None:
    """Raise ValueError if the size of a file differs from that returned by `write_file`, or is None (missing)."""
    if size is None:
        raise ValueError(f"{name} is missing")
    if size != expected["bytes"]:
        raise ValueError(f"{name} has {size} bytes, not {expected['bytes']}")


def check_digest(name: str, digest: str, expected: Mapping[str, int | str]) -> None:
    """Raise ValueError if the SHA-256 of a file differs from that returned by `write_file`."""
    if digest != expected["sha256"]:
        raise ValueError(f"{name} has the SHA-256 {digest[:12]}..., not {str(expected['sha256'])[:12]}...")


def sync_folder(path: Path) -> None:
    """Sync the folder's list of names to disk, so that a new file or a rename is not lost."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
