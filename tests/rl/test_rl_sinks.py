"""Metrics reach every sink with their steps, offline; the report is written anew at a bounded cost."""

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from helpers import REPO
from omni_rl import sinks
from omni_train.log import RunLog
from rl.report_runs import write_run

EXTRAS = ("tensorboard", "wandb", "trackio")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What the three libraries stored, in an environment of its own: trackio and the pillow of the tests do not fit."""
    folder = tmp_path_factory.mktemp("sinks")
    uv = shutil.which("uv") or shutil.which("uv", path=REPO / ".tools" / "bin")
    assert uv, "uv must be on the PATH or in .tools/bin"
    env = os.environ | {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")}
    env |= {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_SILENT": "true"}
    env |= {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    command = [uv, "run", "--quiet", "--isolated", "--exact", "--no-dev", "--python", sys.executable]
    command += ["--package", "omni-rl", *(word for extra in EXTRAS for word in ("--extra", extra))]
    command += ["python", str(Path(__file__).with_name("sinks_alone.py")), str(folder)]
    result = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "stored.json").read_text())


def test_tensorboard_stores_every_number(stored):
    found = stored["tensorboard"]
    assert found["eval/reward"] == [[0, 0.5]]
    assert found["loss"] == [[1, 0.25], [5, -1.5]]
    assert [step for step, _ in found["time/step_s"]] == [0, 1, 5]
    assert math.isnan(found["bad"][0][1])
    assert found["bad"][1] == [5, math.inf]
    assert found["eval/pictures"] == [[0, [2 * 196 + 4, 84 + 4]]]


def test_wandb_stores_every_number_without_a_network(stored):
    found = dict(stored["wandb"])
    assert list(found) == [0, 1, 5]
    assert found[0]["eval/reward"] == 0.5
    assert any(name.startswith("eval/pictures") for name in found[0])
    assert set(found[1]) == {"loss", "bad", "time/step_s"}
    assert math.isnan(found[1]["bad"])
    assert (found[5]["loss"], found[5]["bad"]) == (-1.5, math.inf)


def test_trackio_stores_every_number_in_its_database(stored):
    found = dict(stored["trackio"])
    assert list(found) == [0, 1, 5]
    assert found[0]["eval/reward"] == 0.5
    assert "eval/pictures" in found[0]
    assert found[1] == {"loss": 0.25, "bad": "NaN", "time/step_s": found[1]["time/step_s"]}
    assert found[5]["loss"] == -1.5


def test_a_sink_is_closed_with_the_log_and_a_plain_function_need_not_be(tmp_path):
    seen = []
    closable = sinks.Sink(lambda step, metrics: seen.append(step), lambda: seen.append("closed"))
    with RunLog(tmp_path, is_main=True, total_steps=1, tty=False, sinks=[lambda *_: None, closable]) as log:
        log.log(1, {"loss": 0.5})
    assert seen == [1, "closed"]


def test_the_report_is_there_after_the_first_step_and_complete_after_the_last(tmp_path):
    with RunLog(tmp_path, is_main=True, total_steps=30, tty=False, sinks=[sinks.report(tmp_path)]) as log:
        log.log(0, {"loss": 0.5})
        assert (tmp_path / "report.html").is_file()
        for step in range(1, 31):
            log.log(step, {"loss": 1 / step})
    assert '"step":30,' in (tmp_path / "report.html").read_text()


def test_a_report_that_is_slow_to_write_is_written_less_often(tmp_path, monkeypatch):
    now, written = [0.0], []

    def write_report(folder):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr("omni_rl.report.write_report", write_report)
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    sink = sinks.report(tmp_path)
    for _ in range(100):
        sink(1, {})
        now[0] += 1.0
    assert written == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]  # one second of every twenty
    sink.close()
    assert len(written) == 7


DAMAGED = [  # a file that only the report needs, what a power cut or a hand left in it, what the message says
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
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGED)
def test_a_damaged_file_that_only_the_report_needs_is_named_once_and_stops_nothing(tmp_path, file, content, message):
    folder = write_run(tmp_path / "run")
    (folder / file).write_bytes(content)
    with (
        warnings.catch_warnings(record=True) as told,
        RunLog(folder, is_main=True, total_steps=14, tty=False, sinks=[sinks.report(folder)]) as log,
    ):
        warnings.simplefilter("always")
        log.log(13, {"reward/mean": 0.5})
        log.log(14, {"reward/mean": 0.5})
    (warning,) = told
    assert f"{file}" in str(warning.message)
    assert message in str(warning.message)


def test_an_error_of_the_run_is_not_replaced_by_one_of_its_report(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "config.toml").write_bytes(b"\xff")
    log = RunLog(folder, is_main=True, total_steps=14, tty=False, sinks=[sinks.report(folder)])
    with pytest.warns(UserWarning, match=r"config\.toml"), pytest.raises(RuntimeError, match="of the run"), log:
        raise RuntimeError("of the run")


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def full(folder):
        raise OSError("no space left on device")

    monkeypatch.setattr("omni_rl.report.write_report", full)
    sink = sinks.report(tmp_path)
    with pytest.warns(UserWarning, match="could not be written: no space left on device"):
        sink(1, {})


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_refused_with_the_words_that_install_it(kind, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ValueError, match=rf"track must be .*, got '{kind}': pip install 'omni-rl\[{kind}\]'"):
        sinks.tracker(kind, tmp_path, "project")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("project", ["", "a\nb"])
def test_a_project_needs_a_name_that_can_be_printed(project, monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "find_spec", lambda name: True)
    with pytest.raises(ValueError, match="project must be a printable name with wandb, got"):
        sinks.tracker("wandb", tmp_path, project)
    assert sinks.tracker("none", tmp_path, project) == []
