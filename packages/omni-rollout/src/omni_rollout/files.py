"""Files of a checkpoint: their configuration and completeness. No weights are read."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

COUNTS = re.compile("layers|depth|blocks")  # in the names of configuration entries
MAX_LAYERS = 1000
MAX_JSON_BYTES = 2**28
POINTER = b"version https://git-lfs"  # start of a Git LFS pointer, which stands in for a file that is not fetched
AGAIN = "if a download was interrupted, the same command resumes it"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_fetched(file: Path) -> None:
    """Raise ValueError if a file is only a Git LFS pointer."""
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
        if opened.read(len(POINTER)) == POINTER:
            fault = f"{file} is only a Git LFS pointer: `git lfs pull` fetches the file"
            raise ValueError(f"model is incomplete: {fault}")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is missing or too large, or does not hold a JSON object.
    """
    if not file.is_file():
        raise ValueError(f"model is incomplete: {file} is missing")
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"model is damaged: {file} must have at most {MAX_JSON_BYTES} bytes, got {size}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        check_fetched(file)
        raise ValueError(f"model is damaged: {file} is no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"model is damaged: {file} must hold a JSON object, got {type(content).__name__}")
    return content


def check_counts(config: Mapping[str, object], file: Path) -> None:
    """Raise ValueError for an absurd number of layers in a file's object, with which building the net would not end."""
    open_parts: list[object] = [config]
    while open_parts:
        part = open_parts.pop()
        items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list) else ()
        for name, value in items:
            open_parts.append(value)
            values = value if isinstance(value, list) else [value]
            if COUNTS.search(str(name)) and any(type(v) in (int, float) and abs(v) > MAX_LAYERS for v in values):
                raise ValueError(f"{name} of {file} must be at most {MAX_LAYERS}, got {value!r:.80}")


def safetensors_files(folder: Path, name: str = "diffusion_pytorch_model") -> list[Path]:
    """Return the safetensors files in the folder of a part: those of its index, or the one named `name`.

    name: the library's file name; `model` in transformers folders.

    Raises:
        ValueError: there are none, or the index is damaged.
    """
    file = folder / f"{name}.safetensors"
    index = folder / f"{name}.safetensors.index.json"
    if index.is_file() and not (name == "model" and file.is_file()):  # as the libraries choose
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise ValueError(f"model is damaged: {index} must have a weight_map of file names")
        return sorted({folder / file_name for file_name in names.values()})
    if not file.is_file():
        rule = f"model must have its weights as safetensors, {folder} holds"
        if variants := sorted(folder.glob(f"{name}.*.safetensors")):
            variant = variants[0].name.split(".")[1].partition("-")[0]  # a shard number may follow
            hint = f"load with variant={variant!r} of diffusers, and save_pretrained without"
            raise ValueError(f"{rule} only {variants[0].name}, a variant: {hint}")
        hint, pickles = AGAIN, sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        if pickles:
            hint = f"{pickles[0]} is a pickle, never opened: load it in diffusers or transformers, and save_pretrained"
        raise ValueError(f"{rule} none: {file.name} is missing; {hint}")
    return [file]


def safetensors_bytes(folder: Path, name: str) -> int:
    """Return the bytes of the safetensors files in the folder of a part, or 0 without them."""
    with suppress(ValueError, OSError):
        return sum(file.stat().st_size for file in safetensors_files(folder, name))
    return 0


@contextmanager
def safetensors_slices(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the tensors of safetensors files by name, as slices that are not yet read.

    Raises:
        ValueError: a file is missing or damaged, or repeats a weight.
    """
    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            if not file.is_file():
                raise ValueError(f"model is incomplete: {file} is missing; {AGAIN}")
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as exc:
                check_fetched(file)
                fault = f"{' '.join(str(exc).split()):.300}; {AGAIN}"
                raise ValueError(f"model is damaged: {file} is no whole safetensors file: {fault}") from exc
            for name in opened.keys():  # noqa: SIM118 - the file is not a dict
                if name in slices:
                    raise ValueError(f"model is damaged: {file} must not repeat a weight of another file, got {name}")
                slices[name] = opened.get_slice(name)
        yield slices


def safetensors_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in complete safetensors files. Raises as `safetensors_slices`."""
    with safetensors_slices(files) as slices:
        return {name: tuple(part.get_shape()) for name, part in slices.items()}
