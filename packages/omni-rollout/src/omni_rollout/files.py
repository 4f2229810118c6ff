"""The files of a checkpoint: what their configuration says, and whether they are whole; no weight is read."""

import json
from collections.abc import Iterable
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
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"model is damaged: {file} is no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"model is damaged: {file} must hold a JSON object, got {type(content).__name__}")
    return content


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of a part's folder: those that its index names, or the one that has the libraries' name.

    Raises:
        ValueError: there are none, or the index is damaged.
    """
    for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        index = folder / f"{name}.index.json"
        if not index.is_file():
            if (folder / name).is_file():
                return [folder / name]
            continue
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise ValueError(f"model is damaged: {index} must have a weight_map of file names")
        return sorted({folder / name for name in names.values()})
    raise ValueError(f"model must have its weights as safetensors, {folder} holds none")


def safetensors_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in safetensors files, none of which is cut short.

    Raises:
        ValueError: the file, and what is wrong with it.
    """
    return {name: shape for file in files for name, shape in _shapes(file).items()}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
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
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as exc:
            raise ValueError(f"model is damaged: {file} has no header of a safetensors file") from exc
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"model is incomplete: {file} has {size} bytes, its header says {expected}")
    return shapes
