"""Gather the pages of the documentation site below build/pages, which `make site` then builds with mkdocs.

The documents stay as they are, for whoever reads them in the repository. README.md becomes the home, docs/ the pages at
the top. What they link to outside of docs/ becomes a page too: a document as it is, a file of code as a listing, a
folder as its README or the list of its files. Each package gets a page that mkdocstrings fills from docstrings.
"""

import json
import posixpath
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from wheels import LINK, PACKAGES, ROOT

PAGES = ROOT / "build" / "pages"
PROJECT = ("README.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
LANGUAGES = {".py": "python", ".toml": "toml", ".jsonl": "json"}


def main() -> None:
    """Write all pages anew, and say how many there are."""
    shutil.rmtree(PAGES, ignore_errors=True)
    print(f"{gather(PAGES)} pages in {PAGES.relative_to(ROOT)}")


def gather(out: Path) -> int:
    """Write the pages below a new folder and return their number."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if (ROOT / name).is_file()]
    waiting = [*PROJECT, *(f"packages/{name}/README.md" for name in PACKAGES)]
    waiting += [name for name in files if name.startswith("docs/") and name.endswith(".md")]
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        page = out / place(name)
        page.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            text, linked = moved((ROOT / name).read_text("utf-8"), name)
            page.write_text(UNSEARCHED * name.startswith("docs/evidence/") + text, "utf-8")
            waiting += linked
        elif name.endswith(".ipynb"):
            text, linked = moved(notebook(ROOT / name), name)
            page.write_text(text, "utf-8")
            waiting += linked
        elif name.startswith("docs/images/"):
            shutil.copy(ROOT / name, page)
        else:
            page.write_text(listing(name, files), "utf-8")
    for package in PACKAGES:
        module, page = package.replace("-", "_"), out / "api" / f"{package}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# {package}\n\nFrom the docstrings of `{module}`.\n\n::: {module}\n", "utf-8")
    return len(done) + len(PACKAGES)


def notebook(path: Path) -> str:
    """Return a notebook's cells as one document."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"


def place(name: str) -> str:
    """Return the place in the site of a file or folder of the repository; not for a folder with a README."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/") and PurePosixPath(name).suffix:
        return name.removeprefix("docs/")
    return name if name.endswith(".md") else f"files/{name}.md"


def moved(text: str, name: str) -> tuple[str, list[str]]:
    """Return the text of a page with links to their targets' places in the site, and these targets."""
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
    """Return a page that shows a file of code, or names the files of a folder."""
    path = ROOT / name
    if path.is_dir():
        real = path.resolve().relative_to(ROOT).as_posix()
        below = [file.removeprefix(f"{real}/") for file in files if file.startswith(f"{real}/")]
        return f"{UNSEARCHED}# {name}\n\n" + "".join(f"- `{file}`\n" for file in below)
    return f"{UNSEARCHED}# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}````\n"


if __name__ == "__main__":
    main()
