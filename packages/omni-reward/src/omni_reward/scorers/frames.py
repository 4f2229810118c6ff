"""Image scorers on the frames of a video: `frames:NAME` for any scorer of images.

    mean      mean of the scores of every n-th frame
    positive  mean of those above 0, else 0, as flow_grpo does for text (omni_reward/scorers/text.py)
    min       the minimum: one bad frame costs the whole video
    first, last      the score of that frame

`frames:likeness` with the first frame measures how well a video preserves its first image.

Notation: N samples, T frames, K scored frames.
"""

import math
from dataclasses import replace
from typing import Any

from omni_reward.combine import score_in_batches
from omni_reward.media import Arrays, Meta
from omni_reward.wire import Score, Scorer

PREFIX = "frames:"
FRAMES = ("mean", "positive", "min", "first", "last")


def over_frames(scorer: Scorer, *, frames: str = "mean", every: int = 1) -> Scorer:
    """Return a scorer of `video` [N, T, H, W, 3], uint8, RGB, with the scores of the frames in `details`.

    Args:
        scorer: a scorer of images.
        frames: one of FRAMES.
        every: n to score every n-th frame, beginning with the first.

    Raises:
        ValueError: an argument is invalid.
    """
    if scorer.media != ("image",):
        raise ValueError(f"{PREFIX} must be followed by a scorer of images, got one of {', '.join(scorer.media)}")
    if scorer.groups:
        raise ValueError(f"{PREFIX} must be followed by a scorer of single images, got one of groups")
    if frames not in FRAMES:
        raise ValueError(f"frames must be one of {list(FRAMES)}, got {frames!r}")
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    chosen = {"first": slice(0, 1), "last": slice(-1, None)}.get(frames, slice(None, None, every))

    def score(media: Arrays, prompts: list[str], meta: Meta, *rest: Any) -> list[Score]:
        references, since = rest if scorer.references else ((), *rest)
        scores = []
        for i, clip in enumerate(media["video"][:, chosen]):  # [K, H, W, 3]
            sample_references = [references[i]] * len(clip) if references else ()
            images, texts, lines = {"image": clip}, [prompts[i]] * len(clip), [meta[i]] * len(clip)
            scores.append(score_in_batches(scorer, images, texts, lines, sample_references, since))
        return [_join(frame_scores, frames) for frame_scores in scores]

    return Scorer(
        score, media=("video",), version=scorer.version, references=scorer.references, timed=True, move=scorer.move
    )


def _join(scores: list[Score], frames: str) -> Score:
    """Return the score of a video from the scores of its frames."""
    values = [round(score.value, 6) for score in scores if score.value is not None]
    if len(values) < len(scores):
        return next(score for score in scores if score.value is None)
    if frames in ("mean", "positive"):
        parts = {name: math.fsum(score.parts[name] for score in scores) / len(scores) for name in scores[0].parts}
        counted = [value for value in values if value > 0] or [0.0] if frames == "positive" else values
        return Score(math.fsum(counted) / len(counted), parts=parts, details={"frames": values})
    lowest = scores[values.index(min(values))]
    return replace(lowest, details={**lowest.details, "frames": values})
