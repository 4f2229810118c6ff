"""Scores of samples that a thought came before: a scorer of what was drawn, and rules for what was thought."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from omni_reward import RewardError, Score
from omni_reward.rules import Rules, grade

from omni_rl.flow.scorers import Arrays, Metas, Pending, References, Scorer

FLAG = "--thought-reward"


class ThoughtScorer:
    """A scorer of what was drawn, and rules for the thoughts before: the sum of both, which are parts of the score."""

    def __init__(self, scorer: Scorer, rules: Rules) -> None:
        self.scorer, self.rules = scorer, rules
        self.kinds, self.takes_references = scorer.kinds, scorer.takes_references

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self.scorer.busy_s

    def submit(self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None) -> Pending:
        """The future scores of N samples, whose meta say the `thought`."""
        said: Pending = Future()
        try:
            said.set_result(grade(self.rules, [str(each["thought"]) for each in meta], meta))
        except Exception as exc:  # a user's function may raise anything
            failed = RewardError(f"a rule of {FLAG} fails: {type(exc).__name__}: {exc}")
            failed.__cause__ = exc
            said.set_exception(failed)
        return _Sum(self.scorer.submit(media, prompts, meta, references), said)

    def close(self) -> None:
        """Free what the scorer holds."""
        self.scorer.close()


class _Sum(Future[list[Score]]):
    """The sums of scores that are still to come."""

    def __init__(self, drawn: Pending, said: Pending) -> None:
        super().__init__()
        self.drawn, self.said = drawn, said

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What either of them failed with, if one did; waits for both."""
        return self.drawn.exception(timeout) or self.said.exception(timeout)

    def result(self, timeout: float | None = None) -> list[Score]:
        """Of each sample the sum; none where what was drawn has no score."""
        pairs = zip(self.drawn.result(timeout), self.said.result(timeout), strict=True)
        return [drawn if drawn.value is None else _add(drawn, said) for drawn, said in pairs]


def _add(drawn: Score, said: Score) -> Score:
    parts = {"image": float(drawn.value or 0.0), "thought": float(said.value or 0.0)}
    return replace(drawn, value=sum(parts.values()), parts=parts, details={**drawn.details, **parts})
