"""Likeness scorer: how well an edit preserves the parts of an image that it should not change.

    score = max(0, 1 - d / zero_at),    d = mean absolute difference over the three channels, in [0, 1]

The difference from the first reference is measured either pixel by pixel, as the L1 distance of editing benchmarks
(MagicBrush, arXiv 2306.10012), or between the two median colors: if a word covers less than half of a sign, the median
is the color of the background. A box can be excluded, or the comparison restricted to it.

A reference of another size is resized to the sample's by area averaging, without keeping its aspect ratio.

Notation: N samples, H height, W width.
"""

import numpy as np

from omni_reward.media import Arrays, Meta, References
from omni_reward.wire import Score, Scorer

MEASURES = ("pixels", "ground")


def load_likeness(*, measure: str = "pixels", leave_out: str = "", only: str = "", zero_at: float = 1.0) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, and their first references, with d in `details`.

    Args:
        measure: `pixels` compares pixel by pixel, `ground` the median colors.
        leave_out: box to exclude, TOP,LEFT,BOTTOM,RIGHT in shares of height and width.
        only: box to which the comparison is restricted.
        zero_at: d from which the score is 0, in (0, 1]; 1 is the distance between black and white.

    Raises:
        ValueError: an option is invalid, or both boxes are given.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {list(MEASURES)}, got {measure!r}")
    if not 0 < zero_at <= 1:
        raise ValueError(f"zero_at must be above 0 and at most 1, got {zero_at}")
    if leave_out and only:
        raise ValueError(f"only must be empty with leave_out, got {only!r}")
    box = _read_box("leave_out" if leave_out else "only", leave_out or only or "0,0,1,1")

    def score(media: Arrays, prompts: list[str], meta: Meta, references: References) -> list[Score]:
        images = media["image"]
        compared = _box_mask(box, *images.shape[1:3]) ^ bool(leave_out)
        if not compared.any():
            return [Score(None, abstained=f"the box leaves no pixel of {images.shape[1:3]}")] * len(images)
        return [
            _score_image(image, sample_references, compared)
            for image, sample_references in zip(images, references, strict=True)
        ]

    def _score_image(image: np.ndarray, references: tuple[np.ndarray, ...], compared: np.ndarray) -> Score:
        if not references:
            return Score(None, abstained="the sample has no reference")
        image_pixels, reference_pixels = (
            image[compared],
            resize(references[0], *image.shape[:2])[compared],
        )  # [pixels, 3]
        if measure == "ground":
            image_pixels, reference_pixels = np.median(image_pixels, axis=0), np.median(reference_pixels, axis=0)
        difference = float(np.abs(image_pixels - reference_pixels).mean()) / 255
        return Score(max(0.0, 1 - difference / zero_at), details={"difference": round(difference, 6)})

    return Scorer(score, references=True)


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image [H, W, 3] to [height, width, 3], float64, by area averaging."""
    if image.shape[:2] == (height, width):
        return image.astype(np.float64)
    down, across = _means(height, image.shape[0]), _means(width, image.shape[1])
    return np.einsum("hy,yxc,wx->hwc", down, image, across, optimize=True)


def _box_mask(box: list[float], height: int, width: int) -> np.ndarray:
    """Return a mask [height, width] of the pixels whose center is in the box."""
    rows, columns = ((np.arange(side) + 0.5) / side for side in (height, width))
    return ((rows >= box[0]) & (rows < box[2]))[:, None] & ((columns >= box[1]) & (columns < box[3]))


def _means(count: int, length: int) -> np.ndarray:
    """Return weights [count, length] that average `length` pixels into `count`; rows sum to 1."""
    edges, places = np.arange(count + 1) * length / count, np.arange(length)
    overlaps = np.minimum(edges[1:, None], places + 1) - np.maximum(edges[:-1, None], places)
    return overlaps.clip(0) * count / length


def _read_box(name: str, text: str) -> list[float]:
    try:
        box = [float(number) for number in text.split(",")]
    except ValueError:
        box = []
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1):
        rule = "TOP,LEFT,BOTTOM,RIGHT with 0 <= TOP < BOTTOM <= 1 and 0 <= LEFT < RIGHT <= 1"
        raise ValueError(f"{name} must be {rule}, got {text!r:.80}")
    return box
