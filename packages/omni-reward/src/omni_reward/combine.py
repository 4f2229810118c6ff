"""Combinations of scorers: rewards of `omni_reward.terms` whose terms are scorers.

The raw scores are summed, so a weight must also account for a scorer's scale. A trainer can instead normalize each
scorer separately: `Score.parts` has each raw score under the scorer's name, and `stack_parts` returns them as a table.
If a scorer abstains on a sample, so does the combination.

Notation: N samples, R scorers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_reward.media import Arrays, Meta, References
from omni_reward.terms import Reward
from omni_reward.wire import Score, Scorer


def combine(reward: Reward, scorers: Mapping[str, Scorer]) -> Scorer:
    """Return the scorer of a reward; it takes all its scorers' media, and references or groups if any scorer does.

    Args:
        reward: the weighted sum.
        scorers: scorer by name, for each name in reward.specs. Each is called with at most its batch size.
    """
    sizes = {scorer.batch_size for scorer in scorers.values()}
    media = sorted({kind for scorer in scorers.values() for kind in scorer.media})
    versions = [f"{name}: {scorer.version}" for name, scorer in scorers.items() if scorer.version]

    def score(media: Arrays, prompts: list[str], meta: Meta, *rest: Any) -> list[Score]:
        args = (media, prompts, meta, *(rest if takes_references else ((), *rest)))
        columns = {name: score_in_batches(scorer, *args) for name, scorer in scorers.items()}
        return [_join(reward, dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    takes_references = any(scorer.references for scorer in scorers.values())
    groups = any(scorer.groups for scorer in scorers.values())
    batch_size = None if groups or None in sizes else min(filter(None, sizes))
    movers = [scorer.move for scorer in scorers.values() if scorer.move]

    def move(asleep: bool) -> None:
        for mover in movers:
            mover(asleep)

    options: Any = {"references": takes_references, "timed": True, "groups": groups, "move": move if movers else None}
    return Scorer(score, tuple(media), batch_size=batch_size, version="; ".join(versions), **options)


def stack_parts(scores: Sequence[Score], names: Sequence[str]) -> np.ndarray:
    """Return the parts of N scores under R names as [N, R], float64, with NaN for missing parts.

    These are rewards for `omni_losses.multi_reward_advantages`, which normalizes each column separately. Leave out the
    samples that the trainer masks, and add the column "gate" if a veto should count.
    """
    return np.array([[score.parts.get(name, math.nan) for name in names] for score in scores]).reshape(-1, len(names))


def score_in_batches(
    scorer: Scorer, media: Arrays, prompts: list[str], meta: Meta, references: References, since: float
) -> list[Score]:
    """Return N scores of a scorer, called with at most its batch size. since: as in `Scorer.timed`."""
    scores: list[Score] = []
    size = scorer.batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        piece = slice(start, start + size)
        batch = {kind: media[kind][piece] for kind in scorer.media}
        scores += scorer(batch, prompts[piece], meta[piece], references[piece], since=since)
    return scores


def _join(reward: Reward, scores: Mapping[str, Score]) -> Score:
    """Return a sample's score from the scorers' scores; details of several scorers are prefixed with its name."""
    values = {name: score.value for name, score in scores.items() if score.value is not None}
    parts = values | {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
    givers = Counter(key for score in scores.values() for key in score.details)
    details = {
        key if givers[key] == 1 else f"{name}.{key}": value
        for name, score in scores.items()
        for key, value in score.details.items()
    }
    if len(values) < len(scores):
        reasons = [f"{name}: {score.abstained}" for name, score in scores.items() if score.abstained]
        return Score(None, abstained="; ".join(reasons), parts=parts, details=details)
    value, gate = reward.total(values)
    return Score.of(value, parts=parts | gate, details=details)
