"""Reading of files that the user names."""

import os
import stat
from pathlib import Path

from omni_reward.wire import check_token

MAX_TOKEN_BYTES = 2**16


def read_file(path: str | Path, max_bytes: int, *, may_be_pipe: bool = False) -> bytes:
    """Return the bytes of a file, following links. A pipe without a writer is empty.

    Raises:
        ValueError: it is not a regular file (or a pipe if `may_be_pipe`), or has more than `max_bytes`.
        OSError: it cannot be read.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would otherwise wait for its writer
    kind = os.fstat(number).st_mode
    if not (stat.S_ISREG(kind) or (may_be_pipe and stat.S_ISFIFO(kind))):
        os.close(number)
        raise ValueError(f"{path} must be a regular file")
    os.set_blocking(number, True)
    with open(number, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes")
    return data


def read_token(path: str | Path | None) -> str | None:
    """Return the bearer token from a file or a pipe such as `<(command)`, or None without a path.

    Raises:
        ValueError: as `read_file`, or the token is not valid in a header.
        OSError: the file cannot be read.
    """
    if path is None or not str(path):
        return None
    token = read_file(path, MAX_TOKEN_BYTES, may_be_pipe=True).decode("ascii", "replace").strip()
    check_token(token)
    return token
