"""Write tests/arch/torch_floor.json: the uses of torch in packages and apps that the oldest allowed torch supports.

Run it with a Python that has this torch and nothing else; `uv run --no-project --with torch==2.12.0 python
scripts/release/torch_floor.py` installs it. A test requires that the file has all uses supported by the installed
torch, and the version required by the packages.

A use is a name, such as torch.compile; a keyword of a call, such as torch.compile(dynamic); or an attribute of an
argument whose type is a torch class, such as torch.Tensor.numel.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FILE = REPO / "tests" / "arch" / "torch_floor.json"


def sources() -> list[str]:
    """Return the sources of packages and apps."""
    files = [*REPO.glob("packages/*/src/**/*.py"), *REPO.glob("apps/*.py")]
    return [file.read_text("utf-8") for file in sorted(file for file in files if not file.is_symlink())]


def uses(source: str) -> set[str]:
    """Return the uses of torch in a source."""
    tree = ast.parse(source)
    known = dict(imported(tree))
    found = {name for name in known.values() if name != "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node, known)):
            found.add(name)
        elif isinstance(node, ast.Call) and (name := dotted(node.func, known)):
            found |= {f"{name}({keyword.arg})" for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.FunctionDef):
            found |= set(attributes(node, known))
    return {use for use in found - {"torch"} if not use.startswith("torch.ops.")}  # these are registered, some by us


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local and full names of a source's imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each for each in node.names if each.name.partition(".")[0] == "torch"]
            yield from ((each.asname, each.name) if each.asname else ("torch", "torch") for each in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """Return the full name of an expression such as nn.Linear; "" if it is not from torch."""
    text = ast.unparse(node)
    first, _, rest = text.partition(".")
    is_name = first in known and all(part.isidentifier() for part in text.split("."))
    return f"{known[first]}.{rest}".rstrip(".") if is_name else ""


def attributes(function: ast.FunctionDef, known: dict[str, str]) -> Iterator[str]:
    """Yield the full names of attributes of a function's arguments whose type is a torch class."""
    given = [*function.args.args, *function.args.kwonlyargs]
    kinds = {each.arg: dotted(each.annotation, known) for each in given if each.annotation}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind = kinds.get(node.value.id, "")
            if kind:
                yield f"{kind}.{node.attr}"


def is_there(use: str) -> bool:
    """True if the installed torch supports it. Keywords of C functions are unknown, and pass."""
    name, _, keyword = use.rstrip(")").partition("(")
    value: object = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            if inspect.isclass(value):
                return part in parameters(value)  # an attribute set by its constructor
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        value = getattr(value, part)
    return not keyword or keyword in (found := parameters(value)) or not found or "**" in found


def parameters(value: object) -> set[str]:
    """Return the parameter names of a function or constructor, ** for any keyword; empty if unknown."""
    try:
        found = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()
    return {"**" if each.kind is each.VAR_KEYWORD else each.name for each in found}


def main() -> None:
    """Write the file."""
    version = importlib.import_module("torch").__version__.partition("+")[0]
    found = sorted(filter(is_there, set().union(*map(uses, sources()))))
    FILE.write_text(json.dumps({"torch": version, "uses": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
