"""Every page that a script writes from data is what these data give."""

import json

import comparison
import hacks
import leaderboard
import plan_recipes
import pytest
import real_size
import records_page
from helpers import REPO
from leaderboard_page import fill

FACTS = comparison.read_facts()
WRITTEN = {  # page -> its text with the parts that a script writes
    REPO / "README.md": lambda text: fill(text, {"comparison": comparison.table(FACTS)}),
    comparison.FACTS.with_suffix(".md"): lambda text: comparison.sources(FACTS),
    hacks.PAGE: lambda text: fill(text, {"hacks": hacks.table(hacks.read_rows())}),
    real_size.PAGE: lambda text: fill(
        text, {"measured": real_size.table(json.loads(real_size.DATA.read_text("utf-8")))}
    ),
    plan_recipes.PAGE: lambda text: plan_recipes.page_with_table(),
}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_is_what_its_script_writes(page):
    text = page.read_text("utf-8")
    assert WRITTEN[page](text) == text


def test_pages_with_pictures_are_what_their_scripts_write(capsys):
    assert leaderboard.stale(REPO / "docs") == []
    assert records_page.main(check=True) == 0, capsys.readouterr().out
