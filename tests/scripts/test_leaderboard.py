"""The leaderboard: its page is what its data give, has all algorithms, and compares nothing that cannot be compared."""

import importlib
import json
import re
import time
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import leaderboard
import leaderboard_page
import leaderboard_runs
import pytest
from helpers import REPO
from leaderboard import ENTRIES
from leaderboard_page import page
from leaderboard_plots import Axes, beside, nice_step, plots
from leaderboard_rows import Entry, Evaluation, Row, add_row, grouped, read_rows
from leaderboard_runs import OURS, Job, Scorer, carry_out, changed, collect, images_of, is_finished, next_command
from omni_rl.cli import parse_cli, to_toml

import train_flowgrpo
import train_nft

WINDOWS_OF_MIXGRPO = {"mixgrpo-decay", "mixgrpo-exp-decay"}
A, B = Entry("a", "Algo A", "train_a", "small", "a.md"), Entry("b", "Algo B", "train_b", "small", "b.md", offline=True)
SERVER = Scorer("http://127.0.0.1:9", Path("token"))


def row(entry, seed, before, after, *, images=100, forwards=1200, **others):
    """A made-up row: half of images and forwards are spent when it is evaluated between."""
    evaluations = [
        Evaluation(0, before, 0, 0),
        Evaluation(5, (before + after) / 2, images // 2, forwards // 2),
        Evaluation(10, after, images, forwards),
    ]
    rest = {"peak_memory_mb": 500.0, "wall_s": 60.0, "ratio_deviation": None, "torch": "9.9", "commit": "c" * 40}
    return Row(entry.name, seed, {}, evaluations, images, forwards, **(rest | {"cores": 2} | others))


@pytest.fixture
def rows(monkeypatch):
    """Two algorithms that rise: 0.5 to 0.6, 0.7, 0.8, and 0.5 to 0.55 and 0.65; there are no words about others."""
    monkeypatch.setattr(leaderboard_page, "WORDS", {})
    return [
        row(A, 1, 0.5, 0.7, forwards=1300, peak_memory_mb=1500.4, wall_s=90.0, ratio_deviation=0.0),
        row(A, 0, 0.5, 0.6, ratio_deviation=1.5e-7),
        row(A, 2, 0.5, 0.8, forwards=1400, ratio_deviation=0.0),
        row(B, 0, 0.5, 0.55, commit="d" * 40 + "+"),
        row(B, 1, 0.5, 0.65),
    ]


# The page and what it rests on


def test_page_and_pictures_are_what_the_data_give():
    assert leaderboard.stale() == []
    pictures = REPO / "docs" / "images" / "algorithms"
    assert {path.stem for path in pictures.glob("*.svg")} == {r.name for r in read_rows(leaderboard.DATA)}


def test_rows_were_measured_with_the_presets_as_they_are():
    presets = {entry.name: changed(leaderboard.preset(entry)) for entry in ENTRIES}
    assert [r.name for r in read_rows(leaderboard.DATA) if r.settings != presets[r.name]] == []


@pytest.mark.parametrize("trainer", [train_flowgrpo, train_nft], ids=lambda trainer: trainer.__name__)
def test_every_algorithm_is_in_the_table(trainer):
    algos = {leaderboard.preset(entry).algo for entry in ENTRIES if entry.app == trainer.__name__}
    assert algos == set(trainer.ALGOS) - WINDOWS_OF_MIXGRPO


def test_every_trainer_is_in_the_table_and_all_presets_draw_equally_many_images():
    assert {entry.app for entry in ENTRIES} == {path.stem for path in (REPO / "apps").glob("train_*.py")}
    jobs = leaderboard.plan(ENTRIES, [0, 1], trial=False)
    assert len({job.name for job in jobs}) == 2 * len(ENTRIES)
    assert {images_of(job.settings) for job in jobs if not job.entry.offline} == {job.images for job in jobs}


def test_the_table_has_the_numbers_of_the_data(rows):
    text = page([A, B], rows)
    cells = {line.split("](")[0]: [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()}
    assert cells["| [Algo A"] == [
        "0.500", "**0.700** [0.600, 0.800]", "3 of 3", "100", "1,300", "13.0", "1,500", "1.0", "1.5e-07",
    ]  # fmt: skip
    assert cells["| [Algo B"] == [
        "0.500",
        "**0.600** [0.550, 0.650]",
        "2 of 2",
        "100",
        "1,200",
        "12.0",
        "500",
        "1.0",
        "",
    ]
    assert "Not measured yet: b (seed 2).\n" in text
    assert "torch 9.9, at commit cccccccccccc, dddddddddddd+ (+: with changes)." in text


def test_a_row_that_does_not_rise_in_every_seed_needs_words(rows, monkeypatch):
    rows[4] = row(B, 1, 0.5, 0.5)
    with pytest.raises(ValueError, match="b does not rise in every seed"):
        page([A, B], rows)
    monkeypatch.setitem(leaderboard_page.WORDS, "b", "Too few pairs.")
    text = page([A, B], rows)
    assert "| 1 of 2 |" in text
    assert "## Algo B: why it does not rise in every seed\n\nToo few pairs.\n" in text
    rows[4] = row(B, 1, 0.5, 0.51)
    with pytest.raises(ValueError, match="do not rise that do, or are not there: b"):
        page([A, B], rows)


def test_what_cannot_be_compared_is_refused(rows):
    with pytest.raises(ValueError, match=r"same number of generated images, got .*b, seed 1: 99"):
        page([A, B], [*rows[:4], row(B, 1, 0.5, 0.6, images=99)])
    with pytest.raises(ValueError, match=r"once each, got \[\('b', 1\)\]"):
        page([A, B], [*rows, rows[4]])
    with pytest.raises(ValueError, match=r"in the table, .* got \[\('b', 0\), \('b', 1\)\]"):
        page([A], rows)
    other = [Evaluation(0, 0.5, 0, 0), Evaluation(10, 0.6, 100, 1200)]
    with pytest.raises(ValueError, match="b: all seeds must have been evaluated after the same steps"):
        page([A, B], [*rows[:4], replace(rows[4], evaluations=other)])


def test_rows_survive_the_file_and_take_the_place_of_earlier_ones(rows, tmp_path):
    path = tmp_path / "leaderboard.jsonl"
    assert read_rows(path) == []
    for one in rows:
        add_row(path, one, [A, B])
    assert read_rows(path) == sorted(rows, key=lambda r: (r.name, r.seed))
    better = row(A, 1, 0.5, 0.9)
    add_row(path, better, [A, B])
    assert read_rows(path)[1] == better
    assert len(read_rows(path)) == len(rows)


def test_a_page_that_is_not_up_to_date_is_found(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "DOCS", tmp_path)
    monkeypatch.setattr(leaderboard, "DATA", tmp_path / "leaderboard.jsonl")
    monkeypatch.setattr(leaderboard, "ENTRIES", (A, B))
    assert leaderboard.main(["--page-only"]) == leaderboard.main(["--check"]) == 0
    assert "Not measured yet: anything." in (tmp_path / "leaderboard.md").read_text()
    add_row(tmp_path / "leaderboard.jsonl", rows[0], [A, B])
    assert leaderboard.main(["--check"]) == 1
    assert "not up to date: leaderboard.md, leaderboard.svg, a.svg:" in capsys.readouterr().err
    assert leaderboard.main(["--page-only"]) == leaderboard.main(["--check"]) == 0


# The pictures


def test_pictures_have_every_algorithm_and_every_seed(rows):
    pictures = plots([A, B], rows)
    assert set(pictures) == {"leaderboard.svg", "algorithms/a.svg", "algorithms/b.svg"}
    trees = {name: ElementTree.fromstring(picture) for name, picture in pictures.items()}
    lines = {name: [e.get("points") for e in tree.iter() if e.tag.endswith("polyline")] for name, tree in trees.items()}
    assert {name: len(found) for name, found in lines.items()} == {
        "leaderboard.svg": 2, "algorithms/a.svg": 4, "algorithms/b.svg": 3,
    }  # fmt: skip
    words = "".join(trees["leaderboard.svg"].itertext())
    assert re.search(r"1\. Algo A.*0\.700 \[0\.600, 0\.800\].*2\. Algo B.*0\.600 \[0\.550, 0\.650\]", words, re.DOTALL)
    ends = [[float(number) for number in line.split()[-1].split(",")] for line in lines["leaderboard.svg"]]
    assert ends[0][0] > ends[1][0]  # 1300 forwards in the mean, and 1200
    assert ends[0][1] < ends[1][1]  # a higher score stands higher


def test_an_average_is_over_seeds(rows):
    group = grouped([A, B], rows)[0]
    forwards, scores = zip(*group.average("forwards"), strict=True)
    assert forwards == pytest.approx((0, 650, 1300))
    assert scores == pytest.approx((0.5, 0.6, 0.7))
    assert [images for images, _ in group.average("images")] == [0, 50, 100]


def test_axes_reach_from_edge_to_edge():
    axes = Axes(10, 20, 110, 220, 50.0, (0.4, 0.6))
    assert (axes.x(0), axes.x(25), axes.x(50)) == (10, 60, 110)
    assert (axes.y(0.4), axes.y(0.5), axes.y(0.6)) == (220, 120, 20)


@pytest.mark.parametrize("largest", [1, 3, 7.5, 29, 5120, 104_000, 2e6])
def test_steps_are_round_and_neither_too_many_nor_too_few(largest):
    step = nice_step(largest)
    assert 3 <= largest / step <= 7.5
    assert f"{step:e}"[:8] in ("1.000000", "2.000000", "5.000000")


def test_labels_do_not_cover_each_other():
    taken = []
    heights = [beside(taken, 100, y) for y in (50, 50, 52, 70)]
    assert all(low - high >= 11 for high, low in pairwise(heights))
    assert beside(taken, 130, 50) == 50  # far enough to the right


# The runs


@pytest.fixture
def job(tmp_path, monkeypatch):
    """`job(name)`: the run of that algorithm, in a folder of its own."""
    monkeypatch.setattr(leaderboard_runs, "ROOT", tmp_path)

    def make(name, **settings):
        (entry,) = [entry for entry in ENTRIES if entry.name == name]
        return Job(entry, 1, replace(leaderboard.preset(entry), **settings), 5120, "board")

    return make


def write_run(job, steps, **metrics):
    """A finished run: a line a step, evaluated first and last."""
    job.folder.mkdir(parents=True)
    job.logs.mkdir(exist_ok=True)
    (job.folder / "config.toml").write_text(to_toml(replace(job.settings, name=job.name, seed=1, shard="none")))
    (job.folder / "versions.jsonl").write_text(json.dumps({"packages": {"torch": "9.9"}}) + "\n")
    (job.logs / f"{job.label}.commit").write_text("abc")
    with (job.folder / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            line = {"step": step, "time/step_s": 7.0}
            if step:
                line |= {"perf/forwards": 100 + step, "perf/peak_memory_mb": 500 + step} | metrics
            if step in (0, steps):
                line |= {"eval/reward": 0.5 + step / 10, "eval/watch": 0.4 + step / 10, "time/eval_s": 4.0}
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_run_has_the_settings_of_its_preset(entry, job):
    one = job(entry.name)
    if entry.offline:
        assert next_command(one, SERVER)[0] == "scripts/build_preferences.py"
        one.pairs.mkdir(parents=True)
        (one.pairs / "made.json").write_text("{}")
        (one.pairs / "pairs.jsonl").write_text("")
    script, *flags = next_command(one, SERVER)
    trainer = importlib.import_module(Path(script).stem)
    args = parse_cli(trainer.Args, trainer.PRESETS, trainer.check_args, flags)
    differing = {name for name, value in asdict(args).items() if value != getattr(one.settings, name)}
    assert differing <= OURS
    assert (args.name, args.seed, args.shard) == (f"board/{entry.name}-1", 1, "none")
    assert args.eval_prompts.endswith("data/tiny-signs/test.txt")


def test_preference_files_have_as_many_images(job):
    for images in (5120, 10240, 20480, 2560):
        one = replace(job("dpo-offline"), images=images)
        flags = leaderboard_runs.pair_flags(one)
        assert flags["--num-prompts"] * flags["--group-size"] == images
        assert flags["--num-prompts"] <= 2048
    with pytest.raises(ValueError, match="no preference file of 20483 images"):
        leaderboard_runs.pair_flags(replace(one, images=20483))


def test_a_row_is_what_its_run_has_logged(job):
    one = job("flowgrpo", steps=3, prompts_per_step=2, group_size=4)
    metrics = {"policy/first_ratio_max_dev": 0.0}
    write_run(one, 3, **metrics)
    assert is_finished(one)
    made = collect(one)
    assert made.evaluations == [Evaluation(0, 0.5, 0, 0), Evaluation(3, 0.8, 24, 306)]
    assert (made.images, made.forwards, made.peak_memory_mb, made.wall_s) == (24, 306, 503.0, 17.0)
    assert (made.ratio_deviation, made.torch, made.commit) == (0.0, "9.9", "abc")
    assert made.settings["steps"] == 3
    assert "name" not in made.settings


def test_the_watching_scorer_judges_srpo_and_a_preference_file_is_part_of_what_offline_dpo_costs(job):
    srpo = job("srpo", steps=2)
    write_run(srpo, 2)
    assert [e.score for e in collect(srpo).evaluations] == pytest.approx([0.4, 0.6])
    offline = job("dpo-offline", steps=2)
    write_run(offline, 2)
    offline.pairs.mkdir()
    (offline.pairs / "made.json").write_text('{"images": 5120, "forwards": 51200, "seconds": 100.0}')
    made = collect(offline)
    assert [(e.images, e.forwards) for e in made.evaluations] == [(5120, 51200), (5120, 51403)]
    assert (made.images, made.forwards, made.wall_s, made.ratio_deviation) == (5120, 51403, 110.0, None)


def test_the_ratio_of_awm_is_that_of_the_first_step(job):
    awm = job("awm", steps=2)
    write_run(awm, 2, **{"policy/ratio_max_dev": 1e-7})
    assert collect(awm).ratio_deviation == 1e-7


def test_a_run_with_other_settings_is_not_taken_for_finished(job):
    one = job("nft", steps=2)
    assert not is_finished(one)
    write_run(one, 2)
    assert is_finished(one)
    with pytest.raises(ValueError, match=r"holds a run with lr = .*, not 0.5: move it away"):
        is_finished(job("nft", steps=2, lr=0.5))
    with pytest.raises(ValueError, match="holds a run with steps = 2, not 3"):
        is_finished(job("nft", steps=3))


def test_a_run_that_did_not_count_forwards_is_refused(job):
    one = job("nft", steps=2)
    write_run(one, 2)
    text = (one.folder / "metrics.jsonl").read_text()
    (one.folder / "metrics.jsonl").write_text(text.replace('"perf/forwards"', '"perf/other"'))
    with pytest.raises(ValueError, match="must have perf/forwards"):
        collect(one)


PROGRAM = """
import pathlib, sys, time
folder, label = pathlib.Path(sys.argv[1]), sys.argv[2]
running = folder / f"{label}.running"
running.touch()
assert len(list(folder.glob("*.running"))) <= 2
time.sleep(0.1)
running.unlink()
assert label != "nft-1"
(folder / f"{label}.done").touch()
"""


def test_so_many_runs_at_a_time_and_one_that_fails_stops_no_other(job, tmp_path, monkeypatch):
    def next_step(job, server):
        return None if (tmp_path / f"{job.label}.done").exists() else ["-c", PROGRAM, str(tmp_path), job.label]

    monkeypatch.setattr(leaderboard_runs, "next_command", next_step)
    jobs = [job(name) for name in ("flowgrpo", "nft", "awm", "dpo")]
    ended = {done.label: problem for done, problem in carry_out(jobs, SERVER, at_a_time=2)}
    assert {label for label, problem in ended.items() if not problem} == {"flowgrpo-1", "awm-1", "dpo-1"}
    assert ended["nft-1"].startswith("exit code 1, see ")
    assert "AssertionError" in (jobs[1].logs / "nft-1.txt").read_text()


def test_what_runs_is_ended_with_the_script(job, tmp_path, monkeypatch):
    sleeps = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"

    def next_step(job, server):
        return ["-c", sleeps, str(tmp_path / "there")] if job.entry.name == "nft" else None

    monkeypatch.setattr(leaderboard_runs, "next_command", next_step)
    begun = []
    begin = leaderboard_runs.begin
    monkeypatch.setattr(leaderboard_runs, "begin", lambda *args: begun.append(begin(*args)) or begun[-1])
    with closing(carry_out([job("nft"), job("awm")], SERVER, at_a_time=2)) as runs:
        assert next(runs)[0].entry.name == "awm"
        while not (tmp_path / "there").exists():
            time.sleep(0.02)
    assert begun[0].process.returncode < 0
