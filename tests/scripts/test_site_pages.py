"""The documentation site names every document, and what its pages link to is in it; `make site` builds it in CI.

Where `make site` has made its environment, the site is built here and read in a Chromium.
"""

import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import site_pages
import yaml
from helpers import REPO
from playwright.sync_api import sync_playwright
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Address of the built site."""
    mkdocs = REPO / ".venv-site" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed: make site installs it")
    folder = tmp_path_factory.mktemp("built")
    shutil.copy(REPO / "mkdocs.yml", folder)
    (folder / "packages").symlink_to(REPO / "packages")
    site_pages.gather(folder / "build" / "pages")
    path = {"PATH": f"{mkdocs.parent}:/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([mkdocs, "build", "-q"], cwd=folder, env=path, capture_output=True, text=True)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    handler = partial(SimpleHTTPRequestHandler, directory=folder / "build" / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page(site):
    """A page of a browser, which may ask only the site."""
    found = subprocess.run([REPO / "scripts" / "chromium", "--find"], capture_output=True, text=True)
    assert found.returncode == 0, "no Chromium to read the site in: run scripts/chromium, which installs one"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        page, asked = browser.new_page(viewport={"width": 1400, "height": 900}), []
        page.on("request", lambda request: asked.append(request.url))
        yield page
        assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []
        browser.close()


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("out of memory", "troubleshooting"),
        ("OOM", "troubleshooting"),
        ("gated model", "troubleshooting"),
        ("NaN", "troubleshooting"),
        ("reward does not rise", "troubleshooting"),
        ("hangs", "troubleshooting"),
        ("ratio", "troubleshooting"),
        ("install", "install"),
        ("own reward", "quickstart"),
        ("learning rate", "choosing"),
        ("resume", "resume"),
        ("step rule", "contributing"),
        ("add a model", "contributing"),
        ("group_advantages", "api/omni_losses.advantages"),
    ],
)
def test_the_search_finds_the_page_that_answers(site, page, words, first):
    page.goto(f"{site}/index.html")
    page.locator(".md-search__input").fill(words)
    page.locator(".md-search__input").press("End")  # the page reads the field when a key is released
    result = page.locator(".md-search-result__item > a").first
    page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.match(/^\\d+ match/)")
    assert result.get_attribute("href").partition(".html")[0] == f"{site}/{first}"


@pytest.mark.parametrize("name", ["models", "configuration", "api/omni_train.shard"])
def test_code_in_a_table_is_on_one_line(site, page, name):
    page.goto(f"{site}/{name}.html")
    assert page.locator("td code").count() > 5
    assert (
        page.evaluate("[...document.querySelectorAll('td code')].filter(c => c.getClientRects().length > 1).length")
        == 0
    )


def test_a_signature_has_types_and_fits_the_page(site, page):
    page.goto(f"{site}/api/omni_losses.policy.html")
    lines = page.locator(".doc-signature").first.inner_text().splitlines()
    assert "log_prob: Tensor" in " ".join(lines)
    assert max(map(len, lines)) <= 88
