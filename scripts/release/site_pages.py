"""Collect the pages of the documentation site in build/pages, from which `make site` builds it with mkdocs.

The documents themselves are not changed, for readers of the repository. README.md becomes the home page, docs/ the
top-level pages. Link targets outside of docs/ become pages too: a document unchanged, a code file as a listing, a
folder as its README or a list of its files. Each package gets a page that lists its modules, and each module a page
that mkdocstrings fills from docstrings.

With REPOSITORY, the address of the sources on the web, the pages link there; without it they keep that of `wheels.py`.
"""

import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from wheels import LINK, PACKAGES, ROOT, hosted

PAGES = ROOT / "build" / "pages"
PROJECT = ("README.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
STYLE = "docs/site.css"
LANGUAGES = {".py": "python", ".toml": "toml", ".jsonl": "json"}
UNSEARCHED = "search:\n  exclude: true\n"
FRONT_MATTER = (  # prefix of a page's path -> its front matter for mkdocs; first match
    ("index.md", "hide: [navigation]\n"),
    (("evidence/", "files/"), UNSEARCHED),
    (("api/", "decisions/", "CHANGELOG", "algorithms/", "packages/"), "search:\n  boost: 0.2\n"),
    (("install", "quickstart", "choosing", "scorers", "contributing"), "search:\n  boost: 3\n"),
    ("troubleshooting", "search:\n  boost: 2\n"),
)


def main() -> None:
    """Write all pages again, and print their number."""
    shutil.rmtree(PAGES, ignore_errors=True)
    print(f"{gather(PAGES)} pages in {PAGES.relative_to(ROOT)}")


def gather(out: Path) -> int:
    """Write the pages to a new folder and return their number."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if (ROOT / name).is_file()]
    waiting = [*PROJECT, *(f"packages/{name}/README.md" for name in PACKAGES)]
    waiting += [name for name in files if name == STYLE or (name.startswith("docs/") and name.endswith(".md"))]
    done: set[str] = set()
    pages = {page: text for package in PACKAGES for page, text in api_pages(package, files).items()}
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        if name == STYLE or name.startswith("docs/images/"):
            (out / place(name)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, out / place(name))
        elif name.endswith((".md", ".ipynb")):
            text = (ROOT / name).read_text("utf-8")
            pages[place(name)], linked = moved(text if name.endswith(".md") else notebook(text), name)
            waiting += linked
        else:
            pages[place(name)] = listing(name, files)
    repository = os.environ.get("REPOSITORY", "")
    for name, text in pages.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(front_matter(name) + hosted(text, repository), "utf-8")
    return len(pages)


def front_matter(page: str) -> str:
    """Return the front matter of a page: search settings, and hidden parts."""
    told = next((told for starts, told in FRONT_MATTER if page.startswith(starts)), "")
    return f"---\n{told}---\n" if told else ""


def api_pages(package: str, files: list[str]) -> dict[str, str]:
    """Return the pages of a package's docstrings by name: one that lists its modules, and one per module."""
    source = f"packages/{package}/src/"
    paths = [name.removeprefix(source) for name in files if name.startswith(source) and name.endswith(".py")]
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / source / path
        for path in sorted(paths)
        if not (ROOT / source / path).is_symlink() and not path.endswith("__main__.py")
    }
    about = {name: (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "") for name, path in modules.items()}
    rows = [f"| [`{name}`]({name}.md) | {text.partition(chr(10))[0]} |\n" for name, text in about.items()]
    pages = {
        f"api/{name}.md": f"# {name}\n\nA module of [{package}]({package}.md).\n\n::: {name}\n" for name in modules
    }
    return pages | {f"api/{package}.md": f"# {package}\n\n| module | |\n|---|---|\n{''.join(rows)}"}


def notebook(text: str) -> str:
    """Return a notebook's cells as one document."""
    cells = json.loads(text)["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"


def place(name: str) -> str:
    """Return the path in the site of a file or folder of the repository, except a folder with a README."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/") and PurePosixPath(name).suffix:
        return name.removeprefix("docs/")
    if name.endswith(".ipynb"):
        return name.replace(".ipynb", ".md")
    return name if name.endswith(".md") else f"files/{name}.md"


def moved(text: str, name: str) -> tuple[str, list[str]]:
    """Return the text of a page with links to their targets' paths in the site, and these targets."""
    targets = []

    def link(match: re.Match[str]) -> str:
        path, mark, anchor = match.group(2).partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md"
        targets.append(target)
        way = posixpath.relpath(place(target), posixpath.dirname(place(name)) or ".")
        return f"[{match.group(1)}]({way}{mark}{anchor})"

    blocks = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else LINK.sub(link, block) for block in blocks), targets


def listing(name: str, files: list[str]) -> str:
    """Return a page with the listing of a code file, or the file names of a folder."""
    path = ROOT / name
    if path.is_dir():
        real = path.resolve().relative_to(ROOT).as_posix()
        below = [file.removeprefix(f"{real}/") for file in files if file.startswith(f"{real}/")]
        return f"# {name}\n\n" + "".join(f"- `{file}`\n" for file in below)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}````\n"


if __name__ == "__main__":
    main()
