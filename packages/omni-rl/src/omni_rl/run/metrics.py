"""Metrics shown beyond `metrics.jsonl`: each row sets chart, column of the terminal, merge over ranks, and alarm.

A metric without a row is logged, drawn in its own chart, and averaged over ranks.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report imports no torch
    from omni_train.dist import Merge

MAX_EPS_SHARE = 0.5  # fraction by which an epsilon reduces advantages or steps
MAX_ABSTAINED = 0.2  # share of samples without a score
MAX_CLIPPED = 0.3  # share of ratios outside the clip range
MAX_GAP = 1.0  # |ratio - 1| between sampler and trainer before an update; rare tokens in bfloat16 may come close
MIN_EFFECTIVE = 0.5  # effective sample size as a share of all samples
NUM_EVALS = 4  # evaluations after the first, in which the held-out score must rise
NUM_FALLEN = 2  # evaluations in a row below the best gold score
MIN_CORRELATION = 0.2  # rank correlation of reward and gold score
MIN_DIVERSITY = 0.5  # relative to the first evaluation
MAX_DRIFT = 1.0  # distance of a sample from its first version, relative to that of two random samples
GOLD_REWARD = "eval/gold/reward"
SETTINGS_SINCE = "settings_since"  # metric of a set: the step since which it is evaluated as now
SINCE = re.compile(rf"(eval/(?:[\w-]+/)?){SETTINGS_SINCE}")


@dataclass(frozen=True)
class Chart:
    """A chart of the report. Its lines are the rows of METRICS with its title."""

    section: str
    title: str
    note: str = ""
    smooth: bool = False


@dataclass(frozen=True)
class Rule:
    """A condition that raises an alarm.

    Args:
        title: title of the alarm.
        holds: the condition, a function of the last `window` values of the metric and of each of `others`.
        look: what to check when it holds.
        window: number of consecutive lines passed to the condition.
        from_first: True to pass all lines since the first, once there are `window` of them.
        others: further metrics. A line without one of them is skipped.
        on_policy_only: True to skip lines whose samples are from older weights, as with --draw-ahead.
    """

    title: str
    holds: Callable[..., bool]
    look: str
    window: int = 5
    from_first: bool = False
    others: tuple[str, ...] = ()
    on_policy_only: bool = False


@dataclass(frozen=True)
class Metric:
    """A metric, and where it is shown.

    Args:
        name: its name in `metrics.jsonl`.
        chart: title of its chart.
        label: label of its line there. A comparison of runs draws each chart's first line that a run has.
        column: its column in the terminal, from 1; 0: none.
        merge: how the values of several forwards and ranks are merged.
        alarm: its alarm rule.
    """

    name: str
    chart: str = ""
    label: str = ""
    column: int = 0
    merge: "Merge" = "mean"
    alarm: Rule | None = None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rises(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _stays(errors: Sequence[float], scores: Sequence[float]) -> bool:
    """Return True if the mean of the last three scores is within a standard error above the first, or below it."""
    return _mean(scores[-3:]) <= scores[0] + errors[0]


def is_below_best(scores: Sequence[float], errors: Sequence[float], count: int) -> bool:
    """Return True if the last `count` scores are all below the best earlier score by more than two of its errors."""
    best, error = max(zip(scores[:-count], errors, strict=False), default=(-math.inf, 0.0))
    return max(scores[-count:]) < best - 2 * error


def stderr_name(name: str) -> str:
    """Return the name of the standard error of a held-out score, which charts show as a band."""
    return f"{name}_stderr"


CHARTS = (  # in the order of the page
    Chart("reward", "Reward", "Held-out: fixed prompts and seeds, no injected noise. Training: the samples of a step.",
          smooth=True),
    Chart("reward", "Gold set", "Rank correlation of reward and gold score; spread of a prompt's samples, and distance "
          "from the first evaluation's, both over that of two random samples then."),
    Chart("policy", "KL", "To the model without its adapter, and half the mean squared log-ratio of an update."),
    Chart("policy", "Ratio deviation", "Largest |ratio - 1|. Before the first update: 0 with the embedded engine."),
    Chart("policy", "Clip fraction", "Share of ratios outside the clip range. Below 0.3 is healthy."),
    Chart("policy", "Gradient norm", "Before clipping.", smooth=True),
    Chart("policy", "Spread within groups", "Standard deviation of the rewards of a prompt's samples.", smooth=True),
    Chart("policy", "Nothing to learn from", "Shares of groups with equal scores, and of samples without a score.",
          smooth=True),
    Chart("policy", "Learning rate"),
    Chart("speed", "Throughput", "Samples per second and device, evaluations included.", smooth=True),
    Chart("speed", "Memory", "Of the first rank, in MB."),
    Chart("speed", "Scoring", "Seconds in which the scorer worked, and seconds of waiting for it after sampling.",
          smooth=True),
)  # fmt: skip

METRICS = (
    Metric("eval/reward", "Reward", "held-out", column=2,
           alarm=Rule("The reward rises while the second scorer falls",
                      lambda rewards, watched: _rises(rewards) and _rises(watched[::-1]),
                      "The model may be gaming the reward. Compare the images of these evaluations, raise --kl-coef "
                      "or lower --lr.", window=3, others=("eval/watch",))),
    Metric(stderr_name("eval/reward"),
           alarm=Rule(f"The held-out score has not risen after {NUM_EVALS} evaluations", _stays,
                      "The mean of the last three is not a standard error above the first. Look at the images of "
                      "evaluations with their scores, at Spread within groups and at KL: if it is near 0, raise --lr.",
                      window=1 + NUM_EVALS, from_first=True, others=("eval/reward",))),
    Metric("reward/mean", "Reward", "training", column=1),
    Metric(stderr_name(GOLD_REWARD),
           alarm=Rule("The gold score falls", lambda errors, scores: is_below_best(scores, errors, NUM_FALLEN),
                      "Training is past its best (runs/NAME/best): compare the images of these evaluations. "
                      "--eval.stop-on gold-falls:K stops there.", window=1 + NUM_FALLEN, from_first=True,
                      others=(GOLD_REWARD,))),
    Metric("eval/gold/rank_correlation", "Gold set", "rank correlation",
           alarm=Rule("The reward ranks samples unlike the gold scorer", lambda v: max(v) < MIN_CORRELATION,
                      "The reward prefers the wrong samples: compare its best and worst ones. Another reward, or a "
                      "sum of several, may be harder to game.", window=2)),
    Metric("eval/gold/diversity", "Gold set", "diversity",
           alarm=Rule("The samples of a prompt become similar", lambda v: max(v[-2:]) < MIN_DIVERSITY * v[0],
                      "Look at the images of a prompt. Raise --kl-coef, or lower --lr.", window=3, from_first=True)),
    Metric("eval/gold/drift", "Gold set", "drift",
           alarm=Rule("The samples are far from the first ones", lambda v: min(v) > MAX_DRIFT,
                      "With the same noise they differ as much as two random ones did. Raise --kl-coef, or lower --lr.",
                      window=2)),
    Metric("policy/kl", "KL", "to the reference"),
    Metric("policy/kl_max", merge="max"),
    Metric("policy/approx_kl", "KL", "of the update"),
    Metric("policy/ratio_max_dev", "Ratio deviation", "all updates", merge="max"),
    Metric("policy/first_ratio_max_dev", "Ratio deviation", "before the first", column=4),
    Metric("policy/gap_by_gradients",
           alarm=Rule("Kernels with and without gradients differ", lambda gaps: gaps[0] > 0,
                      "The ratio before the first update was off by this much. Old log-probs are computed with "
                      "gradients from now on; --attention math, if supported, may be exact.", window=1)),
    Metric("policy/gap_noisy",
           alarm=Rule("Kernels are not deterministic", lambda gaps: gaps[0] > 0,
                      "The ratio before the first update was off by this much. Old log-probs are the update's own "
                      "from now on; --attention math, if supported, or --no-compile may be exact.", window=1)),
    Metric("policy/thought_ratio_max_dev", merge="max"),
    Metric("policy/clip_fraction", "Clip fraction", "all",
           alarm=Rule("Many ratios are clipped", lambda shares: _mean(shares) > MAX_CLIPPED,
                      "The policy moves far in a step. Look at learning rate, minibatches and clip range.")),
    Metric("policy/clip_fraction_low", "Clip fraction", "low"),
    Metric("policy/clip_fraction_high", "Clip fraction", "high"),
    Metric("policy/grad_norm", "Gradient norm", "norm", column=5),
    Metric("policy/loss_scale"),
    Metric("policy/skipped_updates",
           alarm=Rule("Updates were skipped", lambda counts: counts[0] > 0,
                      "A gradient was not finite, or no sample had a signal. Look at learning rate, dtype and rewards.",
                      window=1)),
    Metric("policy/rollout_gap",
           alarm=Rule("The engine samples with another policy", lambda gaps: _mean(gaps) > MAX_GAP,
                      "Its log-probs are far from the trainer's. Look at the weight sync, and at the engine's dtype.",
                      on_policy_only=True)),
    Metric("policy/correction_abs_diff_max", merge="max"),
    Metric("policy/correction_ratio_max", merge="max"),
    Metric("policy/correction_ratio_min", merge="min"),
    Metric("policy/correction_effective_fraction",
           alarm=Rule("Importance weights leave few samples", lambda shares: _mean(shares) < MIN_EFFECTIVE,
                      "A few samples weigh more than all others. Look at policy/rollout_gap, and lower "
                      "--correction.high, or --rollout-correction-cap for texts.")),
    Metric("reward/group_std", "Spread within groups", "mean over groups"),
    Metric("reward/zero_variance_ratio", "Nothing to learn from", "groups",
           alarm=Rule("The reward has no signal", lambda ratios, *_: all(ratio == 1 for ratio in ratios),
                      "For 5 steps every group scored the same. Look at what the scorer returns for samples/, and "
                      "whether prompts fit it.", others=("reward/min", "reward/max"))),
    Metric("reward/abstained_ratio", "Nothing to learn from", "samples",
           alarm=Rule("Many samples have no score", lambda shares: _mean(shares) > MAX_ABSTAINED,
                      "They are not used in training. Look at the reasons in samples/ and at the scorer's log.")),
    Metric("advantage/eps_share",
           alarm=Rule("The rewards differ by less than the epsilon of advantages", lambda v: v[0] > MAX_EPS_SHARE,
                      "The epsilon of 1e-4 is added to their standard deviation, which shrinks advantages and the "
                      "loss. Multiply the reward, as in --scorer \"1000*NAME\".", window=1)),
    Metric("policy/eps_share",
           alarm=Rule("Gradients are smaller than Adam's epsilon", lambda v: v[0] > MAX_EPS_SHARE,
                      "Weights move by a small fraction of --lr. Multiply the reward, as in --scorer \"1000*NAME\", or "
                      "lower --optim.adam-epsilon.", window=1)),
    Metric("policy/lr", "Learning rate", "rate"),
    Metric("perf/samples_per_s", "Throughput", "samples/s", column=3),
    Metric("perf/peak_memory_mb", "Memory", "peak"),
    Metric("perf/memory_mb", "Memory", "now"),
    Metric("perf/reserved_memory_mb", "Memory", "reserved"),
    Metric("perf/used_memory_mb", "Memory", "used of the device"),
    Metric("reward/busy_s", "Scoring", "worked"),
    Metric("time/reward_wait_s", "Scoring", "waited for"),
)  # fmt: skip

COLUMNS = [row.name for row in sorted(METRICS, key=lambda row: row.column) if row.column]
EXTREMES: "dict[str, Merge]" = {  # metrics of an update, without the prefix policy/
    row.name.removeprefix("policy/"): row.merge for row in METRICS if row.merge != "mean"
}


def last_settings_since(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the step since which each set is evaluated as in the last line, by the prefix of its metrics."""
    last = next((line for line in reversed(lines) if any(map(SINCE.fullmatch, line))), {})
    return {match[1]: value for name, value in last.items() if (match := SINCE.fullmatch(name))}


def drop_stale_evaluations(
    lines: Sequence[Mapping[str, float]], since: Mapping[str, float] | None = None
) -> Sequence[Mapping[str, float]]:
    """Return the lines without evaluations under settings other than the last ones.

    since: the result of `last_settings_since` by default.
    """
    since = last_settings_since(lines) if since is None else since
    if not any(since.values()):
        return lines

    def is_kept(name: str, step: float) -> bool:
        prefix = max((set_prefix for set_prefix in since if name.startswith(set_prefix)), key=len, default="")
        return not SINCE.fullmatch(name) and step >= since.get(prefix, 0)

    return [{name: value for name, value in line.items() if is_kept(name, line["step"])} for line in lines]
