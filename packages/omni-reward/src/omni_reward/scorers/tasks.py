"""Questions about an image for a vision-language model, the forms of the answers, and their scores.

A valid answer is a JSON object with exactly the requested fields, each within its range; any other raises, and the
caller abstains. The prompt is a JSON string in the question, so that it cannot end its quotation or pass for our text.

| task | fields | score |
|---|---|---|
| `ocr` | `text`: all text in the image | agreement with the quoted text in the prompt, as in `ocr`, in [0, 1] |
| `ocr_contained` | as `ocr` | the same with the formula `contained`, as in verl-omni |
| `alignment` | `reason`; `score`, 0 to 10 | score / 10 |
| `rating` | `alignment`, `coherence`, `style`, 1 to 5 each | (mean - 1) / 4, in [0, 1] |

The three aspects of `rating` and their range are those of UnifiedReward (arXiv 2503.05236), second version. The text is
ours, not that of its training.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from omni_reward.scorers.text import agreement, wanted_text
from omni_reward.wire import Score

MAX_TEXT = 4000  # characters of a field

Range = tuple[float, float]
Words = tuple[str, ...]
Kind = Range | Words | None
_SCALE: Range = (0, 10)
_STARS: Range = (1, 5)


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Args:
        question: its text; {prompt} is replaced by the prompt.
        fields: range of each number in the answer, words of which a text must be one, or None for any text; in the
            order of the answer.
        score: returns the score of a valid answer, given the prompt.
        decline: returns the abstention of a prompt that does not suit the question, else None.
    """

    question: str
    fields: Mapping[str, Kind]
    score: Callable[[dict[str, Any], str], Score]
    decline: Callable[[str], Score | None] = lambda prompt: None

    def ask(self, prompt: str) -> str:
        """Return the question for a prompt."""
        return self.question.replace("{prompt}", json.dumps(prompt, ensure_ascii=False))

    def schema(self) -> dict[str, object]:
        """Return the JSON schema of the answer."""
        properties = {name: _schema_of(span) for name, span in self.fields.items()}
        form = {"type": "object", "properties": properties, "required": list(properties)}
        return {**form, "additionalProperties": False}

    def read(self, answer: str) -> dict[str, Any]:
        """Return the fields of an answer.

        Raises:
            ValueError: the answer does not have the requested form.
        """
        try:
            fields = json.loads(answer)
        except RecursionError as exc:
            raise ValueError("the answer is nested too deeply") from exc
        if not isinstance(fields, dict) or fields.keys() != self.fields.keys():
            raise ValueError(f"the answer must be an object of {list(self.fields)}, got {fields!r:.200}")
        for name, span in self.fields.items():
            _check_field(name, fields[name], span)
        return {name: fields[name] for name in self.fields}

    @property
    def version(self) -> str:
        """The digest of the question and the form."""
        return hashlib.sha256(f"{self.question}{self.schema()}".encode()).hexdigest()[:12]


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
    wanted = wanted_text(prompt)
    return wanted if isinstance(wanted, Score) else None


def _score_ocr(fields: dict[str, Any], prompt: str) -> Score:
    return agreement(str(wanted_text(prompt)), fields["text"])


def _score_contained(fields: dict[str, Any], prompt: str) -> Score:
    return agreement(str(wanted_text(prompt)), fields["text"], "contained")


def _score_alignment(fields: dict[str, Any], prompt: str) -> Score:
    return Score(fields["score"] / _SCALE[1], details={"reason": fields["reason"]})


def _score_rating(fields: dict[str, Any], prompt: str) -> Score:
    low, high = _STARS
    return Score((sum(fields.values()) / len(fields) - low) / (high - low), parts=fields)


QUESTIONS = tomllib.loads((files("omni_reward.scorers") / "questions.toml").read_text("utf-8"))
TASKS = {
    "ocr": Task(QUESTIONS["ocr"], {"text": None}, _score_ocr, _decline_without_text),
    "ocr_contained": Task(QUESTIONS["ocr"], {"text": None}, _score_contained, _decline_without_text),
    "alignment": Task(QUESTIONS["alignment"], {"reason": None, "score": _SCALE}, _score_alignment),
    "rating": Task(QUESTIONS["rating"], {"alignment": _STARS, "coherence": _STARS, "style": _STARS}, _score_rating),
}
