"""OCR scorer: the agreement of an image's text with the quoted text in its prompt.

    boxes     a detector finds the text, and each box is read as a line: for images with text anywhere
    line      the whole image is read as one line: for small signs and labels

The score is a formula of `omni_reward.scorers.text`.

Notation: N samples, H height, W width, K boxes.
"""

import warnings
from typing import Any

import numpy as np
from rapidocr import RapidOCR

from omni_reward.scorers.text import FORMULAS, agreement, require_target_text
from omni_reward.wire import Score, Scorer

MAX_ASPECT = {"boxes": 8, "line": 40}  # the cost grows with it, and the recognizer fails on very tall images
DETECTOR_SIDE = 960  # pixels; larger images are downscaled to it, as by PaddleOCR in flow_grpo
MIN_SIDE = 64  # pixels; a smaller image is likely a sign with one line


def load_ocr(*, reading: str = "boxes", formula: str = "strict", threads: int = 1) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, with the text read and the text wanted in `details`.

    An image without text is scored by the formula. Errors of the detector or recognizer are raised, not scored as 0.

    Args:
        reading: key of MAX_ASPECT.
        formula: one of FORMULAS.
        threads: CPU cores per recognition. The threads busy-wait: more than 1 is slower on shared cores.

    Raises:
        ValueError: an argument is invalid.
    """
    if reading not in MAX_ASPECT:
        raise ValueError(f"reading must be one of {list(MAX_ASPECT)}, got {reading!r}")
    if formula not in FORMULAS:
        raise ValueError(f"formula must be one of {list(FORMULAS)}, got {formula!r}")
    if threads < 1:
        raise ValueError(f"threads must be >= 1, got {threads}")
    engine: Any = RapidOCR(
        params={
            "Global.use_det": reading == "boxes",
            "Global.use_cls": False,
            "Global.log_level": "error",  # otherwise it warns about each image without text
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "Det.limit_type": "max",
            "Det.limit_side_len": DETECTOR_SIDE,
            # [C, H, W] with the minimum width, which grows with the image's aspect ratio. The default of 320 is wider
            # than most signs, and padding costs time.
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        pairs = zip(media["image"], prompts, strict=True)
        return [_score_image(engine, reading, formula, image, prompt) for image, prompt in pairs]

    return Scorer(score, version=f"{reading} {formula}")


def _score_image(engine: Any, reading: str, formula: str, image: np.ndarray, prompt: str) -> Score:
    """Return the score of one image [H, W, 3], independent of its batch."""
    target = require_target_text(prompt)
    if isinstance(target, Score):
        return target
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT[reading] * min(height, width):
        return Score(None, abstained=f"the image has an aspect ratio above {MAX_ASPECT[reading]}")
    if reading == "boxes" and min(height, width) < MIN_SIDE:
        warnings.warn(
            f"ocr searches images of {width} x {height} for text; reading=line reads small signs", stacklevel=1
        )
    if reading == "line" and min(height, width) >= 4 * MIN_SIDE:
        warnings.warn(f"ocr reads images of {width} x {height} as one line; reading=boxes finds text", stacklevel=1)
    result = engine(np.ascontiguousarray(image[..., ::-1]))  # BGR
    texts = result.txts or ()
    if reading == "boxes" and texts:
        texts = [texts[i] for i in reading_order(result.boxes)]
    return agreement(target, " ".join(texts), formula)


def reading_order(boxes: np.ndarray) -> list[int]:
    """Return indices of boxes [K, 4, 2] in reading order, along the direction of the boxes.

    Corners are (x, y), clockwise from the top left. Two boxes are on the same line if the distance between their
    centers is less than half of the smaller height.
    """
    along = (boxes[:, 1] - boxes[:, 0]).sum(axis=0)  # long boxes have more weight
    along = along / max(np.hypot(*along), 1e-9)
    centers = boxes.mean(axis=1)  # [K, 2]
    right, down = centers @ along, centers @ (-along[1], along[0])
    heights = np.hypot(*(boxes[:, 3] - boxes[:, 0]).T)
    lines: list[list[int]] = []
    for i in np.argsort(down, kind="stable").tolist():
        first = lines[-1][0] if lines else i
        if lines and down[i] - down[first] < min(heights[i], heights[first]) / 2:
            lines[-1].append(i)
        else:
            lines.append([i])
    return [i for line in lines for i in sorted(line, key=right.__getitem__)]
