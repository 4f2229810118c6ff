"""Files that a crash or a power failure leaves whole or absent."""

import hashlib
import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> dict[str, int | str]:
    """Write a new file and wait until the disk has it; its size in bytes and its SHA-256, for whoever reads it.

    Raises:
        OSError: the file exists, or could not be written completely.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_file(path: Path, expected: dict[str, int | str]) -> None:
    """Raises ValueError when the file is missing or not what `write_file` returned; reads all of it."""
    check_size(path, expected)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected["sha256"]:
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
