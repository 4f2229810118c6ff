"""Writes docs/configuration.md: every setting of every trainer, from the dataclasses and the comments beside them.

    python scripts/configuration.py            writes the page
    python scripts/configuration.py --check    exit code 1 where the page is not what it would write

The trainers are read, not imported.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """\
# Configuration

`python scripts/configuration.py` writes this page from the trainers' sources; a test fails where it is not up to date.

A setting is a flag of the command line (`--batch-size 8`; switches are `--lr-decay` and `--no-lr-decay`) and a key of a
TOML file (`batch_size = 8`, `lr_decay = true`). What counts is, in this order: the command line, the file given with
`--config FILE.toml`, the preset given with `--preset NAME`, the default. An unknown flag or key is an error, and so is
whatever does not fit together; it is told before any weight is loaded.

```
python apps/train_flowgrpo.py --preset tiny-signs --lr 1e-4 --dry-run
```

prints all settings as they then are, as TOML, and what a training step will do and need. Each run writes the same to
`runs/NAME/config.toml`, without what is not for others to read (URLs and token files); `--config` with that file
repeats the run. `--help` lists the settings with their defaults.
"""


@dataclass(frozen=True)
class Setting:
    """A field of a trainer's Args, in words."""

    name: str
    kind: str
    default: str
    meaning: str

    def row(self) -> str:
        """Its line of a table."""
        cells = (f"`{self.name}`", self.kind, self.default, self.meaning.replace("|", r"\|"))
        return f"| {' | '.join(cells)} |"


def settings(source: str) -> list[Setting]:
    """The settings of the dataclass Args in a trainer's source, in its order."""
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    fields = [node for node in body if isinstance(node, ast.AnnAssign)]
    last = body[-1].end_lineno or 0
    while source.splitlines()[last].lstrip().startswith("#"):  # a comment may go on below its field
        last += 1
    starts = [field.lineno for field in fields] + [last + 1]
    comments = {
        token.start[0]: token.string.split("# fmt:")[0].lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return [
        Setting(
            ast.unparse(field.target),
            kind_of(field.annotation),
            default_of(field.value),
            " ".join(comments[line] for line in range(start, end) if comments.get(line)),
        )
        for field, (start, end) in zip(fields, pairwise(starts), strict=True)
    ]


def kind_of(annotation: ast.expr) -> str:
    """The type in words."""
    if isinstance(annotation, ast.Subscript):  # Literal
        words = ast.literal_eval(annotation.slice)
        return ", ".join(f"`{word}`" for word in ([words] if isinstance(words, str) else words))
    named = {"str": "text", "int": "whole number", "float": "number", "bool": "switch", "None": "none"}
    return " or ".join(named[name] for name in ast.unparse(annotation).split(" | "))


def default_of(value: ast.expr | None) -> str:
    """The default as TOML has it, in code quotes; a path below the repository without the repository."""
    if isinstance(value, ast.JoinedStr):
        pieces = [str(piece.value) for piece in value.values if isinstance(piece, ast.Constant)]
        return f"`{''.join(pieces).lstrip('/')}`"
    default = ast.literal_eval(value) if value is not None else None
    if isinstance(default, bool) or default is None:
        return {True: "on", False: "off", None: "none"}[default]
    return f"`{default}`" if default != "" else ""


def table(rows: list[Setting]) -> str:
    """A table of settings."""
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *(row.row() for row in rows)])


def page() -> str:
    """The whole page: what all trainers share, then what each has of its own or otherwise."""
    sources = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "apps").glob("train_*.py"))}
    found = {name: settings(source) for name, source in sources.items()}
    first, *others = found.values()
    shared = [setting for setting in first if all(setting in other for other in others)]
    parts = [HEAD, "## All trainers\n", table(shared)]
    for name, own in found.items():
        title = (ast.get_docstring(ast.parse(sources[name])) or "").splitlines()[0]
        parts += [f"\n## {name}\n", f"{title}\n", table([setting for setting in own if setting not in shared])]
    return "\n".join(parts) + "\n"


def main() -> int:
    """The exit code."""
    if sys.argv[1:] == ["--check"]:
        if PAGE.exists() and PAGE.read_text("utf-8") == page():
            return 0
        print(f"{PAGE.relative_to(ROOT)} is not up to date: run python scripts/configuration.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
