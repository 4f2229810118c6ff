"""The documentation site names every document, and what its pages link to is in it; `make site` builds it in CI."""

import re

import pytest
import site_pages
import yaml
from helpers import REPO
from scripts.test_doc_links import broken
from wheels import ADDRESS, PACKAGES


class Loader(yaml.SafeLoader):
    """YAML whose tags of Python objects are left alone."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])
CONFIG = yaml.load((REPO / "mkdocs.yml").read_text("utf-8"), Loader=Loader)


def named(entry) -> list[str]:
    """The pages of an entry of the navigation, in its order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    site_pages.gather(folder)
    return folder


def test_the_navigation_names_every_page_once(pages):
    there = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    left_out = tuple(line.strip("/").removesuffix("*.md") for line in CONFIG["not_in_nav"].split())
    assert sorted(named(CONFIG["nav"])) == sorted(page for page in there if not page.startswith(left_out))


def test_every_module_has_a_page_which_its_package_lists(pages):
    for package in PACKAGES:
        source, listed = REPO / "packages" / package / "src", (pages / "api" / f"{package}.md").read_text("utf-8")
        for path in source.rglob("*.py"):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            if not path.is_symlink() and path.stem != "__main__":
                assert (pages / "api" / f"{name}.md").read_text("utf-8").endswith(f"\n::: {name}\n")
                assert f"[`{name}`]({name}.md)" in listed


def test_the_pages_name_one_address_of_the_sources_which_a_real_one_replaces(pages, tmp_path, monkeypatch):
    text = "".join(path.read_text("utf-8") for path in pages.rglob("*.md"))
    colab = "https://colab.research.google.com/github/OWNER/omni-rl"
    assert set(re.findall(r"https://[\w./]+/OWNER/[\w-]+", text)) == {ADDRESS, colab}
    monkeypatch.setenv("REPOSITORY", "https://github.com/us/rl")
    site_pages.gather(tmp_path)
    assert "git clone https://github.com/us/rl && cd omni-rl" in (tmp_path / "install.md").read_text("utf-8")
    assert "com/github/us/rl/blob" in (tmp_path / "notebooks" / "flowgrpo_by_hand.md").read_text("utf-8")


def test_every_document_of_the_repository_is_a_page(pages):
    for path in (REPO / "docs").rglob("*.md"):
        assert (pages / path.relative_to(REPO / "docs")).is_file(), path
    assert "\n# omni-rl\n" in (pages / "index.md").read_text("utf-8")


def test_links_lead_to_pages_of_the_site_and_to_headings_in_them(pages):
    found = {path.relative_to(pages).as_posix(): broken(path) for path in pages.rglob("*.md")}
    assert {page: links for page, links in found.items() if links} == {}


def test_a_build_with_a_broken_link_fails():
    assert CONFIG["strict"] is True
    assert set(CONFIG["validation"]["links"].values()) == {"warn"}
    assert re.search(r"^make .*\bsite\b", (REPO / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
