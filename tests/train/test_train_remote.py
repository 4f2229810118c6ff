"""Checkpoints at a URL: ranks without a shared disk save, any number of ranks continues, and no failure loses one."""

import os
import re
import shutil
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import omni_train.checkpoint.places
import omni_train.checkpoint.saving
import omni_train.checkpoint.store
import omni_train.lock
import omni_train.remote
import pytest
import torch
from helpers import load_newest, names, sampled
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.lock import RunLock
from omni_train.optim import build_adamw, optimizer_step
from omni_train.remote import Remote, check_url
from omni_train.shard import shard, sharded_backward
from s3_store import s3_store
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


@pytest.fixture(scope="module")
def bucket():
    with s3_store() as url:
        yield url


@pytest.fixture
def url(bucket, tmp_path, monkeypatch):
    """The URL of a folder of this test's own; other ranks are looked for often, and what fails is tried again soon."""
    monkeypatch.setattr(omni_train.checkpoint.places.RemoteFolder, "pause_s", 0.05)
    monkeypatch.setattr(omni_train.remote, "PAUSE_S", 0.01)
    return f"{bucket}/{tmp_path.name}"


def on_own_disk(dist, folder, url, **options):
    """Checkpoints of a rank that is the only one of its machine."""
    own = replace(dist, local_rank=0)
    return Checkpoint(folder / f"machine-{dist.rank}", own, url=url, **options)


def filled(value):
    net = nn.Linear(4, 6)
    nn.init.constant_(net.weight, value)
    return net


def trained(dist, *, steps):
    """A sharded net and its optimizer after some steps."""
    torch.manual_seed(0)
    mode = "fsdp2" if dist.world_size > 1 else "none"
    net = shard(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), dist.mesh, mode=mode, block_names=())
    params = list(net.parameters())
    optimizer = build_adamw(params, lr=0.1)
    for step in range(steps):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        sharded_backward(net, net(x).square().mean() / dist.world_size, is_last=True)
        optimizer_step(optimizer, params, lr=0.1, max_grad_norm=1.0, dist=dist)
    return net, optimizer


def contents(net, optimizer):
    """All numbers of a net and its optimizer, whole on every rank."""
    found = [*net.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [getattr(each.detach(), "full_tensor", lambda each=each: each.detach())().tolist() for each in found]


@pytest.mark.parametrize("case", sampled([(2, 4), (4, 1), (1, 2)], 1))
def test_ranks_without_a_shared_disk_save_and_another_number_of_ranks_goes_on(run_ranks, tmp_path, url, case):
    before, after = case

    def save(dist):
        checkpoints = on_own_disk(dist, tmp_path, url, keep=1)
        parts = trained(dist, steps=2)
        checkpoints.save(1, *trained(dist, steps=1), config={"a": 1})
        checkpoints.async_save(2, *parts, config={"a": 1})
        checkpoints.wait()
        return contents(*parts)

    def load(dist):
        parts = trained(dist, steps=0)
        saved = load_newest(on_own_disk(dist, tmp_path / "elsewhere", url), *parts)
        return [saved.step, saved.world_size, contents(*parts)]

    wanted = run_ranks(save, before)[0]
    assert run_ranks(load, after) == [[2, before, wanted]] * after
    assert [names(tmp_path / f"machine-{rank}") for rank in range(before)] == [[]] * before
    objects = Remote(url).sizes()
    assert {name.partition("/")[0] for name in objects} == {"step-00000002"}  # one is kept
    assert sum(name.endswith(".safetensors") for name in objects) == before


@pytest.mark.parametrize("victim", sampled([0, 1], 1))
def test_a_rank_that_is_killed_in_the_middle_of_an_upload_costs_no_step(run_ranks, tmp_path, url, monkeypatch, victim):
    """Another machine finds the older checkpoint; the same machines have the newer one, and complete it."""
    monkeypatch.setattr(omni_train.checkpoint.saving, "LONELY_S", 0.5)
    send = Remote.send

    def work(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        checkpoints.save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})

        def killed(self, path, name):
            if dist.rank == victim and name.endswith(".safetensors"):
                os.kill(os.getpid(), signal.SIGKILL)
            send(self, path, name)

        monkeypatch.setattr(Remote, "send", killed)
        checkpoints.async_save(2, shard(filled(2.0), dist.mesh, mode="fsdp2"), config={})
        try:
            checkpoints.wait()
        finally:
            checkpoints.wait_alone()

    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        run_ranks(work)
    elsewhere = Checkpoint(tmp_path / "elsewhere", init_distributed(), url=url)
    assert load_newest(elsewhere, net := filled(0.0)).step == 1
    assert net.weight.eq(1.0).all()

    def go_on(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        checkpoints.send_rest()
        net = shard(filled(0.0), dist.mesh, mode="fsdp2")
        saved = load_newest(checkpoints, net)
        checkpoints.save(3, net, config={})
        return [saved.step, net.weight.full_tensor().unique().tolist()]

    assert run_ranks(go_on) == [[2, [2.0]]] * 2
    assert elsewhere.latest().step == 3


def test_what_an_upload_has_left_is_no_checkpoint_and_is_deleted_by_the_next(tmp_path, url):
    """Whichever objects an interrupted save or deletion has left."""
    checkpoints = Checkpoint(tmp_path, init_distributed(), url=url)
    checkpoints.save(1, filled(1.0), config={})
    remote = Remote(url)
    index = remote.read("step-00000001/checkpoint.json")
    remote.write("step-00000007/rank-00000-000.safetensors", b"half")
    remote.write("step-00000008/part-00000.json", remote.read("step-00000001/part-00000.json"))  # without its files
    remote.write("keep.txt", b"a user's")
    checkpoints.send_rest()
    assert checkpoints.latest().step == 1
    checkpoints.save(2, filled(2.0), config={})
    folders = {name.partition("/")[0] for name in remote.sizes()}
    assert folders == {"step-00000001", "step-00000002", "keep.txt"}
    remote.delete("step-00000001/checkpoint.json")  # where a deletion begins
    checkpoints.send_rest()
    assert checkpoints.remote.steps() == [2]
    remote.write("step-00000001/checkpoint.json", index)
    with pytest.raises(ValueError, match=rf"step must be new, but {url}/step-00000001 exists"):
        checkpoints.save(1, filled(1.0), config={})


def test_a_checkpoint_that_is_copied_from_a_folder_to_a_url_is_one(tmp_path, url):
    folder = Checkpoint(tmp_path, init_distributed()).save(1, filled(1.0), config={})
    for path in sorted(folder.iterdir(), reverse=True):
        Remote(url).send(path, f"{folder.name}/{path.name}")
    checkpoints = Checkpoint(tmp_path / "elsewhere", init_distributed(), url=url)
    assert load_newest(checkpoints, net := filled(0.0)).step == 1
    assert net.weight.eq(1.0).all()
    assert checkpoints.remote.read_beside(1, "metrics.jsonl") is None


@pytest.mark.parametrize("name", ["rank-00000-000.safetensors", "checkpoint.json"])
def test_a_wrong_byte_is_named_with_its_object_and_the_older_checkpoint(tmp_path, url, name):
    checkpoints = Checkpoint(tmp_path, init_distributed(), url=url)
    for step in (1, 2):
        checkpoints.save(step, filled(float(step)), config={})
    data = bytearray(Remote(url).read(f"step-00000002/{name}"))
    data[-3] ^= 1
    Remote(url).write(f"step-00000002/{name}", bytes(data))
    fault = rf"{url}/step-00000002 is damaged: {name} (has the SHA-256|is not valid JSON).* {url}/step-00000001"
    with pytest.raises(ValueError, match=fault):
        load_newest(checkpoints, filled(0.0))


def test_rows_are_read_by_ranges_and_no_others(tmp_path, url, monkeypatch, run_ranks):
    """Each of two ranks reads the header of the file and half of the rows of one rank's checkpoint."""
    Checkpoint(tmp_path, init_distributed(), url=url).save(1, nn.Linear(64, 32, bias=False), config={})

    def work(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        net = shard(nn.Linear(64, 32, bias=False), dist.mesh, mode="fsdp2")
        checkpoints.verify(saved := checkpoints.latest(), net)
        read, count = Remote.read_ranges, []

        def counted(self, name, ranges):
            count.extend(end - start for start, end in ranges)
            return read(self, name, ranges)

        monkeypatch.setattr(Remote, "read_ranges", counted)
        checkpoints.load(saved, net)
        return [count[0], count[2:]]

    assert run_ranks(work) == [[8, [16 * 64 * 4]]] * 2


def test_a_network_that_fails_for_a_while_is_tried_again(tmp_path, url, monkeypatch):
    """Errors of any library, such as those of a connection."""
    checkpoints, left = Checkpoint(tmp_path, init_distributed(), url=url), [3]
    fail_for(monkeypatch, left)
    with pytest.warns(UserWarning, match=rf"^{url}/step-00000001/\S+: RuntimeError: no route; it is tried again for"):
        checkpoints.save(1, filled(1.0), config={})
    assert left == [0]
    assert load_newest(checkpoints, filled(0.0)).step == 1


@pytest.mark.filterwarnings("ignore:.*tried again")
def test_a_network_that_fails_for_long_is_an_error_and_the_next_start_sends_what_the_disk_has(
    run_ranks, tmp_path, url, monkeypatch
):
    monkeypatch.setattr(omni_train.remote, "SEND_S", 0.05)

    def work(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        checkpoints.save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        net = shard(filled(2.0), dist.mesh, mode="fsdp2")
        with pytest.MonkeyPatch.context() as patch:
            fail_for(patch, [1000 * dist.rank])
            checkpoints.async_save(2, net, config={})
            draft = tmp_path / "machine-1" / "step-00000002.tmp"
            lost = rf"rank 1: {url}/\S+: RuntimeError: no route; tried for 0.05 s. What was not sent stays in {draft}"
            with pytest.raises(OSError, match=lost):
                checkpoints.wait()
        between = checkpoints.latest().step
        checkpoints.send_rest()
        found = shard(filled(0.0), dist.mesh, mode="fsdp2")
        return [between, load_newest(checkpoints, found).step, found.weight.full_tensor().unique().tolist()]

    assert run_ranks(work) == [[1, 2, [2.0]]] * 2
    assert [names(tmp_path / f"machine-{rank}") for rank in range(2)] == [[], []]


@pytest.mark.filterwarnings("ignore:.*tried again")
def test_parts_of_two_saves_of_one_step_are_never_put_together(run_ranks, tmp_path, monkeypatch):
    """Each attempt at step 2 fails; the second one has another second machine."""
    monkeypatch.setattr(omni_train.remote, "PAUSE_S", 0.01)
    monkeypatch.setattr(omni_train.remote, "SEND_S", 0.05)
    url = f"file://{tmp_path}/store"

    def opened(dist, second):
        """Checkpoints on machine-0 and a second machine."""
        return Checkpoint(tmp_path / f"machine-{dist.rank * second}", replace(dist, local_rank=0), url=url)

    def attempt(dist, second, value):
        """Fail to save step 2, as the second machine cannot send its part."""
        (checkpoints := opened(dist, second)).send_rest()
        net = shard(filled(value), dist.mesh, mode="fsdp2")
        with pytest.MonkeyPatch.context() as patch:
            fail_for(patch, [1000 * dist.rank])
            with pytest.raises(OSError, match=r"rank 1: .*What was not sent stays in"):
                checkpoints.save(2, net, config={})

    def found(dist, second):
        """Return the step and the weights with which a start continues."""
        (checkpoints := opened(dist, second)).send_rest()
        net = shard(filled(0.0), dist.mesh, mode="fsdp2")
        return [load_newest(checkpoints, net).step, net.weight.full_tensor().unique().tolist()]

    def work(dist):
        opened(dist, 1).save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        attempt(dist, 1, 2.0)
        attempt(dist, 2, 3.0)
        return [found(dist, 1), found(dist, 2)]

    assert run_ranks(work) == [[[1, [1.0]], [2, [3.0]]]] * 2


@pytest.mark.filterwarnings("ignore:.*tried again")
def test_a_save_is_completed_only_with_what_the_run_keeps_beside_and_with_all_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(omni_train.remote, "PAUSE_S", 0.01)
    monkeypatch.setattr(omni_train.remote, "SEND_S", 0.05)
    url, kept = f"file://{tmp_path}/store", tmp_path / "run" / "metrics.jsonl"
    kept.parent.mkdir()
    here, elsewhere = [
        Checkpoint(folder / "checkpoints", init_distributed(), url=url, beside=[folder / kept.name])
        for folder in (kept.parent, tmp_path / "elsewhere")
    ]
    draft = here.folder / "step-00000002.tmp"
    kept.write_text("1")
    here.save(1, filled(1.0), config={})
    kept.write_text("2")
    write = Remote.write

    def save():
        """Save step 2, of which what is beside cannot be written."""

        def lost(self, own, data):
            if own.endswith(kept.name):
                raise OSError("no route")
            write(self, own, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Remote, "write", lost)
            with pytest.raises(OSError, match="no route"):
                here.save(2, filled(2.0), config={})

    save()
    elsewhere.send_rest()
    assert elsewhere.latest().step == 1
    here.send_rest()
    assert here.latest().step == 2
    assert here.remote.read_beside(2, kept.name) == b"2"
    here.remote.delete(2)
    save()
    next(draft.glob("*.safetensors")).unlink()  # where a removal was stopped
    here.send_rest()
    assert (here.latest().step, names(here.folder)) == (1, [])


def fail_for(patch, left):
    """The next writes fail, as many as `left` says."""
    put = Remote._put

    def fails(self, *call):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("no route")
        put(self, *call)

    patch.setattr(Remote, "_put", fails)


def test_what_a_run_keeps_beside_comes_back_in_an_empty_folder(tmp_path, url):
    run = tmp_path / "run"
    (run / "weights" / "transformer").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    (run / "weights" / "README.md").write_text("a card")
    (run / "weights" / "transformer" / "a.safetensors").write_bytes(bytes(range(256)))
    beside = [run / name for name in ("config.toml", "metrics.jsonl", "weights")]
    checkpoints = Checkpoint(run / "checkpoints", init_distributed(), url=url, beside=beside)
    checkpoints.save(1, filled(1.0), config={})
    remote = checkpoints.remote
    assert remote.read_beside(1, "config.toml") is None
    assert remote.read_beside(1, "metrics.jsonl") == b'{"step": 0}\n'
    remote.fetch_beside(1, "weights", tmp_path / "fetched")
    found = {path.relative_to(tmp_path / "fetched") for path in (tmp_path / "fetched").rglob("*") if path.is_file()}
    assert found == {Path("README.md"), Path("transformer/a.safetensors")}
    assert (tmp_path / "fetched/transformer/a.safetensors").read_bytes() == bytes(range(256))
    Remote(url).write("step-00000001/weights/README.md", b"a cart")
    with pytest.raises(ValueError, match=rf"^{url}/step-00000001/weights/README.md has the SHA-256"):
        remote.fetch_beside(1, "weights", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    Remote(url).write("step-00000001/run.json", b'{"weights/../../out": {"bytes": 1, "sha256": ""}}')
    with pytest.raises(ValueError, match=r"run\.json must name files below it, got 'weights/\.\./\.\./out'"):
        remote.fetch_beside(1, "weights", tmp_path / "again")


class Holder:
    """A forked process that takes the lock of a folder and a URL, and keeps it until it is killed."""

    def __init__(self, folder, url):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                RunLock(folder, init_distributed(), url=url)
                os.write(write, b"holds")
                time.sleep(60)
            finally:
                os._exit(1)
        assert os.read(read, 10) == b"holds"
        os.close(read)
        os.close(write)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_two_runs_at_one_url_are_refused_and_one_that_ended_is_not_in_the_way(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "BEAT_S", 0.1)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 5.0)
    first = Holder(tmp_path / "a", url)
    try:
        with pytest.raises(ValueError, match=rf"{url} is in use by pid {first.pid} on .*another --checkpoint-url"):
            RunLock(tmp_path / "b", init_distributed(), url=url)
        assert (tmp_path / "b" / "lock").read_text() == ""
    finally:
        first.kill()
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 1e6)
    again = RunLock(tmp_path / "a", init_distributed(), url=url)  # at once, as the folder's own lock was free
    again.check()
    again._lease._ends.set()  # as if it could renew it no longer
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 0.5)
    other = RunLock(tmp_path / "c", init_distributed(), url=url)
    with pytest.raises(OSError, match=rf"{url} was taken by pid {os.getpid()} on"):
        again.check()
    again.release()
    other.check()
    other.release()
    assert Remote(url).sizes() == {}


@pytest.mark.parametrize("how", ["a copy of its folder", "a store that creates over what there is"])
def test_the_url_of_a_run_that_goes_on_is_not_taken(tmp_path, url, monkeypatch, how):
    monkeypatch.setattr(omni_train.lock, "BEAT_S", 0.1)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 5.0)
    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    if how == "a copy of its folder":
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    else:
        monkeypatch.setattr(Remote, "create", lambda remote, name, data: remote.write(name, data) or True)
    with pytest.raises(ValueError, match=f"{url} is in use by pid {os.getpid()}"):
        RunLock(tmp_path / "b", init_distributed(), url=url)
    first.check()
    first.release()


def test_a_renewal_is_tried_once_so_that_it_never_comes_over_a_later_holder(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "BEAT_S", 0.1)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 0.6)
    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    tries, put = [], first._lease._remote._put

    def fail(*args):
        tries.append(args)
        if len(tries) < 40:
            raise RuntimeError("no route")
        put(*args)

    monkeypatch.setattr(first._lease._remote, "_put", fail)
    second = RunLock(tmp_path / "b", init_distributed(), url=url)
    time.sleep(0.5)
    second.check()
    with pytest.raises(OSError, match="was taken by"):
        first.check()
    assert 0 < len(tries) < 20
    second.release()


def test_a_run_that_has_lost_the_url_deletes_nothing_of_its_next_holder(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 0.5)
    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    first._lease._ends.set()  # as if it could renew it no longer
    second = RunLock(tmp_path / "b", init_distributed(), url=url)
    Remote(url).write("step-00000130/rank-00000-000.safetensors", b"under way")
    lost = Checkpoint(tmp_path / "a", init_distributed(), url=url, wait_for=first.check)
    with pytest.raises(OSError, match="was taken by"):
        lost.save(125, filled(1.0), config={})
    assert {name for name in Remote(url).sizes() if name != "lock"} == {"step-00000130/rank-00000-000.safetensors"}
    second.release()


def test_a_missing_right_to_delete_is_an_error_at_the_start(tmp_path, url, monkeypatch):
    def refuse(remote, *names):
        raise PermissionError(f"{remote.url}/{names[0]}: Access Denied")

    monkeypatch.setattr(Remote, "delete", refuse)
    with pytest.raises(OSError, match=f"{url}/probe: Access Denied"):
        RunLock(tmp_path / "a", init_distributed(), url=url)
    assert set(Remote(url).sizes()) == {"probe"}


def test_ranges_that_a_store_returns_as_errors_are_raised(tmp_path, url, monkeypatch):
    remote = Remote(url)
    remote.write("a", b"abc")
    file_system, _ = remote._open()
    monkeypatch.setattr(file_system, "cat_ranges", lambda *args, **options: [FileNotFoundError("gone")])
    with pytest.raises(FileNotFoundError, match=f"{url}/a: gone"):
        remote.read_ranges("a", [(0, 2)])


def test_files_of_a_checkpoint_are_checked_on_the_disk_of_the_run(tmp_path, url):
    checkpoints = Checkpoint(tmp_path / "runs", init_distributed(), url=url)
    checkpoints.save(1, filled(1.0), config={})
    shutil.rmtree(tmp_path / "runs")
    seen = []
    saved = checkpoints.latest()
    checkpoints.remote.check(1, name := min(saved.files), saved.files[name], seen.append)
    assert seen[0].is_relative_to(tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_ranks_that_wait_for_a_slow_one_speak_with_it_meanwhile(run_ranks, tmp_path, url, monkeypatch):
    """A wait of 2 s, where a rank hangs after 1."""
    monkeypatch.setattr(omni_train.checkpoint.store, "WAIT_S", 0.1)

    def rank(dist):
        send = Remote.send
        if dist.rank == 1:
            monkeypatch.setattr(Remote, "send", lambda *args: time.sleep(2) or send(*args))
        torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(
            timedelta(seconds=1)
        )
        on_own_disk(dist, tmp_path, url).save(1, filled(1.0), config={})

    run_ranks(rank, 2)
    assert Checkpoint(tmp_path / "again", init_distributed(), url=url).latest().step == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/run", r"must begin with s3://, gs://, file://, got 'bucket/run'"),
        ("http://host/run", "must begin with s3://"),
        ("s3://", "must name a folder, as s3://bucket/run"),
        ("s3://bucket/../run", "must name a folder"),
        ("s3://key:hush@bucket/run", r"must have no user, password or query, .* got 's3://\.\.\.@bucket/run'"),
        ("s3://bucket/run?key=hush", r"must have no user, password or query, .* got 's3://bucket/run'"),
        ("s3://bucket::file://run", "must have no user"),
    ],
)
def test_a_url_that_is_no_folder_or_holds_credentials_is_refused(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_url(url)
    assert "hush" not in str(caught.value)


def test_a_missing_library_is_an_error_that_names_the_command(monkeypatch):
    monkeypatch.setattr(omni_train.remote, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape('s3:// needs s3fs: pip install "omni-train[remote]"')):
        check_url("s3://bucket/run")


def test_a_mounted_folder_is_a_url_too(tmp_path, run_ranks, monkeypatch):
    monkeypatch.setattr(omni_train.checkpoint.places.RemoteFolder, "pause_s", 0.01)
    url = f"file://{tmp_path}/store"

    def work(dist):
        lock, checkpoints = RunLock(tmp_path / "run", dist, url=url), on_own_disk(dist, tmp_path, url)
        for step in (1, 2):
            checkpoints.save(step, shard(filled(float(step)), dist.mesh, mode="fsdp2"), config={})
        lock.check()
        lock.release()
        return load_newest(checkpoints, shard(filled(0.0), dist.mesh, mode="fsdp2")).step

    assert run_ranks(work) == [2, 2]
    assert not [path for path in (tmp_path / "store").rglob("*") if path.suffix == ".tmp"]
