"""A scorer of videos whose prompts say "left" or "right", for tiny-moving-wan: does each hop move the given frame so?

python -m omni_reward.server --scorer python:scripts/moved.py:moved
"""

from collections.abc import Mapping, Sequence

import numpy as np
from omni_reward import Scorer
from omni_reward.scorers.likeness import fit

HOLD, HOP = 4, 8  # frames that a hop lasts, and pixels that it goes


def score(
    media: Mapping[str, np.ndarray],
    prompts: Sequence[str],
    meta: Sequence[Mapping[str, object]],
    references: Sequence[Sequence[np.ndarray]],
) -> list[float]:
    """Return the mean correlation in [-1, 1] of each hop's last frame with the given frame, moved as the prompt says.

    An unreadable word scores little, one that has gone the other way still less, and an empty board 0. The video's own
    first frame would not do in place of the given one: stripes from side to side look the same wherever they move.
    """
    scores = []
    for video, prompt, (given, *_) in zip(media["video"], prompts, references, strict=True):  # [T, H, W, 3]
        way, pairs = HOP if prompt.endswith("right") else -HOP, []
        first = fit(given, *video.shape[1:3]).mean(axis=-1)
        for hops, frame in enumerate(video[::HOLD][1:].mean(axis=-1), start=1):
            wanted, seen = np.roll(first, hops * way, axis=1), frame - frame.mean()
            wanted = wanted - wanted.mean()
            pairs.append((wanted * seen).sum() / max(np.linalg.norm(wanted) * np.linalg.norm(seen), 1.0))
        scores.append(float(np.mean(pairs)))
    return scores


moved = Scorer(score, media=("video",), references=True)
