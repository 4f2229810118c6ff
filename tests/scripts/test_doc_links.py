"""Every relative link in a document leads to a file of the tree, and its anchor to a heading there."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers import REPO

LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=REPO, capture_output=True, text=True, check=True).stdout
PAGES = sorted(LISTED.split())


def links(text: str) -> list[str]:
    """Targets of links and pictures in the text, code aside, but for those elsewhere on the web."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page: str) -> None:
    assert broken(REPO / page) == []


@pytest.mark.parametrize(
    ("link", "leads"),
    [("other.md", True), ("other.md#the-2nd-one", True), ("#here", True), ("pictures", True), ("other.md#third", False),
     ("#there", False), ("gone.md", False), ("https://gone.example/x.md", True)],
)  # fmt: skip
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, leads: bool) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "other.md").write_text("# Other\n\n## The `2nd` one\n\n```\n# third\n```\n")
    (tmp_path / "page.md").write_text(f"# Here\n\nSee [that\nthere]({link}); `[not](code.md)`.\n")
    assert broken(tmp_path / "page.md") == ([] if leads else [link])
