"""Scores of images with thoughts: a scorer of the images, and rules for the thoughts."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from omni_reward import Score
from omni_reward.rules import Rules, grade

from omni_rl.flow.scorers import Arrays, Groups, Metas, Pending, References, Scorer, ruled

FLAG = "--thought-reward"


class ThoughtScorer:
    """A scorer of images, and rules for the thoughts before: a score is the sum of both, which are its parts."""

    def __init__(self, scorer: Scorer, rules: Rules) -> None:
        self.scorer, self.rules = scorer, rules
        self.kinds, self.takes_references = scorer.kinds, scorer.takes_references
        self.takes_groups = scorer.takes_groups

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self.scorer.busy_s

    def submit(
        self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, whose meta hold the `thought`."""
        thought = ruled(lambda: grade(self.rules, [str(each["thought"]) for each in meta], meta), FLAG)
        return _Sum(self.scorer.submit(media, prompts, meta, references, groups), thought)

    def close(self) -> None:
        """Free what the scorer holds."""
        self.scorer.close()


class _Sum(Future[list[Score]]):
    """The sums of scores that are still to come."""

    def __init__(self, image: Pending, thought: Pending) -> None:
        super().__init__()
        self.image, self.thought = image, thought

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of either, if there is one; waits for both."""
        return self.image.exception(timeout) or self.thought.exception(timeout)

    def result(self, timeout: float | None = None) -> list[Score]:
        """Return the sum for each sample; none if the image has no score."""
        pairs = zip(self.image.result(timeout), self.thought.result(timeout), strict=True)
        return [image if image.value is None else _add(image, thought) for image, thought in pairs]


def _add(image: Score, thought: Score) -> Score:
    parts = {"image": float(image.value or 0.0), "thought": float(thought.value or 0.0)}
    return replace(image, value=sum(parts.values()), parts=parts, details={**image.details, **parts})
