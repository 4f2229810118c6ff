"""A scorer from a user's file: `--scorer python:path/to/file.py:function`.

The file is executed, so only the server's command line may name it, never a request. It names a score function as in
`omni_reward.wire.ScoreFn`, or an `omni_reward.Scorer` of one.
"""

import importlib.util
import sys
from pathlib import Path

from omni_reward.wire import ScoreFn

PREFIX = "python:"


def load_user(spec: str) -> ScoreFn:
    """Load the function or Scorer of `python:path/to/file.py:name`.

    Raises:
        ValueError: the file does not exist, or has no callable of this name.
        ImportError: the file imports a package that is not installed.
    """
    path, _, name = spec.removeprefix(PREFIX).rpartition(":")
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"scorer must be python:FILE.py:FUNCTION with a file that exists, got {spec!r}")
    module_spec = importlib.util.spec_from_file_location(f"omni_reward_user_{file.stem}", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module
    try:
        module_spec.loader.exec_module(module)
    except ImportError as exc:
        raise ImportError(f"{path}: {exc}", name=exc.name) from exc
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{path} must have a function {name!r}, got {found!r:.80}")
    return found
