"""What a report shows: curves that keep their extremes, pictures within a budget, alarms; its JSON has no way out."""

import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omni_rl.report import write_eval, write_report, write_samples, write_versions
from omni_rl.report.__main__ import main
from omni_rl.report.data import curve, phases, run_data, shown_names
from omni_rl.report.page import embed
from rl.report_runs import images, metrics, samples, write_metrics, write_run


def named(values, name="m"):
    return [{"step": float(i), name: value} for i, value in enumerate(values)]


def test_a_short_curve_is_as_logged_without_what_is_not_finite():
    steps = [*named([1.0, math.nan, 0.123456789, math.inf]), {"step": 9.0}]
    assert curve(steps, "m") == {"x": [0.0, 2.0], "y": [1.0, 0.12346]}
    assert curve(steps, "absent") == {"x": [], "y": []}


def test_a_held_out_score_has_a_band_of_its_standard_error_and_a_long_curve_that_of_its_range():
    steps = [{"step": float(i), "eval/reward": 0.5, "eval/reward_stderr": 0.1 * i} for i in range(3)]
    steps += [{"step": 3.0, "eval/reward": 0.25}, {"step": 4.0, "reward/mean": 0.1}]  # of one prompt with a score
    bounds = {"low": [0.5, 0.4, 0.3, 0.25], "high": [0.5, 0.6, 0.7, 0.25], "error": [0.0, 0.1, 0.2, 0.0]}
    assert curve(steps, "eval/reward") == {"x": [0, 1, 2, 3], "y": [0.5, 0.5, 0.5, 0.25]} | bounds
    assert set(curve(steps, "reward/mean")) == {"x", "y"}
    assert "error" not in curve(steps, "eval/reward", limit=2)
    assert shown_names(steps) == ["eval/reward", "reward/mean"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=11, max_size=300))
def test_a_long_curve_keeps_order_extremes_and_range(values):
    points = curve(named(values), "m", limit=10)
    assert len(points["x"]) <= 10
    assert points["x"] == sorted(set(points["x"]))
    assert points["x"][0] >= 0
    assert points["x"][-1] <= len(values) - 1
    assert all(low <= y <= high for low, y, high in zip(points["low"], points["y"], points["high"], strict=True))
    assert min(points["low"]) == pytest.approx(min(values), rel=1e-4)
    assert max(points["high"]) == pytest.approx(max(values), rel=1e-4)


def test_the_phases_of_a_stretch_add_up_to_its_mean_step():
    steps = [{"step": float(i), "time/a_s": 1.0, "time/b_s": 0.5, "time/step_s": 2.0} for i in range(10)]
    steps[9] |= {"time/eval_s": 4.0, "time/step_s": 6.0, "time/a_ms_per_sample": 3.0}
    shown = phases(steps, limit=2)
    assert (shown["from"], shown["to"]) == ([0, 5], [4, 9])
    assert list(shown["seconds"]) == ["a", "b", "eval", "rest"]
    assert shown["seconds"]["eval"] == [0.0, 0.8]
    assert shown["seconds"]["rest"] == [0.5, 0.5]
    assert [sum(s[i] for s in shown["seconds"].values()) for i in (0, 1)] == pytest.approx([2.0, 2.8])
    assert phases([])["from"] == []


def test_the_metrics_raise_alarms_once_however_often_they_are_wrong(tmp_path):
    steps = [*metrics(6), {"step": 7, "policy/clip_fraction": None}, {"step": 8, "policy/clip_fraction": None}]
    steps[3]["policy/skipped_updates"] = 2.0
    write_metrics(tmp_path / "run", steps)
    skipped, broken = run_data(tmp_path / "run")["alarms"]
    assert skipped["title"] == "Updates were skipped"
    assert skipped["numbers"] == {"policy/skipped_updates": 2.0, "steps": 1, "since": 3}
    assert (broken["title"], broken["step"]) == ("policy/clip_fraction is not finite", 8)
    assert (broken["numbers"]["steps"], broken["numbers"]["since"]) == (2, 7)
    write_metrics(tmp_path / "healthy", metrics(20))
    assert run_data(tmp_path / "healthy")["alarms"] == []


def test_pictures_of_the_same_prompt_and_seed_stand_in_one_place(tmp_path):
    folder = write_run(tmp_path / "run")
    first, *rest = samples([0.5, 0.6, 0.7])
    write_eval(folder, 8, images(3), [*rest, first])  # another order, as another number of ranks would deal them
    data = run_data(folder)
    assert [prompt["text"] for prompt in data["prompts"]] == ["a red sign", "a green sign", "a blue sign"]
    assert [e["step"] for e in data["evals"]] == [0, 4, 8, 12]
    assert [picture["reward"] for picture in data["evals"][2]["pictures"]] == [0.5, 0.6, 0.7]
    write_eval(folder, 8, images(1), [first])
    assert [p and p["reward"] for p in run_data(folder)["evals"][2]["pictures"]] == [0.5, None, None]


def test_what_a_resumed_run_has_yet_to_reach_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    write_metrics(folder, metrics(8))
    data = run_data(folder)
    assert [e["step"] for e in data["evals"]] == [0, 4, 8]
    assert data["groups"] == []


def test_the_latest_groups_come_first(tmp_path):
    folder = write_run(tmp_path / "run")
    for step in (10, 11):
        write_samples(folder, step, images(4), samples([0.1, 0.2, 0.3, float("nan")], group_size=2))
    shown = run_data(folder)["groups"]
    assert [group["step"] for group in shown] == [12, 12, 11, 11, 10, 10]
    assert shown[0]["rewards"] == [0.1, 0.9, 0.5, 0.4]
    assert shown[3]["rewards"] == [0.3, None]


def test_pictures_stay_within_their_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("omni_rl.report.data.EVAL_BYTES", 400_000)
    monkeypatch.setattr("omni_rl.report.data.SAMPLE_BYTES", 100_000)
    write_metrics(tmp_path / "run", metrics(80))
    for step in range(0, 81, 4):
        write_eval(tmp_path / "run", step, images(16, seed=step), samples([0.5] * 16))
    monkeypatch.setattr("omni_rl.report.folder.MAX_GROUPS", 20)
    write_samples(tmp_path / "run", 80, images(40), samples([0.0, 1.0] * 20, group_size=2))
    data = run_data(tmp_path / "run")
    size = sum(len(picture["src"]) for e in data["evals"] for picture in e["pictures"])
    assert 300_000 < size <= 420_000
    steps = [e["step"] for e in data["evals"]]
    assert (steps[0], steps[-1]) == (0, 80)
    assert len(steps) >= 8
    assert max(np.diff(steps)) <= 2 * min(np.diff(steps))
    assert sum(len(picture["src"]) for group in data["groups"] for picture in group["shown"]) <= 105_000


def test_a_row_cannot_show_a_file_from_elsewhere(tmp_path):
    folder = write_run(tmp_path / "run")
    (tmp_path / "secret.png").write_bytes(b"secret")
    rows = folder / "eval" / "000012" / "rows.json"
    rows.write_text(rows.read_text().replace("0000.png", "../../../secret.png"))
    with pytest.raises(FileNotFoundError):
        write_report(folder)


NAMES = ("metrics.jsonl", "versions.jsonl", "config.toml", "eval/000012/rows.json", "eval/000012/0000.png")
KINDS = [("pipe", NAMES[3]), ("device", NAMES[0]), *(("huge", name) for name in NAMES)]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_what_is_no_file_of_a_fair_size_is_named_and_not_read(tmp_path, kind, name):
    folder = write_run(tmp_path / "run")
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    if kind == "huge" and path.suffix == ".png":
        assert len(json.dumps(run_data(folder))) < 2**20  # it is beyond the page's bytes
        return
    with pytest.raises(ValueError, match=rf"{name} must (be a regular file|have at most)|holds no metrics.jsonl"):
        run_data(folder)


DAMAGED = [  # a file that only the report needs, what a power cut or a hand left in it, what is said
    ("eval/000012/rows.json", b"", "not valid JSON"),
    ("eval/000012/rows.json", b"\0" * 64, "not valid JSON"),
    ("eval/000012/rows.json", b"[" * 100_000, "not valid JSON"),
    ("eval/000012/rows.json", b"{}", "must be a list, got dict"),
    ("eval/000012/rows.json", b"[1]", "entry 1: must be an object, got int"),
    ("eval/000012/rows.json", b'[{"prompt": 5}]', "entry 1: prompt is 5"),
    ("samples/000012/groups.json", b"", "not valid JSON"),
    ("samples/000012/groups.json", b'[{"prompt": "a", "rewards": [], "shown": [7]}]', "must be an object, got int"),
    ("versions.jsonl", b'{"command": "a", "commit": ""}\nx\n', "line 2: not valid JSON"),
    ("versions.jsonl", b'{"commit": ""}\n', "line 1: command is None"),
    ("versions.jsonl", b"[]\n", "line 1: must be a JSON object, got list"),
    ("config.toml", b"\xff", "not valid TOML"),
    ("eval/000012/rows.json", b'[{"prompt": "a", "references": 3}]', "entry 1: "),
    ("eval/000012/rows.json", b'[{"prompt": "a", "references": [{"file": "a.exe", "size": [1, 1]}]}]', "entry 1: "),
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGED)
def test_a_damaged_file_is_named(tmp_path, file, content, message):
    folder = write_run(tmp_path / "run")
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(file)) as error:
        run_data(folder)
    assert message in str(error.value)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_data_comes_back_from_the_page_and_cannot_leave_its_element(data):
    text = embed(data)
    assert json.loads(text) == data
    assert not set(text) & set("<>&")
    assert json.loads(embed({"a": [math.nan, math.inf, -math.inf]})) == {"a": ["nan", "inf", "-inf"]}


def test_the_page_asks_for_nothing(tmp_path):
    folder = write_run(tmp_path / "run")
    write_versions(folder, argv=["{{script}} {{data}}"])
    html = write_report(folder).read_text()
    assert html.count("{{script}} {{data}}") == 1  # placeholders in data stay as they are
    assert set(re.findall(r"https?://[^\s\"'`)]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|script|img|iframe)[^>]*\b(src|href)=(?!\"data:)", html)
    assert "default-src 'none'" in html


def test_the_command_writes_one_report_or_a_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    main(["runs/a"])
    main(["runs/a", "runs/b"])
    main(["runs/a", "runs/b", "--out", "both.html"])
    assert capsys.readouterr().out.split() == ["runs/a/report.html", "runs/comparison.html", "both.html"]
    assert "<title>a and b</title>" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/none"], "runs/none holds no metrics.jsonl"),
        (["runs/a", "runs/a"], "folders must be two or more of different names, got ['a', 'a']"),
        (["runs/a", "--out", "x.html"], "--out needs several runs"),
        (["runs/torn"], "config.toml: not valid TOML"),
    ],
)
def test_the_command_refuses_with_one_message(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    write_metrics(tmp_path / "runs" / "torn", metrics(1))
    (tmp_path / "runs" / "torn" / "config.toml").write_text("a = ")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def edits(count: int, height: int = 16) -> list:
    """Samples of one prompt each, made from a picture of their own."""
    pictures = images(count, height, 96, seed=9)
    return [replace(sample, references=(pictures[i],)) for i, sample in enumerate(samples([0.5] * count))]


def test_a_reference_stands_once_beside_the_pictures_of_all_evaluations(tmp_path):
    write_metrics(tmp_path, metrics(8))
    for step in (0, 4, 8):
        write_eval(tmp_path, step, images(2, seed=step), edits(2))
    write_samples(tmp_path, 8, images(2), edits(2))
    found = run_data(tmp_path)
    [one], [two] = (prompt["references"] for prompt in found["prompts"])
    assert one["size"] == two["size"] == [96, 16]
    assert one["src"].startswith("data:image/png;base64,")
    assert embed(found["prompts"]).count(one["src"]) == 1
    assert [group["references"] for group in found["groups"]] == [[one], [two]]


def test_integers_beyond_a_computers_words_are_named(tmp_path):
    folder, huge = write_run(tmp_path / "run"), 10**400
    (folder / "config.toml").write_text(f"train_steps = {huge}\n")
    assert run_data(folder)["total"] is None
    rows = folder / "eval" / "000012" / "rows.json"
    rows.write_text(re.sub(r'"reward": [^,]*', f'"reward": {huge}', rows.read_text()))
    with pytest.raises(ValueError, match=r"rows\.json: not valid JSON \(integers must fit into 64 bits, got 1000"):
        run_data(folder)
