"""README's comparison is what its facts give, each of which has a source, and our numbers are those of the tables."""

import re

import comparison
import pytest
from helpers import REPO
from leaderboard_page import fill
from omni_rollout.models import MODELS
from omni_rollout.models.tokens import TOKEN_MODELS

FACTS = comparison.read_facts()
CELLS = [(row["title"], name, row[name]) for row in FACTS["rows"] for name in FACTS["peers"]]


def test_the_pages_are_what_the_script_writes():
    readme = (REPO / "README.md").read_text("utf-8")
    assert fill(readme, {"comparison": comparison.table(FACTS)}) == readme
    assert comparison.FACTS.with_suffix(".md").read_text("utf-8") == comparison.sources(FACTS)


@pytest.mark.parametrize(("row", "peer", "cell"), CELLS)
def test_a_cell_has_a_source_or_says_that_it_is_not_verified(row, peer, cell):
    assert ("source" in cell) == (cell.get("says") != "not verified")
    assert ("says" in cell) != ("names" in cell)
    assert len(set(cell.get("names", []))) == len(cell.get("names", []))
    for place in cell.get("source", "").split():
        name, url = comparison.address(place, FACTS["peers"][peer])
        assert re.fullmatch(r"https://[\w.]+\.com/\S+", url)
        assert name in url or place.startswith(("#", "."))


def test_a_project_is_read_at_a_commit_of_a_month():
    for peer in FACTS["peers"].values():
        assert re.fullmatch(r"[0-9a-f]{40}", peer["commit"])
        assert re.match(r"[A-Z][a-z]+ 20\d\d\b", peer["date"])


def test_our_numbers_are_those_of_the_tables_of_models_and_of_the_pages_of_algorithms():
    pages = {path.stem for path in (REPO / "docs" / "algorithms").glob("*.md")}
    models = {*MODELS.values(), *TOKEN_MODELS.values()}
    assert comparison.counts() == {"models": len(models), "algorithms": len(pages)}


def test_names_are_counted_and_words_stay():
    rows = [
        {
            "title": "t",
            "omni-rl": "{models}",
            "a": {"names": ["x", "y"], "source": "#1"},
            "b": {"says": "no", "source": "."},
        }
    ]
    peers = {name: {"url": f"https://git.com/{name}", "commit": name * 40, "date": "May 2026"} for name in "ab"}
    facts = {"peers": peers, "rows": rows}
    assert f"| t | {comparison.counts()['models']} | 2 | no |\n" in comparison.table(facts)
    page = comparison.sources(facts)
    assert "| a | 2: x, y | [#1](https://git.com/a/issues/1) |\n" in page
    assert f"| b | no | [.](https://git.com/b/tree/{'b' * 40}) |\n" in page
