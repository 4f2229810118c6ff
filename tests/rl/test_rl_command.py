"""`omni-rl` starts the programs that its sub-commands name, and says in one line what is wrong with a command line."""

import importlib
import os
import subprocess
import sys
import tomllib

import pytest
from helpers import REPO
from omni_rl.command import __main__ as command

APPS = REPO / "apps"
RUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("train nft --preset tiny-signs", [str(APPS / "train_nft.py"), "--preset", "tiny-signs"]),
        ("train nft --nproc-per-node 2 --lr -1", [*RUN, "2", str(APPS / "train_nft.py"), "--lr", "-1"]),
        ("train srpo --nproc-per-node=1", [*RUN, "1", str(APPS / "train_srpo.py")]),
        ("sample --model m", [str(APPS / "sample.py"), "--model", "m"]),
        ("serve --scorer ocr", ["-m", "omni_reward.server", "--scorer", "ocr"]),
        ("report runs/a", ["-m", "omni_rl.report", "runs/a"]),
        ("push runs/a o/n", ["-m", "omni_rl.hub", "runs/a", "o/n"]),
    ],
)  # fmt: skip
def test_a_sub_command_is_a_program_with_its_own_flags(words: str, started: list[str]):
    assert command.python_words(words.split()) == started


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["trian"], r"the command must be one of train, .*, got 'trian'; did you mean 'train'\?"),
        (["train", "flowgrop"], r"the trainer must be one of .*, got 'flowgrop'; did you mean 'flowgrpo'\?"),
        (["train", "--preset", "tiny-signs"], "the trainer must be one of .*, got '--preset'"),
        (["train", "nft", "--nproc-per-node", "0"], "--nproc-per-node must be a whole number >= 1, got '0'"),
        (["train", "nft", "--nproc-per-node"], "--nproc-per-node must be a whole number >= 1, got ''"),
    ],
)
def test_a_mistake_is_named(words: list[str], mistake: str):
    with pytest.raises(ValueError, match=mistake):
        command.python_words(words)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "omni_rl.command", *words], cwd=REPO, capture_output=True, text=True)


def test_the_exit_code_and_the_message_are_the_programs():
    result = run("sample", "--modle", "m")
    assert (result.returncode, result.stderr) == (
        2,
        "sample.py: error: unknown flag --modle; did you mean '--model'?\n",
    )
    assert run("trian").stderr.startswith("omni-rl: error: the command must be one of ")


def test_the_program_has_the_process_and_so_the_signals_of_the_terminal(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(sys, "argv", ["omni-rl", "serve", "--port", "1"])
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    command.main()
    assert started == [(sys.executable, [sys.executable, "-m", "omni_reward.server", "--port", "1"])]


def test_help_has_a_line_for_each_sub_command_and_each_trainer():
    lines = run("--help").stdout.splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(command.COMMANDS)
    assert max(map(len, lines)) <= 100
    trainers = {line.split()[0] for line in run("train").stdout.splitlines() if line.startswith("  ")}
    assert trainers == {path.stem.removeprefix("train_") for path in APPS.glob("train_*.py")}


def test_the_package_has_every_app_as_a_link_so_that_its_wheel_has_the_file():
    links = sorted((REPO / "packages/omni-rl/src/omni_rl/apps").iterdir())
    assert [link.resolve() for link in links if link.suffix == ".py"] == sorted(APPS.glob("*.py"))
    assert all(link.is_symlink() for link in links if link.suffix == ".py")


def test_the_entry_point_is_there():
    project = tomllib.loads((REPO / "packages/omni-rl/pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["scripts"]["omni-rl"].partition(":")
    assert getattr(importlib.import_module(module), name) is command.main
