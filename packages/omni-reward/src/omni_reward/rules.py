r"""Rules that grade texts: functions of an answer and of what its prompt's line of the file says besides the prompt.

{"prompt": "What is 3 + 4?", "answer": "7"}

A reward names one rule, or several with weights: `math + 0.1*format=<think>.*</think>.*`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from omni_reward.wire import Score

Rule = Callable[[str, Mapping[str, object]], float]

_WEIGHT = re.compile(r"(-?\d+(?:\.\d+)?)\s*\*\s*")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_NUMBER = re.compile(  # never tries fewer digits; of groups that fail, all but the last are passed over at once
    r"((?<![\w.])-?(?>\d{1,3}(?:,\d{3})+|\d+)(?:\.\d++)?(?!,*\d))"
    r"|(?<![\w.])\d{1,3}(?:,\d{3}(?=,\d{3}))*+(?=,\d{3})"
)
_LETTER_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_LETTER_STATED = re.compile(
    r"(?:(?i:\b(?:answer|option|choice)(?:\s+is)?)[\s:=*(\[\"'$]{1,6}|\\boxed\{(?:\\(?:text|mathrm|textbf)\{)?\W*)"
    r"([A-Z](?!\w)|[b-hj-z](?![\w'\u2019]|\.\w)|[ai](?=[)\].,*\"'}$]*(?:\s*$|\n)|[)\]}]))"  # none in "is a good one"
)
_LETTER = re.compile(
    r"(?<![\w'\u2019])([B-HJ-Z]|A(?!\s[a-z]))(?![\w'\u2019])"
)  # neither "I" nor the article is an option


def exact(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the answer is the line's "answer", spaces around it aside, else 0."""
    return float(answer.strip() == str(meta["answer"]).strip())


def contains(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the line's "answer" stands in the answer as a word or a number of its own, else 0.

    A number is not found in a longer one: 7 neither in 7.5, 1.7, 3/7 and 7,000 nor in -7.
    """
    wanted = str(meta["answer"]).strip()
    before, after = r"(?<!\w)", r"(?!\w)"
    if wanted[:1].isdigit():
        before += r"(?<!\d[./])(?<!(?<![\w)])[-\u2212])" + r"(?<!\d,)" * bool(re.match(r"\d{3}(?!\d)", wanted))
    if wanted[-1:].isdigit():
        after += r"(?![./]\d|,\d{3}(?!\d))"
    return float(re.search(before + re.escape(wanted) + after, answer) is not None)


def regex(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the line's "pattern", a regular expression, is found in the answer, else 0."""
    return float(_compile('"pattern"', str(meta["pattern"])).search(answer) is not None)


def choice(answer: str, meta: Mapping[str, object]) -> float:
    r"""1 where the option that the answer states last is the line's "answer", a letter, else 0.

    An option is stated by a lone letter, by "answer is B", "option (B)" or "\boxed{B}", else by a capital on its own.
    """
    if not (right := _LETTER_ALONE.fullmatch(str(meta["answer"]))):
        raise ValueError(f'"answer" must be one letter, got {meta["answer"]!r:.80}')
    if alone := _LETTER_ALONE.fullmatch(answer):
        return float(alone[1].upper() == right[1].upper())
    stated = _LETTER_STATED.findall(answer) or _LETTER.findall(answer)
    return float([letter.upper() for letter in stated[-1:]] == [right[1].upper()])


def number(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the answer's last number equals that of the line's "answer", else 0; of either, that after "####"."""
    right, said = (numbers(text.rpartition("####")[2]) for text in (str(meta["answer"]), answer))
    if not right:
        raise ValueError(f'"answer" must hold a number, got {meta["answer"]!r:.80}')
    return float(bool(said) and float(said[-1].replace(",", "")) == float(right[-1].replace(",", "")))


def numbers(text: str) -> list[str]:
    """The numbers in a text, with their signs, decimals and commas between thousands."""
    return [found for found in _NUMBER.findall(text) if found]


def math(answer: str, meta: Mapping[str, object]) -> float:
    """1 where math-verify finds the answer equal to the line's "answer", a number or LaTeX, else 0."""
    from math_verify import parse, verify

    return float(verify(_right(str(meta["answer"])), parse(answer)))


def json_entries(answer: str, meta: Mapping[str, object]) -> float:
    """1 where the answer is a JSON object, maybe fenced, with the line's "json", entries or a list of keys, else 0."""
    wanted = meta["json"]
    if not isinstance(wanted, dict | list):
        raise ValueError(f'"json" must be an object or a list of keys, got {wanted!r:.80}')
    fenced = _FENCE.fullmatch(answer.strip())
    try:
        said = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(said, dict) or not all(key in said for key in wanted):
        return 0.0
    return float(isinstance(wanted, list) or all(_same(said[key], value) for key, value in wanted.items()))


def has_format(pattern: re.Pattern[str], answer: str, meta: Mapping[str, object]) -> float:
    """1 where the pattern fits the whole answer, else 0."""
    return float(pattern.fullmatch(answer) is not None)


SCORER = "scorer"  # the term that stands for what a server says
# The rules, and the entry of a prompt's line that each asks for. One more is one more row.
RULES: dict[str, tuple[Rule, str]] = {
    "exact": (exact, "answer"),
    "contains": (contains, "answer"),
    "regex": (regex, "pattern"),
    "choice": (choice, "answer"),
    "number": (number, "answer"),
    "math": (math, "answer"),
    "json": (json_entries, "json"),
}


_FORMAT = re.compile(rf"\s*(?:{_WEIGHT.pattern})?format=")
_TERM = re.compile(
    rf"\s*(?:{_WEIGHT.pattern})?(?:(?:{'|'.join([*RULES, SCORER])})\s*|(?:format=|python:).*)", re.DOTALL
)


@dataclass(frozen=True)
class Term:
    """A rule with its weight in the reward, the entry of a prompt's line that it asks for, and its file, if any."""

    name: str
    weight: float
    rule: Rule
    key: str = ""
    file: Path | None = None


@lru_cache
def open_rules(reward: str, *, remote: bool = False) -> tuple[Term, ...]:
    """The terms of a reward, joined by " + ", each maybe with a weight as in `0.1*exact`.

    A term is one of RULES, `format=PATTERN`, or `python:FILE.py:FUNCTION`, whose file is run. A pattern may hold " + ",
    unless what follows reads like a term. remote: SCORER may be a term too, which `grade` does not know.

    Raises:
        ValueError: there is no such rule, file or function, two have one name, or a library is not installed.
    """
    texts: list[str] = []
    for piece in reward.split(" + "):
        if texts and _FORMAT.match(texts[-1]) and not _TERM.fullmatch(piece):
            texts[-1] += f" + {piece}"
        else:
            texts.append(piece.lstrip())
    terms = tuple(_term(text if _FORMAT.match(text) else text.rstrip(), remote=remote) for text in texts)
    if len({term.name for term in terms}) < len(terms):
        raise ValueError(f"must name each rule once, got {reward!r}")
    return terms


def _term(text: str, *, remote: bool) -> Term:
    weighted = _WEIGHT.match(text)
    weight, spec = (float(weighted[1]), text[weighted.end() :]) if weighted else (1.0, text)
    if spec.startswith("format="):
        return Term("format", weight, partial(has_format, _compile("format", spec.removeprefix("format="))))
    if spec.startswith("python:"):
        from omni_reward.scorers.user import load_user

        try:
            own: Callable[..., float] = load_user(spec)  # type: ignore[assignment]  # a Rule, as docs/tokens.md says
        except ImportError as exc:
            raise ValueError(f"{spec} needs what is not installed: {exc}") from exc
        path, _, name = spec.removeprefix("python:").rpartition(":")
        return Term(name, weight, own, file=Path(path))
    if remote and spec == SCORER:
        return Term(SCORER, weight, _unknown)
    if spec not in RULES:
        known = ", ".join([*RULES, *[SCORER] * remote])
        raise ValueError(f"must be one of {known}, format=PATTERN or python:FILE.py:FUNCTION, got {spec!r}")
    if spec == "math" and find_spec("math_verify") is None:
        raise ValueError("math needs math-verify, which is not installed: pip install math-verify")
    return Term(spec, weight, *RULES[spec])


def check_meta(terms: Sequence[Term], meta: Mapping[str, object], *, flag: str = "--reward") -> None:
    """Grade an empty answer.

    Raises:
        ValueError: a prompt's line lacks what a rule asks for, or a rule fails on it.
    """
    for term in terms:
        check_key(term, meta, flag=flag)
        try:
            grade([term], [""], [meta])
        except ValueError:
            raise
        except Exception as exc:  # a user's function may raise anything
            raise ValueError(f"{term.name} fails on an empty answer: {type(exc).__name__}: {exc}") from exc


def check_key(term: Term, meta: Mapping[str, object], *, flag: str = "--reward") -> None:
    """Raise ValueError for a prompt's line without what a rule asks for. flag: that names the rules, for messages."""
    if term.key and term.key not in meta:
        raise ValueError(f'must have the key "{term.key}", which {flag} {term.name} asks for')


def version_of(terms: Sequence[Term]) -> str:
    """A short name for what rules run beside this file: users' files as they are now, and math-verify."""
    found = []
    for term in terms:
        if term.file:
            found.append(f"{term.file.name} {hashlib.sha256(term.file.read_bytes()).hexdigest()[:12]}")
        if term.name == "math":
            try:
                found.append(f"math-verify {version('math-verify')}")
            except PackageNotFoundError:  # a copy that is no package
                found.append("math-verify")
    return "; ".join(found)


def grade(
    terms: Sequence[Term], answers: Sequence[str], metas: Sequence[Mapping[str, object]], *, apart: bool = False
) -> list[Score]:
    """The weighted sums of what the rules say of answers, each with what its prompt's line says.

    apart: what a rule says is a part of the score also where it is the only one.
    """
    scores = []
    for answer, meta in zip(answers, metas, strict=True):
        parts = {term.name: float(term.rule(answer, meta)) for term in terms}
        value = sum(term.weight * parts[term.name] for term in terms)
        own = parts if apart or len(terms) > 1 else {}
        scores.append(Score(value, parts=own, details=own))
    return scores


@lru_cache
def _compile(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL if name == "format" else 0)
    except re.error as exc:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r:.80}: {exc}") from exc


@lru_cache(maxsize=4096)
def _right(answer: str) -> list[object]:
    """What math-verify reads in a line's answer, which needs no dollars around it."""
    from math_verify import parse

    found: list[object] = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not found:
        raise ValueError(f'"answer" must be what math-verify reads, got {answer!r:.80}')
    return found


def _unknown(answer: str, meta: Mapping[str, object]) -> float:
    raise ValueError("a server's score is asked over the wire")


def _same(said: object, wanted: object) -> bool:
    return said == wanted and isinstance(said, bool) == isinstance(wanted, bool)  # True == 1
