"""Files on the hub, without a network: stand-ins have the signatures of the installed huggingface_hub."""

import os
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from omni_rl.settings.cli import read_settings
from omni_rl.settings.toml import to_toml
from omni_rl.tools import hub as program
from omni_train import hub
from omni_train.prompts.files import load_prompts

import train_dpo
import train_gspo

ADDRESS = "hf://datasets/owner/name@v1/some/prompts.txt"


@pytest.fixture
def download(tmp_path, monkeypatch):
    """The hub's download, which finds one file."""
    monkeypatch.setattr(hub, "FETCHED", {})
    path = tmp_path / "snapshots/datasets--owner--name/snapshots/abc123/some/prompts.txt"
    path.parent.mkdir(parents=True)
    path.write_text("a cat\na dog\n")
    stand_in = create_autospec(huggingface_hub.hf_hub_download, return_value=str(path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", stand_in)
    return stand_in


def test_prompts_are_fetched_once_at_their_revision(download):
    assert [record.text for record in load_prompts(ADDRESS)] == ["a cat", "a dog"]
    load_prompts(ADDRESS)
    download.assert_called_once_with("owner/name", "some/prompts.txt", repo_type="dataset", revision="v1")
    assert hub.pin_revision(ADDRESS, hub.local_file(ADDRESS)) == "hf://datasets/owner/name@abc123/some/prompts.txt"
    assert hub.pin_revision("data/prompts.txt", Path("data/prompts.txt")) == "data/prompts.txt"


def test_settings_come_from_a_model_on_the_hub(download):
    path = hub.local_file("hf://owner/name/recipe.toml")
    path.write_text("lr = 0.5\n")
    assert read_settings(train_dpo.Args, ["--config", "hf://owner/name/recipe.toml"], {}, "").lr == 0.5
    download.assert_called_once_with("owner/name", "recipe.toml", repo_type="model", revision=None)
    path.write_text(to_toml(train_dpo.Args(lr=0.25)))  # as a run is pushed, with all settings and no secrets
    assert read_settings(train_dpo.Args, ["--config", "hf://owner/name/recipe.toml"], {}, "").lr == 0.25


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[scorer]\ntoken_file = '/etc/passwd'", "scorer.token_file"),
        ("[scorer]\nwatch_url = 'http://a:1'", "scorer.watch_url"),
        ("scorer.url = 'http://a:1'", "scorer.url"),
        ("[[eval.sets]]\nname = 'a'\nscorer_url = 'http://a:1'", "scorer_url"),
        ("media_root = '/'", "media_root"),
        ("[tracking]\nnotify = 'true'", "tracking.notify"),
        ("[scorer]\nname = 'vlm --option url=http://a:1'", ":// in scorer.name"),
    ],
)
def test_settings_from_the_hub_do_not_choose_who_gets_samples_and_token(text, name, download):
    hub.local_file("hf://owner/name/recipe.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"recipe\.toml must not name (a )?{name}: give the flag, or .*, got '"):
        read_settings(train_dpo.Args, ["--config", "hf://owner/name/recipe.toml"], {}, "")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("reward = 'python:a.py:f'", "reward"),
        ("reward = 'exact + 0.5*python:a.txt:f'", "reward"),
        ('reward = "\\u0070ython:a.py:f"', "reward"),
        ("name = 'python:a.py:f'", "name"),
        ("[[eval.sets]]\nname = 'a'\nprompts = 'python:a.py:f'", "prompts"),
    ],
)
@pytest.mark.parametrize("is_path", [False, True])
def test_settings_from_the_hub_name_no_python_whatever_the_key(text, key, is_path, download):
    address = "hf://owner/name/recipe.toml"
    file = hub.local_file(address)
    beside = file.with_name("recipe.toml")
    file.write_text(text)
    beside.write_text(text)
    with pytest.raises(ValueError, match=f"must not name python: in {key}: give the flag, or a copy of the file that"):
        read_settings(train_gspo.Args, ["--config", str(beside) if is_path else address], {}, "")
    copy = file.parents[5] / "copy.toml"
    copy.write_text(text)
    read_settings(train_gspo.Args, ["--config", str(copy)], {}, "")


@pytest.mark.parametrize("read", [load_prompts, lambda path: read_settings(train_dpo.Args, ["--config", path], {}, "")])
def test_a_file_of_another_kind_is_not_fetched(read, download):
    with pytest.raises(ValueError, match=r"path must end in .*, got hf://datasets/owner/name/evil\.py"):
        read("hf://datasets/owner/name/evil.py")
    download.assert_not_called()


@pytest.mark.parametrize(
    "wrong", ["hf://a.txt", "hf://datasets/owner/name", "hf://owner/name/../../x", "hf:/owner/name/x"]
)
def test_another_address_is_refused(wrong, download):
    with pytest.raises(ValueError, match="path must be hf://datasets/OWNER/NAME/FILE, maybe with @REVISION after NAME"):
        hub.local_file(wrong)
    download.assert_not_called()


def test_without_a_network_the_command_that_fetches_the_file_is_told(download):
    download.side_effect = LocalEntryNotFoundError("no connection")
    told = r"no connection. Fetch it .* `hf download owner/name some/prompts.txt --repo-type dataset --revision v1`"
    with pytest.raises(ValueError, match=told):
        load_prompts(ADDRESS)
    with pytest.raises(
        ValueError, match=r"^--config: path must be .* `hf download owner/name a.toml --repo-type model`"
    ):
        read_settings(train_dpo.Args, ["--config", "hf://owner/name/a.toml"], {}, "")


def test_weights_are_pushed_with_card_and_settings_in_one_commit(tmp_path, monkeypatch, capsys):
    run = tmp_path / "first"
    (run / "weights/high").mkdir(parents=True)
    for name in ("weights/README.md", "weights/high/model.safetensors", "config.toml", "metrics.jsonl"):
        (run / name).write_text(name)
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_commit.return_value.commit_url = "https://hub/commit"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    program.main([str(run), "owner/name", "--dry-run"])
    assert api.mock_calls == []
    program.main([str(run), "owner/name", "--private"])
    assert capsys.readouterr().out.splitlines()[-1] == "https://hub/commit"
    api.create_repo.assert_called_once_with("owner/name", private=True, exist_ok=True)
    (_, adds), _ = api.create_commit.call_args
    assert [add.path_in_repo for add in adds] == ["README.md", "high/model.safetensors", "recipe.toml"]
    api.create_repo.side_effect = RuntimeError("401")
    with pytest.raises(SystemExit, match="2"):
        program.main([str(run), "owner/name"])
    assert "where you may write after `hf auth login`, got owner/name: RuntimeError: 401" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="run must be a folder with weights, which an evaluation writes, found none in"
    ):
        program.files_to_push(tmp_path)


def test_only_what_an_export_writes_is_pushed(tmp_path):
    weights = tmp_path / "run" / "weights"
    (weights / "high" / ".cache").mkdir(parents=True)
    kept = ["README.md", "high/config.json", "high/model.safetensors"]
    for name in [*kept, ".env", ".token.json", "high/.cache/key.json", "notes.md", "high/script.py", "core"]:
        (weights / name).write_text(name)
    os.mkfifo(weights / "pipe.json")
    assert list(program.files_to_push(tmp_path / "run")) == kept


@pytest.mark.parametrize("name", ["weights/key.json", "weights/high", "weights", "config.toml"])
def test_a_link_is_not_pushed(tmp_path, name):
    """What lies behind it is not the run's."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run / "weights", elsewhere):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    (elsewhere / "key.json").touch()
    if name == "weights":
        shutil.rmtree(run / "weights")
    (run / name).symlink_to(elsewhere / "key.json" if "." in name else elsewhere)
    with pytest.raises(ValueError, match=rf"run must have files of its own to push, but \S+/run/{name} is a link"):
        program.files_to_push(run)
