"""JPEG scorer: the size of an image as a JPEG file, to be small or large.

    incompressibility = bytes of the file / 1000          in kB
    compressibility = -incompressibility

The file is written at quality 95, with Pillow's other defaults. These are the two rewards of DDPO (Black et al., arXiv
2305.13301, section 5.1). They need neither a model nor a prompt, which suits a quick check of a whole training run.
They do not depend on the content of an image.

Notation: N samples, H height, W width.
"""

import io

import numpy as np
from PIL import Image

from omni_reward.wire import Score, ScoreFn

MODES = ("compressibility", "incompressibility")

QUALITY = 95
MAX_SIDE = 65_500  # limit of Pillow's encoder


def load_jpeg(*, mode: str = "compressibility") -> ScoreFn:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB: kB, negative for compressibility.

    Raises:
        ValueError: the mode does not exist.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}")
    sign = -1.0 if mode == "compressibility" else 1.0

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        return [_score_image(image, sign) for image in media["image"]]

    return score


def num_kilobytes(image: np.ndarray) -> float:
    """Return the size in kB (1000 bytes) of an image [H, W, 3], uint8, RGB, as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
    return file.tell() / 1000


def _score_image(image: np.ndarray, sign: float) -> Score:
    if max(image.shape) > MAX_SIDE:
        return Score(None, abstained=f"the image has a side of more than {MAX_SIDE} pixels")
    return Score(sign * num_kilobytes(image))
