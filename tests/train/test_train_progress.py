"""What a process says of its work, and where it is shown: in a terminal, in lines, nowhere once nobody reads it."""

import io
import re
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from omni_train import display as display_module
from omni_train import progress
from omni_train.display import Display
from omni_train.weights.load import read_tensors
from safetensors.torch import save_file


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, in a list."""
    now = [0.0]
    time = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(progress, "time", time)
    monkeypatch.setattr(display_module, "time", time)
    progress.start_phase("")
    yield now
    progress.start_phase("")


@pytest.fixture
def shown(clock, monkeypatch):
    """Open a display that looks only when it is asked to."""
    opened = []

    def open_display(**options):
        monkeypatch.setattr(Display, "_watch", lambda self: None)
        opened.append(Display(**options))
        return opened[-1]

    yield open_display
    for each in opened:
        each.close()


def test_a_phase_says_what_is_done_of_what_and_what_is_left_by_that(clock):
    assert progress.describe() == ""
    progress.start_phase("step 1")
    with progress.phase("rollout"):
        said = []
        for number, _ in enumerate(progress.track(["abcd"] * 16, "samples")):
            said += [progress.describe()] if number in (0, 3) else []
            clock[0] += 41 / 13
    assert said == ["step 1: rollout 0 of 64 samples, for 0:00", "step 1: rollout 12 of 64 samples, 0:41 left"]
    assert progress.describe() == "step 1, for 0:50"
    progress.start_phase("")
    assert progress.describe() == ""


def test_a_phase_without_known_work_counts_forwards_and_time(clock):
    with progress.phase("update"):
        progress.count_forward()
        progress.count_forward()
        clock[0] += 3700
        assert progress.describe() == "update, forward 2, for 1:01:40"
        progress.advance(total=16, unit="batches")
        assert progress.describe() == "update 1 of 16 batches, 15:25:00 left"


def test_a_phase_that_comes_again_goes_on_where_it_was(clock):
    with progress.phase("rollout"):
        progress.add_phase("encoding", 3, "prompts")
        for done in range(3):
            with progress.phase("encoding"):
                clock[0] += 1
                assert progress.describe().startswith(f"rollout: encoding {done} of 3 prompts")
                progress.advance()


def test_phases_end_where_their_block_fails_and_with_the_outermost(clock):
    with pytest.raises(KeyError), progress.phase("save"):
        raise KeyError
    with progress.phase("rollout"):
        progress.start_phase("step 2")
        assert progress.describe().startswith("step 2, ")
    assert progress.describe().startswith("step 2, ")


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [
        (2.14e9, 4.5e9, "bytes", "2.1 of 4.5 GB"), (3e6, 13.5e6, "bytes", "3 of 13.5 MB"),
        (5e9, 4e9, "bytes", "5 of 5 GB"), (2e9, 0, "bytes", "2 GB"), (0, 0, "bytes", ""),
        (3, 0, "prompts", "3 prompts"), (0, 64, "samples", "0 of 64 samples"),
    ],
)  # fmt: skip
def test_work_is_counted_in_its_unit(done, total, unit, text):
    assert progress.amount(done, total, unit) == text


def test_reading_weights_counts_the_bytes_of_their_files(clock, tmp_path):
    save_file({"a": torch.ones(1000, 2, dtype=torch.bfloat16), "b": torch.ones(())}, tmp_path / "some.safetensors")
    progress.start_phase("loading", 4004, "bytes")
    read_tensors({"a": torch.empty(1000, 2), "b": torch.empty(())}, [tmp_path / "some.safetensors"])
    assert progress.current_phase().done == 4004


def test_lines_come_only_after_thirty_seconds_without_one(shown, clock, capsys):
    display = shown(tty=False)
    progress.start_phase("loading", 4.5e9, "bytes")
    progress.advance(2.1e9)
    for clock[0] in range(0, 75, 5):
        display.refresh()
        if clock[0] == 40:
            display.update(1, {"loss": 0.5}, 10.0, None)
    assert capsys.readouterr().out.splitlines() == [
        "loading 2.1 of 4.5 GB, 0:34 left", "step=1/0 loss=0.5 step_s=10.0", "loading 2.1 of 4.5 GB, 1:20 left",
    ]  # fmt: skip


def test_a_run_between_two_phases_is_silent(shown, clock, capsys):
    display = shown(tty=False)
    clock[0] = 100
    display.refresh()
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_the_phase_below_the_steps(shown, clock, monkeypatch, tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "metrics.jsonl").touch()
    display = shown()
    progress.start_phase("step 2")
    with progress.phase("rollout", 64, "samples"):
        display.refresh()
        display.begin(4, tmp_path / "metrics.jsonl")
        progress.advance(12)
        clock[0] = 12
        display.update(1, {"loss": 0.5}, 1.0, None)
        display.refresh()
    display.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*\w|━|╸|╺", "", line).strip() for line in terminal.getvalue().splitlines()]
    assert "step 2: rollout 0 of 64 samples, for 0:00" in lines[0]
    assert any("1/4 loss=0.5" in line and "12 of 64 samples, 0:52 left" in under for line, under in pairwise(lines))


def test_listeners_hear_what_the_run_does(shown, clock):
    heard = []
    display = shown(tty=False)
    display.listeners.append(heard.append)
    display.refresh()
    progress.start_phase("loading")
    display.refresh()
    assert heard == ["loading, for 0:00"]


@pytest.mark.parametrize("tty", [False, True])
def test_a_terminal_that_is_gone_is_said_once_and_nothing_fails(shown, clock, monkeypatch, capsys, tty):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError("nobody reads")

        def isatty(self):
            return tty

    monkeypatch.setenv("TERM", "xterm")
    display = shown(tty=False) if not tty else None
    monkeypatch.setattr(sys, "stdout", gone := Gone())
    display = display or shown()
    progress.start_phase("loading")
    clock[0] = 31
    for _ in range(3):
        display.refresh()
        display.update(1, {"loss": 0.5}, 1.0, None)
    display.close()
    assert sys.stdout is gone
    monkeypatch.undo()
    told = capsys.readouterr().err
    assert told.count("the progress on the terminal failed and is switched off: OSError: nobody reads") == 1


def test_a_closed_display_has_no_thread(clock):
    display = Display(tty=False)
    assert display._thread.is_alive()
    display.close()
    display.close()
    assert not display._thread.is_alive()
