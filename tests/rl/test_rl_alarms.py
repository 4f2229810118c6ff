"""Alarms: each rule on the step at which it starts to hold, and not a step before."""

import math

import pytest
from omni_rl.alarms import MAX_ABSTAINED, WINDOW, find_alarms, new_alarms

HEALTHY = {"reward/zero_variance_ratio": 0.2, "reward/min": 0.0, "reward/max": 1.0, "reward/abstained_ratio": 0.0}
DEAD = HEALTHY | {"reward/zero_variance_ratio": 1.0, "reward/max": 0.0}
SILENT = HEALTHY | {"reward/abstained_ratio": MAX_ABSTAINED + 0.1}


def titles(lines):
    return [alarm.title for alarm in find_alarms(lines)]


@pytest.mark.parametrize("lines", [[], [HEALTHY], [HEALTHY] * 20, [{"eval/reward": 0.5}]])
def test_a_healthy_run_has_none(lines):
    assert find_alarms(lines) == []


@pytest.mark.parametrize(
    ("line", "title"), [(DEAD, "The reward tells nothing"), (SILENT, "Many samples have no score")]
)
def test_an_alarm_starts_after_a_window_of_steps_and_is_told_once(line, title):
    lines = [HEALTHY] + [line] * (WINDOW + 3)
    told = [(n, alarm.title) for n in range(len(lines)) for alarm in new_alarms(lines[: n + 1])]
    assert [name for _, name in told] == [title]
    assert WINDOW - 1 <= told[0][0] <= WINDOW
    assert titles([*lines, HEALTHY, HEALTHY, HEALTHY, HEALTHY, HEALTHY]) == []


def test_one_group_that_differs_is_enough_to_learn_from():
    assert titles([DEAD] * (WINDOW - 1) + [DEAD | {"reward/zero_variance_ratio": 0.9}]) == []


def test_lines_of_evaluations_do_not_count_as_steps():
    assert titles([DEAD, {"eval/reward": 0.1}] * (WINDOW - 1)) == []


@pytest.mark.parametrize(
    ("rewards", "watched", "alarm"),
    [
        ([0.1, 0.2, 0.3], [0.9, 0.8, 0.7], True),
        ([0.1, 0.2, 0.3], [0.7, 0.8, 0.9], False),
        ([0.1, 0.2, 0.2], [0.9, 0.8, 0.7], False),
        ([0.2, 0.3], [0.9, 0.8], False),
        ([0.9, 0.1, 0.2, 0.3], [0.1, 0.9, 0.8, 0.7], True),
        ([0.1, 0.2, 0.3], [0.9, math.nan, 0.7], False),
    ],
)
def test_a_reward_that_rises_while_another_falls(rewards, watched, alarm):
    lines = [{"eval/reward": r, "eval/watch": w} for r, w in zip(rewards, watched, strict=True)]
    assert bool(find_alarms(lines)) == alarm
    if alarm:
        assert find_alarms(lines)[0].numbers["reward, to"] == rewards[-1]
