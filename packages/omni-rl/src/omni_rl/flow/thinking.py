"""Scores of images with thoughts: a scorer for the images, and rules for the thoughts."""

from collections.abc import Sequence
from dataclasses import replace

from omni_reward import Score
from omni_reward.rules import Rules, grade
from omni_rollout.model import wrap

from omni_rl.flow.scorers import Arrays, Groups, Metas, Pending, References, Scorer, future_of_rules, join_scores

FLAG = "--thought-reward"


def with_thoughts(scorer: Scorer, rules: Rules) -> Scorer:
    """Return a scorer of images with thoughts. Its scores add the image's score and the rules' grade, as parts."""

    def submit(
        media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, with the `thought` in their meta."""
        thought = future_of_rules(lambda: grade(rules, [str(row["thought"]) for row in meta], meta), FLAG)
        return join_scores(scorer.submit(media, prompts, meta, references, groups), thought, _add)

    return wrap(scorer, submit=submit)


def _add(image: Score, thought: Score) -> Score:
    """Return the sum of both scores, or no score if the image has none."""
    if image.value is None:
        return image
    parts = {"image": image.value, "thought": float(thought.value or 0.0)}
    return replace(image, value=sum(parts.values()), parts=parts, details={**image.details, **parts})
