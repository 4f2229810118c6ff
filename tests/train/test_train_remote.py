"""Checkpoints at a URL: ranks without a shared disk save, any number of ranks continues, and no failure loses one."""

import json
import os
import re
import shutil
import signal
import threading
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
from omni_train.checkpoint.index import parse_part
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
def test_a_rank_that_is_killed_in_the_middle_of_an_upload_leaves_the_older_checkpoint(
    run_ranks, tmp_path, url, monkeypatch, victim
):
    """From which any machines go on, also with the step that was lost."""
    monkeypatch.setattr(omni_train.checkpoint.saving, "LOST_RANKS_S", 0.5)
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
        net = shard(filled(0.0), dist.mesh, mode="fsdp2")
        saved = load_newest(checkpoints, net)
        checkpoints.save(2, shard(filled(3.0), dist.mesh, mode="fsdp2"), config={})
        return [saved.step, net.weight.full_tensor().unique().tolist()]

    assert run_ranks(go_on) == [[1, [1.0]]] * 2
    assert load_newest(elsewhere, net).step == 2
    assert net.weight.eq(3.0).all()
    assert [names(tmp_path / f"machine-{rank}") for rank in range(2)] == [[], []]


def test_what_an_upload_has_left_is_no_checkpoint_and_is_deleted_by_the_next(tmp_path, url):
    """Whichever objects an interrupted save or deletion has left."""
    checkpoints = Checkpoint(tmp_path, init_distributed(), url=url)
    checkpoints.save(1, filled(1.0), config={})
    remote = Remote(url)
    index = remote.read("step-00000001/checkpoint.json")
    remote.write("step-00000007/rank-00000-000.safetensors", b"half")
    remote.write("step-00000008/part-00000.json", remote.read("step-00000001/part-00000.json"))  # without its files
    remote.write("keep.txt", b"a user's")
    assert checkpoints.latest().step == 1
    checkpoints.save(2, filled(2.0), config={})
    folders = {name.partition("/")[0] for name in remote.sizes()}
    assert folders == {"step-00000001", "step-00000002", "keep.txt"}
    remote.delete("step-00000001/checkpoint.json")  # where a deletion begins
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
    assert checkpoints.remote.read_run_file(1, "metrics.jsonl") is None


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


def test_a_rank_fetches_the_files_that_hold_its_rows_and_no_others(tmp_path, url, monkeypatch, run_ranks):
    """One at a time, onto the disk of the run, where nothing stays."""

    def save(dist):
        on_own_disk(dist, tmp_path, url).save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})

    def load(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        net = shard(filled(0.0), dist.mesh, mode="fsdp2")
        checkpoints.verify(saved := checkpoints.latest(), net)
        fetch, fetched = Remote.fetch, []

        def noted(self, name, path):
            fetched.append([name, path.is_relative_to(checkpoints.folder)])
            fetch(self, name, path)

        monkeypatch.setattr(Remote, "fetch", noted)
        checkpoints.load(saved, net)
        return [fetched, names(checkpoints.folder)]

    run_ranks(save)
    own = [f"step-00000001/rank-0000{rank}-000.safetensors" for rank in range(2)]
    assert run_ranks(load) == [[[[name, True]], []] for name in own]


def test_a_network_that_fails_for_a_while_is_tried_again(tmp_path, url, monkeypatch):
    """Errors of any library, such as those of a connection."""
    checkpoints, left = Checkpoint(tmp_path, init_distributed(), url=url), [3]
    fail_for(monkeypatch, left)
    with pytest.warns(UserWarning, match=rf"^{url}/step-00000001/\S+: RuntimeError: no route; it is tried again for"):
        checkpoints.save(1, filled(1.0), config={})
    assert left == [0]
    assert load_newest(checkpoints, filled(0.0)).step == 1


@pytest.mark.filterwarnings("ignore:.*tried again")
def test_a_network_that_fails_for_long_is_an_error_after_which_the_older_checkpoint_is_the_newest(
    run_ranks, tmp_path, url, monkeypatch
):
    """And nothing of the attempt is in the next one."""
    monkeypatch.setattr(omni_train.remote, "SEND_S", 0.05)

    def work(dist):
        checkpoints = on_own_disk(dist, tmp_path, url)
        checkpoints.save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        with pytest.MonkeyPatch.context() as patch:
            fail_for(patch, [1000 * dist.rank])
            checkpoints.async_save(2, shard(filled(2.0), dist.mesh, mode="fsdp2"), config={})
            with pytest.raises(OSError, match=rf"rank 1: {url}/\S+: RuntimeError: no route; tried for 0.05 s"):
                checkpoints.wait()
        between = checkpoints.latest().step
        checkpoints.save(2, shard(filled(3.0), dist.mesh, mode="fsdp2"), config={})
        found = shard(filled(0.0), dist.mesh, mode="fsdp2")
        return [between, load_newest(checkpoints, found).step, found.weight.full_tensor().unique().tolist()]

    assert run_ranks(work) == [[1, 2, [3.0]]] * 2
    assert [names(tmp_path / f"machine-{rank}") for rank in range(2)] == [[], []]


def test_a_part_of_an_earlier_save_that_comes_late_is_none_of_the_next(tmp_path, url):
    checkpoints = Checkpoint(tmp_path, init_distributed(), url=url)
    checkpoints.save(1, filled(1.0), config={})
    late = Remote(url).read("step-00000001/part-00000.json")
    send, sent = Remote.send, []

    def overtaken(self, path, name):
        if name.endswith("part-00000.json") and not sent:
            sent.append(name)
            self.write(name, late)
            threading.Timer(0.3, send, (self, path, name)).start()
        else:
            send(self, path, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "send", overtaken)
        checkpoints.save(2, filled(2.0), config={})
    assert load_newest(checkpoints, net := filled(0.0)).step == 2
    assert net.weight.eq(2.0).all()


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
    checkpoints = Checkpoint(run / "checkpoints", init_distributed(), url=url, run_files=beside)
    checkpoints.save(1, filled(1.0), config={})
    remote = checkpoints.remote
    assert remote.read_run_file(1, "config.toml") is None
    assert remote.read_run_file(1, "metrics.jsonl") == b'{"step": 0}\n'
    remote.fetch_run_folder(1, "weights", tmp_path / "fetched")
    found = {path.relative_to(tmp_path / "fetched") for path in (tmp_path / "fetched").rglob("*") if path.is_file()}
    assert found == {Path("README.md"), Path("transformer/a.safetensors")}
    assert (tmp_path / "fetched/transformer/a.safetensors").read_bytes() == bytes(range(256))
    Remote(url).write("step-00000001/weights/README.md", b"a cart")
    with pytest.raises(ValueError, match=rf"^{url}/step-00000001/weights/README.md has the SHA-256"):
        remote.fetch_run_folder(1, "weights", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "weights")
    checkpoints.save(2, filled(1.0), config={})
    assert remote.read_run_file(2, "metrics.jsonl") is None


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
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.1)
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
    again._lease._released.set()  # as if it could renew it no longer
    for thread in threading.enumerate():
        if thread.name.endswith("(_renew)"):
            thread.join(30)  # its last renewal has arrived
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 2.0)
    other = RunLock(tmp_path / "c", init_distributed(), url=url)
    with pytest.raises(OSError, match=rf"{url} was taken by pid {os.getpid()} on"):
        again.check()
    again.release()
    other.check()
    other.release()
    assert Remote(url).sizes() == {}


@pytest.mark.parametrize("how", ["a copy of its folder", "a store that creates over what there is"])
def test_the_url_of_a_run_that_goes_on_is_not_taken(tmp_path, url, monkeypatch, how):
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.1)
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
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.3)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 2.0)
    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    tries, put = [], first._lease._remote._put

    def fail(*args):
        tries.append(args)
        if len(tries) < 40:
            raise RuntimeError("no route")
        put(*args)

    monkeypatch.setattr(first._lease._remote, "_put", fail)
    second = RunLock(tmp_path / "b", init_distributed(), url=url)
    time.sleep(1.0)
    second.check()
    with pytest.raises(OSError, match="was taken by"):
        first.check()
    assert 0 < len(tries) < 20
    second.release()


def test_a_renewal_of_a_process_that_was_stopped_does_not_come_over_the_next_holder(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.05)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 2.0)
    stopped, goes_on, read = threading.Event(), threading.Event(), omni_train.lock._Lease._read_holder

    def stop_after(lease, **how):
        found = read(lease, **how)
        if lease is first._lease and threading.current_thread() is not threading.main_thread():
            stopped.set()
            goes_on.wait()
        return found

    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    monkeypatch.setattr(omni_train.lock._Lease, "_read_holder", stop_after)
    assert stopped.wait(5)
    second = RunLock(tmp_path / "b", init_distributed(), url=url)
    goes_on.set()
    time.sleep(0.2)  # the renewal is written now
    second.check()
    with pytest.raises(OSError, match="was taken by"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert Remote(url).sizes() == {}


def test_a_process_that_was_stopped_as_it_took_a_url_gives_it_back(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.2)
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 2.0)
    dead = RunLock(tmp_path / "a", init_distributed(), url=url)
    dead._lease._released.set()
    write, found = Remote.write, []

    def stop_before(remote, name, data, **how):
        if name == "lock" and not found:
            found.append(None)  # this process is stopped here, and another one takes the URL meanwhile
            found[0] = RunLock(tmp_path / "c", init_distributed(), url=url)
        write(remote, name, data, **how)

    monkeypatch.setattr(Remote, "write", stop_before)
    with pytest.raises(ValueError, match=f"{url} is in use by another process"):
        RunLock(tmp_path / "b", init_distributed(), url=url)
    time.sleep(0.8)  # until its next renewal, which finds no name
    found[0].check()
    found[0].release()


def test_one_missing_answer_does_not_end_a_lease(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 0.05)
    lock, answers, read = RunLock(tmp_path / "a", init_distributed(), url=url), iter([None]), Remote.read

    def miss(remote, name, **how):
        if name == "lock" and threading.current_thread() is not threading.main_thread() and not next(answers, 1):
            raise FileNotFoundError(name)
        return read(remote, name, **how)

    monkeypatch.setattr(Remote, "read", miss)
    for least in (1, 4):  # renewals, before and after the answer that is missing
        deadline = time.monotonic() + 30
        while lock._lease._num_renewals < least:
            assert time.monotonic() < deadline, "it is renewed no longer"
            time.sleep(0.01)
    monkeypatch.setattr(omni_train.lock, "RENEWAL_S", 2.0)  # a check waits twice as long
    Remote(url).delete("lock")
    lock.check()  # it is written again
    lock.release()


FOREIGN = {
    "deep": "[" * 10**5, "empty": "{}", "list": "[]", "number": "12", "zero": "\x00",
    "types": '{"holder": 1, "token": []}',
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(FOREIGN, 2))
def test_a_lock_that_no_run_has_written_is_one_that_is_not_renewed(tmp_path, url, monkeypatch, name):
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 1.0)
    Remote(url).write("lock", FOREIGN[name].encode())
    lock = RunLock(tmp_path / "a", init_distributed(), url=url)
    lock.check()
    lock.release()


DEEP = b"[" * 10**5
ABOUT = {"step": 2, "config": {}, "versions": {}, "world_size": 1}
PART = {"files": {}, "tensors": {}, "attempt": "a", "about": ABOUT}
FOREIGN_PARTS = {
    "deep": DEEP,
    "a list": b"[]",
    "no UTF-8": b"\xff",
    "nothing": b"{}",
    "no about": json.dumps(PART | {"about": None}).encode(),
    "no ranks": json.dumps(PART | {"about": ABOUT | {"world_size": 0}}).encode(),
    "ranks that are no number": json.dumps(PART | {"about": ABOUT | {"world_size": "2"}}).encode(),
    "more ranks than 64 bits": json.dumps(PART | {"about": ABOUT | {"world_size": 2**70}}).encode(),
    "files without a size": json.dumps(PART | {"files": {"a": {"sha256": ""}}}).encode(),
    "a file elsewhere": json.dumps(PART | {"files": {"../a": {"bytes": 1, "sha256": ""}}}).encode(),
    "a file at the root": json.dumps(PART | {"files": {"/a": {"bytes": 1, "sha256": ""}}}).encode(),
    "tensors of nothing": json.dumps(PART | {"tensors": {"a": {}}}).encode(),
}


@pytest.mark.parametrize("fault", FOREIGN_PARTS)
def test_a_part_that_no_save_writes_is_named_in_one_line(fault):
    with pytest.raises(ValueError, match=r"^part-00000\.json (is not valid JSON|must )") as error:
        parse_part(FOREIGN_PARTS[fault], "part-00000.json", is_first=True)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_an_object_that_is_read_whole_has_a_limit(tmp_path):
    remote = Remote(f"file://{tmp_path}/store")
    remote.write("a", b"abc")
    assert remote.read("a", max_bytes=3) == b"abc"
    with pytest.raises(ValueError, match=r"/store/a must have at most 2 bytes, got 3: move it away"):
        remote.read("a", max_bytes=2)


def test_a_run_that_has_lost_the_url_deletes_nothing_of_its_next_holder(tmp_path, url, monkeypatch):
    monkeypatch.setattr(omni_train.lock, "LEASE_S", 2.0)
    first = RunLock(tmp_path / "a", init_distributed(), url=url)
    first._lease._released.set()  # as if it could renew it no longer
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
