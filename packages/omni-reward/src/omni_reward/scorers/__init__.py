"""Scorers: each module has one `load_...` function, which returns a score function for `create_app`."""

import inspect
from collections.abc import Callable, Mapping

from omni_reward.wire import ScoreFn


def _load_ocr(threads: int) -> ScoreFn:
    from omni_reward.scorers.ocr import load_ocr

    return load_ocr(threads=threads)


SCORERS: dict[str, Callable[..., ScoreFn]] = {  # name -> function of the number of threads and of named options (str)
    "ocr": _load_ocr,
}


def load_scorer(name: str, *, threads: int = 1, options: Mapping[str, str] | None = None) -> ScoreFn:
    """The scorer of that name, ready to score; a `wire.Scorer` where it has more to say of itself than its function.

    Raises:
        ValueError: there is no such scorer, or it has no such option, or refuses its value.
        ImportError: it needs a library that is not installed.
    """
    if name not in SCORERS:
        raise ValueError(f"scorer must be one of {sorted(SCORERS)}, got {name!r}")
    load = SCORERS[name]
    try:
        inspect.signature(load).bind(threads, **(options or {}))
    except TypeError as exc:
        raise ValueError(f"options of {name} must fit it: {exc}") from exc
    return load(threads, **(options or {}))
