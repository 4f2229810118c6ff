"""Whether the files of a checkpoint are all there and whole, without reading a weight."""

import json
from pathlib import Path


def check_safetensors(folder: Path) -> None:
    """Returns when the folder has safetensors files, every one that its index names, none cut short.

    Raises:
        ValueError: the file, and what is wrong with it.
    """
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        files |= {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    if not files:
        raise ValueError(f"model must have its weights as safetensors, {folder} holds none")
    for file in sorted(files):
        if not file.is_file():
            raise ValueError(f"model is incomplete: {file} is missing")
        expected = _expected_size(file)
        if file.stat().st_size != expected:
            raise ValueError(f"model is incomplete: {file} has {file.stat().st_size} bytes, its header says {expected}")


def _expected_size(file: Path) -> int:
    """The size that a safetensors file says it has: an 8-byte length, a JSON header of that length, the tensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"model is incomplete: {file} is no whole safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as exc:
            raise ValueError(f"model is incomplete: the header of {file} is damaged") from exc
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)
