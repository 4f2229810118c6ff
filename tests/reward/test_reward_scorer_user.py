"""A scorer from a file of the user's: what may stand there, and one clear line for what may not."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import sampled
from omni_reward import Scorer
from omni_reward.rules import check_meta, open_rules
from omni_reward.scorers import check_scorer, load_scorer
from omni_reward.scorers.user import media_hint
from omni_reward.wire import WrongScoresError

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from omni_reward import Scorer

@dataclass
class Weights:
    red: float = 1.0

def red(media, prompts, meta):
    return Weights().red * media["image"][..., 0].mean((1, 2))

moving = Scorer(red, media=("video",), version="7")
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my-scorer.py"
    path.write_text(OWN)
    return path


def test_a_function_is_called_as_it_is(own: Path) -> None:
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images[1, ..., 0] = 9
    scores = load_scorer(f"python:{own}:red")({"image": images}, ["", ""], [{}, {}])
    assert [score.value for score in scores] == [0.0, 9.0]


def test_a_scorer_says_more_of_itself(own: Path) -> None:
    scorer = load_scorer(f"python:{own}:moving")
    assert isinstance(scorer, Scorer)
    assert (scorer.media, scorer.version) == (("video",), "7")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("python:{own}:blue", "must have a function 'blue'$"),
        ("python:{own}:number", "must have a function 'number', got 3"),
        ("python:{own}.bak.py:red", "must be python:FILE.py:FUNCTION with a file that exists"),
        ("python:{own}", "a reward must be a name or read like"),
        ("python:my.module:red", "a reward must be a name or read like"),
    ],
)
def test_something_else_is_refused(own: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_scorer(spec.replace("{own}", str(own)))


def test_it_takes_no_options(own: Path) -> None:
    with pytest.raises(ValueError, match=r"options must be empty for python:.*, got \['a'\]"):
        load_scorer(f"python:{own}:red", options={"a": "1"})


def test_a_library_that_the_file_lacks_is_named(own: Path) -> None:
    own.write_text("import no_such_library\nred = no_such_library.red")
    with pytest.raises(ImportError, match=f"^{own}: No module named 'no_such_library'$"):
        load_scorer(f"python:{own}:red")


WRONG = [  # functions, and what is said of them
    ("def red(media, prompts): ...", "{own}, line 1: red must be {rule}, got (media, prompts)"),
    (
        "def red(media, prompts, meta, more): ...",
        "{own}, line 1: red must be {rule}, got (media, prompts, meta, more)",
    ),
    (
        "def red(media, prompts, meta, *, k): ...",
        "{own}, line 1: red must be {rule}, got (media, prompts, meta, *, k)",
    ),
    ("red = lambda media, prompts: 0", "a scorer must be {rule}: too many positional arguments"),
    ("def red(", "{own} must be a file of Python: '(' was never closed (<unknown>, line 1)"),
    ("import math\nred = math.nan + x", "{own} must run, line 2 raised NameError: name 'x' is not defined"),
]


@pytest.mark.parametrize("case", sampled(WRONG, 2))
def test_a_function_of_other_arguments_is_refused_at_the_start(own: Path, case: tuple[str, str]) -> None:
    function, message = case
    own.write_text(function)
    command = [sys.executable, "-m", "omni_reward.server", "--scorer", f"python:{own}:red"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    said = message.format(own=own, rule="a function of (media, prompts, meta)")
    assert done.stderr == f"omni_reward.server: error: {said}\n"


@pytest.mark.parametrize(
    "source",
    [
        "def red(media, prompts, meta, more=1, *, k=2): ...",
        "def red(media, *rest): ...",
        "def red(a): ...\nred = print",
        "import functools\n@functools.cache\ndef red(a): ...",
        "from os import *",
        "def __getattr__(name): ...",
        "if True:\n    import os as red",
    ],
)
def test_what_only_running_the_file_can_tell_is_left_to_the_server(own: Path, source: str) -> None:
    own.write_text(source)
    check_scorer(f"0.5*python:{own}:red + ocr")


def test_the_command_line_serves_it_or_says_why_not(own: Path) -> None:
    command = [sys.executable, "-m", "omni_reward.server", "--scorer", f"python:{own}:blue"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"omni_reward.server: error: {own} must have a function 'blue'\n"


RETURNS = {  # what a function of three prompts returns, and what is said of it
    "None": "f must return 3 numbers in a list, got NoneType: None$",
    "'0.5'": "f must return 3 numbers in a list, got str: '0.5'$",
    "{'score': [0.5, 0.5, 0.5]}": "f must return 3 numbers in a list, got dict: {'score': .*}$",
    "(0.5 for prompt in prompts)": "f must return 3 numbers in a list, got generator: ",
    "0.5": "f must return 3 numbers in a list, got float: 0.5$",
    "np.float32(0.5)": "f must return 3 numbers in a list, got float32: ",
    "wait()": "f must return 3 numbers in a list, got coroutine: ",
    "[0.5]": r"f must return 3 numbers, got 1: \[0.5\]$",
    "[0.5, 0.5, None]": r"f must return 3 numbers, got None for sample 3; return Score\(None, abstained=REASON\)",
    "['a', 'b', 'c']": "f must return 3 numbers, got 'a' for sample 1; ",
    "[[0.5], [0.5], [0.5]]": r"f must return 3 numbers, got \[0.5\] for sample 1; ",
    "np.zeros((3, 1))": r"f must return 3 numbers, got array\(\[0\.\]\) for sample 1; ",
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", RETURNS)
def test_what_a_function_may_return_is_one_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"import numpy as np\nasync def wait(): return 0.5\ndef f(media, prompts, meta): return {value}\n"
    )
    scorer = load_scorer(f"python:{tmp_path / 'mine.py'}:f")
    with pytest.raises(WrongScoresError, match=f"^{RETURNS[value]}"):
        scorer({"image": np.zeros((3, 4, 4, 3), np.uint8)}, ["", "", ""], [{}, {}, {}])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["[1, True, 0.5]", "np.ones(3)", "(np.float16(1), Score(None, abstained='x'), 1)"])
def test_numbers_of_any_kind_are_scores(tmp_path: Path, value: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"import numpy as np\nfrom omni_reward import Score\ndef f(media, prompts, meta): return {value}\n"
    )
    scores = load_scorer(f"python:{tmp_path / 'mine.py'}:f")({}, ["", "", ""], [{}, {}, {}])
    assert scores[0].value == 1.0


@pytest.mark.parametrize(
    ("body", "is_hinted"),
    [
        ("[each.convert('L') for each in media]", True),
        ("[media[0].size]", True),
        ("[each.size for each in media[:2]]", True),
        ("[each.convert('L') for each in media['image']]", True),
        ("[own['word'] for own in meta]", False),
        ("[unknown for own in meta]", False),
    ],
)
def test_a_function_of_a_list_of_images_is_told_what_media_are(tmp_path: Path, body: str, is_hinted: bool) -> None:
    (tmp_path / "mine.py").write_text(f"def f(media, prompts, meta): return {body}\n")
    scorer = load_scorer(f"python:{tmp_path / 'mine.py'}:f")
    with pytest.raises(Exception) as found:
        scorer({"image": np.zeros((1, 4, 4, 3), np.uint8)}, [""], [{}])
    assert media_hint(found.value) == '; media is a dict of arrays: media["image"] is uint8 [N, H, W, 3]' * is_hinted


@pytest.mark.parametrize(
    ("value", "message"),
    [("None", "must return a number, got NoneType: None"), ("'1'", "must return a number, got str: '1'")],
)
def test_a_rule_that_returns_no_number_is_told_before_the_run(tmp_path: Path, value: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(answer, line): return {value}\n")
    with pytest.raises(ValueError, match=message):
        check_meta(open_rules(f"python:{tmp_path / 'mine.py'}:f"), {})


def test_a_file_or_a_function_that_exits_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import sys\nsys.exit(0)\ndef f(media, prompts, meta):\n    pass\n")
    with pytest.raises(ValueError, match=r"mine\.py must run, line 2 raised SystemExit: 0"):
        load_scorer(f"python:{file}:f")
    file.write_text("import sys\ndef rule(answer, meta):\n    sys.exit(0)\n")
    with pytest.raises(ValueError, match="fails on an empty answer: SystemExit: 0"):
        check_meta(open_rules(f"python:{file}:rule"), {})
    scorer = load_scorer(f"rules:python:{file}:rule")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rule fails: SystemExit: 0"):
            scorer({"text": ["yes"]}, ["p"], [{}])
