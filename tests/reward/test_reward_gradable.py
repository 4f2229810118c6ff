"""Prompts to which a reward gives no score are found by their texts and lines, as the scorers themselves say."""

import numpy as np
import pytest
from omni_reward.scorers import load_scorer
from omni_reward.scorers.gradable import find_fault

QUESTIONS = {"questions": ["Is it red?"]}
WISH = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
GRADES = {  # reward and options -> prompts that it grades, and prompts that it does not, with the reason
    "ocr": (("a sign that says “Open”", {}), ("a cat", {}), "ocr: the prompt has no text between double quotes"),
    "frames:ocr": (('a "b"', {}), ("a cat", {}), "frames:ocr: the prompt has no text"),
    "0.5*ocr + 0.5*jpeg": (('a "b"', {}), ('a ""', {}), "ocr: the prompt has no text"),
    "ocr if color >= 0.5 else -1": (('a red "b"', {}), ('a "b"', {}), "color: the prompt must name one color"),
    "color": (("a red cat", {}), ("a red and blue cat", {}), "color: the prompt must name one color"),
    "pitch": (("a tone of 440 Hz", {}), ("a tone", {}), "pitch: the prompt must name one pitch, such as 440 Hz or A4"),
    "geneval": (("a cat", WISH), ("a cat", {"tag": "x"}), "geneval: include must be a list of objects, got None"),
    "vlm task=questions": (("a cat", QUESTIONS), ("a cat", {}), "vlm: questions must be a list of 1 to"),
    "vlm task=ocr": (('a "b"', {}), ("a", {}), "vlm: the prompt has no text"),
    "vlm as look task=ocr": (('a "b"', {}), ("a", {}), "vlm: the prompt has no text"),
    "rules:number": (("a", {"answer": "1"}), ("a", {}), 'must have the key "answer", which --scorer number requires'),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADES)
def test_a_prompt_without_a_score_is_known_before_it_is_sampled(name: str) -> None:
    good, bad, why = GRADES[name]
    *reward, option = name.rsplit(" ", 1) if "task=" in name else (name, "")
    options = dict([option.split("=", 1)]) if option else {}
    fault = find_fault(" ".join(reward), options)
    assert fault(*good) == ""
    assert fault(*bad).startswith(why)


@pytest.mark.parametrize("name", ["jpeg", "python:gone.py:f", "rules:python:gone.py:f", "vlm", "video"])
def test_other_rewards_take_any_prompt(name: str) -> None:
    assert find_fault(name, {})("a", {}) == ""


@pytest.mark.parametrize("text", ["a cat", "a red cat", "a red and blue cat"])
def test_a_scorer_abstains_exactly_where_it_was_foretold(text: str) -> None:
    [score] = load_scorer("color")({"image": np.zeros((1, 8, 8, 3), np.uint8)}, [text], [{}])
    assert (score.value is None) == bool(find_fault("color", {})(text, {}))
