"""One writer per run folder: a lock that the operating system releases when its holder ends."""

import errno
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from omni_train.dist import Dist, gather_json, same_error
from omni_train.files import open_regular, read_regular

LOCK_FILE = "lock"

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of a file system without locks
_held: set[FileLock] = set()  # of this process, as a lock without a reference would be released


class RunLock:
    """The right to write into a run folder, which one process group has at a time; held by the first rank.

    The kernel releases the lock when that process ends in any way, so no stale lock is left; the file stays and names
    the last holder. A process that has the lock may take it again. A forked child does not have it.
    """

    def __init__(self, folder: str | Path, dist: Dist, *, wait_s: float = 5.0) -> None:
        """Take the lock. Every rank calls it.

        Args:
            folder: of the run, made if missing.
            dist: the ranks; the file names them.
            wait_s: seconds that the holder has to end, such as the ranks of a torchrun that was killed.

        Raises:
            ValueError: another process writes into the folder; it is named. Or the lock file is a link, or no file. The
                same on every rank.
            OSError: the folder cannot be written to, or its file system has no locks.
        """
        self.path = Path(folder).absolute() / LOCK_FILE
        self._lock = FileLock(self.path, thread_local=False, is_singleton=True, fallback_to_soft=False)
        places = gather_json(dist, [socket.gethostname(), os.getpid()])
        with same_error(dist):
            if dist.is_main:
                try:
                    self._take(wait_s, ", ".join(f"pid {pid} on {host}" for host, pid in places))
                except OSError as exc:
                    what = "on a disk that has file locks" if exc.errno in _NO_LOCKS else "that can be written to"
                    raise OSError(f"--name must name a folder {what}, got {folder}: {exc}") from exc

    def release(self) -> None:
        """Release the lock before the process ends."""
        self._lock.release(force=True)
        _held.discard(self._lock)

    def _take(self, wait_s: float, name: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_regular(self.path, os.O_RDWR | os.O_CREAT))  # neither a link nor a pipe
        try:
            self._lock.acquire(timeout=wait_s)
            _held.add(self._lock)
        except Timeout:
            holder = read_regular(self.path).decode(errors="replace") or "another process"
            raise ValueError(
                f"{self.path.parent} is in use by {holder}: end that run, or give this one another --name"
            ) from None
        with open(open_regular(self.path, os.O_RDWR), "r+") as file:
            file.truncate()
            file.write(name)
