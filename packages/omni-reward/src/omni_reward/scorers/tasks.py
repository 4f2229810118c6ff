"""Questions about an image for a vision-language model, the formats of the answers, and their scores.

A valid answer has exactly the requested fields, each within its range; any other answer raises an error, and the caller
abstains. The answer is a JSON object. The prompt is a JSON string in the question, so that it cannot end its quotation
or pass for our text. The questions of `ocr` and `unifiedreward...` keep their authors' wording, with the raw prompt,
and expect answers in the format that the models were trained with.

| task | fields | score, in [0, 1] |
|---|---|---|
| `alignment` | `reason`; `score`, 0 to 10 | score / 10 |
| `ocr` | `text`: all text in the image | agreement with the quoted text by the formula `contained` of `ocr` |
| `unifiedreward` | `alignment`, `coherence`, `style`, 1 to 5 each | (mean - 1) / 4 |
| `unifiedreward_v1` | `score`, 1 to 5 | score / 5 |
| `edit` | `success`, `preservation`, `naturalness`, `artifacts`, 0 to 10 each, and two reasons | (1) / 10 |
| `unifiedreward_edit` | the same four, 0 to 25 each | (1) / 25 |
| `edit_rating` | `following`, `quality`, 1 to 4 each | (mean - 1) / 3 |

    sqrt(min(success, preservation) * min(naturalness, artifacts))                                          (1)

An edit is shown next to its first reference, and by itself for its naturalness and artifacts.

Sources: `ocr` is compute_score_ocr of verl-omni (verl_omni/utils/reward_score/genrm_ocr.py), which samples at
temperature 0.7. UnifiedReward (arXiv 2503.05236) is scaled as in verl-omni, its first version as in flow_grpo. (1) is
VIEScore (Ku et al., arXiv 2312.14867). `edit_rating` has the scales of EditReward (arXiv 2509.26346).
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from omni_reward.scorers.text import agreement, require_target_text
from omni_reward.wire import Score, parse_json

MAX_TEXT = 4000  # characters of a field

Range = tuple[float, float]
Words = tuple[str, ...]
Kind = Range | Words | None
NUMBER = r"\s*([-+]?\d+\.?\d*)"
_STARS: Range = (1, 5)
_LEVELS: Range = (1, 4)


@dataclass(frozen=True)
class Message:
    """A message to the model and the format of its answer.

    Args:
        text: the question; {prompt} is replaced by the prompt.
        fields: in the answer's order, the range of a number, the words that a text may be, or None for any text.
        pattern: regular expression of the answer, with a group for each field; by default the answer is JSON.
        system: the first message of the chat, if any.
        shows_all: True if the message shows all images, such as the reference before an edit, and not only the last.
    """

    text: str
    fields: Mapping[str, Kind]
    pattern: str = ""
    system: str = ""
    shows_all: bool = False

    def ask(self, prompt: str) -> str:
        """Return the question for a prompt."""
        return self.text.replace("{prompt}", prompt if self.pattern else json.dumps(prompt, ensure_ascii=False))

    def schema(self) -> dict[str, object] | None:
        """Return the JSON schema of the answer, or None if the answer has a pattern."""
        if self.pattern:
            return None
        properties = {name: _schema_of(span) for name, span in self.fields.items()}
        form = {"type": "object", "properties": properties, "required": list(properties)}
        return {**form, "additionalProperties": False}

    def read(self, answer: str) -> dict[str, Any]:
        """Return the fields of an answer.

        Raises:
            ValueError: the answer does not have the requested format.
        """
        fields = self._match_fields(answer) if self.pattern else parse_json(answer, "the answer")
        if not isinstance(fields, dict) or fields.keys() != self.fields.keys():
            raise ValueError(f"the answer must be an object of {list(self.fields)}, got {fields!r:.200}")
        for name, span in self.fields.items():
            _check_field(name, fields[name], span)
        return {name: fields[name] for name in self.fields}

    def _match_fields(self, answer: str) -> dict[str, Any]:
        match = re.search(self.pattern, answer, re.DOTALL | re.IGNORECASE)
        if not match:
            raise ValueError(f"the answer must give {list(self.fields)} as in its format, got {answer!r:.200}")
        texts = zip(self.fields.items(), match.groups(), strict=True)
        return {name: text if span is None else float(text) for (name, span), text in texts}


@dataclass(frozen=True)
class Task:
    """Kind of judgment, based on the answers to one or more questions.

    Args:
        questions: asked one after another; their fields have distinct names.
        score: returns the score for the fields of all answers and the prompt.
        decline: returns the abstention for a prompt that does not suit the questions, or None.
    """

    questions: tuple[Message, ...]
    score: Callable[[dict[str, Any], str], Score]
    decline: Callable[[str], Score | None] = lambda prompt: None

    @property
    def needs_reference(self) -> bool:
        """True if a question is about an edit."""
        return any(question.shows_all for question in self.questions)

    @property
    def version(self) -> str:
        """Digest of the questions and the answer formats."""
        text = "".join(f"{question.text}{question.schema() or question.pattern}" for question in self.questions)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _schema_of(span: Kind) -> dict[str, object]:
    match span:
        case None:
            return {"type": "string"}
        case [str(), *_]:
            return {"type": "string", "enum": list(span)}
    return {"type": "number", "minimum": span[0], "maximum": span[1]}


def _check_field(name: str, value: object, span: Kind) -> None:
    if span is not None and isinstance(span[0], str):
        if value not in span:
            raise ValueError(f"{name} must be one of {list(span)}, got {value!r:.80}")
    elif span is None:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise ValueError(f"{name} must be a text of at most {MAX_TEXT} characters, got {value!r:.80}")
    elif not isinstance(value, int | float) or isinstance(value, bool) or not span[0] <= value <= span[1]:
        raise ValueError(f"{name} must be a number from {span[0]} to {span[1]}, got {value!r:.80}")


def _decline_without_text(prompt: str) -> Score | None:
    target = require_target_text(prompt)
    return target if isinstance(target, Score) else None


def _score_ocr(fields: dict[str, Any], prompt: str) -> Score:
    return agreement(str(require_target_text(prompt)), fields["text"], "contained")


def _score_alignment(fields: dict[str, Any], prompt: str) -> Score:
    return Score(fields["score"] / 10, details={"reason": fields["reason"]})


def _score_v1(fields: dict[str, Any], prompt: str) -> Score:
    return Score(fields["score"] / 5)


def _score_mean(span: Range) -> Callable[[dict[str, Any], str], Score]:
    low, high = span
    return lambda fields, prompt: Score((sum(fields.values()) / len(fields) - low) / (high - low), parts=fields)


def _score_edit(maximum: float) -> Callable[[dict[str, Any], str], Score]:
    """Return the function that computes VIEScore from an edit's numbers, each from 0 to `maximum`."""

    def score(fields: dict[str, Any], prompt: str) -> Score:
        reasons = {name: value for name, value in fields.items() if isinstance(value, str)}
        shares = {name: value / maximum for name, value in fields.items() if name not in reasons}
        consistency = min(shares["success"], shares["preservation"])
        quality = min(shares["naturalness"], shares["artifacts"])
        return Score(math.sqrt(consistency * quality), parts=shares, details=reasons)

    return score


def _edit_questions(maximum: float) -> tuple[Message, ...]:
    """Return the two questions of UnifiedReward-Edit."""
    pattern, span = rf'"score"\s*:\s*\[{NUMBER}\s*,{NUMBER}\s*\]', (0.0, maximum)
    followed = {"success": span, "preservation": span}
    quality_fields = {"naturalness": span, "artifacts": span}
    return (
        Message(QUESTIONS["unifiedreward_edit"], followed, pattern, shows_all=True),
        Message(QUESTIONS["unifiedreward_quality"], quality_fields, pattern),
    )


QUESTIONS = tomllib.loads((files("omni_reward.scorers") / "questions.toml").read_text("utf-8"))
_TEN: Range = (0, 10)
_AXES = {"alignment": _STARS, "coherence": _STARS, "style": _STARS}
_EDIT = {"reason": None, "success": _TEN, "preservation": _TEN}
_EDIT_QUALITY = {"flaws": None, "naturalness": _TEN, "artifacts": _TEN}
_EDIT_RATING = {"following": _LEVELS, "quality": _LEVELS}
_ASSISTANT = "You are a helpful assistant."  # verl-omni's system message
TASKS = {
    "alignment": Task((Message(QUESTIONS["alignment"], {"reason": None, "score": _TEN}),), _score_alignment),
    "ocr": Task(
        (Message(QUESTIONS["ocr"], {"text": None}, r"\A(.*)\Z", system=_ASSISTANT),), _score_ocr, _decline_without_text
    ),
    "unifiedreward": Task(
        (
            Message(
                QUESTIONS["unifiedreward"],
                _AXES,
                r".*?".join(rf"{axis}\s+Score\s*(?:\(1-5\))?\s*:{NUMBER}" for axis in _AXES),
            ),
        ),
        _score_mean(_STARS),
    ),
    "unifiedreward_v1": Task(
        (Message(QUESTIONS["unifiedreward_v1"], {"score": _STARS}, rf"Final Score:{NUMBER}"),), _score_v1
    ),
    "edit": Task(
        (Message(QUESTIONS["edit"], _EDIT, shows_all=True), Message(QUESTIONS["edit_quality"], _EDIT_QUALITY)),
        _score_edit(10),
    ),
    "unifiedreward_edit": Task(_edit_questions(25), _score_edit(25)),
    "edit_rating": Task((Message(QUESTIONS["edit_rating"], _EDIT_RATING, shows_all=True),), _score_mean(_LEVELS)),
}
