"""The quoted text of a prompt, and its agreement with a text that was read.

Let D be the edit distance from the read text to the target. A score in [0, 1] has one of three formulas:

    strict       1 - D / max(len(target), len(read))
    contained    1 if the read text contains the target, else 1 - min(D, len(target)) / len(target)
    capped       1 - min(D, len(target)) / len(target)

With `strict`, extra text costs as much as missing text. With the others, extra text costs nothing or little. Both texts
are normalized first: Unicode NFKC, upper case, no whitespace. The sources compare in lower case.

Source of `contained`: OcrScorer in flow_grpo/ocr.py of github.com/yifan123/flow_grpo, for images, and
`_levenshtein_score` in verl_omni/utils/reward_score/genrm_ocr.py of github.com/verl-project/verl-omni. Source of
`capped`: OcrScorer_video_or_image in flow_grpo/ocr.py, which averages the scores above 0 of every fourth frame.
"""

import re
import unicodedata

from rapidfuzz.distance import Levenshtein

from omni_reward.wire import Score

FORMULAS = ("strict", "contained", "capped")
_CURLY_QUOTES = dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\uff02"), '"')


def target_text(prompt: str) -> str | None:
    """Return the text between the first pair of double quotes, straight or curly, or None without a pair."""
    match = re.search(r'"([^"]*)"', prompt.translate(_CURLY_QUOTES))
    return match[1] if match else None


def normalize(text: str) -> str:
    """Normalize a text for comparison: NFKC, upper case, no whitespace."""
    return "".join(unicodedata.normalize("NFKC", text).upper().split())


def require_target_text(prompt: str) -> str | Score:
    """Return the normalized quoted text of the prompt, or the abstention for a prompt without one."""
    target = normalize(target_text(prompt) or "")
    return target or Score(None, abstained="the prompt has no text between double quotes")


def agreement(target: str, read: str, formula: str = "strict") -> Score:
    """Return the score of a read text, with both texts in `details`; the target must be normalized."""
    text = normalize(read)
    if formula == "strict":
        value = Levenshtein.normalized_similarity(target, text)
    elif formula == "contained" and target in text:
        value = 1.0
    else:
        value = 1 - min(Levenshtein.distance(target, text), len(target)) / len(target)
    return Score(value, details={"read": read, "target": target})
