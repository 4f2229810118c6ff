"""OCR scorer: how closely the text in an image agrees with the text in quotes in its prompt.

    score = 1 - edit_distance(target, read) / max(len(target), len(read))          in [0, 1]

The length of what was read stands below the line, so extra text costs as much as missing text. Both sides are brought
to one form first: Unicode NFKC, upper case, no white space. The whole image is taken as one line of text; nothing is
searched for in it, so it suits signs and labels, not pages.

Letters: N samples, H height, W width.
"""

import re
import unicodedata
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidocr import RapidOCR

from omni_reward.wire import Score, ScoreFn

MAX_ASPECT = 40  # width / height; the recogniser's work grows with it

_CURLY_QUOTES = dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\uff02"), '"')


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
    target = normalize(target_text(prompt) or "")
    if not target:
        return Score(None, abstained="the prompt has no text between double quotes")
    height, width = image.shape[:2]
    if width > MAX_ASPECT * height:
        return Score(None, abstained=f"the image is more than {MAX_ASPECT} times as wide as high")
    bgr = np.ascontiguousarray(image[..., ::-1])
    read = "".join(engine(bgr).txts or ())
    return Score(Levenshtein.normalized_similarity(target, normalize(read)), details={"read": read, "target": target})


def target_text(prompt: str) -> str | None:
    """Text between the first pair of double quotes, straight or curly; None without a pair."""
    match = re.search(r'"([^"]*)"', prompt.translate(_CURLY_QUOTES))
    return match[1] if match else None


def normalize(text: str) -> str:
    """Text in the one form that both sides are compared in: NFKC, upper case, no white space."""
    return "".join(unicodedata.normalize("NFKC", text).upper().split())
