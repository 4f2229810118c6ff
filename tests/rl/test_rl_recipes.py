"""Every recipe is a start that its trainer accepts, and says where its numbers are from and whether it has been run."""

import importlib
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import REPO
from omni_rl.cli import from_toml, parse_cli, recipes

APPS = ("train_flowgrpo", "train_nft", "train_dpo", "train_srpo", "train_gspo", "train_unigrpo", "train_distill")
ALL = [(app, name) for app in APPS for name in recipes(app)]


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_recipe_says_where_its_numbers_are_from_and_whether_it_has_been_run(app: str, name: str):
    lines = recipes(app)[name].splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert head == lines[: len(head)]
    assert lines[len(head)] == ""
    assert re.fullmatch(r"# [A-Z].{20,90}[^.]", head[0]), "the first line is what --help shows"
    assert sum(line.startswith("# Source: ") for line in head) == 1
    assert sum(bool(re.match(r"# Run here: (yes, on|yes, \d seeds on|no, it needs) ", line)) for line in head) == 1
    values = tomllib.loads(recipes(app)[name])
    if not Path(REPO / values["prompts"]).exists():
        assert any(line.startswith("# Prompts: bring ") for line in head)
    if "Source: chosen here" not in recipes(app)[name]:
        assert re.search(r"published for \d+ accelerators?\b", "\n".join(head))


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_recipe_names_model_and_data_and_the_knob_of_its_model(app: str, name: str):
    values = tomllib.loads(recipes(app)[name])
    size = {"max_new_tokens"} if app == "train_gspo" else {"height", "width"}
    if "duration" in values.get("guidance", ""):  # of sound
        size = {"guidance"}
    assert {"name", "model", "prompts", "eval_prompts", "lr"} | size <= set(values)
    assert "scorer_url" not in values
    if "qwen" in values["model"].lower():
        assert "guidance_scale" not in values, "Qwen-Image's pipeline calls it true_cfg_scale"
    else:
        assert "true_cfg_scale" not in values, "Qwen-Image's knob"


def test_no_two_recipes_of_a_trainer_write_to_one_folder():
    for app in APPS:
        names = [tomllib.loads(text)["name"] for text in recipes(app).values()]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_trainer_accepts_its_recipe(app: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(app)
    args = module.Args(**from_toml(recipes(app)[name], module.Args, name))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f'a sign that says "{i}"\n' for i in range(128)))
    changed = {"prompts": str(prompts), "eval_prompts": str(prompts), "scorer_url": "http://127.0.0.1:8100"}
    if hasattr(args, "reward"):  # rules, which need no server
        del changed["scorer_url"]
    changed = {key: value for key, value in changed.items() if hasattr(args, key)}
    monkeypatch.setenv("RANK", "0")  # as under torchrun, which some recipes need
    module.check_args(replace(args, **changed))


@pytest.mark.parametrize(
    ("more", "ends"), [([], r"; bring \S+ of github.com/\S+ as data/ocr"), (["--prompts", "x.txt"], "")]
)
def test_who_lacks_the_prompts_of_a_recipe_is_told_where_they_are(tmp_path, monkeypatch, capsys, more, ends):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("train_flowgrpo")
    words = ["--preset", "qwen-image-ocr-lora", "--scorer-url", "http://127.0.0.1:8100", *more]
    with pytest.raises(SystemExit):
        parse_cli(module.Args, module.check_args, words, app="train_flowgrpo")
    assert re.search(rf"--prompts: .*\.txt: No such file or directory{ends}\n$", capsys.readouterr().err)


def test_the_recipes_at_the_root_are_those_of_the_package():
    assert (REPO / "recipes").is_symlink()
    assert sorted(path.stem for path in (REPO / "recipes" / "train_nft").glob("*.toml")) == sorted(recipes("train_nft"))
    assert {path.name for path in (REPO / "recipes").iterdir()} == set(APPS)


def test_a_program_without_recipes_has_none():
    assert recipes("no_such_program") == {}
