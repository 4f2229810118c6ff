"""One writer per run folder: a lock that the operating system holds, or a lease where the file system has none."""

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from omni_train.dist import Dist, end_process, gather_json, same_error
from omni_train.files import write_atomically

LOCK_FILE = "lock"
BEAT_S = 5.0  # seconds between two signs of life of a lease
NUM_BEATS = 4  # without any, until a lease counts as given up

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what a file system without locks answers
_held: dict[Path, int] = {}  # the locked files of this process, open


class RunLock:
    """The right to write into a run folder, which one process group has at a time; held by the first rank.

    The kernel gives the lock back when that process ends, however it does, so nothing stale is ever left; the file
    stays and names the last holder. A process that has the lock may ask for it again. On a file system without locks
    the file is a lease that is renewed every `BEAT_S` seconds: one that is no longer renewed is taken over, and who has
    lost his lease ends at once.
    """

    def __init__(self, folder: str | Path, dist: Dist, *, wait_s: float = 5.0) -> None:
        """Take the lock. Every rank calls it.

        Args:
            folder: of the run, made if missing.
            dist: the ranks, which the file names.
            wait_s: seconds that the holder has to end, as the ranks of a torchrun that was killed do.

        Raises:
            ValueError: another process writes into the folder; it is named. The same on every rank.
            OSError: the folder cannot be written to.
        """
        self.path = Path(folder).absolute() / LOCK_FILE
        places = gather_json(dist, [socket.gethostname(), os.getpid()])
        self._holder = ", ".join(f"pid {pid} on {host}" for host, pid in places)
        self._released = Event()
        with same_error(dist):
            if dist.is_main and self.path not in _held:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._lock(wait_s)
                except OSError as exc:
                    raise OSError(f"--name must name a folder that can be written to, got {folder}: {exc}") from exc

    def release(self) -> None:
        """Give the lock back before the process ends."""
        self._released.set()
        if (number := _held.pop(self.path, None)) is not None:
            os.close(number)

    def _lock(self, wait_s: float) -> None:
        number = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + wait_s
            while not _try_lock(number):
                if time.monotonic() > deadline:
                    raise self._taken()
                time.sleep(0.1)
            os.ftruncate(number, 0)
            os.pwrite(number, self._holder.encode(), 0)
            _held[self.path] = number
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise
            self._lease()
        finally:
            if self.path not in _held:
                os.close(number)

    def _lease(self) -> None:
        """Take the lease unless its file changes; of two that take it at once the later one has it."""
        before = self.path.read_bytes()
        for _ in range(NUM_BEATS if before else 0):
            time.sleep(BEAT_S)
            if self.path.read_bytes() != before:
                raise self._taken()
        write_atomically(self.path, f"{0:020}\n{self._holder}")
        time.sleep(2 * BEAT_S)
        if not self._is_mine():
            raise self._taken()
        Thread(target=self._renew, daemon=True).start()

    def _renew(self) -> None:
        count = 0
        while not self._released.wait(BEAT_S):
            count += 1
            with suppress(OSError):  # of a disk that is busy or away for a moment: the next beat may succeed
                if not self._is_mine():
                    end_process(
                        f"{self.path}: another run has taken over, as this one gave no sign of life: it ends here"
                    )
                with self.path.open("r+b") as file:  # in place, as a full disk has no room for a new file
                    file.write(f"{count:020}".encode())
        self.path.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        return self.path.read_bytes().partition(b"\n")[2] == self._holder.encode()

    def _taken(self) -> ValueError:
        count, _, leaser = self.path.read_text(errors="replace").partition("\n")
        name = leaser or count or "another process"
        return ValueError(f"{self.path.parent} is in use by {name}: end that run, or give this one another --name")


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget() -> None:
    """Close in a forked child what its parent has locked, lest the lock outlive the parent."""
    for number in _held.values():
        os.close(number)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
