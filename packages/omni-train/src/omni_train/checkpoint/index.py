"""The index of a checkpoint, and the settings in it. Imports no torch."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_train.files import parse_object, read_regular

INDEX_FILE = "checkpoint.json"
_KINDS = {"step": int, "config": dict, "versions": dict, "world_size": int, "files": dict, "tensors": dict}
_PART_KINDS = {"files": dict, "tensors": dict, "attempt": str}
_MINIMUMS = {"step": 0, "world_size": 1}
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """The contents of checkpoint.json. `step` counts finished training steps; `files` and `tensors` form its index."""

    step: int
    config: dict[str, Any]
    versions: dict[str, str]
    world_size: int
    files: dict[str, dict[str, int | str]]
    tensors: dict[str, dict[str, Any]]


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in ascending order."""
    return sorted(step for path in folder.glob("step-*") if (step := parse_step(path.name)) is not None)


def step_name(step: int) -> str:
    """Return the name of a checkpoint."""
    return f"step-{step:08}"


def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name."""
    match = re.fullmatch("step-([0-9]{8,19})", name)
    return int(match[1]) if match else None


def step_folder(folder: Path, step: int, suffix: str = "") -> Path:
    """Return the folder of a checkpoint."""
    return folder / f"{step_name(step)}{suffix}"


def check_config(saved: Saved, config: Config, *, ignore: Collection[str] = ()) -> None:
    """Raise ValueError listing the settings, except `ignore`, that differ from those of the checkpoint."""
    if changed := config_differences(saved.config, config, ignore=ignore):
        changes = ", ".join(_change(key, config, *values) for key, values in changed.items())
        raise ValueError(
            f"the checkpoint of step {saved.step} was made with other settings: {changes}. Continue with those, or "
            "give the run a name of its own"
        )


def _change(key: str, config: Config, saved: str, current: str) -> str:
    """Return a description of the change; for a digest, name the changed file."""
    name = key.removesuffix("_digest")
    if name == key or "absent" in (saved, current):
        return f"{key} was {saved}, is {current}"
    return f"{config.get(name, f'a file of the {name}')} has other contents than at the start"


def config_differences(saved: Config, current: Config, *, ignore: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, except `ignore`, each with both values as JSON or "absent"."""
    keys = [key for key in {**saved, **current} if key not in ignore]
    values = {key: tuple(json.dumps(c[key]) if key in c else "absent" for c in (saved, current)) for key in keys}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def read_index(folder: Path) -> Saved:
    """Return the index of a folder; raise ValueError if it is missing or was modified."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise ValueError(f"{INDEX_FILE} is missing")
    return parse_index(read_regular(path))


def parse_index(data: bytes) -> Saved:
    """Parse the index from the bytes of its file; raise ValueError if it was modified."""
    content = parse_object(data, INDEX_FILE)
    if content.pop("sha256", None) != index_digest(content):
        raise ValueError(f"{INDEX_FILE} has another SHA-256 than it says")
    if (actual := sorted(content)) != (expected := sorted(_KINDS)):
        raise ValueError(f"{INDEX_FILE} has the keys {actual}, not {expected}: another version of omni-train wrote it")
    _check_kinds(content, _KINDS, INDEX_FILE)
    _check_files(content, INDEX_FILE)
    return Saved(**content)


def parse_part(data: bytes, what: str, *, is_first: bool) -> dict[str, Any]:
    """Parse the index of a rank's part; the first rank's part also describes the checkpoint.

    Raises:
        ValueError: the content is not that of a saved part. what: its file, for the message.
    """
    content = parse_object(data, what)
    _check_kinds(content, _PART_KINDS | ({"about": dict} if is_first else {}), what)
    _check_files(content, what)
    if is_first:
        _check_kinds(content["about"], {name: _KINDS[name] for name in _KINDS.keys() - _PART_KINDS.keys()}, what)
    return content


def _check_kinds(content: Mapping[str, Any], kinds: Mapping[str, type], what: str) -> None:
    """Raise ValueError unless the values have the types that a save writes."""
    fits = all(type(content.get(name)) is kind for name, kind in kinds.items())
    fits = fits and all(content[name] >= minimum for name, minimum in _MINIMUMS.items() if name in kinds)
    fits = fits and all(map(_is_file, content.get("files", {}).values()))
    if not (fits and all(map(_is_tensor, content.get("tensors", {}).values()))):
        raise ValueError(f"{what} must have values of the kinds that a save writes")


def _check_files(content: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless the files are below the folder and include those that hold the tensors."""
    if invalid := [name for name in content["files"] if not _is_below(name)]:
        raise ValueError(f"{what} must name files below it, got {invalid[0]!r:.100}")
    if invalid := sorted(tensor_files(content["tensors"]) - content["files"].keys()):
        raise ValueError(f"{what} must list every file that holds a tensor, lacks {invalid[0]!r:.100}")


def tensor_files(tensors: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of the files that hold tensors of an index."""
    return {file for entry in tensors.values() for file, _ in entry["pieces"]}


def _is_below(name: str) -> bool:
    """Return True if the name is the path of a file below a folder, in printable characters."""
    return name.isprintable() and not {"", ".", ".."}.intersection(name.split("/"))


def _is_file(entry: object) -> bool:
    match entry:
        case {"bytes": int(size), "sha256": str()}:
            return type(size) is int and size >= 0
    return False


def _is_tensor(entry: object) -> bool:
    match entry:
        case {"dtype": str(), "shape": [*shape], "pieces": [*pieces]}:
            are_named = all(isinstance(piece, list) and [*map(type, piece)] == [str, int] for piece in pieces)
            return are_named and all(type(n) is int and n >= 0 for n in [*shape, *(first for _, first in pieces)])
    return False


def index_digest(content: object) -> str:
    """Return the SHA-256 of an index without its own digest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
