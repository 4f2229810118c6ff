"""Alarms: rules on the lines of `metrics.jsonl` that should make a run's owner look, for the terminal and the report.

A reward that tells nothing, one that is being gamed, updates that go wrong. Pure functions of the lines.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

Line = Mapping[str, float]

MAX_ABSTAINED = 0.2  # share of samples without a score
MAX_CLIPPED = 0.3  # share of ratios outside the clip range
MAX_GAP = 1.0  # |ratio - 1| between sampler and trainer before an update; in bfloat16 a rare token's may near it
MIN_EFFECTIVE = 0.5  # share of samples that would be left if all weighed the same


@dataclass(frozen=True)
class Alarm:
    """The step that an alarm speaks of, a title, the numbers that prove it, and where to look."""

    step: int
    title: str
    numbers: dict[str, float]
    look: str


@dataclass(frozen=True)
class Rule:
    """A condition on some metrics.

    Args:
        title: of the alarm.
        names: the metrics; a line that lacks one of them does not count.
        window: lines in a row that the condition sees.
        holds: the condition. Takes a column of `window` values for each of `names`.
        look: where to look when it holds.
    """

    title: str
    names: tuple[str, ...]
    window: int
    holds: Callable[..., bool]
    look: str


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rises(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


ALARMS = (
    Rule("The reward tells nothing", ("reward/zero_variance_ratio", "reward/min", "reward/max"), 5,
         lambda ratios, *_: all(ratio == 1 for ratio in ratios),
         "For 5 steps every group scored the same. Look at what the scorer returns for samples/, and whether prompts "
         "fit it."),
    Rule("Many samples have no score", ("reward/abstained_ratio",), 5, lambda shares: _mean(shares) > MAX_ABSTAINED,
         "They take no part in training. Look at the reasons in samples/ and at the scorer's log."),
    Rule("The reward rises while the second scorer falls", ("eval/reward", "eval/watch"), 3,
         lambda rewards, watched: _rises(rewards) and _rises(watched[::-1]),
         "The model may be gaming the reward. Compare the pictures of these evaluations, raise --kl-coef or lower "
         "--lr."),
    Rule("Updates were skipped", ("policy/skipped_updates",), 1, lambda counts: counts[0] > 0,
         "A gradient was not finite, or no sample had a signal. Look at learning rate, dtype and rewards."),
    Rule("Many ratios are clipped", ("policy/clip_fraction",), 5, lambda shares: _mean(shares) > MAX_CLIPPED,
         "The policy moves far in a step. Look at learning rate, minibatches and clip range."),
    Rule("The engine samples with another policy", ("policy/rollout_gap",), 5, lambda gaps: _mean(gaps) > MAX_GAP,
         "Its log-probs are far from the trainer's. Look at the sync of weights, and at the engine's dtype."),
    Rule("Importance weights leave few samples", ("policy/correction_effective_fraction",), 5,
         lambda shares: _mean(shares) < MIN_EFFECTIVE,
         "A few samples weigh more than all others. Look at policy/rollout_gap, and lower --rollout-correction-cap."),
)  # fmt: skip


class Watch:
    """The alarms of lines that come one after the other; it remembers no more of them than the rules look at."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[Line]] = {}  # by the rule's title
        self._holding: set[str] = set()
        self._broken: set[str] = set()  # metrics that were not finite at least once

    def __call__(self, line: Line) -> list[Alarm]:
        """Return the alarms that this line starts, for the terminal: each is told once, until it has gone."""
        return [_alarm(rule, rows) for rule, rows, is_new in self.see(line) if is_new]

    def see(self, line: Line) -> list[tuple[Rule, list[Line], bool]]:
        """Return the rules that hold with this line, each with the lines it saw and whether it did not hold before.

        line: with its `step`, the next one in step order.
        """
        self._broken |= {name for name, value in line.items() if not math.isfinite(value)}
        found = []
        for rule in (*ALARMS, *map(_not_finite, sorted(self._broken))):
            if all(name in line for name in rule.names):
                rows = self._rows.setdefault(rule.title, deque(maxlen=rule.window))
                rows.append(line)
                if not _holds(rule, rows):
                    self._holding.discard(rule.title)
                    continue
                found.append((rule, list(rows), rule.title not in self._holding))
                self._holding.add(rule.title)
        return found


def find_alarms(lines: Sequence[Line]) -> list[Alarm]:
    """Return one alarm for each rule that held after any of `lines`, for the report, in the order of their steps.

    Its numbers are those of the last time, with `steps`, how often it held, and `since`, the first step of them.
    """
    watch, last, since, counts = Watch(), dict[str, Alarm](), dict[str, float](), Counter[str]()
    for line in lines:
        for rule, rows, _ in watch.see(line):
            last[rule.title] = _alarm(rule, rows)
            since.setdefault(rule.title, line["step"])
            counts[rule.title] += 1
    found = [
        replace(alarm, numbers=alarm.numbers | {"steps": counts[title], "since": since[title]})
        for title, alarm in last.items()
    ]
    return sorted(found, key=lambda alarm: (alarm.step, alarm.title))


def _not_finite(name: str) -> Rule:
    """The rule of a metric that must be finite."""
    return Rule(f"{name} is not finite", (name,), 1, lambda v: not math.isfinite(v[0]), "Look at the steps before it.")


def _holds(rule: Rule, rows: Collection[Line]) -> bool:
    return len(rows) == rule.window and rule.holds(*([row[name] for row in rows] for name in rule.names))


def _alarm(rule: Rule, rows: Sequence[Line]) -> Alarm:
    """The alarm with the metrics' values in the last of the rows, and those in the first that differ."""
    first, last = rows[0], rows[-1]
    numbers = {f"{name}, from": first[name] for name in rule.names if abs(first[name] - last[name]) > 0}
    return Alarm(int(last["step"]), rule.title, numbers | {name: last[name] for name in rule.names}, rule.look)
