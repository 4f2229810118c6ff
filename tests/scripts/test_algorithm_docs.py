"""The pages of the algorithms name all that can be run; their settings, flags, files and functions are the code's."""

import importlib
import re
import shlex
from dataclasses import fields
from pathlib import Path

import omni_losses
import pytest
from helpers import REPO, public_names
from leaderboard import ENTRIES
from omni_rl.settings.toml import recipes

TABLE = "docs/algorithms.md"
PAGES = {path.name: path.read_text("utf-8") for path in sorted((REPO / "docs" / "algorithms").glob("*.md"))}
ALL = {TABLE: (REPO / TABLE).read_text("utf-8")} | {f"docs/algorithms/{name}": text for name, text in PAGES.items()}
TRAINERS = {path.stem: importlib.import_module(path.stem) for path in sorted((REPO / "apps").glob("train_*.py"))}
NOT_OF_AN_ALGORITHM = {"LossOutput", "reward_metrics"}  # what losses return, and what is logged of rewards


def tables(text):
    """Return (names of the columns, rows) of each table."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in block.splitlines()]
        names, _, *rows = [[cell.strip().replace("\\|", "|") for cell in line] for line in lines]
        yield names, rows


def code(text):
    """Return what is in single backticks, outside of blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


((COLUMNS, ROWS),) = tables(ALL[TABLE])
ALGORITHMS = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
PAGE_OF = [re.search(r"\(algorithms/(.+)\)", row["algorithm"])[1] for row in ALGORITHMS]
APP_OF = {page: TRAINERS[code(row["app"])[0]] for row, page in zip(ALGORITHMS, PAGE_OF, strict=True)}


def test_the_table_names_every_page_trainer_and_curve():
    assert set(PAGE_OF) == set(PAGES)
    assert set(APP_OF.values()) == set(TRAINERS.values())
    for page in PAGES:
        curves = re.findall(r"images/algorithms/(.+?)\.svg", PAGES[page])
        assert curves == [entry.name for entry in ENTRIES if entry.page == page]


@pytest.mark.parametrize("name", [name for name, app in TRAINERS.items() if hasattr(app, "ALGOS")])
def test_every_algorithm_of_a_trainer_has_a_row(name):
    flags = [shlex.split(" ".join(code(row["flags"]))) for row in ALGORITHMS if code(row["app"]) == [name]]
    named = [words[words.index("--algo") + 1] if "--algo" in words else TRAINERS[name].Args.algo for words in flags]
    if name != "train_distill":  # whose variants share one page and one row
        assert set(named) == set(TRAINERS[name].ALGOS)


def test_every_loss_is_in_the_table_and_every_public_function_on_a_page():
    in_table = {name for row in ALGORITHMS for name in code(row["loss"])}
    assert in_table <= public_names(omni_losses)
    assert {name for name in public_names(omni_losses) if name.endswith("_loss")} <= in_table
    named = set(re.findall(r"\w+", "".join(ALL.values())))
    assert public_names(omni_losses) - NOT_OF_AN_ALGORITHM - named == set()


@pytest.mark.parametrize("page", ALL)
def test_flags_presets_and_files_are_in_the_code(page):
    trainer = APP_OF.get(Path(page).name)
    known = {f.name for one in [trainer] * bool(trainer) or TRAINERS.values() for f in fields(one.Args)} | {"preset"}
    presets = {name for app in TRAINERS for name in recipes(app)}
    for text in code(ALL[page]):
        if text.startswith("python "):
            continue  # checked as a command
        for flag in re.findall(r"--([a-z][a-z-]*)", text):
            assert flag.replace("-", "_") in known, flag
        for path in re.findall(r"\b(?:apps|packages|scripts)/\S+", text):
            assert (REPO / path).is_file(), path
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text):
            assert text in presets, text
