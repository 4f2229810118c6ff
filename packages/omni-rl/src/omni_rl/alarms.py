"""What in a run's metrics should make its owner look: a reward that tells nothing, or one that is being gamed.

Pure functions of the lines of `metrics.jsonl`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Line = Mapping[str, float]

WINDOW = 5  # training steps in a row that a rule looks at
MAX_ABSTAINED = 0.2  # share of samples without a score
NUM_EVALUATIONS = 3  # in a row, for what evaluations show


@dataclass(frozen=True)
class Alarm:
    """What is wrong, the numbers that say so, and where to look."""

    title: str
    numbers: dict[str, float]
    look: str


def new_alarms(lines: Sequence[Line]) -> list[Alarm]:
    """The alarms that hold after the last of `lines` and did not before it: each is told once, until it has gone."""
    before = {alarm.title for alarm in find_alarms(lines[:-1])}
    return [alarm for alarm in find_alarms(lines) if alarm.title not in before]


def find_alarms(lines: Sequence[Line]) -> list[Alarm]:
    """The alarms that hold after the last of `lines`, which are in step order."""
    rules: tuple[Callable[[Sequence[Line]], Alarm | None], ...] = (_dead_reward, _abstentions, _gamed_reward)
    return [alarm for rule in rules if (alarm := rule(lines)) is not None]


def _dead_reward(lines: Sequence[Line]) -> Alarm | None:
    """No group of the last steps had two different scores, so nothing was learned from any of them."""
    last = [line for line in lines if "reward/zero_variance_ratio" in line][-WINDOW:]
    if len(last) < WINDOW or any(line["reward/zero_variance_ratio"] != 1 for line in last):
        return None
    numbers = {name: last[-1][f"reward/{name}"] for name in ("min", "max")}
    return Alarm(
        "The reward tells nothing",
        {"steps": WINDOW} | numbers,
        "Every group scores the same. Look at what the scorer returns for samples/, and whether prompts fit it.",
    )


def _abstentions(lines: Sequence[Line]) -> Alarm | None:
    last = [line["reward/abstained_ratio"] for line in lines if "reward/abstained_ratio" in line][-WINDOW:]
    if len(last) < WINDOW or not sum(last) / len(last) > MAX_ABSTAINED:
        return None
    return Alarm(
        "Many samples have no score",
        {"steps": WINDOW, "share without a score": sum(last) / len(last)},
        "They take no part in training. Look at the reasons in samples/ and at the scorer's log.",
    )


def _gamed_reward(lines: Sequence[Line]) -> Alarm | None:
    """The trained reward rises from evaluation to evaluation while a second scorer's falls."""
    last = [line for line in lines if "eval/watch" in line][-NUM_EVALUATIONS:]
    rewards, watched = ([line[name] for line in last] for name in ("eval/reward", "eval/watch"))
    rises = all(a < b for a, b in pairwise(rewards))
    falls = all(a > b for a, b in pairwise(watched))
    if len(last) < NUM_EVALUATIONS or not (rises and falls):
        return None
    return Alarm(
        "The reward rises while the second scorer falls",
        {"reward, from": rewards[0], "reward, to": rewards[-1], "second, from": watched[0], "second, to": watched[-1]},
        "The model may be gaming the reward. Compare the pictures of these evaluations, raise --kl-coef or lower --lr.",
    )
