"""No module of the packages imports one that imports it, by whichever way round."""

import ast

import networkx
from helpers import REPO


def sources():
    """The source of each module, by its name."""
    paths = [path for path in REPO.glob("packages/*/src/**/*.py") if not path.is_symlink()]
    return {
        ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]): path.read_text("utf-8") for path in paths
    }


def circles(sources):
    """The sets of modules that import each other, wherever the lines stand."""
    graph = networkx.DiGraph()
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                parts = {f"{node.module}.{alias.name}" for alias in node.names} & sources.keys()
                found = parts or {node.module}
            graph.add_edges_from((name, other) for other in found & sources.keys())
    return [found for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def test_no_module_imports_one_that_imports_it():
    assert circles(sources()) == []


def test_a_circle_is_found_through_a_line_in_a_function():
    assert circles({"a": "import b", "b": "def f():\n    from c import g", "c": "from a import h"}) == [{"a", "b", "c"}]
    assert circles({"a": "import b", "b": "import c", "c": "from d import a"}) == []
