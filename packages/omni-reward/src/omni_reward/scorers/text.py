"""The text that a prompt asks for in quotes, and how closely a text that was read agrees with it.

    score = 1 - edit_distance(target, read) / max(len(target), len(read))          in [0, 1]

The length of what was read stands below the line, so extra text costs as much as missing text. Both sides are brought
to one form first: Unicode NFKC, upper case, no white space.
"""

import re
import unicodedata

from rapidfuzz.distance import Levenshtein

from omni_reward.wire import Score

_CURLY_QUOTES = dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\uff02"), '"')


def target_text(prompt: str) -> str | None:
    """Text between the first pair of double quotes, straight or curly; None without a pair."""
    match = re.search(r'"([^"]*)"', prompt.translate(_CURLY_QUOTES))
    return match[1] if match else None


def normalize(text: str) -> str:
    """Text in the one form that both sides are compared in: NFKC, upper case, no white space."""
    return "".join(unicodedata.normalize("NFKC", text).upper().split())


def wanted_text(prompt: str) -> str | Score:
    """The text that the prompt asks for, in one form, or the abstention of a prompt that asks for none."""
    target = normalize(target_text(prompt) or "")
    return target or Score(None, abstained="the prompt has no text between double quotes")


def agreement(target: str, read: str) -> Score:
    """Score of a text that was read, with both texts in `details`; the target is in one form already."""
    return Score(Levenshtein.normalized_similarity(target, normalize(read)), details={"read": read, "target": target})
