"""Scorers by name: what a server can be told to serve, alone or combined (omni_reward/combine.py).

Each module has `load_...` functions, which return a score function or a Scorer. The functions here hand them the
options of the command line, so that the libraries of a scorer are imported only where it is asked for.
"""

import inspect
from collections.abc import Callable, Mapping

from omni_reward import combine
from omni_reward.scorers.user import PREFIX, load_user
from omni_reward.wire import ScoreFn, Scorer


def _load_ocr(threads: int) -> ScoreFn:
    from omni_reward.scorers.ocr import load_ocr

    return load_ocr(threads=threads)


def _load_jpeg(threads: int, *, mode: str = "compressibility") -> ScoreFn:
    from omni_reward.scorers.jpeg import load_jpeg

    return load_jpeg(mode=mode)


def _load_video(threads: int, *, measure: str = "mean") -> ScoreFn:
    from omni_reward.scorers.video import load_video

    return load_video(measure=measure)


def _load_vlm(
    threads: int,
    *,
    url: str,
    task: str,
    model: str = "",
    token_file: str = "",
    timeout_s: str = "60",
    max_in_flight: str = "8",
    seed: str = "0",
) -> ScoreFn:
    from omni_reward.scorers.vlm import load_vlm

    return load_vlm(
        url,
        task=task,
        model=model or None,
        token_file=token_file or None,
        timeout_s=_number("timeout_s", timeout_s),
        max_in_flight=_integer("max_in_flight", max_in_flight),
        seed=_integer("seed", seed),
    )


def _load_clip(threads: int, **options: str) -> ScoreFn:
    from omni_reward.scorers.clip import load_clip

    return _call("clip", load_clip, threads=threads, **options)


def _load_pickscore(threads: int, **options: str) -> ScoreFn:
    from omni_reward.scorers.clip import load_pickscore

    return _call("pickscore", load_pickscore, threads=threads, **options)


def _load_aesthetic(threads: int, **options: str) -> ScoreFn:
    from omni_reward.scorers.aesthetic import load_aesthetic

    return _call("aesthetic", load_aesthetic, threads=threads, **options)


def _load_imagereward(threads: int, **options: str) -> ScoreFn:
    from omni_reward.scorers.imagereward import load_imagereward

    return _call("imagereward", load_imagereward, threads=threads, **options)


def _load_hpsv3(threads: int, **options: str) -> ScoreFn:
    from omni_reward.scorers.hpsv3 import load_hpsv3

    return _call("hpsv3", load_hpsv3, threads=threads, **options)


SCORERS: dict[str, Callable[..., ScoreFn]] = {  # name -> function of the number of threads and of named options (str)
    "aesthetic": _load_aesthetic,
    "clip": _load_clip,
    "hpsv3": _load_hpsv3,
    "imagereward": _load_imagereward,
    "jpeg": _load_jpeg,
    "ocr": _load_ocr,
    "pickscore": _load_pickscore,
    "video": _load_video,
    "vlm": _load_vlm,
}


def load_scorer(name: str, *, threads: int = 1, options: Mapping[str, str] | None = None) -> ScoreFn:
    """The scorer of that name, ready to score; a `wire.Scorer` where it has more to say of itself than its function.

    Args:
        name: a key of SCORERS, `python:path/to/file.py:function`, or a combination as in `omni_reward.combine`.
        threads: cores that the scorer may use.
        options: settings by name; of a combination, by the scorer's name, a dot and the setting's.

    Raises:
        ValueError: there is no such scorer, or it has no such option, or refuses its value.
        ImportError: it needs a library that is not installed.
    """
    recipe = combine.parse(name)
    if recipe.is_plain:
        [spec] = recipe.specs.values()
        return _load(spec, threads, options or {})
    own: dict[str, dict[str, str]] = {name: {} for name in recipe.specs}
    for key, value in (options or {}).items():
        scorer, _, option = key.partition(".")
        if scorer not in own or not option:
            raise ValueError(f"an option of a combination must be SCORER.OPTION of {sorted(own)}, got {key!r}")
        own[scorer][option] = value
    loaded = {name: _load(spec, threads, own[name]) for name, spec in recipe.specs.items()}
    return combine.combine(recipe, {name: fn if isinstance(fn, Scorer) else Scorer(fn) for name, fn in loaded.items()})


def _load(spec: str, threads: int, options: Mapping[str, str]) -> ScoreFn:
    if spec.startswith(PREFIX):
        if options:
            raise ValueError(f"options must be left out for {spec}, got {sorted(options)}")
        return load_user(spec)
    if spec not in SCORERS:
        raise ValueError(f"scorer must be one of {sorted(SCORERS)} or {PREFIX}FILE.py:FUNCTION, got {spec!r}")
    try:
        return _call(spec, SCORERS[spec], threads, **options)
    except ImportError as exc:
        raise ImportError(f"scorer {spec} needs {exc.name}: install omni-reward[{spec}]", name=exc.name) from exc


def _call(name: str, load: Callable[..., ScoreFn], *args: int, **options: object) -> ScoreFn:
    try:
        inspect.signature(load).bind(*args, **options)
    except TypeError as exc:
        raise ValueError(f"options of {name} must fit it: {exc}") from exc
    return load(*args, **options)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ValueError(f"{name} must be a number, got {text!r:.80}") from exc


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise ValueError(f"{name} must be a whole number, got {text!r:.80}") from exc
