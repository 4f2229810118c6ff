"""A save beside training holds what was there when it was asked for, and its errors are those of all ranks."""

import os
import signal
import threading
import time

import pytest
import torch
from helpers import filled, load_newest, names, sampled
from omni_train.checkpoint.parts import PartFile
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.optim import build_adamw
from omni_train.shard import shard
from omni_train.weights.snapshot import Ema
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


def settle(checkpoints):
    """What a loop does, step after step."""
    deadline = time.monotonic() + 60
    while checkpoints.is_saving:
        checkpoints.poll()
        assert time.monotonic() < deadline


@pytest.fixture
def gate(monkeypatch):
    """Until it is set, no file is written."""
    gate, write = threading.Event(), PartFile.write

    def wait(self, folder):
        gate.wait(60)
        return write(self, folder)

    monkeypatch.setattr(PartFile, "write", wait)
    return gate


def train(net, optimizer, ema, step):
    net(torch.full((1, 2), float(step))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update(step)


def test_it_holds_what_was_there_although_training_goes_on(checkpoints, tmp_path, monkeypatch, gate):
    """The same bytes as of a save that training waited for, twice, the second in the memory of the first."""
    monkeypatch.setattr("omni_train.checkpoint.parts.FILE_BYTES", 30)  # several files
    net = filled(1.0)
    optimizer, ema = build_adamw(net, lr=0.1), Ema(list(net.parameters()), decay=0.5)
    beside, waited = checkpoints, Checkpoint(tmp_path / "waited", init_distributed())
    gate.set()
    places = []
    for step in (1, 2):
        train(net, optimizer, ema, step)
        waited.save(step, net, optimizer, ema, config={"a": 1})
        gate.clear()
        beside.async_save(step, net, optimizer, ema, config={"a": 1})
        train(net, optimizer, ema, 10)
        assert beside.is_saving
        gate.set()
        settle(beside)
        places.append([memory.data_ptr() for memory in beside._memory])
        for path in (waited.folder / f"step-{step:08}").iterdir():
            assert path.read_bytes() == (beside.folder / f"step-{step:08}" / path.name).read_bytes()
    assert places[0] == places[1]
    assert names(beside.folder) == ["step-00000001", "step-00000002"]


def test_the_next_save_waits_for_the_one_before(checkpoints, gate):
    checkpoints.async_save(1, filled(1.0), config={})
    threading.Timer(0.1, gate.set).start()
    assert checkpoints.latest() is None
    checkpoints.async_save(2, filled(2.0), config={})
    assert checkpoints.latest().step >= 1
    checkpoints.wait()
    assert not checkpoints.is_saving
    assert load_newest(checkpoints, net := filled(0.0)).step == 2
    assert net.weight.eq(2.0).all()


def test_several_files_are_written_at_once(checkpoints, monkeypatch):
    """Each write waits until another has begun."""
    monkeypatch.setattr("omni_train.checkpoint.parts.FILE_BYTES", 4)
    both, write = threading.Barrier(2), PartFile.write
    monkeypatch.setattr(PartFile, "write", lambda self, folder: (both.wait(60), write(self, folder))[1])
    checkpoints.async_save(1, filled(1.0), config={})
    checkpoints.wait()
    assert len(checkpoints.latest().files) == 2


@pytest.mark.parametrize("kind", [OSError, ValueError, KeyError])
def test_an_error_of_a_thread_is_raised_at_the_next_step_and_what_was_complete_stays(checkpoints, monkeypatch, kind):
    checkpoints.save(1, filled(1.0), config={})

    def fail(self, folder):
        raise kind("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PartFile, "write", fail)
        checkpoints.async_save(2, filled(2.0), config={})
        with pytest.raises(RuntimeError if kind is KeyError else kind, match="No space left on device"):
            settle(checkpoints)
    assert not checkpoints.is_saving
    assert names(checkpoints.folder) == ["step-00000001"]
    checkpoints.async_save(2, filled(2.0), config={})
    checkpoints.wait()
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_what_is_not_finite_is_named_when_it_is_written(checkpoints):
    """Also where the sum of finite numbers is not."""
    net = nn.ParameterDict({"a": torch.full((4,), 3e38), "b": torch.ones(2)})
    checkpoints.async_save(1, net, config={})
    checkpoints.wait()
    with torch.no_grad():
        net["b"][1] = torch.nan
    checkpoints.async_save(2, net, config={})
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity in weight/b"):
        checkpoints.wait()
    assert names(checkpoints.folder) == ["step-00000001"]


def test_a_dtype_that_no_file_can_hold_is_refused(checkpoints):
    net = filled(1.0)
    net.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"that safetensors has, got torch\.complex64 in buffer/phase"):
        checkpoints.async_save(1, net, config={})


def test_every_dtype_comes_back(checkpoints):
    dtypes = (torch.bool, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.float16, torch.float32)

    def module(value):
        net = filled(1.0)
        for i, dtype in enumerate(dtypes):
            net.register_buffer(f"b{i}", torch.full((3, i + 1), value).to(dtype))
        return net

    checkpoints.async_save(1, saved := module(1), config={})
    checkpoints.wait()
    load_newest(checkpoints, found := module(0))
    assert all(torch.equal(a, b) for a, b in zip(saved.buffers(), found.buffers(), strict=True))


def test_no_thread_but_the_loops_own_takes_part_in_a_collective(run_ranks, tmp_path, monkeypatch):
    gather = torch.distributed.all_gather

    def own(*arguments, **options):
        assert threading.current_thread() is threading.main_thread()
        return gather(*arguments, **options)

    def work(dist):
        monkeypatch.setattr(torch.distributed, "all_gather", own)
        checkpoints = Checkpoint(tmp_path, dist)
        for step in (1, 2):
            checkpoints.async_save(step, shard(filled(step), dist.mesh, mode="fsdp2"), config={})
            settle(checkpoints)
        return checkpoints.latest().step

    assert run_ranks(work) == [2, 2]
    assert names(tmp_path / "step-00000002") == [
        "checkpoint.json", "rank-00000-000.safetensors", "rank-00001-000.safetensors",
    ]  # fmt: skip


def test_a_save_is_completed_although_the_ranks_have_lost_each_other(run_ranks, tmp_path):
    def work(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        checkpoints.async_save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        torch.distributed.destroy_process_group()
        checkpoints.wait_alone()

    run_ranks(work)
    assert names(tmp_path) == ["step-00000001"]


def test_a_part_that_never_comes_is_waited_for_no_longer_than_said(run_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("omni_train.checkpoint.saving.LOST_RANKS_S", 0.2)

    def work(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        if dist.rank == 1:
            PartFile.write = lambda self, folder: time.sleep(600)
        checkpoints.async_save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        if dist.rank == 0:
            checkpoints.wait_alone()

    run_ranks(work)
    assert names(tmp_path) == ["step-00000001.tmp"]


KILLS = [  # the rank that is killed inside its thread, and where
    "0 omni_train.checkpoint.parts.write_file", "1 omni_train.checkpoint.parts.write_file",
    "1 omni_train.checkpoint.saving.write_atomically",
    "0 omni_train.checkpoint.places.write_file", "0 os.rename",
]  # fmt: skip


@pytest.mark.parametrize("kill", sampled(KILLS, 2))
def test_a_kill_between_the_copy_and_the_rename_leaves_what_was_complete(run_ranks, tmp_path, monkeypatch, kill):
    victim, call = int(kill[0]), kill[2:]

    def work(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        checkpoints.save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        if dist.rank == victim:
            monkeypatch.setattr(call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        net = shard(filled(2.0), dist.mesh, mode="fsdp2")
        checkpoints.async_save(2, net, config={})
        for _ in range(10_000):  # training goes on
            torch.distributed.barrier()
            checkpoints.poll()

    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        run_ranks(work)
    alone, net = Checkpoint(tmp_path, init_distributed()), filled(0.0)
    assert load_newest(alone, net).step == 1
    assert net.weight.eq(1.0).all()
    alone.async_save(2, filled(3.0), config={})
    alone.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
