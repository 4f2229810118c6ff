"""A disk that is full, a folder that cannot be written to: every rank says so, and what was complete stays."""

import errno
import os
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import filled, load_newest, names
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.files import write_file
from omni_train.shard import shard
from torch import nn


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoint(tmp_path / "checkpoints", init_distributed(), keep=1)


CALLS = {  # what a save asks of the disk
    "os.fsync": os.fsync,
    "os.rename": os.rename,
    "pathlib.Path.mkdir": Path.mkdir,
    "shutil.rmtree": shutil.rmtree,
    "omni_train.checkpoint.places.write_file": write_file,
    "omni_train.checkpoint.parts.write_file": write_file,
}


class FailsOnce:
    """The function, but its call number `fail_at` finds the disk full; deleting with `ignore_errors` never fails."""

    def __init__(self, function, fail_at):
        self.function, self.fail_at, self.count = function, fail_at, 0

    def __get__(self, instance, owner):
        return self if instance is None else partial(self, instance)  # Path.mkdir is a method

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count == self.fail_at and not kwargs.get("ignore_errors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_wherever_a_save_fails_what_was_complete_stays(checkpoints, monkeypatch, name):
    """In the first save the first such call fails, in the second the second, until a save has no more of them."""
    checkpoints.save(0, filled(0.0), config={})
    for fail_at in range(1, 20):
        newest, call = checkpoints.latest().step, FailsOnce(CALLS[name], fail_at)
        with monkeypatch.context() as patch:
            patch.setattr(name, call)
            if fails := attempt(checkpoints, newest + 1):
                assert "No space left on device" in fails
        net = filled(-1.0)
        assert load_newest(checkpoints, net).step in (newest, newest + 1)
        assert net.weight.eq(checkpoints.latest().step).all()
        if call.count < fail_at:
            break
    assert not fails
    assert fail_at > 1
    assert names(checkpoints.folder) == [f"step-{checkpoints.latest().step:08}"]


def attempt(checkpoints, step):
    """The error of a save, or nothing."""
    try:
        checkpoints.save(step, filled(step), config={})
    except OSError as exc:
        return str(exc)
    return ""


def test_a_rank_that_cannot_write_is_an_error_of_all_and_the_space_comes_back(run_ranks, tmp_path):
    """The second rank may write no file of more than 1000 bytes, as its operating system enforces."""

    def work(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        net = shard(nn.Linear(64, 64), dist.mesh, mode="fsdp2")
        checkpoints.save(1, net, config={})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(OSError, match=r"^rank 1: .*File too large"):
            checkpoints.save(2, net, config={})
        torch.distributed.barrier()
        left = names(tmp_path)
        torch.distributed.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpoints.save(2, net, config={})
        return [left, load_newest(checkpoints, net).step]

    assert run_ranks(work) == [[["step-00000001"], 2]] * 2


def test_a_folder_that_cannot_be_made_is_an_error_of_all(run_ranks, tmp_path):
    (tmp_path / "file").touch()

    def work(dist):
        with pytest.raises(OSError, match=r"rank 0: .*Not a directory"):
            Checkpoint(tmp_path / "file" / "checkpoints", dist).save(1, filled(1.0), config={})

    run_ranks(work)


def test_folders_that_ranks_do_not_share_are_found_out(run_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("omni_train.checkpoint.saving.SHARED_DISK_S", 0.2)

    def work(dist):
        folder = tmp_path / str(dist.rank)
        if dist.rank:
            (folder / "step-00000001.tmp").mkdir(parents=True)
        with pytest.raises(OSError, match=r"part-00001\.json is missing in .*; it must be a folder that all"):
            Checkpoint(folder, dist).save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})

    run_ranks(work)
