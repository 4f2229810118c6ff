"""Write the README's comparison with other projects, and docs/evidence/comparison.md with the source of each cell.

    python scripts/comparison.py

The facts about the others are in docs/evidence/comparison.toml. Numbers are counted: theirs are lengths of its lists,
ours are the models that can be opened and the papers in docs/algorithms.md.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from leaderboard_page import fill

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "docs" / "evidence" / "comparison.toml"
MODELS = ROOT / "packages" / "omni-rollout" / "src" / "omni_rollout" / "models"


class Peer(TypedDict):
    """A project, at the commit that was read."""

    url: str
    commit: str
    date: str


class Cell(TypedDict):
    """A fact about a project: text, or names to count, and their source."""

    says: NotRequired[str]
    names: NotRequired[list[str]]
    source: NotRequired[str]


Row = dict[str, str | Cell]  # a title, our cell, and the cell of each project by name


class Facts(TypedDict):
    """The content of the file."""

    peers: dict[str, Peer]
    rows: list[Row]


def main() -> None:
    """Write both pages."""
    facts = read_facts()
    readme, page = ROOT / "README.md", FACTS.with_suffix(".md")
    readme.write_text(fill(readme.read_text("utf-8"), {"comparison": table(facts)}), "utf-8")
    page.write_text(sources(facts), "utf-8")


def read_facts() -> Facts:
    """Return the facts from the file."""
    return cast(Facts, tomllib.loads(FACTS.read_text("utf-8")))


def table(facts: Facts) -> str:
    """Return the table, with one column per project, and the date when each was read."""
    peers, ours = facts["peers"], counts()
    lines = [["", "omni-rl", *(f"[{name}]({peer['url']})" for name, peer in peers.items())]]
    lines += [[str(row["title"]), str(row["omni-rl"]).format(**ours), *texts(row, peers)] for row in facts["rows"]]
    made = [f"| {' | '.join(line)} |".replace("|  |", "| |", 1) for line in lines]
    read = ", ".join(f"{name} {peer['commit'][:7]} ({peer['date']})" for name, peer in peers.items())
    return "\n".join([made[0], "|---" * (2 + len(peers)) + "|", *made[1:], "", f"Read, not run: {read}.", ""])


def texts(row: Row, peers: dict[str, Peer]) -> list[str]:
    """Return the row's text for each project."""
    cells = [cast(Cell, row[name]) for name in peers]
    return [str(len(cell["names"])) if "names" in cell else cell.get("says", "") for cell in cells]


def sources(facts: Facts) -> str:
    """Return the page of sources, with one line per cell."""
    lines = [
        "# Sources of the comparison",
        "",
        "The source of each cell of [README's table](../../README.md#why-this-and-not-one-of-the-others).",
    ]
    for row in facts["rows"]:
        lines += ["", f"## {row['title']}", "", "| project | cell | source |", "|---|---|---|"]
        for (name, peer), text in zip(facts["peers"].items(), texts(row, facts["peers"]), strict=True):
            cell = cast(Cell, row[name])
            named = f"{text}: {', '.join(cell['names'])}" if "names" in cell else text
            places = [address(place, peer) for place in cell.get("source", "").split()]
            lines.append(f"| {name} | {named} | {', '.join(f'[{place}]({url})' for place, url in places)} |")
    return "\n".join(lines) + "\n"


def address(place: str, peer: Peer) -> tuple[str, str]:
    """Return a short name and the address of a source."""
    if place.startswith("https://"):
        return place.removeprefix("https://").partition("/")[2], place
    if place.startswith("#"):
        return place, f"{peer['url']}/issues/{place[1:]}"
    return (
        place,
        f"{peer['url']}/tree/{peer['commit']}" if place == "." else f"{peer['url']}/blob/{peer['commit']}/{place}",
    )


def counts() -> dict[str, int]:
    """Return the number of models and algorithms of this project."""
    classes = values(MODELS / "__init__.py", "MODELS") | values(MODELS / "tokens" / "__init__.py", "TOKEN_MODELS")
    page = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    return {"models": len(classes), "algorithms": len(set(re.findall(r"arxiv\.org/abs/([\d.]+)", page)))}


def values(path: Path, name: str) -> set[str]:
    """Return the distinct values of a table in a Python file, without importing it."""
    tree = ast.parse(path.read_text("utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name]
    return {ast.unparse(value) for table in tables if isinstance(table, ast.Dict) for value in table.values}


if __name__ == "__main__":
    main()
