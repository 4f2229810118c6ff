"""A program that is told to stop finishes its step, and all ranks stop after the same one."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from omni_train.signals import INTERRUPTS_ENV, catch_stop, resume_command


def test_sigterm_is_remembered_and_nothing_else_happens(alone):
    before = signal.getsignal(signal.SIGTERM)
    with catch_stop() as stop:
        assert not stop.requested(alone)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested(alone)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun and a scheduler may both send one
        assert stop.requested(alone)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_asks_once_and_ends_the_second_time(alone, capfd):
    handler = signal.getsignal(signal.SIGINT)

    def train():
        with catch_stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)  # a SIGTERM before it does not count
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested(alone)
            assert "Ctrl-C once more ends at once" in capfd.readouterr().err
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        train()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(("launcher", "heard"), [("", True), ("torchrun", False), ("omni_rl.run.ranks", True)])
def test_a_second_ctrl_c_is_promised_where_it_is_heard(monkeypatch, capfd, launcher, heard):
    """torchrun, which names its run to the ranks, passes on the first alone."""
    for name, holds in (("TORCHELASTIC_RUN_ID", launcher), (INTERRUPTS_ENV, launcher == "omni_rl.run.ranks")):
        monkeypatch.setenv(name, "1") if holds else monkeypatch.delenv(name, raising=False)
    with catch_stop():
        os.kill(os.getpid(), signal.SIGINT)
    assert ("Ctrl-C once more" in capfd.readouterr().err) == heard


def test_the_old_handlers_return_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def train():
        with catch_stop(list(before)) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise KeyError(stop.received)

    with pytest.raises(KeyError, match="True"):
        train()
    assert {number: signal.getsignal(number) for number in before} == before


def test_ranks_stop_after_the_same_step_whichever_was_told(run_ranks):
    def work(dist):
        with catch_stop() as stop:
            for step in range(10):
                if dist.rank == 1 and step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.requested(dist):
                    break
        return step

    assert run_ranks(work) == [4, 4]


def test_the_resume_command_starts_the_same_program_again(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(
        "import sys\nfrom omni_train.signals import resume_command\nprint(sys.argv[1:])\nprint(resume_command())"
    )
    arguments = ["--prompts", 'a sign that says "A B"', "--lr=1e-4"]
    first = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True).stdout
    told, command = first.splitlines()
    assert told == str(arguments)
    assert shlex.split(command) == [sys.executable, str(script), *arguments]


@pytest.mark.parametrize(
    ("world_size", "local", "launcher"),
    [
        ("8", "8", ["torchrun", "--nproc-per-node", "8"]),
        ("16", "8", ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]),
    ],
)
def test_the_resume_command_of_torchrun_has_its_ranks(monkeypatch, world_size, local, launcher):
    monkeypatch.setattr(sys, "argv", ["apps/train.py", "--name", "a b"])
    for name, value in {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, value)
    assert shlex.split(resume_command()) == [*launcher, "apps/train.py", "--name", "a b"]


def test_the_resume_command_is_what_the_user_typed(monkeypatch):
    monkeypatch.setenv("OMNI_RL_COMMAND", "omni-rl train flowgrpo --nproc-per-node 2")
    monkeypatch.setenv("RANK", "0")
    assert resume_command() == "omni-rl train flowgrpo --nproc-per-node 2"
