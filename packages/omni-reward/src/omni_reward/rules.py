r"""Rules that grade texts: functions of an answer and the other entries of its prompt's line in the file.

{"prompt": "What is 3 + 4?", "answer": "7"}

A reward of `omni_reward.terms` names them: `math + 0.1*format=<think>.*</think>.*`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from omni_reward.terms import FORMAT, Reward, parse
from omni_reward.wire import Score, is_number

Rule = Callable[[str, Mapping[str, object]], float]

_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_NUMBER = re.compile(  # never backtracks into digits; skips all but the last of a number's groups at once if they fail
    r"((?<![\w.])-?(?>\d{1,3}(?:,\d{3})+|\d+)(?:\.\d++)?(?!,*\d))"
    r"|(?<![\w.])\d{1,3}(?:,\d{3}(?=,\d{3}))*+(?=,\d{3})"
)
_SINGLE_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_LETTER_STATED = re.compile(
    r"(?:(?i:\b(?:answer|option|choice)(?:\s+is)?)[\s:=*(\[\"'$]{1,6}|\\boxed\{(?:\\(?:text|mathrm|textbf)\{)?\W*)"
    r"([A-Z](?!\w)|[b-hj-z](?![\w'\u2019]|\.\w)|[ai](?=[)\].,*\"'}$]*(?:\s*$|\n)|[)\]}]))"  # not "a" in "is a good one"
)
# Neither "I" nor the article is an option.
_LETTER = re.compile(r"(?<![\w'\u2019])([B-HJ-Z]|A(?!\s[a-z]))(?![\w'\u2019])")


def exact(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the answer equals the line's "answer", ignoring surrounding whitespace, else 0."""
    return float(answer.strip() == str(meta["answer"]).strip())


def contains(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the answer contains the line's "answer" as a separate word or number, else 0.

    A number does not match within a longer one: 7 is not in 7.5, 1.7, 3/7, 7,000 or -7.
    """
    expected = str(meta["answer"]).strip()
    before, after = r"(?<!\w)", r"(?!\w)"
    if expected[:1].isdigit():
        before += r"(?<!\d[./])(?<!(?<![\w)])[-\u2212])" + r"(?<!\d,)" * bool(re.match(r"\d{3}(?!\d)", expected))
    if expected[-1:].isdigit():
        after += r"(?![./]\d|,\d{3}(?!\d))"
    return float(re.search(before + re.escape(expected) + after, answer) is not None)


def regex(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the line's "pattern", a regular expression, matches in the answer, else 0."""
    return float(_compile('"pattern"', str(meta["pattern"])).search(answer) is not None)


def choice(answer: str, meta: Mapping[str, object]) -> float:
    r"""Return 1 if the option that the answer states last is the line's "answer", a letter, else 0.

    An option is stated as a single letter, as "answer is B", "option (B)" or "\boxed{B}", else as a separate capital.
    """
    if not (right := _SINGLE_LETTER.fullmatch(str(meta["answer"]))):
        raise ValueError(f'"answer" must be one letter, got {meta["answer"]!r:.80}')
    if single := _SINGLE_LETTER.fullmatch(answer):
        return float(single[1].upper() == right[1].upper())
    stated = _LETTER_STATED.findall(answer) or _LETTER.findall(answer)
    return float([letter.upper() for letter in stated[-1:]] == [right[1].upper()])


def number(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the answer and the line's "answer" have the same last number, else 0; "####" may mark it."""
    expected, answered = (numbers(text.rpartition("####")[2]) for text in (str(meta["answer"]), answer))
    if not expected:
        raise ValueError(f'"answer" must hold a number, got {meta["answer"]!r:.80}')
    return float(bool(answered) and float(answered[-1].replace(",", "")) == float(expected[-1].replace(",", "")))


def numbers(text: str) -> list[str]:
    """Return the numbers in a text, with their signs, decimals and commas between thousands."""
    return [number for number in _NUMBER.findall(text) if number]


def math(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if math-verify finds the answer equal to the line's "answer", a number or LaTeX, else 0."""
    from math_verify import parse, verify

    return float(verify(_parse_math(str(meta["answer"])), parse(answer)))


def json_entries(answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the answer is a JSON object, possibly in a code fence, with the entries or keys of "json", else 0."""
    expected = meta["json"]
    if not isinstance(expected, dict | list):
        raise ValueError(f'"json" must be an object or a list of keys, got {expected!r:.80}')
    fenced = _FENCE.fullmatch(answer.strip())
    try:
        parsed = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(parsed, dict) or not all(key in parsed for key in expected):
        return 0.0
    return float(isinstance(expected, list) or all(_is_equal(parsed[key], value) for key, value in expected.items()))


def has_format(pattern: re.Pattern[str], answer: str, meta: Mapping[str, object]) -> float:
    """Return 1 if the pattern matches the entire answer, else 0."""
    return float(pattern.fullmatch(answer) is not None)


SCORER = "scorer"  # the term for the score of a reward server
# The rules, and the entry of a prompt's line that each requires; a new rule is a new row.
RULES: dict[str, tuple[Rule, str]] = {
    "exact": (exact, "answer"),
    "contains": (contains, "answer"),
    "regex": (regex, "pattern"),
    "choice": (choice, "answer"),
    "number": (number, "answer"),
    "math": (math, "answer"),
    "json": (json_entries, "json"),
}


@dataclass(frozen=True)
class Term:
    """Rule with the entry of a prompt's line that it requires, and its file, if any."""

    name: str
    rule: Rule
    key: str = ""
    file: Path | None = None


@dataclass(frozen=True)
class Rules:
    """Reward whose terms are rules; terms that a server scores are only in `reward`."""

    reward: Reward
    terms: tuple[Term, ...]


@lru_cache
def open_rules(text: str, *, remote: bool = False) -> Rules:
    """Return the rules of a reward, as in `omni_reward.terms`.

    A term is one of RULES, `format=PATTERN`, or `python:FILE.py:FUNCTION`, whose file is executed. remote: True if
    SCORER may be a term too, which `grade` does not compute.

    Raises:
        ValueError: the text is not a reward, a rule, file or function does not exist, or a library is not installed.
    """
    reward = parse(text, [*RULES, SCORER])
    known = [*RULES, *[SCORER] * remote]
    return Rules(reward, tuple(_term(*term, known) for term in reward.specs.items() if not remote or term[1] != SCORER))


def _term(name: str, spec: str, known: Sequence[str]) -> Term:
    if spec.startswith(FORMAT):
        return Term(name, partial(has_format, _compile("format", spec.removeprefix(FORMAT))))
    if spec.startswith("python:"):
        from omni_reward.scorers.user import load_user

        try:
            rule: Callable[..., float] = load_user(spec, "answer, line")  # type: ignore[assignment]  # a Rule, as docs/tokens.md says
        except ImportError as exc:
            raise ValueError(f"{spec} needs a package that is not installed: {exc}") from exc
        return Term(name, rule, file=Path(spec.removeprefix("python:").rpartition(":")[0]))
    if spec not in RULES:
        raise ValueError(f"must be one of {', '.join(known)}, format=PATTERN or python:FILE.py:FUNCTION, got {spec!r}")
    if spec == "math" and find_spec("math_verify") is None:
        raise ValueError("math needs math-verify, which is not installed: pip install math-verify")
    return Term(name, *RULES[spec])


def check_meta(rules: Rules, meta: Mapping[str, object], *, flag: str = "--reward") -> None:
    """Check a prompt's line by grading an empty answer.

    Raises:
        ValueError: an entry that a rule requires is missing, or a rule fails on the line.
    """
    check_keys(rules, meta, flag=flag)
    for term in rules.terms:
        try:
            _value(term, "", meta)
        except ValueError:
            raise
        except (Exception, SystemExit) as exc:  # a user's function may raise anything
            raise ValueError(f"{term.name} fails on an empty answer: {type(exc).__name__}: {exc}") from exc


def check_keys(rules: Rules, meta: Mapping[str, object], *, flag: str = "--reward") -> None:
    """Raise ValueError if an entry that a rule requires is missing. flag: the setting that names the rules."""
    for term in rules.terms:
        if term.key and term.key not in meta:
            raise ValueError(f'must have the key "{term.key}", which {flag} {term.name} requires')


def rules_version(rules: Rules) -> str:
    """Return the versions of users' files, as they are now, and of math-verify, where the rules use them."""
    parts = []
    for term in rules.terms:
        if term.file:
            parts.append(f"{term.file.name} {hashlib.sha256(term.file.read_bytes()).hexdigest()[:12]}")
        if term.rule is math:
            try:
                parts.append(f"math-verify {version('math-verify')}")
            except PackageNotFoundError:  # a copy without metadata
                parts.append("math-verify")
    return "; ".join(parts)


def judge(rules: Rules, answers: Sequence[str], metas: Sequence[Mapping[str, object]]) -> list[dict[str, float]]:
    """Return the value of each rule for each answer. metas: the lines of the answers' prompts."""
    return [
        {term.name: _value(term, answer, meta) for term in rules.terms}
        for answer, meta in zip(answers, metas, strict=True)
    ]


def _value(term: Term, answer: str, meta: Mapping[str, object]) -> float:
    value: object = term.rule(answer, meta)
    if not is_number(value):
        if isinstance(value, Coroutine):
            value.close()  # otherwise it warns that it was never awaited
        raise ValueError(f"{term.name} must return a number, got {type(value).__name__}: {value!r:.80}")
    return float(value)  # type: ignore[arg-type]  # a number


def grade(rules: Rules, answers: Sequence[str], metas: Sequence[Mapping[str, object]]) -> list[Score]:
    """Return the reward of each answer; with several rules, their values are the parts."""
    scores = []
    for values in judge(rules, answers, metas):
        value, gate = rules.reward.total(values)
        parts = values | gate if len(rules.terms) > 1 else {}
        scores.append(Score(value, parts=parts, details=parts))
    return scores


@lru_cache
def _compile(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL if name == "format" else 0)
    except re.error as exc:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r:.80}: {exc}") from exc


@lru_cache(maxsize=4096)
def _parse_math(answer: str) -> list[object]:
    """Parse a line's answer, with or without dollar signs around it, with math-verify."""
    from math_verify import parse

    parsed: list[object] = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not parsed:
        raise ValueError(f'"answer" must be one that math-verify can parse, got {answer!r:.80}')
    return parsed


def _is_equal(value: object, expected: object) -> bool:
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)  # True == 1
