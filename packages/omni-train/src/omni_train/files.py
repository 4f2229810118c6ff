"""Files and folders that a crash or a power failure leaves as they were before or as they are meant to be."""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import get_native_id
from typing import Any


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, which is not a link and, with O_RDWR, has no other name; its descriptor.

    Raises:
        ValueError: it is something else: a pipe would hang, and behind a link another's file may lie.
        OSError: it cannot be opened.
    """
    if not os.path.islink(path):  # one that comes now is refused as well, in other words
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        found = os.fstat(number)
        if stat.S_ISREG(found.st_mode) and (found.st_nlink < 2 or not flags & os.O_RDWR):
            return number
        os.close(number)
    raise ValueError(f"{path} must be a regular file and no link, hard or symbolic: move it away")


def read_regular(path: str | Path, max_bytes: int = 2**30) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        ValueError: as `open_regular`, or it has more than `max_bytes`.
        OSError: it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise ValueError(f"{path} must have at most {max_bytes} bytes, got {size}: move it away")
        return file.read()


def write_file(path: Path, *parts: bytes | memoryview) -> dict[str, int | str]:
    """Write a new file and wait until the disk has it; its size in bytes and its SHA-256, for whoever reads it.

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
    """Put a file into its folder at once: whoever opens it, now or after a crash, sees the old one or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{get_native_id()}")  # two threads or processes may write the same file
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder_atomically(folder: str | Path, write: Mapping[str, bytes | str] | Callable[[Path], object]) -> None:
    """Put a folder into its place at once, all of its files on the disk; one that is there is replaced.

    The files get the rights that the folder has from the umask, whatever wrote them. One process writes a folder.

    Args:
        folder: its parents are made if missing.
        write: the content of each file by its name, or a function that writes them into the folder it is given.

    Raises:
        OSError: it could not be written. What was there stays.
    """
    folder = Path(folder)
    temporary, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if callable(write):
            write(temporary)
        else:
            for name, data in write.items():
                write_file(temporary / name, data.encode() if isinstance(data, str) else data)
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


def _sync_files(folder: Path) -> None:
    """Wait until the disk has all that is in the folder: a rename may get there before the content does."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(folder.stat().st_mode & 0o666)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line. What follows the last newline was torn by a crash and is left out.

    Raises:
        ValueError: any other line is no JSON object, or the file none that `read_regular` takes.
        OSError: the file cannot be read.
    """
    entries = []
    for number, line in enumerate(read_regular(path).split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line.decode(), parse_int=parse_int)
        except (ValueError, RecursionError) as exc:
            raise damaged_line(path, number, f"not valid JSON ({exc})") from exc
        if not isinstance(entry, dict):
            raise damaged_line(path, number, f"must be a JSON object, got {type(entry).__name__}")
        entries.append(entry)
    return entries


def parse_int(text: str) -> int:
    """Return the integer of a JSON file, for `json.loads`.

    Raises:
        ValueError: it needs more than 64 bits, so that no float and no tensor could hold it.
    """
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(f"integers must fit into 64 bits, got {text:.20}...")
    return number


def damaged_line(path: str | Path, number: int, fault: str) -> ValueError:
    """The error of a line that nobody has written so: where it is, what is wrong, what to do."""
    return ValueError(f"{path}, line {number}: {fault}. Delete the line, or move the file away")


def load_metrics(path: str | Path) -> list[dict[str, float]]:
    """The steps of a `metrics.jsonl`, in step order; null becomes NaN.

    A step that was logged again after a resume counts once, as logged last. A last line torn by a crash is left out.

    Raises:
        ValueError: any other line is damaged; it is named.
    """
    steps = {entry["step"]: entry for entry in read_steps(path)}
    return [steps[step] for step in sorted(steps)]


def read_steps(path: str | Path) -> list[dict[str, float]]:
    """Return every line of a `metrics.jsonl`; null becomes NaN. Raises as `load_metrics`."""
    entries = read_jsonl(path)
    for number, entry in enumerate(entries, start=1):
        if type(entry.get("step")) is not int or not all(isinstance(v, int | float | None) for v in entry.values()):
            raise damaged_line(path, number, "must be numbers, one of them the step")
    return [{name: math.nan if value is None else value for name, value in entry.items()} for entry in entries]


def file_digest(path: str | Path) -> str:
    """The SHA-256 of a file; reads all of it."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def probe_digest(paths: Iterable[str | Path], *, num_blocks: int = 64, block_bytes: int = 4096) -> str:
    """A SHA-256 that tells large files apart without reading them: of their sizes and evenly spread blocks of each.

    Of safetensors files the first block holds names and shapes, and other weights differ in nearly every block; a
    change of a few bytes may go unseen.
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


def check_file(path: Path, expected: dict[str, int | str]) -> None:
    """Raises ValueError when the file is missing or not what `write_file` returned; reads all of it."""
    check_size(path, expected)
    if (found := file_digest(path)) != expected["sha256"]:
        raise ValueError(f"{path.name} has the SHA-256 {found[:12]}..., not {str(expected['sha256'])[:12]}...")


def check_size(path: Path, expected: dict[str, int | str]) -> None:
    """Raises ValueError when the file is missing or has another size than `write_file` returned."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes, not {expected['bytes']}")


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's list of names: a new file or a rename may otherwise be forgotten."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
