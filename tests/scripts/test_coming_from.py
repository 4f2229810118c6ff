"""The pages that advise on settings name flags and recipes that exist, with values that they take."""

import importlib
import re
from typing import Literal, get_args, get_origin

import pytest
from helpers import REPO
from omni_reward.cli import build_parser
from omni_rl.settings.fields import flag_of, leaves, strip_metadata
from omni_rl.settings.toml import load_recipes, read_other_names, suggest

DOCS = REPO / "docs"
FILES = [DOCS / "coming-from.md", DOCS / "choosing.md", DOCS / "algorithms.md", *sorted(DOCS.glob("algorithms/*.md"))]
PAGES = {path.stem: path.read_text("utf-8") for path in FILES}
APPS = [importlib.import_module(path.stem) for path in sorted((REPO / "apps").glob("train_*.py"))]
FLAGS: dict[str, list[object]] = {}  # of any trainer -> its types
for app in APPS:
    for name, field in leaves(app.Args).items():
        FLAGS.setdefault(flag_of(name), []).append(strip_metadata(field.type))
VARIANTS = "".join(path.read_text("utf-8") for path in (REPO / "apps" / "variants").glob("*.py"))
OTHERS = {flag_of(name) for name in re.findall(r"^    (\w+): .+  # ", VARIANTS, re.MULTILINE)}  # settings of pages
OTHERS |= {"--preset", "--config", "--nproc-per-node"} | {w for a in build_parser()._actions for w in a.option_strings}


def tables(text):
    """Return (names of the columns, rows) of each table."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in block.splitlines()]
        names, _, *rows = [[cell.strip().replace("\\|", "|") for cell in line] for line in lines]
        yield names, rows


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
    equivalents = [here for known in read_other_names()["equivalents"].values() for here in known]
    told = {flag for here in equivalents for flag in re.findall(r"--[a-z][a-z0-9.-]+", here)}
    assert told - FLAGS.keys() == {"--nproc-per-node"}


@pytest.mark.parametrize("page", PAGES)
def test_flags_recipes_and_files_of_the_text_exist(page):
    text = re.sub(r"^```.*?^```|`python [^`]+`", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)  # checked as commands
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]+\b", text))
    assert named - FLAGS.keys() - OTHERS == set()
    presets = {name for app in APPS for name in load_recipes(app.__name__)}
    assert set(re.findall(r"`((?:sd35|qwen-image|flux|tiny-signs)-[\w-]+)`", text)) <= presets
    assert [
        path for path in re.findall(r"`((?:apps|packages|scripts)/\S+)`", text) if not (REPO / path).is_file()
    ] == []
