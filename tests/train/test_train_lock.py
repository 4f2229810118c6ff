"""A run folder has one writer, also after SIGKILLs; what else is named lock is refused; orphaned ranks end."""

import errno
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from omni_train.dist import init_distributed
from omni_train.lock import RunLock


class Writer:
    """A forked process that takes the lock of a folder and keeps it until it is killed."""

    def __init__(self, folder, wait_s):
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                RunLock(folder, init_distributed(), wait_s=wait_s)
                os.write(write, b"holds")
                time.sleep(60)
            except ValueError as exc:
                os.write(write, str(exc).encode())
            os._exit(1)
        os.close(write)

    def says(self):
        """That it holds the lock, or why it does not; waits for it."""
        return os.read(self.pipe, 1000).decode()

    def code(self):
        """Waits for the end."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def start(tmp_path):
    """Start a writer."""
    started = []

    def start(wait_s=0.0, folder="run"):
        started.append(Writer(tmp_path / folder, wait_s))
        return started[-1]

    yield start
    for writer in started:
        os.close(writer.pipe)
        if os.path.exists(f"/proc/{writer.pid}"):
            os.kill(writer.pid, signal.SIGKILL)
            os.waitpid(writer.pid, 0)


def test_the_second_writer_is_refused_and_told_who_is_first(start):
    first = start()
    assert first.says() == "holds"
    told = start().says()
    assert re.fullmatch(rf"\S+run is in use by pid {first.pid} on \S+: end that run, or give .*", told)
    assert start(folder="another").says() == "holds"
    assert os.waitpid(first.pid, os.WNOHANG) == (0, 0)  # the first lives on


def test_a_writer_that_was_killed_leaves_nothing_in_the_way(start):
    first = start()
    assert first.says() == "holds"
    os.kill(first.pid, signal.SIGKILL)
    assert first.code() == -signal.SIGKILL
    assert start().says() == "holds"


def test_a_writer_that_is_about_to_end_is_waited_for(start):
    first = start()
    assert first.says() == "holds"
    second = start(wait_s=60.0)
    assert select.select([second.pipe], [], [], 0.5)[0] == []
    os.kill(first.pid, signal.SIGKILL)
    assert second.says() == "holds"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        OSError, match=r"^--name must name a folder on a disk that has file locks, got \S+/run: \[Errno"
    ):
        RunLock(tmp_path / "run", init_distributed())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "hard link", "pipe", "folder"])
def test_what_is_named_lock_but_is_no_file_of_its_own_is_refused(tmp_path, kind):
    path, elsewhere = tmp_path / "run" / "lock", tmp_path / "elsewhere"
    path.parent.mkdir()
    if kind != "dangling symlink":
        elsewhere.write_text("a user's")
    {"hard link": lambda: path.hardlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}.get(
        kind, lambda: path.symlink_to(elsewhere)
    )()
    with pytest.raises((ValueError, OSError), match=r"/run/lock must be a regular file|Is a directory: \S+/run/lock"):
        RunLock(path.parent, init_distributed(), wait_s=0.0)
    assert not elsewhere.exists() if kind == "dangling symlink" else elsewhere.read_text() == "a user's"


def test_a_lock_may_be_taken_again_by_its_holder_and_given_back(start, tmp_path):
    lock = RunLock(tmp_path / "run", init_distributed(), wait_s=0.0)
    RunLock(tmp_path / "run", init_distributed(), wait_s=0.0)
    assert "is in use by" in start().says()
    lock.release()
    assert start().says() == "holds"
    with pytest.raises(ValueError, match="is in use by"):
        RunLock(tmp_path / "run", init_distributed(), wait_s=0.0)


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path, start):
    lock = RunLock(tmp_path / "run", init_distributed(), wait_s=0.0)
    start(folder="another").says()  # a child that lives on
    lock.release()  # as the kernel does when the parent ends
    assert start().says() == "holds"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"--name must name a folder that can be written to, got \S+/file/run: .*Not a dir"
    ):
        RunLock(tmp_path / "file" / "run", init_distributed())


def test_one_rank_that_may_not_write_is_all_of_them(run_ranks, tmp_path):
    def work(dist):
        lock = RunLock(tmp_path / "run", dist)
        if dist.is_main:
            pids = re.findall(r"pid (\d+)", (tmp_path / "run" / "lock").read_text())
        lock.release()
        return [os.getpid(), pids if dist.is_main else None]

    (first, named), (second, _) = run_ranks(work)
    assert named == [str(first), str(second)]

    def refused(dist):
        with pytest.raises(ValueError, match=rf"rank 0: {tmp_path}/run is in use by pid {os.getppid()} on"):
            RunLock(tmp_path / "run", dist, wait_s=0.0)

    lock = RunLock(tmp_path / "run", init_distributed())
    run_ranks(refused)
    lock.release()


def test_ranks_end_when_their_torchrun_was_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\nfrom omni_train.dist import init_distributed\n"
        "dist = init_distributed()\nopen(f'{sys.argv[1]}/{dist.rank}', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path]
    torchrun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    torchrun.kill()
    told = torchrun.communicate(timeout=30)[1]  # returns when the ranks, which hold the other end, are gone
    assert all(f"torchrun (pid {torchrun.pid}) has ended: its rank with pid {pid} ends too" in told for pid in pids)
