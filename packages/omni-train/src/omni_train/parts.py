"""The parts of a checkpoint that the ranks write, and reading any rows of a tensor from them.

A part is the rows that one rank holds; a tensor that is whole on every rank is written by the first. In the index each
tensor has `{"dtype", "shape", "pieces": [[file, first row], ...]}`, and each file its size and SHA-256.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

from omni_train.dist import Dist
from omni_train.files import write_file
from omni_train.state import in_batches, local_rows

FILE_BYTES = 2**29  # a rank has one file's tensors in host memory at a time, and twice more while they are packed

Index = dict[str, dict[str, Any]]  # {"files": {name: ...}, "tensors": {name: ...}}


def write_part(folder: Path, dist: Dist, state: Mapping[str, Tensor]) -> Index:
    """Write this rank's rows of `state`; the index of what it wrote.

    Raises:
        OSError: a file could not be written.
        ValueError: a tensor of `state` is not finite; buffers may be, as masks are.
    """
    index: Index = {"files": {}, "tensors": {}}
    for number, rows in enumerate(in_batches(_own_rows(dist, state), FILE_BYTES, num_bytes=lambda row: row[1].nbytes)):
        file = f"rank-{dist.rank:05}-{number:03}.safetensors"
        index["files"][file] = write_file(folder / file, save({name: local for name, local, _ in rows}))
        for name, _, first in rows:
            about = {"dtype": str(state[name].dtype), "shape": list(state[name].shape), "pieces": [[file, first]]}
            index["tensors"][name] = about
        del rows  # before the next ones come to the host
    return index


def merge_parts(parts: Sequence[Index]) -> Index:
    """One index of what all ranks wrote."""
    merged: Index = {"files": {}, "tensors": {}}
    for part in parts:
        merged["files"] |= part["files"]
        for name, entry in part["tensors"].items():
            pieces = merged["tensors"].get(name, {"pieces": []})["pieces"] + entry["pieces"]
            merged["tensors"][name] = entry | {"pieces": pieces}
    return merged


@torch.no_grad()
def read_tensors(folder: Path, index: Mapping[str, Mapping[str, Any]], targets: Mapping[str, Tensor]) -> None:
    """Fill each target, or this rank's rows of it, with what the checkpoint has under its name.

    Raises:
        ValueError: the pieces do not hold all rows, or hold NaN or infinity.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for name, target in targets.items():
            pieces = []
            for file, first in index[name]["pieces"]:
                if file not in opened:  # mapped, not read: only the rows that are asked for come from the disk
                    opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                pieces.append((opened[file].get_slice(name), first))
            local, first = local_rows(target)
            if _copy_rows(local, first, pieces) != len(local):
                raise ValueError(f"{name} lacks rows in {folder}")
            _check_finite(name, local)


def check_fits(index: Mapping[str, Mapping[str, Any]], state: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the index has the tensors of `state`, no others, of the same shapes and dtypes."""
    for what, names in (("lacks", state.keys() - index.keys()), ("also has", index.keys() - state.keys())):
        if names:
            raise ValueError(f"checkpoint does not fit: it {what} {len(names)} tensors, such as {min(names)}")
    for name, tensor in state.items():
        then = index[name]["dtype"], index[name]["shape"]
        if then != (now := (str(tensor.dtype), list(tensor.shape))):
            raise ValueError(
                f"checkpoint does not fit: {name} is {then[0]} {then[1]}, the module has {now[0]} {now[1]}"
            )


def check_part(path: Path, index: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError unless a file of `write_part` holds what the index says, all finite; buffers need not be."""
    said = {name: first for name, entry in index.items() for file, first in entry["pieces"] if file == path.name}
    try:
        with safe_open(path, framework="pt") as file:
            if said.keys() != set(file.keys()):
                raise ValueError(f"{path.name} holds other tensors than the index says")
            for name, first in said.items():
                local, shape = file.get_tensor(name), index[name]["shape"] or [1]
                found = [str(local.dtype), *local.shape[1:]]
                if found != [index[name]["dtype"], *shape[1:]] or first + len(local) > shape[0]:
                    raise ValueError(f"{path.name} does not hold {name} as the index says")
                _check_finite(name, local)
    except SafetensorError as exc:
        raise ValueError(f"{path.name} is no safetensors file: {exc}") from exc


def _own_rows(dist: Dist, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, int]]:
    """(name, rows on the host, number of the first row) of all that this rank has to write."""
    for name, tensor in state.items():
        local, first = local_rows(tensor)
        if len(local) and (dist.is_main or isinstance(tensor, DTensor)):
            _check_finite(name, local)
            yield name, local.detach().cpu().contiguous(), first


def _copy_rows(local: Tensor, first: int, pieces: Sequence[tuple[Any, int]]) -> int:
    """Copy what the pieces have of the rows `first ... first + len(local) - 1`; how many rows that were."""
    copied = 0
    for piece, start in pieces:
        low, high = max(first, start), min(first + len(local), start + piece.get_shape()[0])
        if low < high:
            local[low - first : high - first].copy_(piece[low - start : high - start])
            copied += high - low
    return copied


def _check_finite(name: str, local: Tensor) -> None:
    if local.is_floating_point() and not name.startswith("buffer/") and not local.isfinite().all():
        raise ValueError(f"a checkpoint must be finite, got NaN or infinity in {name}")
