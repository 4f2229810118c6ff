"""How lines are counted, and a docstring on what others may use."""

import ast
from collections.abc import Iterator
from pathlib import Path

import count_lines
import pytest

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


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


def folders() -> list[Path]:
    found = count_lines.programs()
    assert {"apps", "omni_sched", "omni_losses", "omni_reward", "omni_rollout", "omni_train", "omni_rl"} <= {
        folder.name for folder in found
    }
    return found


def test_only_lines_of_code_count():
    function = '@cache\ndef f(\n    x,\n):\n    """A."""\n    # why\n    return x + (  # what\n        1\n    )\n'
    assert count_lines.code_lines(function) == {1, 2, 3, 4, 7, 8, 9}
    text = '"""M.\n\nN."""\n\nTEXT = """\na\n\nb"""\n"loose"\n\nclass C:\n    """C."""\n'
    assert count_lines.code_lines(text) == {5, 6, 7, 8, 9, 11}


def test_public_names_have_docstrings():
    found = [path for folder in folders() if folder.name != "apps" for path in count_lines.sources(folder)]
    assert [f"{path}: {fault}" for path in found for fault in docstring_faults(path.read_text("utf-8"))] == []


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
