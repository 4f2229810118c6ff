"""Scores of images with thoughts: a scorer of the images, and rules for the thoughts."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from omni_reward import Score
from omni_reward.rules import Rules, grade
from omni_rollout.model import wrap

from omni_rl.flow.scorers import Arrays, Groups, Metas, Pending, References, Scorer, ruled

FLAG = "--thought-reward"


def with_thoughts(scorer: Scorer, rules: Rules) -> Scorer:
    """Return a scorer of images with rules for the thoughts before: a score is the sum of both, which are its parts."""

    def submit(
        media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, whose meta hold the `thought`."""
        thought = ruled(lambda: grade(rules, [str(each["thought"]) for each in meta], meta), FLAG)
        return _Sum(scorer.submit(media, prompts, meta, references, groups), thought)

    return wrap(scorer, submit=submit)


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
