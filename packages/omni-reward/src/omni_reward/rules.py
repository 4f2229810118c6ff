"""Rules that grade texts: functions of an answer and of what its prompt's line of the file says besides the prompt.

{"prompt": "What is 3 + 4?", "answer": "7"}
"""

import re
from collections.abc import Callable, Mapping, Sequence

from omni_reward.wire import Score

Rule = Callable[[str, Mapping[str, object]], float]


def exact(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the answer is the line's "answer", spaces around it aside, else 0."""
    return float(answer.strip() == str(meta["answer"]).strip())


def contains(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the line's "answer" stands in the answer as a word of its own, else 0."""
    return float(re.search(rf"(?<!\w){re.escape(str(meta['answer']).strip())}(?!\w)", answer) is not None)


def regex(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the line's "pattern", a regular expression, is found in the answer, else 0."""
    return float(re.search(str(meta["pattern"]), answer) is not None)


# The rules, and the entry of a prompt's line that each asks for. One more is one more row.
RULES: dict[str, tuple[Rule, str]] = {
    "exact": (exact, "answer"),
    "contains": (contains, "answer"),
    "regex": (regex, "pattern"),
}


def grade(rule: Rule, answers: Sequence[str], metas: Sequence[Mapping[str, object]]) -> list[Score]:
    """The scores of answers, each with what its prompt's line says."""
    return [Score(float(rule(answer, meta))) for answer, meta in zip(answers, metas, strict=True)]
