"""Whether the files of a checkpoint are all there and whole, without reading a weight."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"model is incomplete: {file} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"model is damaged: {file} is no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"model is damaged: {file} must hold a JSON object, got {type(content).__name__}")
    return content


def check_safetensors(folder: Path) -> set[str]:
    """The names of the tensors in a folder of safetensors files: all that its index names, none cut short.

    Raises:
        ValueError: the file, and what is wrong with it.
    """
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"model is damaged: {index} must have a weight_map")
        files |= {folder / str(name) for name in names.values()}
    if not files:
        raise ValueError(f"model must have its weights as safetensors, {folder} holds none")
    return {name for file in sorted(files) for name in _tensor_names(file)}


def _tensor_names(file: Path) -> list[str]:
    """What a safetensors file holds: an 8-byte length, a JSON header of that length, then the tensors."""
    if not file.is_file():
        raise ValueError(f"model is incomplete: {file} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"model is incomplete: {file} has {size} bytes, not even its header")
        try:
            header = json.loads(stream.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, LookupError, AttributeError, TypeError) as exc:
            raise ValueError(f"model is damaged: {file} has no header of a safetensors file") from exc
    expected = 8 + length + max(ends.values(), default=0)
    if size != expected:
        raise ValueError(f"model is incomplete: {file} has {size} bytes, its header says {expected}")
    return list(ends)
