"""What a checkpoint folder holds, what is refused, and that a failed save loses nothing."""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import filled, load_newest, names
from omni_train.checkpoint.store import Checkpoint, check_config, config_differences
from omni_train.lora import add_lora
from omni_train.optim import build_adamw
from omni_train.shard import shard
from omni_train.weights.snapshot import Ema, Snapshot
from safetensors import safe_open
from torch import nn


def damage(path):
    """Another byte in the middle, the size kept."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_safetensors_and_an_index_with_sizes_and_checksums(checkpoints):
    folder = checkpoints.save(7, filled(2.0), config={"lr": 0.1})
    assert folder == checkpoints.folder / "step-00000007"
    assert names(folder) == ["checkpoint.json", "rank-00000-000.safetensors"]
    index = json.loads((folder / "checkpoint.json").read_text())
    data = (folder / "rank-00000-000.safetensors").read_bytes()
    expected = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert index["files"] == {"rank-00000-000.safetensors": expected}
    assert set(index["versions"]) == {"python", "torch", "omni-train", "safetensors"}
    saved = checkpoints.latest()
    assert (saved.step, saved.config, saved.world_size) == (7, {"lr": 0.1}, 1)
    with safe_open(folder / "rank-00000-000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"weight/weight", "weight/bias"}
        assert file.get_tensor("weight/weight").eq(2.0).all()


def test_frozen_parameters_stay_with_the_base_and_frozen_adapters_do_not(checkpoints):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name in ("default", "old"):
        add_lora(net, ["0"], rank=1, alpha=1, adapter=name, seed=0)
    checkpoints.save(1, net, config={})
    weights = {name for name in checkpoints.latest().tensors if name.startswith("weight/")}
    assert weights == {f"weight/0.lora_{factor}.{name}.weight" for factor in "AB" for name in ("default", "old")}


def test_the_last_ones_are_kept_and_the_newest_is_found(checkpoints):
    for step in (0, 5, 30, 200, 1000):
        checkpoints.save(step, filled(step), config={})
    assert names(checkpoints.folder) == ["step-00000030", "step-00000200", "step-00001000"]
    net = filled(0.0)
    assert load_newest(checkpoints, net).step == 1000
    assert net.weight.eq(1000.0).all()


def test_ranks_write_their_own_rows_and_whole_tensors_once(run_ranks, tmp_path):
    def work(dist):
        net = shard(filled(1.0), dist.mesh, mode="fsdp2")
        net.register_buffer("scale", torch.ones(2))
        Checkpoint(tmp_path, dist).save(1, net, config={})
        return Checkpoint(tmp_path, dist).latest().tensors

    tensors = run_ranks(work)[0]
    first, second = "rank-00000-000.safetensors", "rank-00001-000.safetensors"
    assert tensors["weight/weight"]["pieces"] == [[first, 0], [second, 2]]  # three rows on two ranks
    assert tensors["weight/weight"]["shape"] == [3, 2]
    assert tensors["buffer/scale"]["pieces"] == [[first, 0]]


def test_whole_tensors_are_dealt_over_ranks_by_size_and_go_back_to_any_number(run_ranks, tmp_path, monkeypatch):
    """Of 40, 24, 12 and 8 bytes the first rank writes 40 and the second 44; of too few to share, the first all."""
    sizes = (3, 10, 6, 2)

    def work(dist, share_bytes):
        monkeypatch.setattr("omni_train.checkpoint.parts.SHARE_BYTES", share_bytes)
        checkpoints = Checkpoint(tmp_path / f"{share_bytes}", dist)
        checkpoints.save(1, nn.ParameterList([torch.full((n,), float(n)) for n in sizes]), config={})
        net = nn.ParameterList([torch.zeros(n) for n in sizes])
        entries = load_newest(checkpoints, net).tensors
        return [[p.tolist() for p in net], [entries[f"weight/{i}"]["pieces"] for i in range(len(sizes))]]

    for share_bytes, owners in ((16, [1, 0, 1, 1]), (48, [0, 0, 0, 0])):
        first, second = run_ranks(partial(work, share_bytes=share_bytes))
        weights = [[float(n)] * n for n in sizes]
        assert first == second == [weights, [[[f"rank-{owner:05}-000.safetensors", 0]] for owner in owners]]


def test_a_file_holds_no_more_than_it_must(checkpoints, monkeypatch):
    monkeypatch.setattr("omni_train.checkpoint.parts.FILE_BYTES", 100)
    net = nn.ParameterList([torch.ones(n) for n in (10, 10, 10, 100, 1)])
    folder = checkpoints.save(1, net, config={})
    held = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            held.append(sorted(file.keys()))
    assert held == [["weight/0", "weight/1"], ["weight/2"], ["weight/3"], ["weight/4"]]
    fresh = nn.ParameterList([torch.zeros(n) for n in (10, 10, 10, 100, 1)])
    load_newest(checkpoints, fresh)
    assert all(p.eq(1).all() for p in fresh)


@pytest.mark.parametrize("file", ["rank-00000-000.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("fault", ["truncated", "damaged", "missing"])
def test_damage_is_found_and_the_next_older_one_is_offered(checkpoints, file, fault):
    for step in (1, 2, 3):
        checkpoints.save(step, filled(step), config={})
    os.truncate(checkpoints.folder / "step-00000002" / "rank-00000-000.safetensors", 9)  # not to be offered
    path = checkpoints.folder / "step-00000003" / file
    if fault == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif fault == "damaged":
        damage(path)
    else:
        path.unlink()
    message = rf"step-00000003 is damaged: {re.escape(file)} .*Move it away to continue from \S+/step-00000001, which"
    net = filled(0.0)
    with pytest.raises(ValueError, match=message):
        load_newest(checkpoints, net)
    assert net.weight.eq(0.0).all()
    shutil.rmtree(checkpoints.folder / "step-00000003")
    with pytest.raises(ValueError, match="step-00000002 is damaged"):
        checkpoints.latest()
    shutil.rmtree(checkpoints.folder / "step-00000002")
    assert load_newest(checkpoints, net).step == 1
    assert net.weight.eq(1.0).all()


def test_without_an_older_one_the_message_says_so(checkpoints):
    path = checkpoints.save(1, filled(1.0), config={}) / "checkpoint.json"
    path.unlink()
    with pytest.raises(ValueError, match=r"checkpoint\.json is missing\. There is no older one"):
        checkpoints.latest()


def test_every_rank_says_what_one_found(run_ranks, tmp_path):
    def save(dist):
        Checkpoint(tmp_path, dist).save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})

    def load(dist):
        with pytest.raises(ValueError, match=r"^rank 0: checkpoint .*rank-00000-000\.safetensors has the SHA-256"):
            load_newest(Checkpoint(tmp_path, dist), shard(filled(0.0), dist.mesh, mode="fsdp2"))

    run_ranks(save)
    damage(tmp_path / "step-00000001" / "rank-00000-000.safetensors")
    run_ranks(load)


def test_litter_of_a_crash_is_ignored_and_cleaned(checkpoints):
    checkpoints.save(1, filled(1.0), config={})
    litter = checkpoints.folder / "step-00000002.tmp"
    litter.mkdir()
    (litter / "rank-00000-000.safetensors").write_bytes(b"half")
    assert checkpoints.latest().step == 1
    checkpoints.save(2, filled(2.0), config={})
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_a_step_is_saved_once(checkpoints):
    checkpoints.save(1, filled(1.0), config={})
    with pytest.raises(ValueError, match=r"step must be new, but \S+step-00000001 exists"):
        checkpoints.save(1, filled(2.0), config={})
    net = filled(0.0)
    load_newest(checkpoints, net)
    assert net.weight.eq(1.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name(checkpoints, bad):
    net = filled(1.0)
    optimizer, ema = build_adamw(net, lr=0.1), Ema(list(net.parameters()), decay=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoints.save(1, net, optimizer, ema, config={})
    for name, tensor in (
        ("weight/bias", net.bias),
        ("optimizer.exp_avg_sq/weight", optimizer.state[net.weight]["exp_avg_sq"]),
        ("ema/bias", ema.pairs()[1][1]),
    ):
        with torch.no_grad():
            before = tensor.clone()
            tensor.view(-1)[-1] = bad
            with pytest.raises(ValueError, match=f"must be finite, got NaN or infinity in {re.escape(name)}"):
                checkpoints.save(2, net, optimizer, ema, config={})
            tensor.copy_(before)
    assert names(checkpoints.folder) == ["step-00000001"]


def test_what_is_not_finite_in_a_file_is_refused_by_name(checkpoints, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("omni_train.checkpoint.parts.check_finite", lambda *_: None)
        checkpoints.save(1, filled(math.nan), config={})
    with pytest.raises(ValueError, match="NaN or infinity in weight/"):
        load_newest(checkpoints, filled(0.0))


def test_a_checkpoint_is_verified_without_a_model(checkpoints, monkeypatch):
    folder = checkpoints.save(1, filled(1.0), config={})
    saved = checkpoints.latest()
    with torch.device("meta"):
        net, other = nn.Linear(2, 3), nn.Linear(2, 4)
    checkpoints.verify(saved, net)
    with pytest.raises(ValueError, match=r"weight/weight is torch.float32 \[3, 2\], the module has .* \[4, 2\]"):
        checkpoints.verify(saved, other)
    with monkeypatch.context() as patch:  # what is verified is not read for that again
        patch.setattr("omni_train.checkpoint.store.check_file", None)
        checkpoints.load(saved, filled(0.0))
    damage(folder / "rank-00000-000.safetensors")
    with pytest.raises(ValueError, match=r"is damaged: rank-00000-000\.safetensors has the SHA-256"):
        checkpoints.verify(saved)


def test_one_process_in_place_of_several_ranks_verifies_all_files(run_ranks, tmp_path, alone):
    """As in a dry run for two ranks."""

    def work(dist):
        Checkpoint(tmp_path, dist).save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})

    run_ranks(work)
    checkpoints = Checkpoint(tmp_path, replace(alone, world_size=2))
    saved = checkpoints.latest()
    assert len(saved.files) == 2
    for name in saved.files:
        path = tmp_path / "step-00000001" / name
        data = path.read_bytes()
        damage(path)
        with pytest.raises(ValueError, match=f"is damaged: {re.escape(name)} has the SHA-256"):
            checkpoints.verify(saved)
        path.write_bytes(data)
    checkpoints.verify(saved)


def test_a_mask_may_be_infinite(checkpoints):
    net = filled(1.0)
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    net.register_buffer("scratch", torch.zeros(1), persistent=False)
    checkpoints.save(1, net, config={})
    net.mask.zero_()
    load_newest(checkpoints, net)
    assert net.mask.tolist() == [0.0, -math.inf]
    assert "buffer/scratch" not in checkpoints.latest().tensors


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoints):
    net = filled(1.0)
    checkpoints.save(1, net, build_adamw(net, lr=0.1), config={})
    for other, message in (
        (nn.Linear(2, 4), r"weight/weight is torch\.float32 \[3, 2\], the module has torch\.float32 \[4, 2\]"),
        (nn.Linear(2, 3).double(), r"weight/weight is torch\.float32 \[3, 2\], the module has torch\.float64 \[3, 2\]"),
        (nn.Linear(2, 3, bias=False), "also has 1 tensors, such as weight/bias"),
        (nn.Sequential(nn.Linear(2, 3)), "lacks 2 tensors, such as weight/0.bias"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint does not fit: .*{message}"):
            load_newest(checkpoints, other)


def test_what_a_run_keeps_beside_its_model_comes_back_on_any_number_of_ranks(run_ranks, tmp_path, alone):
    rows = torch.arange(12.0).view(4, 3)

    def load(dist, net):
        checkpoints = Checkpoint(tmp_path, dist)
        load_newest(checkpoints, net)
        return checkpoints.kept

    def save(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        checkpoints.kept["first"] = rows
        checkpoints.save(1, shard(filled(1.0), dist.mesh, mode="fsdp2"), config={})
        return {name: t.tolist() for name, t in load(dist, shard(filled(0.0), dist.mesh, mode="fsdp2")).items()}

    assert run_ranks(save) == [{"first": rows.tolist()}] * 2
    assert load(alone, net := filled(0.0))["first"].equal(rows)
    assert net.weight.eq(1.0).all()


def test_what_a_run_keeps_beside_its_model_is_checked_as_weights_are(checkpoints):
    checkpoints.kept = {"first": torch.tensor([math.nan])}
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in kept/first"):
        checkpoints.save(1, filled(1.0), config={})
    checkpoints.kept = {"first": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"^kept must be float32, got torch\.int64 in first"):
        checkpoints.save(1, filled(1.0), config={})
    checkpoints.kept = {"first": torch.ones(2)}
    checkpoints.save(2, filled(1.0), config={})
    saved = checkpoints.latest()
    saved.tensors["kept/first"]["shape"] = [2**50]
    checkpoints._verified = saved
    with pytest.raises(ValueError, match="kept/first lacks rows"):
        checkpoints.load(saved, filled(0.0))


def test_an_average_that_is_applied_is_not_saved(checkpoints):
    net = filled(1.0)
    ema = Ema(list(net.parameters()), decay=0.9)
    with ema.applied(), pytest.raises(RuntimeError, match=r"inside applied\(\)"):
        checkpoints.save(1, net, None, ema, config={})


def test_averages_and_snapshots_of_one_module_are_kept_apart_by_name(checkpoints):
    def averages(net):
        params = list(net.parameters())
        return Ema(params, decay=0.9), Snapshot(params, name="copy"), Snapshot([], name="none")

    ema, copy, none = averages(net := filled(1.0))
    with torch.no_grad():
        net.weight.fill_(3.0)
    ema.update(1000)
    saved = checkpoints.save(1, net, None, (ema, copy, none), config={})
    kept = json.loads((saved / "checkpoint.json").read_text())["tensors"]
    assert {name for name in kept if not name.startswith("weight")} == {
        "ema/weight", "ema/bias", "copy/weight", "copy/bias",
    }  # fmt: skip
    ema, copy, none = averages(other := filled(0.0))
    load_newest(checkpoints, other, None, (ema, copy, none))
    for average, value in ((ema, 1.2), (copy, 1.0)):
        weight = next(tensor for param, tensor in average.pairs() if param is other.weight)
        torch.testing.assert_close(weight, torch.full_like(weight, value))


def test_parameters_from_elsewhere_are_refused(checkpoints):
    with pytest.raises(ValueError, match=r"must hold parameters of the module, got one of shape \(3, 2\)"):
        checkpoints.save(1, filled(1.0), ema=Ema(list(filled(2.0).parameters()), decay=0.9), config={})


def test_a_configuration_that_json_cannot_hold_is_refused_before_anything_is_written(checkpoints):
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, filled(1.0), config={"folder": checkpoints.folder})
    assert not checkpoints.folder.exists()


def test_other_settings_are_refused_with_their_values(checkpoints):
    checkpoints.save(4, filled(1.0), config={"lr": 0.1, "sizes": (1, 2), "gone": None, "steps": 10})
    saved = checkpoints.latest()
    same = {"lr": 0.1, "sizes": (1, 2), "gone": None, "steps": 20}
    check_config(saved, same, ignore=("steps",))
    changed = {"lr": 0.2, "sizes": (1, 2), "steps": 20, "new": True}
    message = (
        "step 4 was made with other settings: lr was 0.1, is 0.2, gone was null, is absent, new was absent, is true"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_config(saved, changed, ignore=("steps",))
    assert config_differences({"a": 1}, {"a": 1.0}) == {"a": ("1", "1.0")}
    assert config_differences({"a": [1]}, {"a": (1,)}) == {}


def test_another_version_is_said(checkpoints, monkeypatch):
    checkpoints.save(1, filled(1.0), config={})
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    with pytest.warns(UserWarning, match=r"made with .* read with .*'torch': '0\.0\.1'.*: the last bits may differ"):
        load_newest(checkpoints, filled(0.0))
