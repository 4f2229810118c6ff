"""Metrics reach every tracker with their steps, offline."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO
from omni_rl.run import sinks
from omni_train.log import RunLog

EXTRAS = ("tensorboard", "wandb", "trackio", "swanlab", "mlflow")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What the libraries stored, in an environment of its own: trackio and the pillow of the tests do not fit."""
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


def test_swanlab_stores_every_number_without_a_network(stored):
    found = dict(stored["swanlab"])
    assert list(found) == [0, 1, 5]
    assert found[0]["eval/reward"] == 0.5
    assert found[0]["eval/pictures"] == 1
    assert found[1]["loss"] == 0.25
    assert found[5]["loss"] == -1.5


def test_mlflow_stores_every_number_in_one_run_of_a_database(stored):
    found = stored["mlflow"]
    assert found["eval/reward"] == [[0, 0.5]]
    assert found["loss"] == [[1, 0.25], [5, -1.5]]
    assert math.isnan(found["bad"][0][1])
    assert found["bad"][1] == [5, sys.float_info.max]
    assert (found["params"], found["status"], found["sheets"]) == ({"lr": "0.5"}, "FINISHED", ["000000.png"])


def test_a_sink_is_closed_with_the_log_and_a_plain_function_need_not_be(tmp_path):
    seen = []
    closable = sinks.Sink(lambda step, metrics: seen.append(step), lambda: seen.append("closed"))
    with RunLog(tmp_path, is_main=True, total_steps=1, sinks=[lambda *_: None, closable]) as log:
        log.log(1, {"loss": 0.5})
    assert seen == [1, "closed"]


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_missing_library_is_refused_with_the_words_that_install_it(kind, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ValueError, match=rf"--tracking\.to must be .*, got '{kind}': pip install 'omni-rl\[{kind}\]'"):
        sinks.tracker(kind, tmp_path, "project")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["wand", "none,wandb", "wandb,wandb", ""])
def test_trackers_are_named_once_each(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "find_spec", lambda name: True)
    with pytest.raises(ValueError, match=r"--tracking\.to must be none, or of tensorboard, wandb, .*, each once"):
        sinks.check_tracker(kind, "project")


@pytest.mark.parametrize("project", ["", "a\nb"])
def test_a_project_needs_a_name_that_can_be_printed(project, monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "find_spec", lambda name: True)
    with pytest.raises(ValueError, match=r"--tracking\.project must be a printable name with wandb, got"):
        sinks.tracker("wandb", tmp_path, project)
    assert sinks.tracker("none", tmp_path, project) == []
