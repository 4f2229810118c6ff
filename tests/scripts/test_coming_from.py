"""The pages that advise on settings name flags and recipes that exist, with values that they take."""

import importlib
import re
from typing import Literal, get_args, get_origin

import pytest
from helpers import REPO
from omni_reward.cli import build_parser
from omni_rl.settings.fields import flag_of, kind_of, leaves
from omni_rl.settings.toml import ELSEWHERE, recipes, suggest
from scripts.test_algorithm_docs import tables

PAGES = {name: (REPO / "docs" / f"{name}.md").read_text("utf-8") for name in ("coming-from", "choosing")}
APPS = [importlib.import_module(path.stem) for path in sorted((REPO / "apps").glob("train_*.py"))]
FLAGS: dict[str, list[object]] = {}  # of any trainer -> its types
for app in APPS:
    for name, field in leaves(app.Args).items():
        FLAGS.setdefault(flag_of(name), []).append(kind_of(field.type))
OTHERS = {"--preset", "--config", "--nproc-per-node"} | {w for a in build_parser()._actions for w in a.option_strings}


def takes(flag: str) -> bool:
    """True if a trainer has the flag and takes the value after it."""
    name, _, value = flag.partition(" ")
    kinds = FLAGS.get(name, [])
    return any(not value or get_origin(kind) is not Literal or value in map(str, get_args(kind)) for kind in kinds)


def test_a_flag_of_the_tables_takes_its_value():
    cells = [row[1] for _, rows in tables(PAGES["coming-from"]) for row in rows]
    flags = {flag for cell in cells for flag in re.findall(r"`(--[^`]+)`", cell)}
    assert len(flags) > 50
    assert [flag for flag in sorted(flags) if not takes(flag)] == []
    assert not takes("--algo ppo")


def test_a_name_of_another_project_is_told_the_flags_that_the_page_has_for_it():
    rows = next(rows for _, rows in tables(PAGES["coming-from"]) if rows[0][0].startswith("`learning_rate`"))
    for theirs, ours in ((re.findall(r"`([^`]+)`", there), re.findall(r"`(--[^`]+)`", here)) for there, here in rows):
        for name in theirs:
            told = re.findall(r"--[a-z][a-z0-9.-]+", suggest(flag_of(name), FLAGS))
            assert told, name
            assert {*told} <= {*ours}, name
    told = {flag for here in ELSEWHERE for flag in re.findall(r"--[a-z][a-z0-9.-]+", here)}
    assert told - FLAGS.keys() == {"--nproc-per-node"}


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_recipes_of_the_text_exist(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]+\b", PAGES[page]))
    assert named - FLAGS.keys() - OTHERS == set()
    presets = {name for app in APPS for name in recipes(app.__name__)}
    assert set(re.findall(r"`((?:sd35|qwen-image|flux)-[\w-]+)`", PAGES[page])) <= presets
