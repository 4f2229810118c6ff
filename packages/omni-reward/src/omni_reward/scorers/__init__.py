"""Scorers by name, each served on its own or as part of a reward (omni_reward/terms.py)."""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from omni_reward.combine import combine
from omni_reward.scorers.frames import PREFIX as FRAMES
from omni_reward.scorers.frames import over_frames
from omni_reward.scorers.rules import PREFIX as RULES
from omni_reward.scorers.rules import load_rules
from omni_reward.scorers.user import PREFIX, check_user, load_user
from omni_reward.terms import Reward, parse
from omni_reward.wire import ScoreFn, Scorer

if TYPE_CHECKING:
    from omni_reward.scorers.neural import Empty

SCORERS = (
    "aesthetic", "clap", "clip", "color", "editreward", "flow", "geneval", "hpsv2", "hpsv3", "imagebind", "imagereward",
    "jpeg", "likeness", "ocr", "pickscore", "pitch", "sync", "video", "videoalign", "vlm",
)  # fmt: skip


def find_loader(name: str) -> Callable[..., ScoreFn]:
    """Return the `load_...` function of a scorer; only this imports the scorer's libraries.

    Raises:
        ValueError: the scorer does not exist.
        ImportError: it needs a library that is not installed.
    """
    load: Callable[..., ScoreFn]
    match name:
        case "aesthetic":
            from omni_reward.scorers.aesthetic import load_aesthetic as load
        case "clap":
            from omni_reward.scorers.clap import load_clap as load
        case "clip":
            from omni_reward.scorers.clip import load_clip as load
        case "color":
            from omni_reward.scorers.color import load_color as load
        case "editreward":
            from omni_reward.scorers.editreward import load_editreward as load
        case "flow":
            from omni_reward.scorers.flow import load_flow as load
        case "geneval":
            from omni_reward.scorers.geneval import load_geneval as load
        case "hpsv2":
            from omni_reward.scorers.hpsv2 import load_hpsv2 as load
        case "hpsv3":
            from omni_reward.scorers.hpsv3 import load_hpsv3 as load
        case "imagebind":
            from omni_reward.scorers.imagebind import load_imagebind as load
        case "imagereward":
            from omni_reward.scorers.imagereward import load_imagereward as load
        case "jpeg":
            from omni_reward.scorers.jpeg import load_jpeg as load
        case "likeness":
            from omni_reward.scorers.likeness import load_likeness as load
        case "ocr":
            from omni_reward.scorers.ocr import load_ocr as load
        case "pickscore":
            from omni_reward.scorers.clip import load_pickscore as load
        case "pitch":
            from omni_reward.scorers.sound import load_pitch as load
        case "sync":
            from omni_reward.scorers.sound import load_sync as load
        case "video":
            from omni_reward.scorers.video import load_video as load
        case "videoalign":
            from omni_reward.scorers.videoalign import load_videoalign as load
        case "vlm":
            from omni_reward.scorers.vlm import load_vlm as load
        case _:
            matches = get_close_matches(name, SCORERS, n=1)
            known = f"{list(SCORERS)}, {PREFIX}FILE.py:FUNCTION or {RULES}REWARD"
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise ValueError(f"scorer must be one of {known}, got {name!r}{hint}")
    return load


def check_scorer(name: str) -> None:
    """Raise ValueError unless all scorers of a reward exist; no scorer is loaded, and no user's file is executed."""
    for spec in () if name.startswith(RULES) else parse(name).specs.values():
        if (inner := spec.removeprefix(FRAMES)).startswith(PREFIX):
            check_user(inner)
        elif inner not in SCORERS:
            find_loader(inner)


def load_scorer(name: str, *, threads: int = 1, options: Mapping[str, str] | None = None) -> Scorer:
    """Load a scorer by name.

    Args:
        name: one of SCORERS, `python:path/to/file.py:function`, a scorer of images after `frames:`, a reward as in
            `omni_reward.terms`, or rules for texts after `rules:`.
        threads: cores that the scorer may use.
        options: settings by name; for a combination, by SCORER.NAME.

    Raises:
        ValueError: the scorer or an option does not exist, or the scorer does not accept its value.
        ImportError: it needs a library that is not installed.
    """
    if name.startswith(RULES):  # patterns may contain any character
        return Scorer.of(_call(name, partial(load_rules, name.removeprefix(RULES)), options or {}))
    reward = parse(name)
    by_scorer = _options_by_scorer(reward, options or {})
    loaded = {name: _load(spec, threads, by_scorer[name]) for name, spec in reward.specs.items()}
    return next(iter(loaded.values())) if reward.is_plain else combine(reward, loaded)


def find_empty(name: str) -> "Callable[..., Empty] | None":
    """Return the `empty_...` function of a scorer with a network, or None for other scorers.

    Raises:
        ImportError: it needs a library that is not installed.
    """
    empty: Callable[..., Empty] | None = None
    match name:
        case "aesthetic":
            from omni_reward.scorers.aesthetic import empty_aesthetic as empty
        case "clap":
            from omni_reward.scorers.clap import empty_clap as empty
        case "clip":
            from omni_reward.scorers.clip import empty_clip as empty
        case "editreward":
            from omni_reward.scorers.editreward import empty_editreward as empty
        case "geneval":
            from omni_reward.scorers.geneval import empty_geneval as empty
        case "hpsv2":
            from omni_reward.scorers.hpsv2 import empty_hpsv2 as empty
        case "hpsv3":
            from omni_reward.scorers.hpsv3 import empty_hpsv3 as empty
        case "imagebind":
            from omni_reward.scorers.imagebind import empty_imagebind as empty
        case "imagereward":
            from omni_reward.scorers.imagereward import empty_imagereward as empty
        case "pickscore":
            from omni_reward.scorers.clip import empty_pickscore as empty
        case "videoalign":
            from omni_reward.scorers.videoalign import empty_videoalign as empty
    return empty


def empty_networks(name: str, device: str, options: Mapping[str, str], num_devices: int = 1) -> "dict[str, Empty]":
    """Return the scorers' networks on the first accelerators, with uninitialized weights, by the scorer's name.

    Scorers whose option `device` is a CPU or an accelerator beyond the first `num_devices` are left out.

    Args:
        name, options: as in `load_scorer`.
        device: device on which the networks are allocated.

    Raises:
        ValueError, ImportError: as `load_scorer`.
    """
    if name.startswith(RULES):
        return {}
    reward = parse(name)
    by_scorer = _options_by_scorer(reward, options)
    networks: dict[str, Empty] = {}
    for key, spec in reward.specs.items():
        where = re.fullmatch(r"(?!cpu)\w*?(?::(\d+))?", by_scorer[key].get("device", ""))
        empty = find_empty(spec.removeprefix(FRAMES))
        if empty and where and int(where[1] or 0) < num_devices:
            known = inspect.getfullargspec(empty).kwonlyargs
            networks[key] = empty(
                device, **{option: text for option, text in by_scorer[key].items() if option in known}
            )
    return networks


def device_options(name: str, options: Mapping[str, str]) -> list[str]:
    """Return the options that place the networks of a reward on a device, such as "device" or "clip.device".

    Options that are given are left out. If one of them is not a CPU, the list is empty: the user has placed the
    networks.

    name, options: as in `load_scorer`.

    Raises:
        ValueError, ImportError: as `load_scorer`.
    """
    if name.startswith(RULES):
        return []
    reward = parse(name)
    by_scorer = _options_by_scorer(reward, options)
    loaders = {key: spec.removeprefix(FRAMES) for key, spec in reward.specs.items()}
    keys = [
        key
        for key, spec in loaders.items()
        if not spec.startswith(PREFIX) and "device" in inspect.signature(find_loader(spec)).parameters
    ]
    if any(not by_scorer[key].get("device", "cpu").startswith("cpu") for key in keys):
        return []
    return ["device" if reward.is_plain else f"{key}.device" for key in keys if "device" not in by_scorer[key]]


def _options_by_scorer(reward: Reward, options: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the options of each scorer of a reward."""
    by_scorer: dict[str, dict[str, str]] = {name: {} for name in reward.specs}
    if reward.is_plain:
        return {name: dict(options) for name in by_scorer}
    for key, value in options.items():
        scorer, _, option = key.partition(".")
        if scorer not in by_scorer or not option:
            raise ValueError(f"an option of a combination must be SCORER.OPTION of {sorted(by_scorer)}, got {key!r}")
        by_scorer[scorer][option] = value
    return by_scorer


def _load(spec: str, threads: int, options: Mapping[str, str]) -> Scorer:
    if spec.startswith(FRAMES):
        frame_options = {name: text for name, text in options.items() if name in ("frames", "every")}
        others = {name: text for name, text in options.items() if name not in frame_options}
        image = _load(spec.removeprefix(FRAMES), threads, others)
        return Scorer.of(_call(spec, partial(over_frames, image), frame_options))
    if spec.startswith(PREFIX):
        if options:
            raise ValueError(f"options must be empty for {spec}, got {sorted(options)}")
        return Scorer.of(load_user(spec))
    try:
        load = find_loader(spec)
        extra = {"threads": threads} if "threads" in inspect.signature(load).parameters else {}
        return Scorer.of(_call(spec, load, options, **extra))
    except ImportError as exc:
        raise ImportError(f"scorer {spec} needs {exc.name}: install omni-reward[{spec}]", name=exc.name) from exc


def _call(spec: str, load: Callable[..., ScoreFn], options: Mapping[str, str], **extra: int) -> ScoreFn:
    """Call a `load_...` function with options."""
    signature = inspect.signature(load)
    try:
        converted: dict[str, str | float] = {name: _convert(name, text, signature) for name, text in options.items()}
        bound = signature.bind(**extra, **converted)
    except TypeError as exc:
        raise ValueError(f"options of {spec} must fit it: {exc}") from exc
    return load(*bound.args, **bound.kwargs)


def _convert(name: str, text: str, signature: inspect.Signature) -> str | float:
    """Convert the option to a number if its default is one."""
    parameter = signature.parameters.get(name)
    kind = {int: int, float: float}.get(type(parameter.default)) if parameter else None
    try:
        return kind(text) if kind else text
    except ValueError as exc:
        raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number, got {text!r:.80}") from exc
