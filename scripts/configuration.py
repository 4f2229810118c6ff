"""Write docs/configuration.md: every setting of every trainer, from the dataclasses and the comments next to them.

    python scripts/configuration.py            writes the page
    python scripts/configuration.py --check    exits with code 1 if the page is not up to date

The trainers are parsed, not imported.
"""

import ast
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from omni_rl.run import engines
from omni_rl.settings import args, eval_sets, groups, token_args

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """\
# Configuration

`python scripts/configuration.py` writes this page from the sources.

A setting is a flag of the command line (`--batch-size 8`; switches are `--verbose` and `--no-verbose`) and a key of a
TOML file (`batch_size = 8`, `verbose = true`). Precedence: the command line, the file given with `--config FILE.toml`,
the [recipe](../recipes) given with `--preset NAME`, the default. An unknown flag or key is an error, and so are
settings that do not fit together.

A group such as `lora` is a prefix of flags (`--lora.rank 8`, `--lora.no-use-dora`) and a table of a file (`rank = 8`
below `[lora]`). The flag of `scorer.name` is `--scorer`. The word `none` clears a setting that is empty by default:
`--memory.offload none` overrides a recipe.

```
python apps/train_flowgrpo.py --preset tiny-signs --lr 1e-4 --dry-run
```

This prints all settings as TOML, and the plan of a training step. Each run writes the settings to
`runs/NAME/config.toml`, without URLs and token files. Such a file can be
[your own recipe](command.md#a-recipe-of-your-own). Use a [loop](command.md#several-runs) to try several values.

If a setting must be one of several words, the column *default* lists the default first and then the others.
"""
SHARED = tuple(inspect.getsource(module) for module in (engines, args, token_args, eval_sets, groups))
CLASSES = {
    "RunArgs": "All trainers",
    "MediaArgs": "All trainers on images, videos and sound",
    "TokenArgs": "All trainers of policies over tokens",
}
SETS = {
    "EvalSet": "all trainers",
    "MediaEvalSet": "all trainers on images, videos and sound",
    "TokenEvalSet": "all trainers of policies over tokens",
}
SETS_HEAD = """
## [[eval.sets]]

A file of settings may end with evaluation sets in addition to `eval.prompts`, one table for each:

```toml
[[eval.sets]]
name = "long"
prompts = "data/tiny-signs/long.txt"
num_inference_steps = 20
samples_per_prompt = 4
pass_threshold = 0.9
```

Their metrics are `eval/long/reward` and so on. Messages count them from 1: `eval.sets[2].prompts must be given`. The
copy of the settings in `runs/NAME/config.toml` has `scorer_url = "..."` if a set has its own scorer.
"""


@dataclass(frozen=True)
class Setting:
    """A field of a trainer's Args, as text."""

    name: str
    words: list[str]
    default: str
    meaning: str
    group: str

    def row(self) -> str:
        """Return the setting's row of a table."""
        others = ", ".join(word for word in self.words if word != self.default)
        cells = (
            f"`{self.name}`",
            f"{self.default} or {others}" if others else self.default,
            self.meaning.replace("|", r"\|"),
        )
        return f"| {' | '.join(cells)} |"


def settings(source: str) -> list[Setting]:
    """Return the settings of the dataclass Args in a trainer's source, those shared by all trainers first."""
    return list(fields_of("Args", (*SHARED, source)).values())


@cache
def fields_of(name: str, sources: tuple[str, ...]) -> dict[str, Setting]:
    """Return the fields of a class in one of the sources by name, including those of its bases in the sources."""
    found: dict[str, Setting] = {}
    nodes = [node for source in sources for node in parsed(source).body]
    aliases = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    for source in sources:
        for node in parsed(source).body:
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            for base in node.bases:
                found |= fields_of(name_of(base), sources)
            lines = source.splitlines()
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    key, text = ast.unparse(field.target), lines[field.lineno - 1].partition("  # ")[2]
                    inner = fields_of(name_of(unwrapped(field.annotation)), sources)
                    if inner:  # a group of settings
                        prefix, given = "" if is_flat(field.annotation) else f"{key}.", defaults_of(field.value)
                        found |= {
                            f"{prefix}{name}": replace(
                                own,
                                name=f"{prefix}{name}",
                                group=own.group or key,
                                default=given.get(name, own.default),
                            )
                            for name, own in inner.items()
                        }
                        continue
                    if field.value is None:  # listed by the trainers, each with its own help
                        continue
                    text += " (required)" * ("REQUIRED" in ast.unparse(field.annotation))
                    found[key] = Setting(key, words_of(field.annotation, aliases), default_of(field.value), text, "")
    return found


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a module's source."""
    return ast.parse(source)


def name_of(expression: ast.expr) -> str:
    """Return the name of a class without its module, such as Run for groups.Run."""
    return expression.attr if isinstance(expression, ast.Attribute) else ast.unparse(expression)


def is_flat(annotation: ast.expr) -> bool:
    """True if the annotation is that of a group whose settings have no prefix."""
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Flat"


def unwrapped(annotation: ast.expr) -> ast.expr:
    """Return the type in an `Annotated` or a `Flat`, or any other annotation unchanged."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Annotated", "Flat"):
        return annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    return annotation


def words_of(annotation: ast.expr, aliases: Mapping[str, ast.expr]) -> list[str]:
    """Return the allowed words of a setting, in code quotes; empty if any value is allowed."""
    annotation = unwrapped(annotation)
    annotation = aliases.get(ast.unparse(annotation), annotation)
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Literal":
        return []
    words = ast.literal_eval(annotation.slice)
    return [f"`{word}`" for word in ([words] if isinstance(words, str) else words)]


def defaults_of(value: ast.expr | None) -> dict[str, str]:
    """Return the defaults that a trainer gives to a group, such as 1 in Data(group_size=1)."""
    given = value.keywords if isinstance(value, ast.Call) else ()
    return {each.arg: default_of(each.value) for each in given if each.arg}


def default_of(value: ast.expr | None) -> str:
    """Return the default in TOML, in code quotes; a path in the repository is relative to it."""
    if isinstance(value, ast.JoinedStr):
        pieces = [str(piece.value) for piece in value.values if isinstance(piece, ast.Constant)]
        return f"`{''.join(pieces).lstrip('/')}`"
    default = ast.literal_eval(value) if value is not None else None
    if isinstance(default, bool) or default is None:
        return {True: "on", False: "off", None: "none"}[default]
    return f"`{default}`" if default not in ("", ()) else ""


def table(rows: list[Setting]) -> str:
    """Return a table of settings."""
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *(row.row() for row in rows)])


def page() -> str:
    """Return the whole page: shared settings by group, then those that are new or different in each trainer."""
    sources = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "apps").glob("train_*.py"))}
    parts, shared = [HEAD], list[Setting]()
    for cls, title in CLASSES.items():
        own = [setting for setting in fields_of(cls, SHARED).values() if setting not in shared]
        parts += [f"\n## {title}" if shared else f"## {title}"]
        for group in dict.fromkeys(setting.group for setting in own):
            parts += [f"\n### {group}\n", table([setting for setting in own if setting.group == group])]
        shared += own
    parts.append(SETS_HEAD)
    for cls, title in SETS.items():
        base = [] if cls == "EvalSet" else list(fields_of("EvalSet", SHARED).values())
        parts += [f"Of {title}:\n", table([row for row in fields_of(cls, SHARED).values() if row not in base]), ""]
    for name, source in sources.items():
        title = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        own = [setting for setting in settings(source) if setting not in shared]
        parts += [f"\n## {name}\n", f"{title}\n", table(own)]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write or check the page; return the exit code."""
    if sys.argv[1:] == ["--check"]:
        if PAGE.exists() and PAGE.read_text("utf-8") == page():
            return 0
        print(f"{PAGE.relative_to(ROOT)} is not up to date: run python scripts/configuration.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
