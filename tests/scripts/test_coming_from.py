"""The page for those who come from another project names flags that are here, and values that they take."""

import importlib
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from helpers import REPO
from omni_reward.cli import build_parser
from omni_rl.settings.cli import recipes
from scripts.test_algorithm_docs import tables

PAGE = (REPO / "docs" / "coming-from.md").read_text("utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
APPS = [importlib.import_module(path.stem) for path in sorted((REPO / "apps").glob("train_*.py"))]
FLAGS: dict[str, list[object]] = {}  # of any trainer -> its types
for app in APPS:
    for field, kind in get_type_hints(app.Args).items():
        FLAGS.setdefault(f"--{field.replace('_', '-')}", []).append(kind)
ROWS = [(section, *row) for section, text in SECTIONS.items() for names, rows in tables(text + "\n") for row in rows]


def test_there_is_a_table_for_each_project():
    assert list(SECTIONS) == ["flow_grpo", "TRL's DDPO", "TRL's GRPO", "Flow-Factory", "verl", "verl-omni"]
    for section in SECTIONS:
        assert len([row for row in ROWS if row[0] == section]) >= 20


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_stands_once_and_leads_to_flags_or_to_none(section):
    rows = [row for row in ROWS if row[0] == section]
    there = [cell for _, cell, _, _ in rows]
    assert len(set(there)) == len(there)
    for _, _, here, differs in rows:
        assert re.fullmatch(r"none|`--[^`]+`(, `--[^`]+`)*", here), here
        assert here != "none" or differs, "what there is instead"


def takes(flag: str) -> bool:
    """Whether a trainer has the flag, with the value that may stand behind it."""
    name, _, value = flag.partition(" ")
    kinds = FLAGS.get(name, [])
    return any(not value or get_origin(kind) is not Literal or value in map(str, get_args(kind)) for kind in kinds)


def test_a_flag_of_the_tables_is_one_of_a_trainer_and_takes_the_value():
    flags = {flag for *_, here, _ in ROWS for flag in re.findall(r"`(--[^`]+)`", here)}
    assert len(flags) > 50
    assert [flag for flag in flags if not takes(flag)] == []
    assert not takes("--algo ppo")
    assert not takes("--learning-rate")


def test_flags_and_recipes_of_the_text_are_here():
    server = {word for action in build_parser()._actions for word in action.option_strings}
    torchrun = {"--nproc-per-node"}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE):
        assert flag in FLAGS.keys() | server | torchrun | {"--preset", "--config"}, flag
    known = {name for app in APPS for name in recipes(app.__name__)}
    assert {"sd35-medium-flowgrpo-ocr", "qwen-image-ocr-lora"} <= known
    assert all(f"`{name}`" in PAGE for name in ("sd35-medium-flowgrpo-ocr", "qwen-image-ocr-lora"))
