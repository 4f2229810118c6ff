"""What must answer at once imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO

HEAVY = {"torch", "diffusers", "transformers", "peft"}


def imported(*arguments: str) -> tuple[set[str], str]:
    """The top-level names of all modules that `python ARGUMENTS` imports, and its output; it must exit with 0."""
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=True)
    table = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {name.partition(".")[0] for name in table}, result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "omni_train",
        "omni_rl.settings.cli",
        "omni_train.prompts.sampler",
        "omni_rl.report.process",
        "omni_rl.run.sinks",
        "omni_reward",
    ],
)
def test_importing_costs_no_torch(module: str):
    names, _ = imported("-c", f"import {module}")
    assert module.partition(".")[0] in names
    assert names & HEAVY == set()


APPS = sorted(path.name for path in (REPO / "apps").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("app", APPS)
def test_help_costs_no_torch(app: str):
    names, printed = imported(f"apps/{app}", "--help")
    assert "usage:" in printed
    assert names & HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_the_command_lists_what_it_starts_without_importing_any_of_it(words: list[str]):
    names, printed = imported("-m", "omni_rl.tools.command", *words)
    assert "usage: omni-rl" in printed
    assert names & (HEAVY | {"numpy", "requests", "omni_train", "omni_reward"}) == set()


def test_the_check_sees_a_heavy_import(tmp_path: Path):
    (tmp_path / "torch.py").touch()
    names, _ = imported("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch")
    assert names & HEAVY == {"torch"}
