"""One writer per run folder: a lock that the operating system releases when its holder ends.

The folder of a URL has no such lock. There, one object names the holder, which renews a second object; a holder that
has not renewed it for `LEASE_S` has lost the lock. So a late renewal, as from a process that was suspended, never
overwrites the next holder's name.
"""

import errno
import json
import os
import re
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from omni_train.dist import Dist, gather_json, same_error
from omni_train.files import open_regular, parse_json, read_regular
from omni_train.remote import READ_S, Remote

LOCK_FILE, PROBE_FILE = "lock", "probe"
MAX_BYTES = 2**20  # of an object of a lease
RENEWAL_S, LEASE_S = 15.0, 60.0  # between two renewals of a lease; until a lease without renewal is free

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems without locks
_held: set[FileLock] = set()  # by this process, as a lock without a reference would be released


class RunLock:
    """The right to write into a run folder, which one process group has at a time; held by the first rank.

    The kernel releases the lock when that process ends in any way, so no stale lock is left; the file stays and names
    the last holder. A process that has the lock may take it again. A forked child does not have it.
    """

    def __init__(self, folder: str | Path, dist: Dist, *, wait_s: float = 5.0, url: str = "") -> None:
        """Take the lock. Every rank calls it.

        Args:
            folder: folder of the run, created if missing.
            dist: the ranks; the file names them.
            wait_s: seconds to wait for the holder to end, such as the ranks of a killed torchrun.
            url: URL of a folder to lock too, for a run that stores its checkpoints there.

        Raises:
            ValueError: another process (named in the message) writes into the folder or the URL, or the lock file is a
                link or not a file. The same on every rank.
            OSError: the folder cannot be written to, or its file system has no locks.
        """
        self.path = Path(folder).absolute() / LOCK_FILE
        self._lock = FileLock(self.path, thread_local=False, is_singleton=True, fallback_to_soft=False)
        self._lease: _Lease | None = None
        places = gather_json(dist, [socket.gethostname(), os.getpid()])
        with same_error(dist):
            if dist.is_main:
                holder = ", ".join(f"pid {pid} on {host}" for host, pid in places)
                try:
                    before = self._take(wait_s)
                except OSError as exc:
                    what = "on a disk that has file locks" if exc.errno in _NO_LOCKS else "that can be written to"
                    raise OSError(f"--name must name a folder {what}, got {folder}: {exc}") from exc
                if url:
                    self._lease = _Lease(Remote(url), holder, before)
                    holder += f"\n{self._lease.token} {self._place()}"
                with open(open_regular(self.path, os.O_RDWR), "r+") as file:
                    file.truncate()
                    file.write(holder)

    def check(self) -> None:
        """Raise OSError on the first rank if another process has taken the URL because this one could not renew it."""
        if self._lease:
            self._lease.check()

    def release(self) -> None:
        """Release the lock before the process ends."""
        if self._lease:
            self._lease.release()
        self._lock.release(force=True)
        _held.discard(self._lock)

    def _take(self, wait_s: float) -> str:
        """Take the kernel's lock; return the token of the last holder's lease, if any."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_regular(self.path, os.O_RDWR | os.O_CREAT))  # neither a link nor a pipe
        try:
            self._lock.acquire(timeout=wait_s)
            _held.add(self._lock)
        except Timeout:
            other = read_regular(self.path).decode(errors="replace").partition("\n")[0] or "another process"
            raise ValueError(
                f"{self.path.parent} is in use by {other}: end that run, or give this one another --name"
            ) from None
        token, _, place = read_regular(self.path).decode(errors="replace").partition("\n")[2].partition(" ")
        return token if place == self._place() else ""

    def _place(self) -> str:
        """Return an identifier that no copy of the file shares."""
        return f"{socket.gethostname()} {self.path.stat().st_ino}"


class _Lease:
    """An object that names the only writer of a URL, and one that counts its renewals, made in a thread."""

    def __init__(self, remote: Remote, holder: str, before: str) -> None:
        """Take the URL.

        before: token of a holder known to have ended, because this process now has its lock on a disk.

        Raises:
            ValueError: another process renews it, or has just taken it.
            OSError: objects of the URL cannot be read, written or deleted.
        """
        self._remote, self._holder, self.token, self._num_renewals = remote, holder, uuid4().hex, 0
        self._released = threading.Event()
        remote.write(PROBE_FILE, b"")
        remote.delete(PROBE_FILE)  # a missing right to delete raises now, not in a later save
        other = self._read_holder()  # first, as not every store refuses to create an existing object
        if other or not remote.create(LOCK_FILE, self._text()):
            other = other or self._read_holder()
            if not before or before not in other:
                self._wait_for_end(other)
            self._take_over(other)
        self.check()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Raise OSError if the object names another holder; wait for a missing object, as a renewal restores it."""
        deadline = time.monotonic() + 2 * RENEWAL_S
        while not (text := self._read_holder()) and time.monotonic() < deadline:
            time.sleep(RENEWAL_S / 10)
        if self.token not in text:
            holder = _read_entry(text, "holder") or "another process"
            raise OSError(f"{self._remote.url} was taken by {holder}, as this run could not renew its lock")

    def release(self) -> None:
        """Delete the object if it belongs to this holder."""
        self._released.set()
        with suppress(OSError, ValueError):  # it then expires
            if self.token in self._read_holder():
                self._remote.delete(LOCK_FILE)
            self._remote.delete(_counter_name(self.token))

    def _wait_for_end(self, other: str) -> None:
        """Wait until the lease of another holder has ended; raise ValueError if it is renewed."""
        deadline, counter = time.monotonic() + LEASE_S, self._read(_counter_name(_read_entry(other, "token")))
        while time.monotonic() < deadline:
            time.sleep(min(1.0, LEASE_S / 10))
            if not (current := self._read_holder()):
                return
            if current != other or self._read(_counter_name(_read_entry(other, "token"))) != counter:
                raise self._in_use_error(current)

    def _take_over(self, other: str) -> None:
        """Overwrite the name of a holder whose lease has ended with this one's.

        Raises:
            ValueError: another process has written its name first, or may have while this one was suspended.
        """
        looked = time.monotonic()
        if (current := self._read_holder()) not in (other, ""):
            raise self._in_use_error(current)
        self._remote.write(LOCK_FILE, self._text())
        if time.monotonic() - looked > LEASE_S:
            self.release()  # a holder whose name is missing writes it again
            raise self._in_use_error("")
        if other:
            self._remote.delete(_counter_name(_read_entry(other, "token")))

    def _in_use_error(self, text: str) -> ValueError:
        hint = "end that run, or give this one another --checkpoint-url"
        return ValueError(f"{self._remote.url} is in use by {_read_entry(text, 'holder') or 'another process'}: {hint}")

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(RENEWAL_S):
            with suppress(OSError, ValueError):  # the next beat tries again, and `check` reports a loss
                checked_at, text = time.monotonic(), self._read_holder(limit_s=0)
                if self.token in text or (not text and self._restore(renewed)):
                    self._num_renewals += 1
                    self._remote.write(_counter_name(self.token), str(self._num_renewals).encode(), limit_s=0)
                    renewed = checked_at
                elif _read_entry(text, "token"):
                    taken = f"{self._remote.url} was taken by {_read_entry(text, 'holder') or 'another process'}"
                    warnings.warn(f"{taken}: this run ends with its next save", stacklevel=2)
                    return

    def _restore(self, renewed: float) -> bool:
        """Write a missing name again, if there is no other and the lease has not ended; return True if it is written.

        renewed: clock time of the last renewal, in seconds.
        """
        return time.monotonic() - renewed < LEASE_S and self._remote.create(LOCK_FILE, self._text())

    def _read_holder(self, *, limit_s: float = READ_S) -> str:
        """Return the text of the holder's object; empty if there is none."""
        return self._read(LOCK_FILE, limit_s=limit_s)

    def _read(self, name: str, *, limit_s: float = READ_S) -> str:
        try:
            return self._remote.read(name, limit_s=limit_s, max_bytes=MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _text(self) -> bytes:
        return json.dumps({"holder": self._holder, "token": self.token}).encode()


def _counter_name(token: str) -> str:
    """Return the name of the object that counts a holder's renewals."""
    return f"{LOCK_FILE}-{token if re.fullmatch('[0-9a-f]{32}', token) else 'unknown'}"


def _read_entry(text: str, key: str) -> str:
    """Return an entry of a lease's text; empty if no holder has written the text."""
    try:
        return str(parse_json(text)[key])
    except (ValueError, LookupError, TypeError):
        return ""
