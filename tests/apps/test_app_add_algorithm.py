"""docs/contributing.md adds an algorithm: taken literally, on a copy, its changes apply, keep the rules, and train."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from arch.test_arch_sizes import docstring_faults
from helpers import REPO

PAGE = (REPO / "docs" / "contributing.md").read_text("utf-8")
SECTION = PAGE.partition("\n## Add an algorithm\n")[2].partition("\n## ")[0]
DIFFS = re.findall(r"^```diff\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
CHANGED = [re.search(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)[1] for diff in DIFFS]
((TEST, TEST_CODE),) = re.findall(r"`(tests/\S+\.py)`:\n\n```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
(TRAIN,) = re.findall(r"^`python (apps/train_\w+\.py .*)`$", SECTION, re.MULTILINE)
COPIED = ("apps", "packages/omni-losses/src", "scripts/configuration.py", "docs/configuration.md", "pyproject.toml")
TINY = """
eval_prompts = "eval.txt"
width = 64
num_inference_steps = 4
eval_num_inference_steps = 2
prompts_per_step = 2
group_size = 4
batch_size = 4
train_steps = 2
eval_every = 2
"""


def follow(folder):
    """Does in a copy what the page says up to its commands."""
    for name in COPIED:
        source, place = REPO / name, folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place)
    for name in ("data", "checkpoints"):
        (folder / name).symlink_to(REPO / name)
    for path, diff in zip(CHANGED, DIFFS, strict=True):
        result = subprocess.run(
            ["git", "apply", "--verbose", "-"], cwd=folder, input=diff, capture_output=True, text=True,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )  # fmt: skip
        advice = f"the block of docs/contributing.md for {path} does not apply: bring its lines up to those of {path}"
        assert result.returncode == 0, f"{advice}\n{result.stderr}"
    (folder / TEST).parent.mkdir(parents=True)
    (folder / TEST).write_text(TEST_CODE, "utf-8")


def python(folder, *words):
    """Runs Python in the copy, whose omni_losses stands before the installed one; what it printed."""
    env = os.environ | {"PYTHONPATH": str(folder / "packages" / "omni-losses" / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_adds_fewer_than_40_lines():
    added = [line for diff in DIFFS for line in diff.splitlines() if line[:1] == "+" and line[:4] != "+++ "]
    assert 10 < len(added) < 40


def test_its_changes_apply_and_keep_the_rules(tmp_path):
    follow(tmp_path)
    for path in CHANGED:
        before, after = ((root / path).read_text("utf-8") for root in (REPO, tmp_path))
        assert docstring_faults(after) == docstring_faults(before)
    python(tmp_path, "-m", "ruff", "check", *CHANGED, TEST)
    python(tmp_path, "-m", "ruff", "format", "--check", *CHANGED, TEST)
    assert "`python scripts/configuration.py`" in SECTION
    python(tmp_path, "scripts/configuration.py")
    assert "`cispo`" in (tmp_path / "docs" / "configuration.md").read_text("utf-8")


def test_its_test_passes(tmp_path):
    follow(tmp_path)
    assert "1 passed" in python(tmp_path, "-m", "pytest", "-q", TEST)


def test_its_command_trains_and_leaves_the_repository_alone(tmp_path, bright_url):
    follow(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n')
    words = [bright_url if word.startswith("http:") else word for word in shlex.split(TRAIN)]
    python(tmp_path, *words, "--config", "tiny.toml")
    log = (tmp_path / "runs" / "cispo" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [line for line in map(json.loads, log) if "policy/loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["policy/first_ratio_max_dev"] == 0
        assert line["policy/skipped_updates"] == 0
        assert line["policy/grad_norm"] > 0
        assert line["policy/ratio_max_dev"] > 0  # the second update's, whose weights are no longer the old ones
    assert [path for path in CHANGED if "cispo" in (REPO / path).read_text("utf-8")] == []
    assert not (REPO / TEST).exists()
