"""`omni-rl` starts the programs that its sub-commands name, and says in one line what is wrong with a command line."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import REPO
from omni_rl.settings.toml import load_recipes
from omni_rl.tools import command, doctor

APPS = REPO / "apps"
RUN = ["-m", "omni_rl.run.ranks", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("train nft --preset tiny-signs", [str(APPS / "train_nft.py"), "--preset", "tiny-signs"]),
        ("train nft --nproc-per-node 2 --lr -1", [*RUN, "2", str(APPS / "train_nft.py"), "--lr", "-1"]),
        ("train srpo --nproc_per_node=2", [*RUN, "2", str(APPS / "train_srpo.py")]),
        ("train srpo --nproc_per_node 2", [*RUN, "2", str(APPS / "train_srpo.py")]),
        ("train srpo --nproc-per-node=1", [*RUN, "1", str(APPS / "train_srpo.py")]),
        ("sample --model m", [str(APPS / "sample.py"), "--model", "m"]),
        ("serve --scorer ocr", ["-m", "omni_reward.server", "--scorer", "ocr"]),
        ("report runs/a", ["-m", "omni_rl.report", "runs/a"]),
        ("prompts ocr", ["-m", "omni_rl.tools.prompts", "ocr"]),
        ("score --scorer ocr a.png", ["-m", "omni_rl.tools.score", "--scorer", "ocr", "a.png"]),
        ("push runs/a o/n", ["-m", "omni_rl.tools.hub", "runs/a", "o/n"]),
    ],
)
def test_a_sub_command_is_a_program_with_its_own_flags(words: str, started: list[str]):
    assert command.python_args(words.split()) == started


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
        command.python_args(words)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omni_rl.tools.command", *words], cwd=REPO, capture_output=True, text=True
    )


def test_help_is_a_command_too(monkeypatch, capfd):
    for words, begins in (("help", "usage: omni-rl COMMAND"), ("train help", "usage: omni-rl train TRAINER")):
        monkeypatch.setattr(sys, "argv", ["omni-rl", *words.split()])
        command.main()
        assert capfd.readouterr().out.startswith(begins)


def test_the_exit_code_and_the_message_are_the_programs():
    result = run("sample", "--modle", "m")
    assert (result.returncode, result.stderr) == (
        2,
        "sample.py: error: unknown flag --modle; did you mean '--model'?\n",
    )
    assert run("trian").stderr.startswith("omni-rl: error: the command must be one of ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--lrr 1", 2, "train_nft.py: error: unknown flag --lrr; did you mean '--lr'?\n"),
        ("--preset tiny-signs --batch-size 48", 2, "train_nft.py: error: --batch-size times ranks (96) must divide"),
        ("--preset tiny-signs --scorer orc", 2, "train_nft.py: error: --scorer must be one of ["),
    ],
)
def test_the_settings_of_several_ranks_are_checked_once_before_any_starts(monkeypatch, capfd, words, code, said):
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(os, "execv", lambda *started: pytest.fail("ranks start"))
    monkeypatch.setattr(sys, "argv", ["omni-rl", "train", "nft", "--nproc-per-node", "2", *words.split()])
    with pytest.raises(SystemExit) as end:
        command.main()
    out, err = capfd.readouterr()
    assert (end.value.code, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(said)


def test_ctrl_c_while_settings_are_checked_ends_without_a_traceback(monkeypatch, capfd):
    def interrupted(*given, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.subprocess, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["omni-rl", "train", "nft", "--nproc-per-node", "2"])
    with pytest.raises(SystemExit, match=r"^130$"):
        command.main()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("words", ["--help", "--preset tiny-signs --check --scorer.url http://127.0.0.1:1"])
def test_what_only_prints_prints_once_for_several_ranks(monkeypatch, capfd, words):
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(os, "execv", lambda *started: pytest.fail("ranks start"))
    monkeypatch.setattr(sys, "argv", ["omni-rl", "train", "nft", "--nproc-per-node", "2", *words.split()])
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main()
    assert len(re.findall("(?m)^usage|^model = ", capfd.readouterr().out)) == 1


def test_the_program_has_the_process_with_the_signals_of_the_terminal_and_what_the_user_typed(monkeypatch):
    started = []
    monkeypatch.setenv("OMNI_RL_COMMAND", "")
    monkeypatch.setattr(sys, "argv", ["omni-rl", "train", "nft", "--name", "a b"])
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    command.main()
    assert started == [(sys.executable, [sys.executable, str(APPS / "train_nft.py"), "--name", "a b"])]
    assert os.environ["OMNI_RL_COMMAND"] == "omni-rl train nft --name 'a b'"


def test_the_entry_point_is_there():
    project = tomllib.loads((REPO / "packages/omni-rl/pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["scripts"]["omni-rl"].partition(":")
    assert getattr(importlib.import_module(module), name) is command.main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a clone."""
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoints", "data"):
        (tmp_path / name).symlink_to(REPO / name)
    return tmp_path


def diagnose(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        doctor.main(list(words))
    return int(str(end.value.code)), capsys.readouterr().out


def test_the_doctor_names_what_is_there_and_how_to_get_what_is_not(place: Path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("wandb", "vllm_omni") else find_spec(name))
    code, told = diagnose(capsys)
    assert code == 0
    assert re.search(r'^missing +wandb +--tracking.to wandb: pip install "omni-rl\[wandb\]"$', told, re.MULTILINE)
    assert re.search(r"^missing +--engine vllm-omni +.*make install-vllm-omni", told, re.MULTILINE)
    assert re.search(r"^ok +--engine diffusers +works$", told, re.MULTILINE)
    assert re.search(rf"^ok +torch +{re.escape(version('torch'))}$", told, re.MULTILINE)
    assert re.search(r"^ok +checkpoints +.*tiny-signs-qwen-image", told, re.MULTILINE)
    assert told.endswith("\nTrainers can run here.\n")


def test_the_doctor_ends_with_1_where_nothing_can_train(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    code, told = diagnose(capsys, "--json")
    answer = json.loads(told)
    by_name = {finding["name"]: finding for finding in answer["findings"]}
    assert (code, answer["can_train"]) == (1, False)
    assert (by_name["peft"]["state"], by_name["peft"]["get"]) == ("missing", 'pip install "omni-rl"')
    assert by_name["checkpoints"]["text"] == "small models other than those of tiny-signs"
    assert by_name["checkpoints"]["state"] == by_name["--engine diffusers"]["state"] == "missing"


def test_the_doctor_says_where_the_token_is_from_without_a_network(place: Path, capsys, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    for token, saved, told in (
        ("", "", "^missing +token of the hub +.*accept .* license .*, then `hf auth login`, or set HF_TOKEN$"),
        ("hf_a", "", "^ok +token of the hub +HF_TOKEN; gated models also need their license to be accepted$"),
        ("", "hf_b", "^ok +token of the hub +that of `hf auth login`; "),
    ):
        (place / "token").write_text(saved)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(place / "token"))
        monkeypatch.setenv("HF_TOKEN", token)
        out = diagnose(capsys)[1]
        assert re.search(told, out, re.MULTILINE)
        assert "hf_" not in out


def test_every_extra_that_the_doctor_advises_is_there():
    project = tomllib.loads((REPO / "packages/omni-rl/pyproject.toml").read_text("utf-8"))["project"]
    assert {extra for _, extra in doctor.EXTRAS.values()} == set(project["optional-dependencies"])


@pytest.mark.parametrize("name", command.trainers())
def test_a_trainer_begins_with_the_commands_that_start_it(name):
    path = command.trainers()[name]
    told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    [ranks] = re.findall(rf"^    omni-rl train {name} {command.RANKS} (\d+) -", told, re.MULTILINE)
    assert f"\n    torchrun --standalone {command.RANKS} {ranks} apps/{path.name} ..." in told
    assert re.search(rf"^    omni-rl train {name} --preset ", told, re.MULTILINE)
    assert set(re.findall(r"--preset (\S+)", told)) <= load_recipes(path.stem).keys()
