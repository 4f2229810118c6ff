"""docs/contributing.md adds an algorithm, a step rule and a model: taken literally on a copy, they hold."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import REPO, in_turn

PAGE = (REPO / "docs" / "contributing.md").read_text("utf-8")
TINY = """
width = 64
num_inference_steps = 4
prompts_per_step = 2
group_size = 4
batch_size = 4
train_steps = 2

[eval]
prompts = "eval.txt"
num_inference_steps = 2
every = 2
"""
RUN = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
"""


class Guide:
    """What a section says: its diffs, the files that they change, one new `file` of that `code`, and its commands."""

    def __init__(self, title: str) -> None:
        section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        self.diffs = re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        self.changed = [re.search(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)[1] for diff in self.diffs]
        blocks = re.findall(r"`(\S+\.py)`:\n\n```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        ((self.file, self.code),) = blocks
        self.commands = re.findall(r"`python (.*?)`", section)

    def lines(self, sign):
        """The lines that the diffs add, or take away."""
        return [line for diff in self.diffs for line in diff.splitlines() if line[:1] == sign and line[:3] != sign * 3]


GUIDES = {word: Guide(f"Add {word}") for word in ("an algorithm", "a step rule", "a model")}
ALGORITHM, RULE, MODEL = GUIDES.values()
CONFIGURE, TRAIN_ALGORITHM = ALGORITHM.commands
(TRAIN_RULE,) = RULE.commands
PYTEST, BUILD, TRAIN_MODEL = MODEL.commands


def apply(diff, path, folder, *options):
    command, env = ["git", "apply", *options, "--verbose", "-"], os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}
    result = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True, env=env)
    advice = f"the block of docs/contributing.md for {path} does not apply: bring its lines up to those of {path}"
    assert result.returncode == 0, f"{advice}\n{result.stderr}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree that has all three, whose changes each apply to the tree also without the others'."""
    folder = tmp_path_factory.mktemp("trees") / "copy"
    left = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("apps", "packages", "scripts", "tests"):
        shutil.copytree(REPO / name, folder / name, ignore=left)
    (folder / "docs").mkdir()
    shutil.copy(REPO / "pyproject.toml", folder)
    for name in ("data", "checkpoints"):
        (folder / name).symlink_to(REPO / name)
    for guide in GUIDES.values():
        (folder / guide.file).write_text(guide.code, "utf-8")
        for path, diff in zip(guide.changed, guide.diffs, strict=True):
            apply(diff, path, REPO, "--check")
            apply(diff, path, folder)
    return folder


def python(copy, *words):
    """Runs Python in the copy, whose packages stand before the installed ones; what it printed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, copy.glob("packages/*/src"))), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *words], cwd=copy, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_they_are_short_and_the_model_takes_nothing_away():
    assert 10 < len(ALGORITHM.lines("+")) < 40
    assert 10 < len(RULE.lines("+")) < 40
    assert len(MODEL.code.splitlines()) <= 90
    assert MODEL.file.startswith("packages/omni-rollout/src/omni_rollout/models/")
    files = [path.rpartition("/")[2] for path in MODEL.changed]
    assert files == ["__init__.py", "build_tiny_models.py", "model_rows.py"]
    assert MODEL.lines("-") == []


def test_their_changes_apply_and_keep_the_rules(copy):
    changed = [path for guide in GUIDES.values() for path in guide.changed]
    files = [*changed, *(guide.file for guide in GUIDES.values())]
    python(copy, "-m", "ruff", "check", *files)
    python(copy, "-m", "ruff", "format", "--check", *files)
    python(copy, *CONFIGURE.split())
    assert "`cispo`" in (copy / "docs" / "configuration.md").read_text("utf-8")


@in_turn(0, 3)
def test_their_tests_pass(copy):
    assert "3 passed" in python(copy, "-m", "pytest", "-q", ALGORITHM.file, RULE.file)


@in_turn(1, 3)
def test_the_models_pictures_are_those_of_the_stock_pipeline_and_it_is_held_to_all_that_models_are(copy):
    said = python(copy, *shlex.split(PYTEST))
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) >= 20
    assert "skipped" not in said


@in_turn(2, 3)
def test_their_commands_train_and_the_repository_does_not_know_them(copy, bright_url):
    (copy / "tiny.toml").write_text(TINY)
    (copy / "eval.txt").write_text('a blue sign that says "AB"\n')
    trained = {"cispo": TRAIN_ALGORITHM, "linear": TRAIN_RULE, "ovis": TRAIN_MODEL}
    given = f"--config tiny.toml --scorer.url {bright_url}"
    python(copy, "-c", RUN, BUILD, *(f"{command} {given}" for command in trained.values()))
    for name in trained:
        lines = (copy / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines()
        steps = [line for line in map(json.loads, lines) if "policy/loss" in line]
        assert len(steps) == 2
        for line in steps:
            assert line["policy/first_ratio_max_dev"] == 0
            assert line["policy/skipped_updates"] == 0
            assert line["policy/grad_norm"] > 0
            # The second update's weights are no longer the old ones.
            assert name != "cispo" or line["policy/ratio_max_dev"] > 0
    for guide, word in zip(GUIDES.values(), (" cispo_loss", "linear_step", "ovis"), strict=True):
        assert [path for path in guide.changed if word in (REPO / path).read_text("utf-8").lower()] == []
        assert not (REPO / guide.file).exists()
