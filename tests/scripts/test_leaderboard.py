"""The leaderboard: its page is what its data give, has all algorithms, and compares nothing that cannot be compared."""

import importlib
from contextlib import nullcontext
from pathlib import Path

import leaderboard
import pytest
from helpers import REPO, TEXT_TRAINERS
from leaderboard import LONG, SHORT, TUNING, Job
from leaderboard_page import ENTRIES, RATES, blocks, tuned_rate
from omni_reward.serving import Server
from omni_rl.settings.cli import read_settings
from omni_rl.settings.fields import build, values_of
from omni_rl.settings.toml import from_toml, load_recipes
from tiny_signs import is_eval_word

DOCS = REPO / "docs"
ALL_DATA = leaderboard.read_all(DOCS)
DATA, LARGER, TRIALS = ALL_DATA.values()
WINDOWS_OF_MIXGRPO = {"mixgrpo-decay", "mixgrpo-exp-decay"}
SERVER = Server("http://127.0.0.1:9", Path("token"), None)
OFFLINE, SRPO = (entry for entry in ENTRIES if entry.name in ("dpo-offline", "srpo"))


def trainer(entry):
    return importlib.import_module(entry.app)


def settings_of(entry):
    """The settings of the entry's recipe, an Args."""
    args = trainer(entry).Args
    return build(args, from_toml(load_recipes(entry.app)[entry.preset], args, entry.preset))


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


def test_each_row_has_its_picture():
    assert {path.stem for path in (DOCS / "images" / "algorithms").glob("*.svg")} == {row["name"] for row in DATA}


def test_rows_were_measured_with_the_recipes_as_they_are():
    by_name, budgets = (
        {entry.name: entry for entry in ENTRIES},
        {budget.data: budget for budget in (SHORT, LONG, TUNING)},
    )
    of_rows = [(Job(by_name[row["name"]], row["seed"], budgets[file], row.get("rate", 1.0)), row)
               for file, rows in ALL_DATA.items() for row in rows]  # fmt: skip
    assert [job.name for job, row in of_rows if row["settings"] != job.settings()] == []


def test_larger_rows_have_the_rate_that_won_and_all_of_their_images():
    assert {row["images"] for row in LARGER} <= {20_480}
    assert {(row["images"], row["seed"]) for row in TRIALS} <= {(2560, leaderboard.TUNING_SEED)}
    won = {entry.name: tuned_rate(TRIALS, entry) for entry in ENTRIES}
    assert [row["name"] for row in LARGER if row["rate"] != won[row["name"]]] == []


def test_every_algorithm_and_trainer_is_in_the_table():
    trainers = {path.stem for path in (REPO / "apps").glob("train_*.py")}
    others = {"train_unigrpo", "train_distill", "train_sft", *TEXT_TRAINERS}  # not alone, nothing sampled, no pictures
    assert {entry.app for entry in ENTRIES} == trainers - others
    for app in ("train_flowgrpo", "train_nft"):
        algos = {settings_of(entry).algo for entry in ENTRIES if entry.app == app}
        assert algos == set(importlib.import_module(app).ALGOS) - WINDOWS_OF_MIXGRPO


def trial(entry, rate, words, color):
    """A made-up trial of a learning rate."""
    own = row(entry, leaderboard.TUNING_SEED, 0.5, words, rate=rate)
    own["evaluations"] = [each | {"color": color} for each in own["evaluations"]]
    return own


def test_the_best_of_words_and_colors_is_the_rate_once_all_have_been_tried():
    entry, other = ENTRIES[:2]
    trials = [trial(entry, 0.5, 0.55, 1.0), trial(entry, 1.0, 0.6, 1.0), trial(other, 2.0, 0.9, 1.0)]
    assert tuned_rate(trials, entry) is None
    assert tuned_rate([*trials, trial(entry, 2.0, 0.7, 0.8)], entry) == 1.0  # as its colors fall
    assert tuned_rate([*trials, trial(entry, 2.0, 0.7, 0.95)], entry) == 2.0


def test_the_page_names_what_is_not_run_and_not_tuned(rows):
    entry = ENTRIES[0]
    nothing = blocks(rows, [], [])
    assert f"0 runs of 0 of {len(ENTRIES)} rows" in nothing["larger"]
    assert nothing["tuning"].startswith(f"Not tuned yet: {'; '.join(each.title for each in ENTRIES)}.")
    own = [trial(entry, rate, 0.5 + rate / 10, 1.0) | {"backwards": 300, "cpu_s": 70.4} for rate in RATES]
    found = blocks(rows, [own[2]], own)
    others = "; ".join(each.title for each in ENTRIES[1:])
    assert f"1 runs of 1 of {len(ENTRIES)} rows are finished. **Not run yet:** {others}." in found["larger"]
    cells = "| 1 | 2x | 0.500 | **0.700** [0.700, 0.700] | 1.000, 1.000 | 1,200 | 300 | 70 |"
    assert cells in found["larger"]
    assert "| FlowGRPO | 0.550, 1.000 | 0.600, 1.000 | 0.700, 1.000 | 2x |" in found["tuning"]
    assert "FlowGRPO;" not in found["tuning"].splitlines()[0]
    assert "2x, not tuned" in blocks(rows, [own[2]], own[1:])["larger"]


def test_runs_that_the_data_has_are_not_made_again_and_a_row_is_tuned_before_it_runs(monkeypatch, tmp_path):
    entry = ENTRIES[0]
    known = trial(entry, 0.5, 0.55, 1.0) | {"settings": Job(entry, 100, TUNING, 0.5).settings()}
    old = trial(entry, 1.0, 0.55, 1.0) | {"settings": {"lr": 1.0}}
    rows = {SHORT.data: [], LONG.data: [], TUNING.data: [known, old]}
    asked = []

    def measure(jobs, at_a_time, server):
        asked.append([(job.budget.images, job.seed, job.rate) for job in jobs])
        rows[TUNING.data] += [trial(job.entry, job.rate, 0.6, 1.0) for job in jobs if job.budget is TUNING]
        return []

    monkeypatch.setattr(leaderboard, "measure", measure)
    monkeypatch.setattr(leaderboard, "ROOT", REPO)
    monkeypatch.setattr(leaderboard, "VALIDATION", tmp_path / "validation.txt")
    monkeypatch.setattr(leaderboard, "serving", lambda *_, **__: nullcontext(SERVER))
    monkeypatch.setattr(leaderboard.signal, "signal", lambda *_: None)
    leaderboard.measure_all(leaderboard.parse(["--images=20480", "--only=flowgrpo", "--seeds=3,4"]), rows)
    assert asked == [[(2560, 100, 1.0), (2560, 100, 2.0)], [(20_480, 3, 1.0), (20_480, 4, 1.0)]]
    words = {name: {line.split('"')[1] for line in (REPO / "data/tiny-signs" / f"{name}.txt").open()}
             for name in ("train", "eval", "test")}  # fmt: skip
    validation = {line.split('"')[1] for line in (tmp_path / "validation.txt").open()}
    assert len(validation) == 256
    assert validation.isdisjoint(set().union(*words.values()))
    assert all(map(is_eval_word, validation))  # which no pretraining has seen


def test_scores_of_words_and_colors_are_those_of_the_reward_or_of_a_judged_set():
    both = {"eval/ocr": 0.5, "eval/color": 0.9, "eval/reward": 0.7}
    assert leaderboard.held_out(both, LONG) == {"score": 0.5, "color": 0.9}
    assert leaderboard.held_out({"eval/test/ocr": 0.4, "eval/test/color": 0.8, "eval/reward": 1.0}, LONG) == {
        "score": 0.4, "color": 0.8,
    }  # fmt: skip
    assert leaderboard.held_out({"eval/watch": 0.3, "eval/reward": 1.0}, SHORT) == {"score": 0.3}
    assert leaderboard.held_out({"reward/mean": 1.0}, LONG) == {}


def test_what_cannot_be_compared_is_refused(rows):
    with pytest.raises(ValueError, match=r"same number of generated images, got .*flow-cps-1: 99"):
        blocks([*rows[:4], row(ENTRIES[1], 1, 0.5, 0.6, images=99)], [], [])
    with pytest.raises(ValueError, match="each seed once"):
        blocks([*rows, rows[4]], [], [])
    with pytest.raises(ValueError, match="algorithms in the table"):
        blocks([rows[0] | {"name": "other"}], [], [])
    short = rows[4] | {"evaluations": rows[4]["evaluations"][::2]}
    with pytest.raises(ValueError, match="flow-cps: all seeds must have been evaluated after the same steps"):
        blocks([*rows[:4], short], [], [])


def test_the_larger_budget_has_its_steps_and_rate_and_judges_what_a_gradient_trains(monkeypatch, tmp_path):
    monkeypatch.setattr(leaderboard, "ROOT", tmp_path)
    for entry in (ENTRIES[0], SRPO):
        job = Job(entry, 1, LONG, 2.0)
        script, *flags = leaderboard.train_command(job, SERVER)
        recipe, own = settings_of(entry), read_settings(trainer(entry).Args, flags, load_recipes(Path(script).stem), "")
        samples = own.run.train_steps * own.data.prompts_per_step * own.data.group_size
        assert (samples, own.run.train_steps // own.eval.every, own.lr) == (20_480, 4, 2 * recipe.lr)
        assert own.run.name == f"leaderboard/20480/{entry.name}-1-x2"
        (judged,) = own.eval.sets or [None]
        assert (judged is None) == (entry is not SRPO)
    assert (judged.name, judged.prompts, judged.scorer_url) == ("test", "data/tiny-signs/test.txt", SERVER.url)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_run_has_the_settings_of_its_recipe(entry):
    job = Job(entry, 1)
    script, *flags = leaderboard.train_command(job, SERVER)
    args = read_settings(trainer(entry).Args, flags, load_recipes(Path(script).stem), "")
    assert {name for name, value in job.settings().items() if values_of(args)[name] != value} == set()
    assert (args.run.name, args.run.seed, args.sharding.mode) == (f"leaderboard/3840/{entry.name}-1", 1, "none")
    assert (REPO / args.eval.prompts).is_file()
    asked = args.scorer.watch_url if entry is SRPO else args.scorer.url
    assert (asked, args.scorer.token_file) == (SERVER.url, "token")
