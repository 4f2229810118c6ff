"""Trainers share what they share through modules: no two are the same file with a few lines changed."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from helpers import REPO

MAX_SHARE = 0.4
TRAINERS = sorted((REPO / "apps").glob("train_*.py"))


def shared_lines(first: str, second: str) -> float:
    """The share of the shorter text's lines that the other has too, each as often as both have it; blank ones aside."""
    a, b = (Counter(line.strip() for line in text.splitlines() if line.strip()) for text in (first, second))
    return (a & b).total() / min(a.total(), b.total())


def test_there_are_trainers_to_compare():
    assert len(TRAINERS) >= 4


@pytest.mark.parametrize(("first", "second"), list(combinations(TRAINERS, 2)), ids=lambda path: path.stem)
def test_no_two_trainers_share_more_than_two_fifths_of_their_lines(first: Path, second: Path):
    share = shared_lines(first.read_text("utf-8"), second.read_text("utf-8"))
    assert share <= MAX_SHARE, f"{first.name} and {second.name} share {share:.0%} of their lines"


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ("a\nb\nc\nd\n", "a\n\n  b\ne\nf\n", 0.5),
        ("a\na\nb\n", "a\nc\nd\ne\n", 1 / 3),
        ("a\n", "b\n", 0.0),
        ("a", "a", 1.0),
    ],
)
def test_only_lines_that_both_have_count(first: str, second: str, share: float):
    assert shared_lines(first, second) == pytest.approx(share)
