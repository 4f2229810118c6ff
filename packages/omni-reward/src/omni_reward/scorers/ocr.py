"""OCR scorer: how closely the text in an image agrees with the text in quotes in its prompt.

The score is that of `omni_reward.scorers.text`. The whole image is taken as one line of text; nothing is searched for
in it, so it suits signs and labels, not pages.

Letters: N samples, H height, W width.
"""

from typing import Any

import numpy as np
from rapidocr import RapidOCR

from omni_reward.scorers.text import agreement, wanted_text
from omni_reward.wire import Score, ScoreFn

MAX_ASPECT = 40  # the recogniser's work grows with the width, and it fails on what is very high


def load_ocr(*, threads: int = 1) -> ScoreFn:
    """Score function for `image` [N, H, W, 3], uint8, RGB, with what was read and what was wanted in `details`.

    Args:
        threads: cores that one recognition may use. Its threads spin while they wait, so more than 1 costs more than it
            brings on cores that others use too.

    Raises:
        ValueError: threads is below 1.
    """
    if threads < 1:
        raise ValueError(f"threads must be >= 1, got {threads}")
    engine: Any = RapidOCR(
        params={
            "Global.use_det": False,
            "Global.use_cls": False,
            "Global.log_level": "error",  # one warning per image without text otherwise
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            # [C, H, W], W being the least width: the image's own aspect decides the rest. The default, 320, has the
            # recogniser work through padding that is wider than most signs.
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        return [_score_image(engine, image, prompt) for image, prompt in zip(media["image"], prompts, strict=True)]

    return score


def _score_image(engine: Any, image: np.ndarray, prompt: str) -> Score:
    """Score of one image [H, W, 3]; one at a time, so that it cannot depend on the others of its batch."""
    target = wanted_text(prompt)
    if isinstance(target, Score):
        return target
    if max(image.shape[:2]) > MAX_ASPECT * min(image.shape[:2]):
        return Score(None, abstained=f"the image has an aspect ratio above {MAX_ASPECT}")
    bgr = np.ascontiguousarray(image[..., ::-1])
    return agreement(target, "".join(engine(bgr).txts or ()))
