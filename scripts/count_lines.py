"""Count the lines of code of packages and apps, without docstrings, comments and blank lines.

python scripts/count_lines.py [FOLDER_OR_FILE ...]
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code, from 1; strings other than docstrings count."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    return lines - _docstring_lines(source)


def _docstring_lines(source: str) -> set[int]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    first = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    return {n for node in first for n in range(node.lineno, (node.end_lineno or 0) + 1)}


def sources(folder: Path) -> list[Path]:
    """Return the Python files of a folder, without links, or the file itself."""
    return [folder] if folder.is_file() else sorted(path for path in folder.rglob("*.py") if not path.is_symlink())


def count(paths: Iterable[Path]) -> int:
    """Return the total number of code lines of these files."""
    return sum(len(code_lines(path.read_text("utf-8"))) for path in paths)


def programs() -> list[Path]:
    """Return the folders to count: the source of each package, and the apps."""
    return [*sorted(ROOT.glob("packages/*/src/*")), ROOT / "apps"]


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or programs()
    counts = {folder: count(sources(folder)) for folder in folders}
    for folder, number in counts.items():
        print(f"{number:6,}  {folder}")
    print(f"{sum(counts.values()):6,}")


if __name__ == "__main__":
    main()
