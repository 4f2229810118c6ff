"""OCR scorer: how closely the text in an image agrees with the text in quotes in its prompt.

    boxes     a detector finds the text, and each box is read as a line: for images in which text stands somewhere
    line      the whole image is read as one line, and nothing is searched for: for small signs and labels

The score is that of `omni_reward.scorers.text`, by one of its formulas.

Letters: N samples, H height, W width, K boxes.
"""

import warnings
from typing import Any

import numpy as np
from rapidocr import RapidOCR

from omni_reward.scorers.text import FORMULAS, agreement, wanted_text
from omni_reward.wire import Score, Scorer

MAX_ASPECT = {"boxes": 8, "line": 40}  # the work grows with it, and the recognizer fails on what is very high
DETECTOR_SIDE = 960  # pixels; larger images are shrunk to it, as PaddleOCR does in flow_grpo
LEAST_SIDE = 64  # pixels; a smaller image is likely a sign that is one line


def load_ocr(*, reading: str = "boxes", formula: str = "strict", threads: int = 1) -> Scorer:
    """Scorer for `image` [N, H, W, 3], uint8, RGB, with what was read and what was wanted in `details`.

    An image without text scores by the formula. A failure of the detector or the recognizer is raised and never a 0.

    Args:
        reading: key of MAX_ASPECT.
        formula: one of FORMULAS.
        threads: cores that one recognition may use. Its threads spin while they wait, so more than 1 costs more than it
            brings on cores that others use too.

    Raises:
        ValueError: an argument breaks its rule.
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
            "Global.log_level": "error",  # one warning per image without text otherwise
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "Det.limit_type": "max",
            "Det.limit_side_len": DETECTOR_SIDE,
            # [C, H, W], W being the least width: the image's own aspect decides the rest. The default, 320, has the
            # recognizer work through padding that is wider than most signs.
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        pairs = zip(media["image"], prompts, strict=True)
        return [_score_image(engine, reading, formula, image, prompt) for image, prompt in pairs]

    return Scorer(score, version=f"{reading} {formula}")


def _score_image(engine: Any, reading: str, formula: str, image: np.ndarray, prompt: str) -> Score:
    """Score of one image [H, W, 3]; one at a time, so that it cannot depend on the others of its batch."""
    target = wanted_text(prompt)
    if isinstance(target, Score):
        return target
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT[reading] * min(height, width):
        return Score(None, abstained=f"the image has an aspect ratio above {MAX_ASPECT[reading]}")
    if reading == "boxes" and min(height, width) < LEAST_SIDE:
        warnings.warn(
            f"ocr searches images of {width} x {height} for text; reading=line reads small signs", stacklevel=1
        )
    if reading == "line" and min(height, width) >= 4 * LEAST_SIDE:
        warnings.warn(f"ocr reads images of {width} x {height} as one line; reading=boxes finds text", stacklevel=1)
    found = engine(np.ascontiguousarray(image[..., ::-1]))  # BGR
    texts = found.txts or ()
    if reading == "boxes" and texts:
        texts = [texts[i] for i in reading_order(found.boxes)]
    return agreement(target, " ".join(texts), formula)


def reading_order(boxes: np.ndarray) -> list[int]:
    """Indices of boxes [K, 4, 2] line by line from the top, each line from the left, as the boxes are turned.

    Corners go clockwise from the top left, and x comes before y. Boxes are on one line where their centers lie less
    than half of the smaller height apart.
    """
    along = (boxes[:, 1] - boxes[:, 0]).sum(axis=0)  # long boxes weigh more
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
