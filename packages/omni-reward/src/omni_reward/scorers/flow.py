"""Rule-based optical-flow scorer: the speed of motion, or its agreement with the direction in the prompt.

    speed = mean over frames and the fastest pixels of |d| fps / h        in frame heights per second
    direction = mean d . u / mean |d|                                     in [-1, 1]; 0 without motion

d is the displacement of a pixel from one frame to the next, by the method of Lucas and Kanade (IJCAI 1981) on a pyramid
(Bouguet, 2000): in a window around each pixel, d solves the normal equations of I(p) = J(p + d) to first order,
iteratively, from coarse to fine frames. The frames are the small ones of `omni_reward.scorers.video`; displacements of
up to an eighth of a frame are found. Areas without texture show no motion. u is the unit vector of the direction that
the prompt names.

With the fastest 5 % of the pixels, speed is the quantity of VBench's dynamic degree (arXiv 2311.17982, with RAFT).

Notation: N samples, T frames, H height, W width, h and w those of small frames.
"""

import re
from itertools import pairwise
from typing import Any

import numpy as np

from omni_reward.media import Arrays, Meta
from omni_reward.scorers.video import gray_frames, shrink
from omni_reward.wire import Score, Scorer

MEASURES = ("speed", "direction")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # down and right
MIN_SIDE = 16  # of the smallest frames of the pyramid
REACH = 3  # pixels from the center of the window to its edge
ROUNDS = 4  # iterations at each size
STIFFNESS = 50.0  # added to the window's mean squared gradient, in levels per pixel, to suppress motion from noise


def load_flow(*, measure: str = "speed", top: float = 1.0) -> Scorer:
    """Load the scorer of `video` [N, T, H, W, 3], uint8, RGB.

    Args:
        measure: `speed`, or `direction` (left, right, up or down, as the prompt names it).
        top: share of the fastest pixels of each frame over which the speed is averaged.

    Raises:
        ValueError: the measure does not exist, or top is not in (0, 1].
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {list(MEASURES)}, got {measure!r}")
    if not 0 < top <= 1:
        raise ValueError(f"top must be above 0 and at most 1, got {top}")

    def score_clip(clip: np.ndarray, prompt: str, fps: float) -> Score:
        if len(clip) < 2 or min(clip.shape[1:3]) < MIN_SIDE:
            return Score(None, abstained=f"the video has fewer than 2 frames or {MIN_SIDE} pixels a side")
        directions = set(re.findall(r"\b(left|right|up|down)(?:wards?)?\b", re.sub(r'"[^"]*"', " ", prompt.lower())))
        if measure == "direction" and len(directions) != 1:
            return Score(None, abstained=f"the prompt must name one of {list(DIRECTIONS)}, got {sorted(directions)}")
        small = gray_frames(clip)[1]
        flows = np.stack([optical_flow(*pair) for pair in pairwise(small)])  # [T - 1, 2, h, w]
        lengths = np.sort(np.hypot(flows[:, 0], flows[:, 1]).reshape(len(flows), -1))
        unit = fps / small.shape[1]
        down, right = (float(mean) * unit for mean in flows.mean(axis=(0, 2, 3)))
        speed = float(lengths[:, -max(1, round(top * lengths.shape[1])) :].mean()) * unit
        parts, value = {"speed": speed, "right": right, "down": down}, speed
        if measure == "direction":
            value = float(np.dot((down, right), DIRECTIONS[directions.pop()])) / max(float(lengths.mean()) * unit, 1e-6)
        return Score(value, parts=parts)

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        rates: list[Any] = [sample["fps"] for sample in meta]  # numbers above 0, see omni_reward.media
        return [score_clip(*args) for args in zip(media["video"], prompts, rates, strict=True)]

    return Scorer(score, media=("video",))


def optical_flow(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the displacement (down, right) [2, h, w], in pixels, of each pixel of a frame [h, w] to the next frame."""
    pyramid = [np.stack([before, after])]
    while min(pyramid[-1].shape[1:]) >= 2 * MIN_SIDE:
        pyramid.append(shrink(pyramid[-1], 2))
    flow = np.zeros((2, 1, 1))
    for first, second in reversed(pyramid):
        h, w = first.shape
        flow = 2 * flow.repeat(2, axis=1).repeat(2, axis=2)
        flow = np.pad(flow, ((0, 0), (0, max(0, h - flow.shape[1])), (0, max(0, w - flow.shape[2]))), "edge")[:, :h, :w]
        gy, gx = np.gradient(first)
        for _ in range(ROUNDS):
            moved, visible = _sample(second, flow)
            error = moved - first
            yy, xy, xx, ey, ex = (_window(visible * x) for x in (gy * gy, gy * gx, gx * gx, gy * error, gx * error))
            yy, xx = yy + STIFFNESS, xx + STIFFNESS
            step = np.stack([xx * ey - xy * ex, yy * ex - xy * ey]) / (xx * yy - xy**2)
            flow = flow - step.clip(-1, 1)
    return flow


def _window(x: np.ndarray) -> np.ndarray:
    """Return the mean over the window around each pixel of [h, w], with edge padding."""
    for _ in range(2):  # down, then across
        sums = np.pad(x, ((REACH + 1, REACH), (0, 0)), "edge").cumsum(axis=0)
        x = (sums[2 * REACH + 1 :] - sums[: -2 * REACH - 1]).T / (2 * REACH + 1)
    return x


def _sample(image: np.ndarray, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the image [h, w] sampled bilinearly at p + flow(p), and True for the positions inside the image."""
    h, w = image.shape
    places = np.indices((h, w)) + flow
    rows, columns = places[0].clip(0, h - 1), places[1].clip(0, w - 1)
    y, x = rows.astype(int).clip(0, h - 2), columns.astype(int).clip(0, w - 2)
    dy, dx = rows - y, columns - x
    above, below = (image[i, x] * (1 - dx) + image[i, x + 1] * dx for i in (y, y + 1))
    return above * (1 - dy) + below * dy, (places == (rows, columns)).all(axis=0)
