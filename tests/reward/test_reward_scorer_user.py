"""A scorer from a file of the user's: what may stand there, and one clear line for what may not."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omni_reward import Scorer
from omni_reward.scorers import check_scorer, load_scorer

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


@pytest.mark.parametrize(
    ("function", "message"),
    [
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
    ],
)
def test_a_function_of_other_arguments_is_refused_at_the_start(own: Path, function: str, message: str) -> None:
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
