"""Questions about an image from its prompt's metadata; the score is the share of right answers.

    "questions": ["Is there a dog?", {"question": "Is the dog white?", "parents": [0]},
                  {"question": "How many cats are there?", "answer": 3}]
    "vqa_list": [["How many cats are there?", "three"], ["Are the cats black?", "Yes"]]

An answer is yes (the default), no, or a number. A question with `parents`, indices of earlier questions, counts as
right only if they do, as in DPG-Bench (Hu et al., arXiv 2403.05135) and DSG (Cho et al., arXiv 2310.18235). `vqa_list`
has GenEval 2's pairs (Kamath et al., arXiv 2512.16853), whose share of right answers is its TIFA score. Both benchmarks
ask one question at a time; here all questions about an image are asked at once, without its prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from omni_reward.scorers.tasks import QUESTIONS, Message, Range, Task, Words
from omni_reward.wire import Score

TASK = "questions"
MAX_QUESTIONS = 64
YES_NO: Words = ("yes", "no")
COUNTS: Range = (0, 1_000_000)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Question:
    """Question with its right answer (yes, no or a number) and the indices of the questions that it depends on."""

    text: str
    answer: str | int = "yes"
    parents: tuple[int, ...] = ()


def read_questions(meta: Mapping[str, object]) -> list[Question]:
    """Return the questions of a prompt.

    Raises:
        ValueError: there are none or too many, or one is invalid.
    """
    key = "vqa_list" if "vqa_list" in meta and "questions" not in meta else "questions"
    value = meta.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str) or not 1 <= len(value) <= MAX_QUESTIONS:
        raise ValueError(f"{key} must be a list of 1 to {MAX_QUESTIONS} questions, got {value!r:.80}")
    return [_read_question(f"{key}[{i}]", item, i) for i, item in enumerate(value)]


def _read_question(where: str, value: object, index: int) -> Question:
    match value:
        case str():
            value = {"question": value}
        case [text, answer]:
            value = {"question": text, "answer": answer}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a question, got {value!r:.80}")
    text, parents = value.get("question"), value.get("parents", [])
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}.question must be a text, got {text!r:.80}")
    if not isinstance(parents, list) or any(type(parent) is not int or not 0 <= parent < index for parent in parents):
        raise ValueError(f"{where}.parents must be indices of earlier questions, got {parents!r:.80}")
    return Question(text, _read_answer(where, value.get("answer", "yes")), tuple(parents))


def _read_answer(where: str, value: object) -> str | int:
    word = str(value).strip().lower()
    if word in YES_NO:
        return word
    if word in NUMBERS:
        return NUMBERS.index(word)
    if word.isascii() and word.isdecimal() and int(word) <= COUNTS[1]:
        return int(word)
    raise ValueError(f"{where}.answer must be yes, no or a number, got {value!r:.80}")


def checklist(meta: Mapping[str, object]) -> Task:
    """Return the task that asks a prompt's questions.

    Raises:
        ValueError: as `read_questions`.
    """
    questions = read_questions(meta)
    listing = json.dumps({str(i): question.text for i, question in enumerate(questions, start=1)}, ensure_ascii=False)
    fields = {
        str(i): YES_NO if isinstance(question.answer, str) else COUNTS for i, question in enumerate(questions, start=1)
    }
    return Task((Message(QUESTIONS[TASK].replace("{questions}", listing), fields),), partial(_score, questions))


def _score(questions: Sequence[Question], fields: dict[str, Any], prompt: str) -> Score:
    right: list[bool] = []
    for question, answer in zip(questions, fields.values(), strict=True):
        right.append(answer == question.answer and all(right[parent] for parent in question.parents))
    missed = [question.text[:200] for question, is_right in zip(questions, right, strict=True) if not is_right]
    return Score(sum(right) / len(right), parts={"all": float(all(right))}, details={"missed": missed})
