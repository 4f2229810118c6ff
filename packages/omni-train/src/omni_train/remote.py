"""A folder at a URL, such as s3://bucket/run, over fsspec. Imports no torch, and fsspec only when it is used.

An object appears only once it is complete, and there is no rename. Failed calls are retried for a while: `READ_S` for
a read, `SEND_S` for a write. Credentials come from the environment and the files of the store's own tools, never from
the URL.
"""

import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import get_native_id
from typing import Any, TypeVar

READ_S, SEND_S = 30.0, 600.0  # how long calls are retried
MAX_BYTES = 2**30  # maximum size of an object that is read whole
PAUSE_S = 1.0  # before the first retry; each later pause is twice as long, up to half a minute
SCHEMES = {  # the library of each, and how to install it
    "s3": ("s3fs", 'pip install "omni-train[remote]"'),
    "gs": ("gcsfs", 'pip install "omni-train[remote]" gcsfs'),
    "file": ("fsspec", 'pip install "omni-train[remote]"'),
}
T = TypeVar("T")


def check_url(url: str) -> None:
    """Raise ValueError unless `url` is the URL of a folder without credentials and its library is installed."""
    scheme, mark, rest = url.partition("://")
    redacted = f"{scheme}{mark}{re.sub('^.*@', '...@', rest.partition('?')[0])}"
    if not mark or scheme not in SCHEMES:
        raise ValueError(
            f"the URL must begin with {', '.join(f'{name}://' for name in SCHEMES)}, got {redacted!r:.200}"
        )
    if re.search(r"[@?#]|::", rest):
        raise ValueError(
            f"the URL must have no user, password or query, which files would keep: credentials belong into the "
            f"environment or the files of the store's own tools, got {redacted!r:.200}"
        )
    if not rest.strip("/") or not url.isprintable() or ".." in rest.split("/"):
        raise ValueError(f"the URL must name a folder, as s3://bucket/run, got {redacted!r:.200}")
    library, install = SCHEMES[scheme]
    if not find_spec(library):
        raise ValueError(f"{scheme}:// needs {library}: {install}")


class Remote:
    """The folder of a URL. Names are relative to it, as "step-00000120/checkpoint.json"; errors have the full URL."""

    def __init__(self, url: str) -> None:
        """Store the URL; nothing is accessed before the first call.

        Raises:
            ValueError: as in `check_url`.
        """
        check_url(url)
        self.url = url.rstrip("/")
        self._is_disk = url.startswith("file:")
        self._place: tuple[Any, str] | None = None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of all objects below a folder, by relative name; empty if there is no folder."""

        def find(fs: Any, path: str) -> dict[str, int]:
            entries = fs.find(path, detail=True)
            return {name.removeprefix(path).lstrip("/"): int(info["size"]) for name, info in entries.items()}

        return self._call(find, folder, READ_S)

    def read(self, name: str, *, limit_s: float = READ_S, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the bytes of an object. limit_s: time limit for retries.

        Raises:
            FileNotFoundError: it does not exist.
            ValueError: it has more than `max_bytes`.
            OSError: it could not be read.
        """

        def cat(fs: Any, path: str) -> tuple[int, bytes]:
            size = int(fs.info(path)["size"])
            return size, bytes(fs.cat_file(path)) if size <= max_bytes else b""

        size, data = self._call(cat, name, limit_s)
        if size > max_bytes:
            raise ValueError(f"{self.url}/{name} must have at most {max_bytes} bytes, got {size}: move it away")
        return data

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object to a file. Raises as in `read`."""
        self._call(lambda fs, place: fs.get_file(place, str(path)), name, READ_S)

    def write(self, name: str, data: bytes, *, limit_s: float = SEND_S) -> None:
        """Write an object, or replace it. limit_s: time limit for retries. Raises OSError."""
        self._call(lambda fs, path: self._put(fs, path, lambda place: fs.pipe_file(place, data)), name, limit_s)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists; return True on success. One of several writers succeeds. Raises OSError."""
        try:
            self._call(lambda fs, path: fs.pipe_file(path, data, mode="create"), name, READ_S)
        except FileExistsError:
            return self.read(name) == data  # True for a call whose response was lost
        return True

    def send(self, path: Path, name: str) -> None:
        """Write an object from a file, or replace it. Raises OSError."""
        self._call(lambda fs, place: self._put(fs, place, lambda target: fs.put_file(str(path), target)), name, SEND_S)

    def delete(self, name: str) -> None:
        """Delete an object, if there is one. Raises OSError."""
        with suppress(FileNotFoundError):
            self._call(lambda fs, path: fs.rm_file(path), name, SEND_S)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects below a folder. Raises OSError."""
        with suppress(FileNotFoundError):
            self._call(lambda fs, path: fs.rm(path, recursive=True), folder, SEND_S)

    def _put(self, fs: Any, path: str, put: Callable[[str], object]) -> None:
        """Write an object; on a disk, where files appear before they are complete, under a temporary name first."""
        if not self._is_disk:
            put(path)
            return
        put(draft := f"{path}.{get_native_id()}.tmp")
        fs.mv(draft, path)

    def _call(self, work: Callable[[Any, str], T], name: str, limit_s: float) -> T:
        """Return `work(file system, path)`, with retries until `limit_s` have passed unless it can never succeed."""
        url, start, pause_s = f"{self.url}/{name}".rstrip("/"), time.monotonic(), PAUSE_S
        while True:
            try:
                fs, root = self._open()
                return work(fs, f"{root}/{name}".rstrip("/"))
            except (FileNotFoundError, FileExistsError, PermissionError) as exc:
                raise type(exc)(f"{url}: {exc}") from exc
            except Exception as exc:  # from any library
                fault = f"{url}: {type(exc).__name__}: {exc}"
                if time.monotonic() + pause_s > start + limit_s:
                    raise OSError(f"{fault}; tried for {limit_s:g} s") from exc
                if pause_s == PAUSE_S:
                    warnings.warn(f"{fault}; it is tried again for {limit_s:g} s", stacklevel=3)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 30.0)

    def _open(self) -> tuple[Any, str]:
        """Return the file system, with listings uncached, and the folder's path in it."""
        if self._place is None:
            from fsspec.core import url_to_fs

            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._place = url_to_fs(self.url, **options, **({"auto_mkdir": True} if self._is_disk else {}))
        return self._place
