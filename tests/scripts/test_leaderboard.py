"""The leaderboard: its page is what its data give, has all algorithms, and compares nothing that cannot be compared."""

import importlib
from pathlib import Path

import leaderboard
import pytest
from helpers import REPO
from leaderboard import Job
from leaderboard_page import ENTRIES, blocks, read_rows
from omni_reward.serving import Server
from omni_rl.settings.cli import read_settings
from omni_rl.settings.fields import build, values_of
from omni_rl.settings.toml import from_toml, recipes

DOCS = REPO / "docs"
DATA = read_rows(DOCS / "evidence" / "leaderboard.jsonl")
WINDOWS_OF_MIXGRPO = {"mixgrpo-decay", "mixgrpo-exp-decay"}
SERVER = Server("http://127.0.0.1:9", Path("token"), None)
OFFLINE, SRPO = (entry for entry in ENTRIES if entry.name in ("dpo-offline", "srpo"))


def trainer(entry):
    return importlib.import_module(entry.app)


def settings_of(entry):
    """The settings of the entry's recipe, an Args."""
    args = trainer(entry).Args
    return build(args, from_toml(recipes(entry.app)[entry.preset], args, entry.preset))


def row(entry, seed, before, after, *, images=100, forwards=1200, **others):
    """A made-up row: half of images and forwards are spent when it is evaluated between."""
    points = [(0, before, 0), (5, (before + after) / 2, 0.5), (10, after, 1)]
    evaluations = [{"step": s, "score": y, "images": images * x, "forwards": forwards * x} for s, y, x in points]
    rest = {"peak_memory_mb": 500.0, "wall_s": 60.0, "ratio_deviation": None, "torch": "9.9", "commit": "c" * 40}
    rest |= {"name": entry.name, "seed": seed, "settings": {}, "evaluations": evaluations}
    return rest | {"images": images, "forwards": forwards, "cores": 2} | others


@pytest.fixture
def rows():
    """Two algorithms that rise: 0.5 to 0.6, 0.7, 0.8, and 0.5 to 0.55 and 0.65."""
    first, second = ENTRIES[:2]
    return [
        row(first, 1, 0.5, 0.7, forwards=1300, peak_memory_mb=1500.4, wall_s=90.0, ratio_deviation=0.0),
        row(first, 0, 0.5, 0.6, ratio_deviation=1.5e-7),
        row(first, 2, 0.5, 0.8, forwards=1400, ratio_deviation=0.0),
        row(second, 0, 0.5, 0.55, commit="d" * 40 + "+"),
        row(second, 1, 0.5, 0.65),
    ]


def test_table_and_pictures_are_what_the_data_give():
    assert leaderboard.stale(DOCS) == []
    assert {path.stem for path in (DOCS / "images" / "algorithms").glob("*.svg")} == {row["name"] for row in DATA}


def test_rows_were_measured_with_the_recipes_as_they_are():
    now = {entry.name: Job(entry, 0, trial=False).settings() for entry in ENTRIES}
    assert [row["name"] for row in DATA if row["settings"] != now[row["name"]]] == []


def test_every_algorithm_and_trainer_is_in_the_table():
    trainers = {path.stem for path in (REPO / "apps").glob("train_*.py")}
    others = {"train_gspo", "train_unigrpo", "train_distill", "train_sft"}  # no pictures, not alone, nothing sampled
    assert {entry.app for entry in ENTRIES} == trainers - others
    for app in ("train_flowgrpo", "train_nft"):
        algos = {settings_of(entry).algo for entry in ENTRIES if entry.app == app}
        assert algos == set(importlib.import_module(app).ALGOS) - WINDOWS_OF_MIXGRPO


def test_what_cannot_be_compared_is_refused(rows):
    with pytest.raises(ValueError, match=r"same number of generated images, got .*flow-cps-1: 99"):
        blocks([*rows[:4], row(ENTRIES[1], 1, 0.5, 0.6, images=99)])
    with pytest.raises(ValueError, match="each seed once"):
        blocks([*rows, rows[4]])
    with pytest.raises(ValueError, match="algorithms in the table"):
        blocks([rows[0] | {"name": "other"}])
    short = rows[4] | {"evaluations": rows[4]["evaluations"][::2]}
    with pytest.raises(ValueError, match="flow-cps: all seeds must have been evaluated after the same steps"):
        blocks([*rows[:4], short])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_run_has_the_settings_of_its_recipe(entry):
    job = Job(entry, 1, trial=False)
    script, *flags = leaderboard.train_command(job, SERVER)
    args = read_settings(trainer(entry).Args, flags, recipes(Path(script).stem), "")
    assert {name for name, value in job.settings().items() if values_of(args)[name] != value} == set()
    assert (args.name, args.seed, args.sharding.mode) == (f"leaderboard/{entry.name}-1", 1, "none")
    assert (REPO / args.eval.prompts).is_file()
    asked = args.scorer.watch_url if entry is SRPO else args.scorer.url
    assert (asked, args.scorer.token_file) == (SERVER.url, "token")
