"""Alarms for the terminal and the report: rules that detect problems in the lines of `metrics.jsonl`.

The rules are in `omni_rl.run.metrics`. All functions are pure functions of the lines.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omni_rl.run.metrics import METRICS, Rule

Line = Mapping[str, float]
ADVICE = "Look at the steps before it. For a loss or a norm lower --lr, or try --dtype float32."
ALARMS = tuple((row.name, row.alarm) for row in METRICS if row.alarm)


@dataclass(frozen=True)
class Alarm:
    """A step, the title of the rule that holds there, the numbers that show it, and what to check."""

    step: int
    title: str
    numbers: dict[str, float]
    look: str

    @property
    def text(self) -> str:
        """A line for the terminal. The report shows the same, from the log."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        return f"ALARM after step {self.step}: {self.title} ({numbers}). {self.look}"


class Watch:
    """The state of the rules over the lines of a run. It stores only the lines that they need."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[Line]] = {}  # by the rule's title
        self._active: set[str] = set()
        self._non_finite: set[str] = set()  # metrics that have been non-finite at least once

    def __call__(self, line: Line) -> list[Alarm]:
        """Return the alarms that begin with this line. An alarm that ended may begin again."""
        return [alarm for alarm, is_new in self.update(line) if is_new]

    def update(self, line: Line) -> list[tuple[Alarm, bool]]:
        """Return the alarms that hold at this line, each with True if it did not hold before.

        line: the next line in step order, with its `step`.
        """
        self._non_finite |= {name for name, value in line.items() if not math.isfinite(value)}
        alarms = []
        for name, rule in (*ALARMS, *((name, _not_finite(name)) for name in sorted(self._non_finite))):
            names = (name, *rule.others)
            is_stale = rule.on_policy_only and line.get("policy/staleness", 0) > 0
            if is_stale or any(name not in line for name in names):
                continue
            rows = self._rows.setdefault(rule.title, deque(maxlen=None if rule.from_first else rule.window))
            rows.append(line)
            if len(rows) >= rule.window and rule.holds(*([row[name] for row in rows] for name in names)):
                alarms.append((_alarm(rule, names, rows), rule.title not in self._active))
                self._active.add(rule.title)
            else:
                self._active.discard(rule.title)
        return alarms


def find_alarms(lines: Sequence[Line]) -> list[Alarm]:
    """Return one alarm for each rule that held after any of `lines`, for the report, in the order of their steps.

    Its numbers are those of the last step at which it held, plus `steps`, how often it held, and `since`, the first
    step at which it held.
    """
    watch, last, since, counts = Watch(), dict[str, Alarm](), dict[str, float](), Counter[str]()
    for line in lines:
        for alarm, _ in watch.update(line):
            last[alarm.title] = alarm
            since.setdefault(alarm.title, line["step"])
            counts[alarm.title] += 1
    alarms = [
        replace(alarm, numbers=alarm.numbers | {"steps": counts[title], "since": since[title]})
        for title, alarm in last.items()
    ]
    return sorted(alarms, key=lambda alarm: (alarm.step, alarm.title))


def _not_finite(name: str) -> Rule:
    return Rule(f"{name} is not finite", lambda v: not math.isfinite(v[0]), ADVICE, window=1)


def _alarm(rule: Rule, names: Sequence[str], rows: Sequence[Line]) -> Alarm:
    """Return the alarm with the metrics' values in the last row, and the values in the first row that differ."""
    first, last = rows[0], rows[-1]
    numbers = {f"{name}, from": first[name] for name in names if abs(first[name] - last[name]) > 0}
    return Alarm(int(last["step"]), rule.title, numbers | {name: last[name] for name in names}, rule.look)
