"""The trace of a step: a file for each of its phases, which ends after some calls of the net."""

import gzip
import json

import pytest
import torch
from omni_train import profiling
from omni_train.profiling import ProfiledLog
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.* lacks the step")  # of runs that begin in their middle


def run(folder, *, steps, resume_step=-1, is_main=True, calls=3):
    """Steps 0, which evaluates, and so on, each with two phases."""
    net = nn.Linear(2, 2)
    log = ProfiledLog(folder, step=2, nets={net}, resume_step=resume_step, is_main=is_main, total_steps=3)
    for step in steps:
        for phase in ("rollout", "update") if step else ("eval",):
            with log.phase(phase):
                for _ in range(calls):
                    net(torch.zeros(1, 2)).sum().backward()
        log.log(step, {})
    return sorted(path.name for path in folder.glob("trace/*"))


def names(path):
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_the_phases_of_one_step_are_traced(tmp_path, capsys):
    assert run(tmp_path, steps=range(4)) == ["000002-rollout.json.gz", "000002-update.json.gz"]
    found = names(tmp_path / "trace" / "000002-update.json.gz")
    assert found.count("aten::linear") == 3
    assert found.count("AddmmBackward0") == 3  # on the thread of the backward pass
    assert f"profile of step 2: {tmp_path}/trace/000002-rollout.json.gz" in capsys.readouterr().out


def test_a_phase_within_another_is_part_of_its_trace(tmp_path):
    log = ProfiledLog(tmp_path, step=1, nets=(), resume_step=0, is_main=True, total_steps=3)
    with log.phase("update"), log.phase("reward_wait"):
        torch.zeros(1).sin()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["000001-update.json.gz"]
    assert "aten::sin" in names(tmp_path / "trace" / "000001-update.json.gz")


def test_a_run_that_continues_counts_on(tmp_path):
    assert len(run(tmp_path, steps=(2, 3), resume_step=1)) == 2
    assert run(tmp_path / "later", steps=(3,), resume_step=2) == []


def test_a_trace_ends_after_so_many_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "MAX_CALLS", 2)
    run(tmp_path, steps=range(3), calls=5)
    assert names(tmp_path / "trace" / "000002-rollout.json.gz").count("aten::linear") == 2


def test_a_trace_that_cannot_end_within_a_forward_ends_no_run_and_is_ended_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(profiling, "MAX_CALLS", 2)
    stop, stopped = torch.profiler.profile.stop, []

    def fail(profile):
        stop(profile)  # another profile may start in this process
        stopped.append(profile)
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch.profiler.profile, "stop", fail)
    assert run(tmp_path, steps=range(4), calls=5) == []
    assert len(stopped) == 1
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert told == ["WARNING: the profile failed and is switched off: RuntimeError: no space left"]


def test_other_ranks_write_none(tmp_path):
    assert run(tmp_path, steps=range(3), is_main=False) == []


def test_what_breaks_within_a_trace_is_told_as_it_is(tmp_path):
    log = ProfiledLog(tmp_path, step=1, nets=(), resume_step=0, is_main=True, total_steps=3)
    with pytest.raises(ValueError, match="broken"), log.phase("update"):
        raise ValueError("broken")
    with log.phase("rollout"):  # the profiler is free again
        pass
