"""docs/contributing.md adds a model: taken literally, on a copy, its changes apply, keep the rules, draw and train."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from apps.test_app_add_algorithm import PAGE, TINY
from arch.test_arch_sizes import docstring_faults
from helpers import REPO

SECTION = PAGE.partition("\n## Add a model\n")[2].partition("\n## ")[0]
DIFFS = re.findall(r"^```diff\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
CHANGED = [re.search(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)[1] for diff in DIFFS]
((FILE, CODE),) = re.findall(r"`(packages/\S+\.py)`:\n\n```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
PYTEST, BUILD, TRAIN = (shlex.split(line) for line in re.findall(r"^`python (.*)`$", SECTION, re.MULTILINE))
COPIED = ("apps", "packages", "scripts", "tests")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree that has the model."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(REPO / "pyproject.toml", folder)
    for name in ("data", "checkpoints"):
        (folder / name).symlink_to(REPO / name)
    (folder / FILE).write_text(CODE, "utf-8")
    for path, diff in zip(CHANGED, DIFFS, strict=True):
        result = subprocess.run(
            ["git", "apply", "--verbose", "-"], cwd=folder, input=diff, capture_output=True, text=True,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )  # fmt: skip
        advice = f"the block of docs/contributing.md for {path} does not apply: bring its lines up to those of {path}"
        assert result.returncode == 0, f"{advice}\n{result.stderr}"
    return folder


def python(folder, *words):
    """Runs Python in the copy, whose omni_rollout stands before the installed one; what it printed."""
    env = os.environ | {"PYTHONPATH": str(folder / "packages" / "omni-rollout" / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_model_is_a_file_of_at_most_90_lines_a_row_a_builder_and_a_row_of_the_tests(copy):
    assert len(CODE.splitlines()) <= 90
    assert FILE.startswith("packages/omni-rollout/src/omni_rollout/models/")
    assert [path.rpartition("/")[2] for path in CHANGED] == ["__init__.py", "build_tiny_models.py", "model_rows.py"]
    assert [line for diff in DIFFS for line in diff.splitlines() if line[:1] == "-" and line[:4] != "--- "] == []
    assert docstring_faults(CODE) == []
    python(copy, "-m", "ruff", "check", FILE, *CHANGED)
    python(copy, "-m", "ruff", "format", "--check", FILE, *CHANGED)


def test_its_pictures_are_those_of_the_stock_pipeline_and_it_is_held_to_all_that_models_are(copy):
    said = python(copy, *PYTEST)
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) >= 20
    assert "skipped" not in said


def test_it_trains_and_the_repository_does_not_know_it(copy, bright_url):
    python(copy, *BUILD)
    (copy / "tiny.toml").write_text(TINY)
    (copy / "eval.txt").write_text('a blue sign that says "AB"\n')
    words = [bright_url if word.startswith("http:") else word for word in TRAIN]
    python(copy, *words, "--config", "tiny.toml")
    log = (copy / "runs" / "ovis" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [line for line in map(json.loads, log) if "policy/loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["policy/first_ratio_max_dev"] == 0
        assert line["policy/skipped_updates"] == 0
        assert line["policy/grad_norm"] > 0
    assert [path for path in CHANGED if "ovis" in (REPO / path).read_text("utf-8").lower()] == []
    assert not (REPO / FILE).exists()
