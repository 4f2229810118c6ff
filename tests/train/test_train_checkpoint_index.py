"""The index of a checkpoint is believed where its files agree with it, and what was verified is what is loaded."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from helpers import filled
from omni_train.checkpoint.store import Checkpoint
from omni_train.optim import build_adamw


def forge(folder, change):
    """Another index, with the checksum that it says it has."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest} | content))


def test_an_index_of_another_version_is_named_so(checkpoints):
    forge(checkpoints.save(1, filled(1.0), config={}), lambda index: index.update(format=9))
    with pytest.raises(ValueError, match="another version of omni-train wrote it"):
        checkpoints.latest()


def test_an_index_nested_beyond_measure_is_damage(checkpoints):
    folder = checkpoints.save(1, filled(1.0), config={})
    (folder / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"step-00000001 is damaged: checkpoint\.json is not valid JSON"):
        checkpoints.latest()


def entry(index):
    return index["tensors"]["weight/weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (
                lambda index, name=name: index["files"].update({name: {"bytes": 1, "sha256": ""}}),
                f"files below it, got {name!r}",
            )
            for name in ("../x", "", ".", "..", "/a", "a/", "a//b", "a\0")
        ),
        (lambda index: entry(index).update(pieces=[["../x", 0]]), "holds a tensor, lacks '../x'"),
        (lambda index: entry(index).update(pieces=[["elsewhere", 0]]), "holds a tensor, lacks 'elsewhere'"),
    ],
)
def test_an_index_of_files_that_are_not_the_checkpoints_is_damage(checkpoints, change, message):
    forge(checkpoints.save(1, filled(1.0), config={}), change)
    with pytest.raises(ValueError, match=rf"is damaged: checkpoint\.json must .*{re.escape(message)}\. There is"):
        checkpoints.latest()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(step="1"),
        lambda index: index.update(config=[]),
        lambda index: index.update(versions=None),
        lambda index: index.update(files=[]),
        lambda index: index["files"].update(more={"bytes": "1", "sha256": ""}),
        lambda index: index.update(tensors=[]),
        lambda index: index["tensors"].update(more=[]),
        lambda index: entry(index).pop("pieces"),
        lambda index: entry(index).update(pieces=["ab"]),
        lambda index: entry(index)["pieces"][0].__setitem__(1, "0"),
        lambda index: entry(index)["pieces"][0].__setitem__(1, -1),
        lambda index: entry(index).update(shape={}),
        lambda index: entry(index).update(shape=[3, 2.0]),
        lambda index: entry(index).update(dtype=None),
    ],
)
def test_an_index_of_values_of_other_kinds_is_damage(checkpoints, change):
    forge(checkpoints.save(1, filled(1.0), config={}), change)
    with pytest.raises(
        ValueError, match=r"is damaged: checkpoint\.json must have values of the kinds that a save writes"
    ):
        checkpoints.latest()


def test_a_number_that_no_computer_word_holds_is_damage(checkpoints):
    forge(checkpoints.save(1, filled(1.0), config={}), lambda index: index.update(step=10**400))
    with pytest.raises(
        ValueError, match=r"checkpoint\.json is not valid JSON \(integers must fit into 64 bits, got 1000"
    ):
        checkpoints.latest()


@pytest.mark.parametrize(
    "name", ["step-\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff12", "step-2", "step-" + "9" * 200]
)
def test_a_folder_whose_name_no_save_writes_is_no_checkpoint(checkpoints, name):
    checkpoints.save(1, filled(1.0), config={})
    (checkpoints.folder / name).mkdir()
    assert checkpoints.latest().step == 1


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_unfinished_checkpoint_that_is_no_folder_is_refused_and_kept(checkpoints, tmp_path, kind):
    checkpoints.save(1, filled(1.0), config={})
    path, elsewhere = checkpoints.folder / "step-00000002.tmp", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    path.symlink_to(elsewhere) if kind == "link" else path.touch()
    for use in (checkpoints.latest, lambda: checkpoints.save(2, filled(2.0), config={})):
        with pytest.raises(ValueError, match=r"step-00000002\.tmp must be a folder, which .*: move it away"):
            use()
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: entry(index).update(shape=[3, 10**12]),
        lambda index: entry(index).update(shape=[2, 2]),
        lambda index: entry(index).update(shape=[]),
        lambda index: entry(index).update(dtype="torch.float64"),
        lambda index: entry(index)["pieces"][0].__setitem__(1, 1),
        lambda index: index["tensors"].pop("weight/weight"),
        lambda index: index["tensors"].update(more=entry(index)),
    ],
)
def test_an_index_that_says_other_than_its_files_is_damage(checkpoints, change):
    forge(checkpoints.save(1, filled(1.0), config={}), change)
    with pytest.raises(ValueError, match=r"is damaged: rank-00000-000\.safetensors (does not hold|holds)"):
        checkpoints.verify(checkpoints.latest())


def test_no_state_of_an_optimizer_is_allocated_as_an_index_says(checkpoints):
    net = filled(1.0)
    optimizer = build_adamw(net, lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = checkpoints.save(1, net, optimizer, config={})
    forge(folder, lambda index: index["tensors"]["optimizer.step/bias"].update(shape=[10**12, 10**3], pieces=[]))
    saved = checkpoints.latest()
    with pytest.raises(ValueError, match=r"does not hold|holds other tensors"):
        checkpoints.load(saved, net, optimizer)
    checkpoints._verified = saved
    with pytest.raises(ValueError, match=r"optimizer\.step/bias must have the shape \[3\] or be one number"):
        checkpoints.load(saved, net, optimizer)


def test_a_folder_under_another_steps_name_is_found_when_it_is_looked_for(checkpoints):
    folder = checkpoints.save(1, filled(1.0), config={})
    shutil.copytree(folder, folder.with_name("step-00000007"))
    with pytest.raises(ValueError, match=r"step-00000007 is damaged: checkpoint\.json is of step 1: .* copied"):
        checkpoints.latest()


def test_what_was_verified_is_loaded_although_a_newer_one_has_come(checkpoints):
    checkpoints.save(4, filled(4.0), config={})
    checkpoints.verify(saved := checkpoints.latest())
    checkpoints.save(8, filled(8.0), config={})
    net = filled(0.0)
    checkpoints.load(saved, net)
    assert net.weight.eq(4.0).all()


def test_equal_runs_leave_equal_bytes_whatever_was_drawn_elsewhere(tmp_path, alone):
    folders = [
        Checkpoint(tmp_path / name, alone).save(1, filled(1.0), config={}) for name in ("a", "b") if torch.rand(1)
    ]
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
