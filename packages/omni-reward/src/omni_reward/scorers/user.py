"""Scorer from a user's file: `--scorer python:path/to/file.py:function`.

The file is executed, so only the server's command line may name it, never a request. The name is that of a score
function as in `omni_reward.wire.ScoreFn`, or of an `omni_reward.Scorer` built from one.
"""

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omni_reward.wire import ScoreFn

PREFIX = "python:"
MODULE = "omni_reward_user_"  # prefix of the module names of users' files


def load_user(spec: str, arguments: str = "media, prompts, meta") -> ScoreFn:
    """Load the function or Scorer of `python:path/to/file.py:name`. arguments: the arguments of the function.

    Raises:
        ValueError: as `check_user`, or the file raises an exception, or the named object is not callable.
        ImportError: the file imports a package that is not installed.
    """
    check_user(spec, arguments)
    path, _, name = spec.removeprefix(PREFIX).rpartition(":")
    file = Path(path)
    module_spec = importlib.util.spec_from_file_location(f"{MODULE}{file.stem}", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module
    try:
        module_spec.loader.exec_module(module)
    except ImportError as exc:
        raise ImportError(f"{path}: {exc}", name=exc.name) from exc
    except (Exception, SystemExit) as exc:  # a user's file may raise anything
        frame = user_frame(exc)
        raise ValueError(
            f"{path} must run, line {frame.lineno if frame else 0} raised {type(exc).__name__}: {exc}"
        ) from exc
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} must have a function {name!r}, got {function!r:.80}")
    return function


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last line of a user's file in the traceback of an error, or None if it has no such file."""
    frames, lines = traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    return next((line for name, line in reversed([*zip(names, lines, strict=True)]) if name.startswith(MODULE)), None)


def media_hint(error: BaseException) -> str:
    """Return what media are if a user's function took them for a list of images, as in other trainers; else nothing."""
    is_key = isinstance(error, KeyError) and isinstance(error.args[0], int)
    is_attribute = isinstance(error, AttributeError) and isinstance(error.obj, str | dict | np.ndarray)
    is_slice = isinstance(error, TypeError) and "'slice'" in str(error)
    return (
        '; media is a dict of arrays: media["image"] is uint8 [N, H, W, 3]'
        if is_key or is_attribute or is_slice
        else ""
    )


def check_user(spec: str, arguments: str = "media, prompts, meta") -> None:
    """Check a `python:path/to/file.py:name` from its file's text without executing it. arguments: as in `load_user`.

    Raises:
        ValueError: the file does not exist, is not Python, never mentions the name, or defines a function with other
            arguments.
    """
    path, _, name = spec.removeprefix(PREFIX).rpartition(":")
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"scorer must be python:FILE.py:FUNCTION with a file that exists, got {spec!r}")
    try:
        module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as exc:
        raise ValueError(f"{path} must be a file of Python: {exc}") from exc
    if {name, "*", "__getattr__"}.isdisjoint(_names(module)):
        raise ValueError(f"{path} must have a function {name!r}")
    bound = [node for node in module.body if name in set(_names(node))]
    if (
        bound
        and isinstance(function := bound[-1], ast.FunctionDef)
        and function.name == name
        and not function.decorator_list
    ):
        args, params = function.args, [*function.args.posonlyargs, *function.args.args]
        num, num_needed = arguments.count(",") + 1, len(params) - len(args.defaults)
        if num_needed > num or (len(params) < num and not args.vararg) or None in args.kw_defaults:
            rule = f"{name} must be a function of ({arguments})"
            raise ValueError(f"{path}, line {function.lineno}: {rule}, got ({ast.unparse(args)})")


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the code may bind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
