"""Alarms: each rule on the step at which it starts to hold, and not a step before."""

import math

import numpy as np
import pytest
from omni_rl.run.alarms import Watch, find_alarms
from omni_rl.run.metrics import MAX_ABSTAINED, MAX_CLIPPED, MAX_EPS_SHARE, MAX_GAP, MIN_EFFECTIVE, NUM_EVALS

WINDOW = 5
HEALTHY = {
    "reward/zero_variance_ratio": 0.2, "reward/min": 0.0, "reward/max": 1.0, "reward/abstained_ratio": 0.0,
    "policy/clip_fraction": 0.1, "policy/skipped_updates": 0.0, "policy/loss": 0.0,
    "policy/rollout_gap": 0.1, "policy/correction_effective_fraction": 1.0,
    "advantage/eps_share": 0.01, "policy/eps_share": MAX_EPS_SHARE,
}  # fmt: skip
DEAD = HEALTHY | {"reward/zero_variance_ratio": 1.0, "reward/max": 0.0}
SILENT = HEALTHY | {"reward/abstained_ratio": MAX_ABSTAINED + 0.1}
CLIPPED = HEALTHY | {"policy/clip_fraction": MAX_CLIPPED + 0.1}
FAR = HEALTHY | {"policy/rollout_gap": MAX_GAP + 0.5}
UNEVEN = HEALTHY | {"policy/correction_effective_fraction": MIN_EFFECTIVE - 0.1}
SKIPPED = HEALTHY | {"policy/skipped_updates": 1.0}
SMALL = HEALTHY | {"advantage/eps_share": MAX_EPS_SHARE + 0.01}
FAINT = HEALTHY | {"policy/eps_share": MAX_EPS_SHARE + 0.01}
BROKEN = HEALTHY | {"policy/loss": math.nan}


def log(*lines):
    return [{"step": float(step)} | line for step, line in enumerate(lines)]


def told(lines):
    """(number of the line, alarm) of the alarms that are told as the lines come."""
    watch = Watch()
    return [(n, alarm) for n, line in enumerate(lines) for alarm in watch(line)]


def titles(lines):
    return [alarm.title for alarm in find_alarms(lines)]


@pytest.mark.parametrize("lines", [[], [HEALTHY], [HEALTHY] * 20, [{"eval/reward": 0.5}]])
def test_a_healthy_run_has_none(lines):
    assert find_alarms(log(*lines)) == told(log(*lines)) == []


@pytest.mark.parametrize(
    ("line", "title", "window"),
    [
        (DEAD, "The reward has no signal", WINDOW),
        (SILENT, "Many samples have no score", WINDOW),
        (CLIPPED, "Many ratios are clipped", WINDOW),
        (FAR, "The engine samples with another policy", WINDOW),
        (UNEVEN, "Importance weights leave few samples", WINDOW),
        (SKIPPED, "Updates were skipped", 1),
        (SMALL, "The rewards differ by less than the epsilon of advantages", 1),
        (FAINT, "Gradients are smaller than Adam's epsilon", 1),
        (BROKEN, "policy/loss is not finite", 1),
    ],
)
def test_an_alarm_starts_after_a_window_of_steps_is_told_once_and_again_when_it_comes_back(line, title, window):
    lines = log(*[HEALTHY] * WINDOW, *[line] * (WINDOW + 3), *[HEALTHY] * WINDOW, *[line] * WINDOW)
    places = [n for n, alarm in told(lines) if alarm.title == title]
    assert len(places) == len(told(lines)) == 2
    if line is DEAD:  # the mean of a window rises above its bound before all of the window does
        assert places == [2 * WINDOW - 1, len(lines) - 1]
    else:
        assert WINDOW <= places[0] < WINDOW + window
    (alarm,) = find_alarms(lines)
    assert (alarm.title, alarm.step, alarm.numbers["since"]) == (title, len(lines) - 1, places[0])


TITLE = f"The held-out score has not risen after {NUM_EVALS} evaluations"


def evaluated(scores, error):
    return log(*(HEALTHY | {"eval/reward": score, "eval/reward_stderr": error} for score in scores))


def simulated(rise, *, count=12, prompts=64, seed=0):
    """Evaluations of a policy whose true score rises so much from one to the next, as means of noisy prompts."""
    noise = np.random.default_rng(seed)
    rows = [noise.normal(0.5 + rise * n, 0.3, prompts) for n in range(count)]
    return log(*({"eval/reward": row.mean(), "eval/reward_stderr": row.std(ddof=1) / prompts**0.5} for row in rows))


def test_a_score_that_cannot_rise_is_told_after_some_evaluations_with_its_numbers():
    lines = evaluated([0.5] * (NUM_EVALS + 1), 0.01)
    assert titles(lines[:1]) == titles(lines[:-1]) == []
    ((place, alarm),) = told(lines)
    assert (place, alarm.title) == (NUM_EVALS, TITLE)
    assert alarm.numbers == {"eval/reward_stderr": 0.01, "eval/reward": 0.5}
    assert titles(evaluated([0.9, 0.5, 0.4, 0.3, 0.2], 0.01)) == [TITLE]
    (alarm,) = find_alarms(evaluated([0.5, 0.4, 0.4, 0.4, 0.4], 0.01))
    assert alarm.numbers["eval/reward, from"] == 0.5


def test_a_score_that_has_risen_and_stays_there_is_not_told():
    assert titles(evaluated([0.2, 0.4, 0.6, *[0.9] * 20], 0.01)) == []
    assert titles(evaluated([0.5, 0.52, 0.52, 0.52, 0.52], 0.01)) == []


def test_noise_over_prompts_is_no_rise_and_a_rise_is_seen_in_it():
    """Of 200 runs each, those that are told."""
    flat = [titles(simulated(0.0, seed=seed)) for seed in range(200)]
    rising = [titles(simulated(0.05, seed=seed)) for seed in range(200)]
    assert sum(found == [TITLE] for found in flat) > 180
    assert sum(found == [TITLE] for found in rising) < 10


def test_one_group_that_differs_is_enough_to_learn_from():
    assert titles(log(*[DEAD] * (WINDOW - 1), DEAD | {"reward/zero_variance_ratio": 0.9})) == []


def test_lines_of_evaluations_do_not_count_as_steps():
    assert titles(log(*[DEAD, {"eval/reward": 0.1}] * (WINDOW - 1))) == []
    lines = log(*[DEAD] * WINDOW, {"eval/reward": 0.1})
    assert titles(lines) == ["The reward has no signal"]
    assert [n for n, _ in told(lines)] == [WINDOW - 1]  # not again a line later


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
    lines = log(*({"eval/reward": r, "eval/watch": w} for r, w in zip(rewards, watched, strict=True)))
    found = [alarm for n, alarm in told(lines) if n == len(lines) - 1 and "second scorer" in alarm.title]
    assert bool(found) == alarm
    if alarm:
        assert found[0].numbers["eval/reward, from"] == rewards[-3]
        assert found[0].numbers["eval/reward"] == rewards[-1]
