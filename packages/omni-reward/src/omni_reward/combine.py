"""Several scorers as one: a weighted sum, with gates that veto.

    0.7*ocr + 0.3*jpeg
    0.7*ocr + 0.3*vlm as look if clip >= 0.2 and look >= 0.5 else -1

A term is a scorer with a weight (1 where none is given) and, after `as`, a name of its own, which a scorer needs that
occurs twice. The sum is taken over the scores as they are: a weight also makes up for a scorer's unit. Where the unit
should not matter, the trainer can normalize every scorer by itself: each one's raw score stands in `Score.parts` under
its name, and `stack_parts` puts them into a table.

A gate names a scorer, which may be one of the sum, and the least score that passes. A sample below it gets the number
after `else`, the veto, or its sum where that is lower still, so that a veto never pays. A veto is a score and no
abstention: a sample that cheats has to end up below the others of its group, while one that abstains would be left out
and never unlearned. `Score.parts["gate"]` is 1 where all gates passed and 0 where one did not.

When a scorer abstains on a sample, there is neither a sum nor a verdict, and the combination abstains.

Letters: N samples, R scorers.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_reward.media import Arrays, Meta, References
from omni_reward.wire import Score, Scorer

GATE = "gate"  # the part that is 1 where all gates passed and 0 where not
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_SCORER = r"(?P<spec>(?:frames:)?(?:python:[^\s*]+?\.py:[A-Za-z_]\w*|[A-Za-z_]\w*))(?:\s+as\s+(?P<name>[A-Za-z_]\w*))?"
_WHOLE = re.compile(rf"(?P<sum>.+?)(?:\s+if\s+(?P<gates>.+)\s+else\s+(?P<veto>[+-]?{_NUMBER}))?\s*")
_TERM = re.compile(rf"\s*(?P<sign>[+-]?)\s*(?:(?P<weight>{_NUMBER})\s*\*\s*)?{_SCORER}\s*(?=[+-]|$)")
_GATE = re.compile(rf"\s*{_SCORER}\s*>=\s*(?P<least>[+-]?{_NUMBER})\s*")
_EXAMPLE = "'0.7*ocr + 0.3*jpeg' or '0.7*ocr + 0.3*jpeg if clip >= 0.2 else 0'"


@dataclass(frozen=True)
class Recipe:
    """A combination as it was written.

    Args:
        specs: what to load for each scorer, by the scorer's name: all that the sum and the gates need.
        weights: weight in the sum, by name; finite and not 0.
        gates: least score that passes, by name; finite.
        veto: score of a sample that does not pass; None without gates.
    """

    specs: Mapping[str, str]
    weights: Mapping[str, float]
    gates: Mapping[str, float]
    veto: float | None

    @property
    def is_plain(self) -> bool:
        """True for one scorer as it is."""
        return not self.gates and list(self.weights.values()) == [1.0]


def parse(text: str) -> Recipe:
    """The combination that a text describes.

    Raises:
        ValueError: it does not read as in this module's docstring.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise ValueError(f"scorer must be a name or read like {_EXAMPLE}, got {text!r:.200}")
    specs: dict[str, str] = {}
    weights: dict[str, float] = {}
    left = whole["sum"]
    while left:
        term = _TERM.match(left)
        if term is None:
            raise ValueError(f"scorer must be a name or read like {_EXAMPLE}, got {left!r:.200} in it")
        left = left[term.end() :]
        name = _add(specs, term)
        if name in weights:
            raise ValueError(f"scorer must not have two terms {name!r}; 'as' gives one a name of its own")
        weights[name] = _finite(term["sign"] + (term["weight"] or "1"))
        if weights[name] == 0:
            raise ValueError(f"a weight must not be 0, got {term[0].strip()!r:.200}")
    gates: dict[str, float] = {}
    for part in re.split(r"\s+and\s+", whole["gates"]) if whole["gates"] else []:
        gate = _GATE.fullmatch(part)
        if gate is None:
            raise ValueError(f"a gate must read like 'clip >= 0.2', got {part!r:.200}")
        name = gate["spec"] if gate["spec"] in specs and not gate["name"] else _add(specs, gate)
        if name in gates:
            raise ValueError(f"scorer must not have two gates {name!r}")
        gates[name] = _finite(gate["least"])
    return Recipe(specs, weights, gates, _finite(whole["veto"]) if whole["veto"] else None)


def combine(recipe: Recipe, scorers: Mapping[str, Scorer]) -> Scorer:
    """Scorer of the combination; it takes all kinds of media that its scorers take, and references if one does.

    Args:
        recipe: what to combine.
        scorers: scorer by name, for each name in recipe.specs. None is called with more than its batch size.
    """
    sizes = [scorer.batch_size for scorer in scorers.values()]
    known = [size for size in sizes if size is not None]
    media = sorted({kind for scorer in scorers.values() for kind in scorer.media})
    versions = [f"{name}: {scorer.version}" for name, scorer in scorers.items() if scorer.version]

    def score(media: Arrays, prompts: list[str], meta: Meta, *more: Any) -> list[Score]:
        given = (media, prompts, meta, *(more if wants else ((), *more)))
        columns = {name: score_in_batches(scorer, *given) for name, scorer in scorers.items()}
        return [_join(recipe, dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    batch_size = min(known) if len(known) == len(sizes) else None
    wants = any(scorer.references for scorer in scorers.values())
    version = "; ".join(versions)
    return Scorer(score, media=tuple(media), batch_size=batch_size, version=version, references=wants, timed=True)


def stack_parts(scores: Sequence[Score], names: Sequence[str]) -> np.ndarray:
    """Parts [N, R], float64, of N scores by R names; NaN where a score has no such part.

    As rewards for `omni_losses.multi_reward_advantages`, which normalizes each column by itself. Leave out the samples
    that the trainer masks anyway, and add the column "gate" where a veto should count.
    """
    return np.array([[score.parts.get(name, math.nan) for name in names] for score in scores]).reshape(-1, len(names))


def _add(specs: dict[str, str], found: re.Match[str]) -> str:
    """Name of the scorer that was found, now also in specs."""
    spec = found["spec"]
    name = found["name"] or spec.rpartition(":")[2]
    if name == GATE:
        raise ValueError(f"scorer must not be called {GATE!r}; 'as' gives it another name")
    if specs.setdefault(name, spec) != spec:
        raise ValueError(f"scorer must not call both {specs[name]} and {spec} {name!r}; 'as' gives one another name")
    return name


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number must be finite, got {text:.80}")
    return number


def score_in_batches(
    scorer: Scorer, media: Arrays, prompts: list[str], meta: Meta, references: References, since: float
) -> list[Score]:
    """Scores of N samples by a scorer that is called with no more than its batch size. since: as `Scorer.timed`."""
    scores: list[Score] = []
    size = scorer.batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        piece = slice(start, start + size)
        own = {kind: media[kind][piece] for kind in scorer.media}
        scores += scorer(own, prompts[piece], meta[piece], references[piece], since=since)
    return scores


def _join(recipe: Recipe, scores: Mapping[str, Score]) -> Score:
    """Score of one sample, from its score by each scorer; details that several give have the scorer's name before."""
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
    total = math.fsum(weight * values[name] for name, weight in recipe.weights.items())
    if recipe.veto is None:
        return Score.of(total, parts=parts, details=details)
    passed = all(values[name] >= least for name, least in recipe.gates.items())
    return Score.of(total if passed else min(total, recipe.veto), parts=parts | {GATE: float(passed)}, details=details)
