"""A scorer of videos for tiny-moving-wan: whether each hop moves the given frame as the prompt says, left or right.

python -m omni_reward.server --scorer python:scripts/moved.py:moved
"""

from collections.abc import Mapping, Sequence

import numpy as np
from omni_reward import Scorer
from omni_reward.scorers.likeness import resize

HOLD, HOP = 4, 8  # frames per hop, and pixels per hop


def score(
    media: Mapping[str, np.ndarray],
    prompts: Sequence[str],
    meta: Sequence[Mapping[str, object]],
    references: Sequence[Sequence[np.ndarray]],
) -> list[float]:
    """Return the mean correlation in [-1, 1] of each hop's last frame with the given frame, moved as the prompt says.

    An unreadable word scores low, a word that moves the other way even lower, and an empty board 0. The given frame
    cannot be replaced by the video's own first frame: full-width stripes look the same wherever they move.
    """
    scores = []
    for video, prompt, (given, *_) in zip(media["video"], prompts, references, strict=True):  # [T, H, W, 3]
        way, pairs = HOP if prompt.endswith("right") else -HOP, []
        first = resize(given, *video.shape[1:3]).mean(axis=-1)
        for hops, frame in enumerate(video[::HOLD][1:].mean(axis=-1), start=1):
            wanted, seen = np.roll(first, hops * way, axis=1), frame - frame.mean()
            wanted = wanted - wanted.mean()
            pairs.append((wanted * seen).sum() / max(np.linalg.norm(wanted) * np.linalg.norm(seen), 1.0))
        scores.append(float(np.mean(pairs)))
    return scores


moved = Scorer(score, media=("video",), references=True)
