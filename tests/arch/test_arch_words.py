"""Words that replace the field's own may only become fewer: docs/notation.md has the pairs."""

import re

import pytest
from helpers import REPO

WORDS = re.compile(
    r"\b(alone|told|tells|said|stands|lies|whatever|apart|alike|nobody|as [\w' -]{1,40}\bhas it)\b", re.I
)
MOST = {"packages": 25, "apps": 0, "docs": 13}  # lower it when there are fewer
NOT_COUNTED = ("docs/decisions/", "docs/evidence/")


def count(text: str) -> int:
    """Return how many of the words the text has."""
    return len(WORDS.findall(" ".join(text.split())))


@pytest.mark.parametrize("folder", MOST)
def test_words_that_the_field_does_not_use_become_fewer(folder: str) -> None:
    paths = [path for end in ("py", "md") for path in (REPO / folder).rglob(f"*.{end}") if not path.is_symlink()]
    names = {path.relative_to(REPO).as_posix(): path for path in paths}
    counts = {name: count(path.read_text("utf-8")) for name, path in names.items() if not name.startswith(NOT_COUNTED)}
    most = sorted(counts, key=lambda name: -counts[name])[:5]
    assert sum(counts.values()) <= MOST[folder], f"use the words of docs/notation.md; most are in {most}"


@pytest.mark.parametrize(("text", "number"), [("Only here.", 0), ("It is told as the\npaper has it, alone.", 3)])
def test_words_are_counted_across_lines(text: str, number: int) -> None:
    assert count(text) == number
