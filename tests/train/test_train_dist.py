"""Small gathers: rank order, clear errors, and the same code without ranks."""

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from socket import create_server

import pytest
import torch
import torch.multiprocessing
from omni_train.dist import (
    gather_by_index,
    gather_json,
    init_distributed,
    is_lost_rank,
    mean_metrics,
    same_error,
    shard_mesh,
    shutdown,
    tell_failure,
)
from omni_train.roles import split
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = """
import torch
from omni_train.dist import init_distributed

init_distributed()
generator = torch.Generator().manual_seed(0)


def moved(x, count):
    storage = torch.empty(x.numel() + 32)
    start = -storage.data_ptr() // 4 % 16 + count  # numbers behind a multiple of 64 bytes
    return storage[start : start + x.numel()].view(x.shape).copy_(x)


for rows, inner, columns in ((1, 64, 64), (3, 64, 128), (7, 33, 47), (48, 64, 256)):
    a, b = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    aligned = torch.nn.functional.linear(moved(a, 0), moved(b, 0))
    for count in (1, 2, 4, 8):
        assert torch.equal(torch.nn.functional.linear(moved(a, count), moved(b, 0)), aligned), (rows, count)
        assert torch.equal(torch.nn.functional.linear(moved(a, 0), moved(b, count)), aligned), (columns, count)
"""


def test_a_product_has_the_same_bits_at_any_address():
    """Mapped weights have another alignment than copies: without `MKL_CBWR` an AMD EPYC differs."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, check=True, timeout=120)


def test_without_torchrun_there_is_one_rank_and_no_group(alone):
    assert (alone.rank, alone.world_size, alone.mesh, alone.is_main) == (0, 1, None, True)
    assert not torch.distributed.is_initialized()
    shutdown()


def test_ranks_know_their_place(run_ranks):
    def work(dist):
        return [dist.rank, dist.world_size, dist.local_rank, dist.is_main, dist.mesh.size(), dist.mesh.ndim]

    assert run_ranks(work) == [[0, 2, 0, True, 2, 1], [1, 2, 1, False, 2, 1]]


PLACES = [[3, 0, 4], [1, 2], []]  # of each rank's values


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_values_go_to_their_places_however_they_were_dealt(run_ranks, order):
    def work(dist):
        places = PLACES[order[dist.rank]]
        values = torch.tensor([math.nan if place == 3 else place / 2 for place in places], dtype=torch.float64)
        whole = gather_by_index(dist, torch.tensor(places, dtype=torch.int64), values, 5)
        return [repr(whole.tolist()), str(whole.dtype)]

    assert run_ranks(work, 3) == [["[0.0, 0.5, 1.0, nan, 2.0]", "torch.float64"]] * 3


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([[0, 1], [1, 2]], "every index must come once, got 1 2 times"),
        ([[0], [2]], "every index must come once, no rank has 1"),
        ([[0, 1], [3]], "indices must be from 0 to 2, got 3"),
        ([[0, 1], [-1]], "indices must be from 0 to 2, got -1"),
        ([[0, 1, 2], []], r"must have one length, got \[3, 0\] and \[3, 1\] in rank order"),
    ],
)
def test_an_index_that_is_not_once_somewhere_is_named_on_every_rank(run_ranks, places, message):
    def work(dist):
        mine = torch.tensor(places[dist.rank], dtype=torch.int64)
        with pytest.raises(ValueError, match=message):
            gather_by_index(dist, mine, torch.zeros(len(mine) or 1), 3)

    run_ranks(work)


def test_one_rank_sorts_its_values_by_index(alone):
    values = torch.tensor([1.0, 2.0, 3.0])
    assert gather_by_index(alone, torch.tensor([2, 0, 1]), values, 3).tolist() == [2.0, 3.0, 1.0]
    with pytest.raises(ValueError, match="no rank has 3"):
        gather_by_index(alone, torch.tensor([2, 0, 1]), values, 4)
    assert gather_by_index(alone, torch.tensor([], dtype=torch.int64), values[:0], 0).shape == (0,)


def test_json_values_may_differ_in_length_and_type(run_ranks, alone):
    values = [["sign that says \u00fc\u4e2d", None], {"score": 1.5, "tags": []}]
    assert run_ranks(lambda dist: gather_json(dist, values[dist.rank])) == [values, values]
    assert gather_json(alone, values) == [values]


@pytest.mark.parametrize("length", [4094, 4095, 100_000])  # a message, and what no longer fits in one
def test_json_values_of_any_length_arrive_whole(run_ranks, alone, length):
    values = ["long" * (length // 4) + "s" * (length % 4), "short"]
    assert run_ranks(lambda dist: gather_json(dist, values[dist.rank])) == [values, values]
    assert gather_json(alone, values[0]) == [values[0]]


def test_metrics_are_averaged_over_ranks_and_extremes_are_extreme(run_ranks, alone):
    def work(dist):
        metrics = {"a": 1.0 + dist.rank, "b": torch.tensor(4.0), "a_min": 1.0 + dist.rank, "a_max_dev": dist.rank}
        own = metrics if dist.is_main else dict(reversed(metrics.items()))
        return mean_metrics(dist, own, merges={"a_min": "min", "a_max_dev": "max"})

    assert run_ranks(work) == [{"a": 1.5, "a_max_dev": 1.0, "a_min": 1.0, "b": 4.0}] * 2
    assert mean_metrics(alone, {"a": 1.0}) == {"a": 1.0}
    assert mean_metrics(alone, {}) == {}


def test_different_names_are_an_error_on_every_rank(run_ranks):
    def work(dist):
        with pytest.raises(ValueError, match=r"same names on every rank, got \[\['m0'\], \['m1'\]\]"):
            mean_metrics(dist, {f"m{dist.rank}": 0.0})

    run_ranks(work)


def test_a_metric_that_must_be_finite_names_its_rank_on_every_rank(run_ranks, alone):
    def work(dist):
        metrics = {"loss": math.nan if dist.rank else 1.0, "other": math.inf}
        with pytest.raises(FloatingPointError, match=r"^loss must be finite, but is nan on rank 1$"):
            mean_metrics(dist, metrics, finite=("loss",))

    run_ranks(work)
    assert mean_metrics(alone, {"other": math.inf}, finite=("loss",)) == {"other": math.inf}


class Rings(TorchDispatchMode):
    """How many ranks meet in each gather."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allgather_.default:
            self.sizes.append(len(args[0][0]))
        return func(*args, **(kwargs or {}))


def everything(dist):
    """What each function that sends small messages returns or raises on this rank."""
    texts = [f"{dist.rank}" * length for length in (1, 4094, 4095, 9000)]
    found = [gather_json(dist, text) for text in texts] + [gather_json(dist, None)]
    found += [gather_json(dist, "long" * 3000 if dist.rank == 2 else dist.rank)]
    places = torch.tensor([[5, 0], [], [3, 1, 4], [2]][dist.rank], dtype=torch.int64)
    found.append(gather_by_index(dist, places, places / 3, 6).tolist())
    metrics = {"mean": 0.1 * dist.rank, "most": dist.rank}
    found.append(mean_metrics(dist, metrics, merges={"most": "max"}))
    with pytest.raises(FloatingPointError) as infinite:
        mean_metrics(dist, {"loss": math.inf if dist.rank == 3 else 0.0}, finite=("loss",))
    with pytest.raises(ValueError, match="names") as names:
        mean_metrics(dist, {f"m{dist.rank // 2}": 0.0})
    with pytest.raises(ValueError, match="once") as twice:
        gather_by_index(dist, torch.tensor([dist.rank // 2]), torch.zeros(1), 4)
    with pytest.raises(OSError, match="No such file") as lost, same_error(dist):
        Path("/" if dist.rank != 2 else "/not there").stat()
    return found + [str(error.value) for error in (infinite, names, twice, lost)]


def sizes_of_rings(dist):
    """How many ranks meet in each exchange of a message."""
    with Rings() as seen:
        gather_json(dist, 0)
    return seen.sizes


def test_messages_go_by_machine_to_the_values_of_one_ring(run_ranks, monkeypatch, store):
    monkeypatch.setattr("omni_train.dist._RING_RANKS", 3)

    def work(dist):
        assert sizes_of_rings(dist) == [2, 2]
        ring = replace(dist, machines=None)
        assert sizes_of_rings(ring) == [4]
        assert everything(dist) == everything(ring)
        told = tell_failure(f"{dist.rank} of {dist.local_rank}", wait_s=20)
        mesh = shard_mesh(dist, 2)  # whose groups are named after those
        total = torch.full((1,), float(dist.rank))
        torch.distributed.all_reduce(total, group=mesh.get_group("shard"))
        shutdown()
        return [[told[rank] for rank in range(4)], total.item()]

    told = [f"{rank} of {rank % 2}" for rank in range(4)]
    assert run_ranks(work, 4, per_machine=2) == [[told, total] for total in (1.0, 1.0, 5.0, 5.0)]


def test_ranks_of_each_role_send_messages_by_machine(run_ranks, monkeypatch):
    monkeypatch.setattr("omni_train.dist._RING_RANKS", 3)

    def work(dist):
        own = split(dist, 4, timeout_s=60).dist
        found = [sizes_of_rings(own), gather_json(own, dist.rank)]
        shutdown()
        return found

    assert run_ranks(work, 8, per_machine=2) == [[[2, 2], [*range(i, i + 4)]] for i in (0, 4) for _ in range(4)]


def test_machines_of_unequal_numbers_of_ranks_keep_one_ring(run_ranks, monkeypatch):
    monkeypatch.setattr("omni_train.dist._RING_RANKS", 2)

    def work(dist):
        return [sizes_of_rings(dist), gather_json(dist, dist.rank)]

    assert run_ranks(work, 3, per_machine=2) == [[[3], [0, 1, 2]]] * 3


def test_ranks_connect_when_they_first_speak(run_ranks, monkeypatch):
    """In a ring of four, a rank has two neighbors; the third one it does not know."""

    def work(dist):
        gather_json(dist, None)
        found = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        number = sum(path.is_symlink() and os.readlink(path).startswith("socket:") for path in found)
        gather_json(dist, None)  # all have counted
        return number

    first = run_ranks(work, 4)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert run_ranks(work, 4) == [count + 1 for count in first]


def meet_and_end(rank, port):
    """What a rank does that ends at once, and the store with it if it is the first."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 8, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    init_distributed(timeout_s=60)
    shutdown()
    os._exit(0)


@pytest.mark.slow
def test_the_store_of_the_first_rank_outlives_the_last_connections():
    """Ranks that connect in the barrier of the end need it: with one barrier half of these ends failed."""
    for _ in range(6):
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(meet_and_end, args=(port,), nprocs=8, start_method="fork")


@pytest.fixture
def store(monkeypatch):
    """What torchrun's agent holds, and the environment that leads to it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_ranks_that_fail_tell_each_other(run_ranks, store):
    def work(dist):
        told = tell_failure(f"rank {dist.rank} is tired", wait_s=20)
        return [told[0], told[1]]

    assert run_ranks(work) == [["rank 0 is tired", "rank 1 is tired"]] * 2


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_asked(run_ranks, store):
    def work(dist):
        start = time.monotonic()
        told = tell_failure("", wait_s=0.3) if dist.is_main else {}
        return [list(told), time.monotonic() - start < 5]

    assert run_ranks(work) == [[[0], True], [[], True]]


def test_torchruns_sigterm_does_not_cut_a_message_short(run_ranks, store):
    """As torchrun sends it: while the ranks that are left wait for the one that was killed, and again."""

    def work(dist):
        if dist.rank == 0:
            return None  # the one that tells nothing
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        told = tell_failure("broken", wait_s=1.0)
        os.kill(os.getpid(), signal.SIGTERM)  # the message is still to be printed
        return told[1]

    assert run_ranks(work) == [None, "broken"]


@pytest.fixture
def sigterm():
    """The handler of SIGTERM, put back at the end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_a_rank_whose_store_is_gone_hears_nobody(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setitem(os.environ, name, value)
    assert tell_failure("broken", wait_s=0.3) == {1: "broken"}
    monkeypatch.delitem(os.environ, "WORLD_SIZE")
    assert tell_failure("broken") == {1: "broken"}


def test_the_errors_of_a_lost_rank_are_known(run_ranks):
    def work(dist):
        torch.distributed.barrier()  # both have met
        if dist.rank:
            os._exit(0)
        with pytest.raises(RuntimeError) as caught:
            torch.distributed.barrier()
        assert is_lost_rank(caught.value)
        os._exit(0)  # there is nobody to meet at the end

    with pytest.raises(FileNotFoundError, match=r"0\.json"):  # neither rank has written a result
        run_ranks(work)
    assert not is_lost_rank(RuntimeError("out of memory"))


def test_a_forked_test_leaves_alone_the_process_groups_of_its_parent(tmp_path):
    """The end of one waits for threads, which a fork lacks; tests/conftest.py sees to it."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    group = torch.distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    group.allreduce([torch.ones(1)]).wait()
    circle: list[object] = [group]
    circle.append(circle)
    gc.disable()
    try:
        del group, circle
        if not (pid := os.fork()):
            gc.collect()
            os._exit(7)
    finally:
        gc.enable()
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
