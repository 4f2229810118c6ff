"""The leaderboard: its page is what its data give, has all algorithms, and compares nothing that cannot be compared."""

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import leaderboard
import pytest
from helpers import REPO
from leaderboard import Job
from leaderboard_page import ENTRIES, blocks, by_algorithm, draw, fill, read_rows, rising
from omni_reward.testing import Server
from omni_rl.settings.cli import from_toml, read_settings, recipes, to_toml

DOCS = REPO / "docs"
DATA = read_rows(DOCS / "leaderboard.jsonl")
PAGE = (DOCS / "leaderboard.md").read_text("utf-8")
WINDOWS_OF_MIXGRPO = {"mixgrpo-decay", "mixgrpo-exp-decay"}
SERVER = Server("http://127.0.0.1:9", Path("token"), None)
OFFLINE, SRPO = (entry for entry in ENTRIES if entry.name in ("dpo-offline", "srpo"))


def trainer(entry):
    return importlib.import_module(entry.app)


def settings_of(entry):
    """The settings of the entry's recipe, an Args."""
    args = trainer(entry).Args
    return args(**from_toml(recipes(entry.app)[entry.preset], args, entry.preset))


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
    assert {entry.app for entry in ENTRIES} == trainers - {"train_gspo", "train_unigrpo", "train_distill"}, (
        "no pictures, or not alone"
    )
    for app in ("train_flowgrpo", "train_nft"):
        algos = {settings_of(entry).algo for entry in ENTRIES if entry.app == app}
        assert algos == set(importlib.import_module(app).ALGOS) - WINDOWS_OF_MIXGRPO


def test_the_page_says_why_a_row_does_not_rise_in_every_seed():
    falling = {entry.title for entry, group in by_algorithm(DATA).items() if rising(group) < len(group)}
    told = {
        line[3:].partition(":")[0] for line in PAGE.splitlines() if line.endswith("why it does not rise in every seed")
    }
    assert told == falling


def test_all_recipes_draw_equally_many_images():
    for entry in ENTRIES:
        args = settings_of(entry)
        images = args.train_steps * args.prompts_per_step * args.group_size
        assert entry is OFFLINE or images == leaderboard.IMAGES, entry.name
    assert {row["images"] for row in DATA} == {leaderboard.IMAGES}


def test_the_table_has_the_numbers_of_the_data(rows):
    text = blocks(rows)["results"]
    cells = {line.split("](")[0][3:]: [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()}
    assert cells["FlowGRPO"] == [
        "0.500", "**0.700** [0.600, 0.800]", "3 of 3", "1,300", "1,500", "1.0", "1.5e-07",
    ]  # fmt: skip
    assert cells["Flow-CPS"] == [
        "0.500", "**0.600** [0.550, 0.650]", "2 of 2", "1,200", "500", "1.0", "",
    ]  # fmt: skip
    assert "torch 9.9 on 2 CPU cores, at commit cccccccccccc, dddddddddddd+.\n" in text


def test_the_best_row_of_the_table_is_the_first(rows):
    best = row(ENTRIES[2], 0, 0.5, 0.9)
    text = blocks([*rows, best])["results"]
    assert [text.index(f"[{ENTRIES[i].title}]") for i in (2, 0, 1)] == sorted(
        text.index(f"[{ENTRIES[i].title}]") for i in range(3)
    )


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


def test_what_is_written_by_hand_stays():
    assert fill("a\n<!-- x -->\nold\n<!-- end -->\nb\n", {"x": "new"}) == "a\n<!-- x -->\n\nnew\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="must have a block between <!-- y --> and <!-- end -->"):
        fill("<!-- x -->\n<!-- end -->", {"y": ""})


def test_files_that_are_not_up_to_date_are_found(rows, tmp_path):
    (tmp_path / "leaderboard.md").write_text("<!-- results -->\n<!-- end -->\n")
    leaderboard.write(rows, tmp_path)
    assert leaderboard.stale(tmp_path) == []
    assert read_rows(tmp_path / "leaderboard.jsonl") == sorted(rows, key=lambda r: (r["name"] != "flowgrpo", r["seed"]))
    with (tmp_path / "leaderboard.jsonl").open("a") as file:
        file.write(json.dumps(row(ENTRIES[1], 2, 0.5, 0.9)) + "\n")
    assert leaderboard.stale(tmp_path) == ["leaderboard.svg", "flowgrpo.svg", "flow-cps.svg", "leaderboard.md"]


def test_pictures_have_every_algorithm(rows, tmp_path):
    draw(rows, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.svg")) == ["flow-cps.svg", "flowgrpo.svg", "leaderboard.svg"]
    words = " ".join(ElementTree.parse(tmp_path / "leaderboard.svg").getroot().itertext())
    assert words.index("1. FlowGRPO: 0.700 [0.600, 0.800]") < words.index("2. Flow-CPS: 0.600 [0.550, 0.650]")
    first = (tmp_path / "leaderboard.svg").read_bytes()
    draw(rows, tmp_path)
    assert (tmp_path / "leaderboard.svg").read_bytes() == first


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_run_has_the_settings_of_its_recipe(entry):
    job = Job(entry, 1, trial=False)
    script, *flags = leaderboard.train_command(job, SERVER)
    args = read_settings(trainer(entry).Args, flags, recipes(Path(script).stem), "")
    assert {name for name, value in job.settings().items() if getattr(args, name) != value} == set()
    assert (args.name, args.seed, args.shard) == (f"leaderboard/{entry.name}-1", 1, "none")
    assert (REPO / args.eval_prompts).is_file()
    asked = args.watch_scorer_url if entry is SRPO else args.scorer_url
    assert (asked, args.scorer_token_file) == (SERVER.url, "token")


def write_run(job, steps, **metrics):
    """A finished run: a line a step, evaluated first and last."""
    job.folder.mkdir(parents=True)
    (job.folder / "config.toml").write_text(to_toml(settings_of(job.entry)))
    (job.folder / "versions.jsonl").write_text(json.dumps({"packages": {"torch": "9.9"}, "commit": "abc"}) + "\n")
    with (job.folder / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            line = {"step": step, "time/step_s": 7.0}
            if step:
                line |= {"perf/forwards": 100.0, "perf/peak_memory_mb": 500 + step} | metrics
            if step in (0, steps):
                line |= {"eval/reward": 0.5 + step / 1000, "time/eval_s": 4.0}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of its own."""
    monkeypatch.setattr(leaderboard, "ROOT", tmp_path)
    return tmp_path


def test_a_row_is_what_its_run_has_logged(root):
    job = Job(ENTRIES[0], 1, trial=False)
    assert not job.is_finished()
    write_run(job, 60, **{"policy/first_ratio_max_dev": 0.0})
    assert job.is_finished()
    made = leaderboard.collect(job)
    assert made["evaluations"] == [
        {"step": 0, "score": 0.5, "images": 0, "forwards": 0},
        {"step": 60, "score": 0.56, "images": 3840, "forwards": 6000},
    ]
    assert (made["images"], made["forwards"], made["peak_memory_mb"], made["wall_s"]) == (3840, 6000, 560.0, 416.0)
    assert (made["ratio_deviation"], made["torch"], made["commit"]) == (0.0, "9.9", "abc")
    text = (job.folder / "config.toml").read_text()
    (job.folder / "config.toml").write_text(text.replace("lr = 8e-05", "lr = 0.5"))
    with pytest.raises(ValueError, match="holds a run with other settings, lr: move it away"):
        leaderboard.collect(job)


def test_a_preference_file_is_part_of_what_offline_dpo_costs(root):
    job = Job(OFFLINE, 1, trial=False)
    write_run(job, 60)
    job.pairs.mkdir()
    (job.pairs / "made.json").write_text('{"images": 3840, "forwards": 38400, "seconds": 100.0}')
    made = leaderboard.collect(job)
    assert [(e["images"], e["forwards"]) for e in made["evaluations"]] == [(3840, 38400), (3840, 44400)]
    assert (made["images"], made["wall_s"], made["ratio_deviation"]) == (3840, 516.0, None)


def test_what_the_watching_scorer_says_is_the_score_of_srpo(root):
    job = Job(SRPO, 1, trial=False)
    write_run(job, 120)
    lines = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    watched = [line | {"eval/watch": 0.25} if "eval/reward" in line else line for line in lines]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in watched))
    assert [e["score"] for e in leaderboard.collect(job)["evaluations"]] == [0.25, 0.25]


def test_a_program_that_fails_is_named_with_its_log(root):
    job = Job(ENTRIES[0], 1, trial=True)
    with pytest.raises(RuntimeError, match=r"-c ended with exit code 3, see .*/leaderboard-try/flowgrpo-1.txt"):
        leaderboard.run(job, ["-c", "print('why'); raise SystemExit(3)"], set())
    assert (root / "runs" / "leaderboard-try" / "flowgrpo-1.txt").read_text() == "why\n"


def test_what_runs_is_ended_when_the_script_is(root, monkeypatch):
    """As by an interrupt, which comes while the main thread waits for the runs."""
    started = threading.Event()

    def sleep(job, server, running):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        running.add(process)
        started.set()
        process.wait()

    def interrupt(futures):
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(leaderboard, "make", sleep)
    monkeypatch.setattr(leaderboard, "as_completed", interrupt)
    monkeypatch.setattr(leaderboard.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        leaderboard.measure([Job(ENTRIES[0], 1, trial=True), Job(ENTRIES[1], 1, trial=True)], 1)
