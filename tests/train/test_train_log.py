"""One JSON line a step that survives crashes, and progress a person can read."""

import json
import math
import re
import sys
import time
import warnings

import pytest
import torch
from omni_train.display import Display
from omni_train.dist import Moment
from omni_train.files import load_metrics
from omni_train.log import RunLog


@pytest.fixture
def open_log(tmp_path):
    """Open the log of one folder, as plain lines unless told otherwise."""

    def open_log(**options):
        return RunLog(tmp_path, **({"is_main": True, "total_steps": 4} | options))

    return open_log


@pytest.fixture
def lines(tmp_path):
    return lambda: (tmp_path / "metrics.jsonl").read_text().splitlines()


def test_a_step_is_one_json_line_under_the_callers_names(open_log, lines):
    with open_log() as log:
        log.log(0, {"reward/mean": 0.5, "loss": torch.tensor(0.25)})
        assert len(lines()) == 1  # already there, before the log is closed
    entry = json.loads(lines()[0])
    assert entry.pop("time/step_s") >= 0
    assert entry == {"step": 0, "reward/mean": 0.5, "loss": 0.25}


def test_phases_add_up_within_a_step_and_start_again(open_log, lines):
    with open_log() as log:
        for _ in range(2):
            with log.phase("rollout"):
                time.sleep(0.02)
        with log.phase("update"):
            pass
        log.log(0, {})
        log.log(1, {})
    first, second = map(json.loads, lines())
    assert 0.04 <= first["time/rollout_s"] < 1.0
    assert first["time/rollout_s"] + first["time/update_s"] <= first["time/step_s"]
    assert set(second) == {"step", "time/step_s"}


def test_a_phase_within_another_takes_its_seconds_from_it(open_log, lines, monkeypatch):
    moments = iter(map(Moment, (0.0, 1.0, 1.5, 4.0)))
    monkeypatch.setattr("omni_train.log.now", lambda: next(moments))
    with open_log() as log:
        with log.phase("update"):
            with log.phase("reward_wait"):
                assert log.last_phase == "reward_wait"
            assert log.last_phase == "update"
        log.log(0, {})
    entry = json.loads(lines()[0])
    assert (entry["time/update_s"], entry["time/reward_wait_s"]) == (3.5, 0.5)


def test_times_per_image_are_those_of_the_step(open_log, lines, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0])
    monkeypatch.setattr("omni_train.log.time.perf_counter", lambda: next(clock))
    with open_log() as log:
        with log.phase("rollout"):
            pass
        log.log(1, {}, num_samples=8)
    assert json.loads(lines()[0]) == {
        "step": 1,
        "time/rollout_s": 2.0,
        "time/step_s": 5.0,
        "time/rollout_ms_per_sample": 250.0,
        "perf/samples_per_s": 1.6,
    }


def test_numbers_json_cannot_hold_are_null_with_one_warning_a_name(open_log, lines, tmp_path):
    seen = []
    with open_log(sinks=[lambda step, metrics: seen.append(metrics["loss"])]) as log:
        with pytest.warns(UserWarning, match="loss is nan at step 0"):
            log.log(0, {"loss": math.nan})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.log(1, {"loss": math.inf})
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines()] == [None, None]
    assert math.isnan(seen[0])
    assert seen[1] == math.inf
    assert all(math.isnan(entry["loss"]) for entry in load_metrics(tmp_path / "metrics.jsonl"))


def test_sinks_get_what_the_file_gets(open_log, lines):
    seen = []
    with open_log(sinks=[lambda *args: seen.append(args)]) as log:
        log.log(3, {"loss": 1.0})
    step, metrics = seen[0]
    assert {"step": step} | metrics == json.loads(lines()[0])


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    seen = []
    with RunLog(tmp_path / "x", is_main=False, total_steps=1, sinks=[lambda *args: seen.append(args)]) as log:
        with log.phase("update"):
            pass
        log.log(0, {"loss": 1.0})
    assert not (tmp_path / "x").exists()
    assert seen == []
    assert capsys.readouterr().out == ""


def test_names_of_the_log_itself_are_refused(open_log):
    with open_log() as log, pytest.raises(ValueError, match=r"got \['step', 'time/step_s'\]"):
        log.log(0, {"step": 1.0, "time/step_s": 2.0, "loss": 3.0})


def test_a_step_logged_again_counts_as_logged_last(open_log, tmp_path):
    for losses in ([1.0, 2.0, 3.0], [20.0]):
        with open_log() as log:
            for step, loss in enumerate(losses, start=len(losses) == 1):
                log.log(step, {"loss": loss})
    entries = load_metrics(tmp_path / "metrics.jsonl")
    assert [(entry["step"], entry["loss"]) for entry in entries] == [(0, 1.0), (1, 20.0), (2, 3.0)]


def test_plain_progress_is_one_line_a_step_with_the_time_left(open_log, capsys):
    with open_log(columns=["loss", "reward"]) as log:
        time.sleep(0.05)
        log.log(1, {"reward": 0.123456, "loss": 1.0, "hidden": 5.0})
        log.log(4, {"reward": 1.0})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step=1/4 loss=1 reward=0.1235 step_s=")
    assert "hidden" not in first
    assert "eta=0:00:00" in last


@pytest.mark.parametrize("line", ['{"loss": 1.0}', '{"step": "1"}', '{"step": 1, "loss": "x"}', '{"step": 1.5}', "[]"])
def test_a_line_that_is_no_step_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: must be .* Delete the line, or move the file away"):
        load_metrics(path)


class BrokenSink:
    """Fails whenever it is called."""

    def __call__(self, step, metrics):
        raise KeyError("no such chart")

    def close(self):
        raise OSError("no space left")


def test_a_sink_that_fails_neither_stops_training_nor_hides_its_error(open_log, lines, capfd):
    seen = []

    def train():
        with open_log(sinks=[BrokenSink(), lambda *args: seen.append(args)]) as log:
            log.log(0, {})
            log.log(1, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(lines()) == len(seen) == 2
    told = ("KeyError: 'no such chart'", "OSError: no space left")  # each once, the second of the end
    assert capfd.readouterr().err == "".join(f"WARNING: a sink of the log failed: {why}\n" for why in told)


def test_a_sink_that_fails_for_a_while_gets_the_next_lines_and_its_end(open_log, capfd):
    seen = []

    class Server:
        def __call__(self, step, metrics):
            if step in (1, 2):
                raise ConnectionError(f"503 at step {step}, of {object()}")
            seen.append(step)

        def close(self):
            seen.append("end")

    with open_log(sinks=[Server()]) as log:
        for step in range(5):
            log.log(step, {})
    assert seen == [0, 3, 4, "end"]
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("WARNING: a sink of the log failed: ConnectionError: 503 at step 1, of <object")


def test_the_time_left_is_that_of_training_steps_and_evaluations(open_log, capsys, monkeypatch):
    """Evaluations of 50 s before the first step, after every other and after the last; steps of 10 s, one of 100 s."""
    now = [0.0]
    monkeypatch.setattr("omni_train.log.time.perf_counter", lambda: now[0])
    with open_log(total_steps=7, eval_every=2) as log:
        for step in range(8):
            now[0] += (0 if step == 0 else 100 if step == 3 else 10) * 1.0
            if step % 2 == 0 or step == 7:
                with log.phase("eval"):
                    now[0] += 50.0
            log.log(step, {})
    told = [line.partition("eta=")[2] for line in capsys.readouterr().out.splitlines()]
    evals = (4, 3, 3, 2, 2, 1, 0)  # that are left after steps 1 to 7
    left_s = [(7 - step) * 10 + evals[step - 1] * 50 for step in range(1, 8)]
    assert told == ["", *(f"0:{seconds // 60:02}:{seconds % 60:02}" for seconds in left_s)]


def test_a_narrow_terminal_shows_the_time_left_and_the_last_evaluation(open_log, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    with open_log(
        display=Display(tty=True), total_steps=400, columns=["reward/mean", "eval/reward", "policy/some_long_name"]
    ) as log:
        log.log(0, {"eval/reward": 0.25})
        log.log(1, {"reward/mean": 0.5, "policy/some_long_name": 1.0})
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"1/400 eta 0:00:\d\d eval/reward=0.25 reward/mean=0.5 ", last)


def test_the_bar_shows_the_change_of_rewards_and_the_course_of_evaluations(open_log, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    columns = ["reward/mean", "eval/reward", "loss"]
    with open_log(columns=columns) as log:
        for step, score in enumerate([0.0, 0.25, 1.0]):
            log.log(step, {"reward/mean": 0.5, "eval/reward": score, "loss": 1.0})
    with open_log(display=Display(tty=True), columns=columns, resume_step=2) as log:
        log.log(3, {"reward/mean": 0.25, "loss": 2.0})
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "reward/mean=0.25 (-0.25) loss=2 " in shown
    with open_log(display=Display(tty=True), columns=columns, resume_step=3) as log:
        log.log(4, {"reward/mean": 0.75, "eval/reward": 0.5})
    assert "reward/mean=0.75 (+0.25) eval/reward=0.5 ▁▃█▅ " in capsys.readouterr().out.splitlines()[-1]


def test_without_rich_a_terminal_gets_lines(open_log, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with open_log(display=Display(tty=True)) as log:
        log.log(1, {"loss": 0.5})
    assert capsys.readouterr().out.startswith("step=1/4 loss=0.5")


def test_the_speed_of_a_phase_is_its_operations_over_its_seconds(tmp_path):
    log = RunLog(tmp_path, is_main=True, total_steps=1)
    with log.phase("rollout"):
        pass
    log.log(1, {}, flops={"rollout": 3e12, "elsewhere": 1.0}, peak_tflops=10.0)
    (line,) = load_metrics(tmp_path / "metrics.jsonl")
    assert line["perf/rollout_tflops"] * line["time/rollout_s"] == pytest.approx(3)
    assert line["perf/rollout_mfu"] == pytest.approx(line["perf/rollout_tflops"] / 10)
    assert "perf/elsewhere_tflops" not in line
