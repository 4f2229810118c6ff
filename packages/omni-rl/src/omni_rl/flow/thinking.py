"""Scores of images with thoughts: a scorer of the images, and rules for the thoughts."""

from collections.abc import Sequence
from dataclasses import replace

from omni_reward import Score
from omni_reward.rules import Rules, grade
from omni_rollout.model import wrap

from omni_rl.flow.scorers import Arrays, Groups, Metas, Pending, References, Scorer, joined, ruled

FLAG = "--thought-reward"


def with_thoughts(scorer: Scorer, rules: Rules) -> Scorer:
    """Return a scorer of images with rules for the thoughts before: a score is the sum of both, which are its parts."""

    def submit(
        media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, whose meta hold the `thought`."""
        thought = ruled(lambda: grade(rules, [str(each["thought"]) for each in meta], meta), FLAG)
        return joined(scorer.submit(media, prompts, meta, references, groups), thought, _add)

    return wrap(scorer, submit=submit)


def _add(image: Score, thought: Score) -> Score:
    """Return the sum of both scores; none if the image has no score."""
    if image.value is None:
        return image
    parts = {"image": image.value, "thought": float(thought.value or 0.0)}
    return replace(image, value=sum(parts.values()), parts=parts, details={**image.details, **parts})
