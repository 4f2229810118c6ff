"""Put the keys of recipes in the order of --help, with a blank line between groups; comments stay.

    python scripts/sort_recipes.py [--check]

--check names the recipes that are in another order, with exit code 1.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from omni_rl.settings.notes import notes_of_help
from omni_rl.settings.order import in_order, title_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "apps"))


def in_groups(text: str, titles: Mapping[str, str], names: Sequence[str]) -> str:
    """Return a recipe whose keys have the order of `names`. titles: of the groups that blank lines part."""
    head, _, body = text.partition("\n\n")
    table, lines = "", dict[str, str]()
    for line in filter(None, body.splitlines()):
        if line.startswith("["):
            table = line.strip("[]") + "."
        else:
            lines[table + line.partition(" ")[0]] = line
    flat = sorted((name for name in lines if "." not in name), key=names.index)
    parts = ["\n".join(lines[name] for name in part) for _, part in groupby(flat, lambda name: titles[name])]
    inner = sorted((name for name in lines if "." in name), key=names.index)
    for table, own in groupby(sorted(inner, key=lambda name: tables(inner).index(name.partition(".")[0])), table_of):
        parts.append("\n".join([f"[{table}]", *(lines[name] for name in own)]))
    return "\n\n".join([head, *parts]) + "\n"


def table_of(name: str) -> str:
    """Return the table of a setting."""
    return name.partition(".")[0]


def tables(names: Sequence[str]) -> list[str]:
    """Return the tables of settings, in the order of their first ones."""
    return list(dict.fromkeys(map(table_of, names)))


def sorted_recipes() -> dict[Path, str]:
    """Return each recipe's file with its text in order."""
    found: dict[Path, str] = {}
    for folder in sorted(path for path in (ROOT / "recipes").iterdir() if path.is_dir()):
        cls = importlib.import_module(folder.name).Args
        texts = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.toml"))}
        names, notes = in_order(cls, texts), notes_of_help(cls)
        titles = {name: title_of(cls, name, notes) for name in names}
        found |= {folder / f"{name}.toml": in_groups(text, titles, names) for name, text in texts.items()}
    return found


def main() -> None:
    wrong = {path: text for path, text in sorted_recipes().items() if path.read_text("utf-8") != text}
    for path, text in wrong.items():
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is in another order: python scripts/sort_recipes.py")
        else:
            path.write_text(text, "utf-8")
    sys.exit("--check" in sys.argv and bool(wrong))


if __name__ == "__main__":
    main()
