"""The rules that grade texts, on cases made by hand."""

import random
import re
import sys
from types import ModuleType

import pytest
from omni_reward.rules import check_meta, grade, numbers, open_rules, rules_version


def value(reward, said, /, **meta):
    [score] = grade(open_rules(reward), [said], [meta])
    return score.value


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", 1), (" (b). ", 1), ("B) Paris", 1), ("The answer is B because I saw it.", 1), ("Answer: **B**", 1),
        (r"Not A, so \boxed{B}", 1), ("A, C or B? It is B, I think.", 1), ("First B. The answer is C.", 0),
        ("A bee. B", 1), ("B is what I'd say", 1), ("Banana", 0), ("", 0), ("C", 0),
        ("option A is wrong, option B fits", 1),
    ],
)  # fmt: skip
def test_a_choice_is_the_letter_stated_last(answer, right):
    assert value("choice", answer, answer="B") == right
    assert value("choice", answer, answer="(b)") == right


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        ('{"city": "Paris", "n": 3, "more": []}', {"city": "Paris", "n": 3}, 1),
        ('```json\n{"n": 3.0}\n```', {"n": 3}, 1),
        ('{"n": 3}', ["n"], 1), ('{"m": 3}', ["n"], 0), ('{"m": 3}', {"n": 3}, 0), ('{"n": 4}', {"n": 3}, 0),
        ('{"n": true}', {"n": 1}, 0), ('["n"]', ["n"], 0), ('"n"', ["n"], 0), ("n: 3", ["n"], 0),
        ("[" * 100_000, ["n"], 0),
        ('Here: {"n": 3}', ["n"], 0), ("{}", [], 1),
    ],
)  # fmt: skip
def test_json_has_the_entries_of_the_line(answer, wanted, right):
    assert value("json", answer, json=wanted) == right


def test_a_format_fits_the_whole_answer():
    reward = "format=<think>.*</think>.+"
    assert value(reward, "<think>a\nb</think>7") == 1
    assert value(reward, "So: <think>a</think>7") == value(reward, "<think>a</think>") == 0


def test_a_reward_is_the_weighted_sum_of_its_rules_and_tells_them_apart():
    rules = open_rules("contains + 0.25*format=<a>.* + -0.5*regex")
    meta = {"answer": "7", "pattern": "x"}
    scores = grade(rules, ["<a>7", "7", "<a>x", ""], [meta] * 4)
    assert [score.value for score in scores] == [1.25, 1.0, -0.25, 0.0]
    assert scores[2].parts == scores[2].details == {"contains": 0.0, "format": 1.0, "regex": 1.0}


def test_math_asks_math_verify(monkeypatch):
    """A stand-in that reads fractions shows what is read and compared, the line's answer first and between dollars."""
    asked = []

    def parse(text):
        inner = text.strip("$ ")
        return [float(inner)] if inner.replace(".", "").isdigit() else []

    def verify(right, said):
        asked.append((right, said))
        return right == said

    module = ModuleType("math_verify")
    module.__spec__ = sys.__spec__
    module.parse, module.verify = parse, verify
    monkeypatch.setitem(sys.modules, "math_verify", module)
    open_rules.cache_clear()
    assert value("math", "0.5", answer=".5") == 1
    assert value("math", "no idea", answer=2) == 0
    assert asked == [([0.5], [0.5]), ([2.0], [])]
    with pytest.raises(ValueError, match="\"answer\" must be one that math-verify can parse, got ''"):
        check_meta(open_rules("math"), {"answer": ""})


def test_math_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("omni_reward.rules.find_spec", lambda name: None)
    open_rules.cache_clear()
    with pytest.raises(ValueError, match=r"math needs math-verify, which is not installed: pip install math-verify"):
        open_rules("exact + math")


def test_a_function_of_the_users_grades(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def short(answer, meta):\n    return len(answer) <= meta['most']\n")
    assert value(f"2*python:{file}:short", "ab", most=2) == 2
    assert value(f"python:{file}:short", "abc", most=2) == 0
    with pytest.raises(ValueError, match=r"short fails on an empty answer: KeyError: 'most'"):
        check_meta(open_rules(f"python:{file}:short"), {})
    with pytest.raises(ValueError, match="must have a function 'long'"):
        open_rules(f"python:{file}:long")
    (tmp_path / "needs.py").write_text("from no_such_library import f\n")
    with pytest.raises(ValueError, match=r"needs a package that is not installed: .*no_such_library"):
        open_rules(f"python:{tmp_path}/needs.py:f")
    with pytest.raises(ValueError, match="a file that exists"):
        open_rules(f"python:{tmp_path}/gone.py:f")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("ocr", r"must be one of exact, .*, format=PATTERN or python:FILE.py:FUNCTION, got 'ocr'"),
        ("", "a reward must be a name or read like .* got ''"),
        ("exact + 2*exact", "a reward must not have two terms 'exact'; 'as' gives one another name"),
        ("format=(", r"format must be a regular expression, got '\(': "),
    ],
)
def test_a_reward_that_is_none_is_refused(reward, message):
    with pytest.raises(ValueError, match=message):
        open_rules(reward)


@pytest.mark.parametrize(
    ("reward", "meta", "message"),
    [
        ("choice", {"word": "B"}, 'must have the key "answer", which --reward choice requires'),
        ("choice", {"answer": "Bee"}, "\"answer\" must be one letter, got 'Bee'"),
        ("regex", {"pattern": "("}, "\"pattern\" must be a regular expression, got '\\('"),
        ("json", {"json": "n"}, "\"json\" must be an object or a list of keys, got 'n'"),
    ],
)
def test_a_line_that_no_rule_can_grade_is_refused(reward, meta, message):
    with pytest.raises(ValueError, match=message):
        check_meta(open_rules(reward), meta)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("x = 7.", 1), ("5-7", 1), ("6,7,8", 1), ("7%", 1), ("f(2)-7", 1), ("7.5", 0), ("1.7", 0), ("3/7", 0),
        ("7/8", 0), ("7,000", 0), ("-7", 0), ("is -7.", 0), ("17", 0), ("a7", 0),
    ],
)  # fmt: skip
def test_a_number_is_not_contained_in_a_longer_one(answer, right):
    assert value("contains", answer, answer=7) == right
    assert value("contains", "1,700", answer="700") == 0
    assert value("contains", "it is -7.5", answer="-7.5") == value("contains", "Paris.", answer="Paris") == 1


@pytest.mark.parametrize(
    ("answer", "option", "right"),
    [
        ("the answer is b", "B", 1), ("the answer is b because", "B", 1), ("The answer is (b).", "B", 1),
        (r"\boxed{b}", "B", 1), (r"\boxed{\text{B}}", "B", 1), ("the answer is a.", "A", 1),
        ("answer: (a) or so", "A", 1), ("the answer is a good one. B", "A", 0), ("the answer is a good one. B", "B", 1),
        ("The answer is e.g. odd. B", "B", 1),
    ],
)  # fmt: skip
def test_a_choice_may_be_stated_in_small_letters(answer, option, right):
    assert value("choice", answer, answer=option) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("#### 1,234", 1), ("so 1234.0", 1), ("$1,234.", 1), ("5 #### 1234\n", 1), ("1234 or 5", 0), ("-1234", 0),
        ("", 0), ("x1234", 0),
    ],
)  # fmt: skip
def test_a_number_is_the_last_one(answer, right):
    assert value("number", answer, answer="3 apples #### 1234") == right
    with pytest.raises(ValueError, match='"answer" must hold a number, got'):
        check_meta(open_rules("number"), {"answer": "none"})


def test_a_number_takes_no_longer_in_a_long_answer_than_its_length():
    """A scan for each digit would take minutes; the numbers are those of the plain pattern."""
    plain = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d,]*\d)")
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(["1", ",", ".", "-", "2 3", ",345", ",678"], k=12))
        assert numbers(text) == plain.findall(text), text
    for text in ("1" * 300_000 + ",1", "1," * 150_000 + "7", "3." + "1" * 300_000 + ",7", "1" + ",111" * 75_000 + ",7"):
        assert value("number", text, answer="7") == (text[-1] == "7")


def test_a_pattern_with_a_plus_is_one_term():
    assert open_rules("format=a + b + 0.5*exact").reward.weights == {"format": 1.0, "exact": 0.5}
    assert value("format=a + b", "a  b") == 1
    assert value("0.5*format=1 + 2 + contains", "1  2", answer="2") == 1.5


def test_a_gate_vetoes_answers_of_another_format():
    rules = open_rules("contains - 0.5*exact as whole if format=<a>.*>= .* >= 1 else -1")
    scores = grade(rules, ["<a>>= 7", "7", "<a>>= "], [{"answer": "7"}] * 3)
    assert [score.value for score in scores] == [1.0, -1.0, 0.0]
    assert scores[1].parts == {"contains": 1.0, "whole": 1.0, "format": 0.0, "gate": 0.0}


def test_a_rule_that_is_none_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"must be one of exact, .* math, json, format=PATTERN or .* got 'scorer'"):
        open_rules("scorer")
    with pytest.raises(ValueError, match=r"must be one of exact, .* json, scorer, format=PATTERN or .* got 'scorers'"):
        open_rules("scorers", remote=True)


def test_the_version_of_rules_is_that_of_their_files(tmp_path):
    file = tmp_path / "own.py"
    reward = f"exact + python:{file}:one"
    file.write_text("def one(answer, line):\n    return 1\n")
    first = rules_version(open_rules(reward))
    file.write_text("def one(answer, line):\n    return 2\n")
    assert first.startswith("own.py ")
    assert rules_version(open_rules(reward)) != first
    assert rules_version(open_rules("exact")) == ""
