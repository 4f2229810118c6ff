"""Short functions, short files, and a docstring on whatever others may use."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import REPO

MAX_FILE_LINES = 400
MAX_CODE_LINES = {"packages": 40, "apps": 60}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> int:
    """Lines of a function from `def` on, without its docstring, blank lines and lines that are only a comment."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if has_docstring else range(0)
    lines = source.splitlines()
    kept = (lines[n - 1].strip() for n in range(function.lineno, (function.end_lineno or 0) + 1) if n not in docstring)
    return sum(1 for line in kept if line and not line.startswith("#"))


def size_faults(source: str, max_code_lines: int) -> list[str]:
    """Functions with more code lines than allowed, and a file with more lines than allowed."""
    faults = [
        f"{node.name} has {count} code lines, {max_code_lines} allowed"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := num_code_lines(node, source)) > max_code_lines
    ]
    if (count := len(source.splitlines())) > MAX_FILE_LINES:
        faults.append(f"the file has {count} lines, {MAX_FILE_LINES} allowed")
    return faults


def public(node: Documented, name: str) -> Iterator[tuple[Documented, str]]:
    """A module, class or function, and the public classes, functions and methods in it."""
    yield node, name
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from public(child, child.name)


def docstring_faults(source: str) -> list[str]:
    """Public names without a docstring."""
    return [f"{name} has no docstring" for node, name in public(ast.parse(source), "it") if not ast.get_docstring(node)]


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in REPO.glob(pattern))


@pytest.mark.parametrize("folder", MAX_CODE_LINES)
def test_functions_and_files_are_short(folder: str):
    found = sources(f"{folder}/**/*.py")
    assert found
    limit = MAX_CODE_LINES[folder]
    assert [f"{path}: {fault}" for path in found for fault in size_faults(path.read_text("utf-8"), limit)] == []


def test_scripts_and_tests_are_short_files():
    found = sources("scripts/*.py", "tests/**/*.py")
    assert [f"{path}: {n}" for path in found if (n := len(path.read_text("utf-8").splitlines())) > MAX_FILE_LINES] == []


def test_public_names_have_docstrings():
    found = sources("packages/*/src/**/*.py")
    assert [f"{path}: {fault}" for path in found for fault in docstring_faults(path.read_text("utf-8"))] == []


def test_only_code_lines_count():
    source = '@cache\ndef f(\n    x,\n):\n    """A.\n\n    B.\n    """\n\n    # why\n    return x  # what\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert num_code_lines(function, source) == 4


def test_a_long_function_and_a_long_file_are_faults():
    body = "    x = 1\n" * 39
    assert size_faults(f"def f():\n{body}", 40) == []
    assert size_faults(f"def f():\n{body}    return x\n", 40) == ["f has 41 code lines, 40 allowed"]
    method = "class C:\n    async def f():\n" + "        x = 1\n" * 40
    assert size_faults(method, 40) == ["f has 41 code lines, 40 allowed"]
    assert size_faults("x = 1\n" * 400, 40) == []
    assert size_faults("x = 1\n" * 401, 40) == ["the file has 401 lines, 400 allowed"]


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("x = 1", ["it"]),
        ('"""M."""\ndef f(): ...', ["f"]),
        ('"""M."""\nasync def f(): ...', ["f"]),
        ('"""M."""\nclass C:\n    def f(self): ...', ["C", "f"]),
        ('"""M."""\nclass _C:\n    def f(self): ...', []),
        ('"""M."""\ndef _f(): ...', []),
        ('"""M."""\ndef f():\n    """F."""\n    def inner(): ...', []),
    ],
)
def test_a_missing_docstring_is_a_fault(source: str, missing: list[str]):
    assert docstring_faults(source) == [f"{name} has no docstring" for name in missing]
