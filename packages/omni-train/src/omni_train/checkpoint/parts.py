"""The parts of a checkpoint, one per rank, and reading any rows of a tensor from them.

A part has the rows of one rank; if several ranks hold equal rows, one of them writes the rows. In the index, each
tensor has `{"dtype", "shape", "pieces": [[file, first row], ...]}`, and each file its size and SHA-256.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from omni_train.checkpoint.state import in_batches, local_rows
from omni_train.dist import Dist
from omni_train.files import write_file

FILE_BYTES = 2**29  # maximum size of a file, unless a single tensor is larger
SHARE_BYTES = 2**26  # minimum bytes per rank before another rank with equal rows also writes: opening files takes time
DTYPES = {  # safetensors' names
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Index = dict[str, dict[str, Any]]  # {"files": {name: ...}, "tensors": {name: ...}}


@dataclass(frozen=True)
class Row:
    """A rank's rows of one tensor, from row `first` on; `shape` is that of the whole tensor. A scalar is one row."""

    name: str
    local: Tensor
    first: int
    shape: list[int]


class PartFile:
    """A file of a part in host memory: the bytes of its rows, widest dtypes first."""

    def __init__(self, name: str, rows: Sequence[Row], memory: Tensor) -> None:
        """Copy the rows, from any device, into the memory; `synchronize` completes copies into pinned memory.

        memory: uint8, at least as many elements as the rows have bytes.
        """
        self.name = name
        # Widest dtypes first, so that each number is aligned to its size.
        self.rows = sorted(rows, key=lambda row: (-row.local.itemsize, str(row.local.dtype)))
        self._places = list(pairwise(accumulate((row.local.nbytes for row in self.rows), initial=0)))
        self._memory = memory[: self._places[-1][1]]
        for row, place in zip(self.rows, self._places, strict=True):
            target = self._memory[slice(*place)].view(row.local.dtype).view(row.local.shape)
            target.copy_(row.local.detach(), non_blocking=memory.is_pinned())

    def write(self, folder: Path) -> dict[str, int | str]:
        """Write the file and sync it to disk; return its size and SHA-256.

        Raises:
            OSError: it could not be written.
            ValueError: a tensor other than a buffer is not finite (buffers such as masks need not be).
        """
        for row, place in zip(self.rows, self._places, strict=True):
            check_finite(row.name, self._memory[slice(*place)].view(row.local.dtype))
        header = file_header({row.name: row.local for row in self.rows})
        return write_file(folder / self.name, header, self._memory.numpy().data)

    def index(self) -> dict[str, dict[str, Any]]:
        """Return the index entries of its tensors."""
        return {
            row.name: {"dtype": str(row.local.dtype), "shape": row.shape, "pieces": [[self.name, row.first]]}
            for row in self.rows
        }


def file_header(tensors: Mapping[str, Tensor], **metadata: str) -> bytes:
    """Return the header of a safetensors file that stores the tensors one after another.

    Widest dtypes must come first, so that each number is aligned to its size.
    """
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def part_files(dist: Dist, state: Mapping[str, Tensor]) -> dict[str, list[Row]]:
    """Return the files that this rank must write, by name, with their rows, which share memory with `state`.

    Raises:
        ValueError: safetensors does not support a tensor's dtype.
    """
    rows, copies = [], assign_copies(state, dist.world_size)
    for name, tensor in state.items():
        local, first = local_rows(tensor)
        if local.dtype not in DTYPES:
            raise ValueError(f"tensors must be of a dtype that safetensors has, got {local.dtype} in {name}")
        if len(local) and dist.rank // _num_holders(tensor) == copies[name]:
            rows.append(Row(name, local, first, list(tensor.shape)))
    batches = in_batches(rows, FILE_BYTES, num_bytes=lambda row: row.local.nbytes)
    return {f"rank-{dist.rank:05}-{number:03}.safetensors": batch for number, batch in enumerate(batches)}


def assign_copies(state: Mapping[str, Tensor], num_ranks: int) -> dict[str, int]:
    """Return which copy of each tensor to write: if n ranks hold one copy, copy c is that of the ranks from n c on."""
    chosen: dict[str, int] = {}
    for holders in {_num_holders(tensor) for tensor in state.values()}:
        sizes = {name: t.numel() * t.itemsize for name, t in state.items() if _num_holders(t) == holders}
        num_copies = min(num_ranks // holders, max(1, sum(sizes.values()) // (holders * SHARE_BYTES)))
        chosen |= assign_by_size(sizes, num_copies)
    return chosen


def assign_by_size(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """Assign each name to one of `number` shares: largest first, each to the share with the least total so far."""
    chosen: dict[str, int] = {}
    loads = [(0, share) for share in range(number)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        load, chosen[name] = loads[0]
        heapreplace(loads, (load + sizes[name], chosen[name]))
    return chosen


def num_bytes(rows: Sequence[Row]) -> int:
    """Return the total size of the rows in bytes."""
    return sum(row.local.nbytes for row in rows)


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory, uint8, for copies from `device`; pinned if possible."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # the device cannot pin memory, or too little host memory is left
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8)


def merge_parts(parts: Sequence[Index]) -> Index:
    """Merge the indices of all ranks' parts."""
    merged: Index = {"files": {}, "tensors": {}}
    for part in parts:
        merged["files"] |= part["files"]
        for name, entry in part["tensors"].items():
            pieces = merged["tensors"].get(name, {"pieces": []})["pieces"] + entry["pieces"]
            merged["tensors"][name] = entry | {"pieces": pieces}
    return merged


@torch.no_grad()
def read_tensors(
    open_file: Callable[[str], AbstractContextManager[Path]],
    index: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Tensor],
) -> None:
    """Fill each target, or this rank's rows of it, with the checkpoint's tensor of the same name, file by file.

    open_file: returns a context manager that yields the path of a file, given its name.

    Raises:
        ValueError: rows are missing from the pieces, or contain NaN or infinity.
    """
    pieces: dict[str, list[tuple[str, int]]] = {}
    for name, target in targets.items():
        local, first = local_rows(target)
        ordered = sorted(index[name]["pieces"], key=lambda piece: piece[1])
        for (file, start), (_, end) in pairwise([*ordered, ("", first + len(local))]):
            if max(first, start) < min(first + len(local), end):
                pieces.setdefault(file, []).append((name, start))
    copied: Counter[str] = Counter()
    for file, starts in pieces.items():
        with open_file(file) as path, safe_open(path, framework="pt") as opened:
            for name, start in starts:
                rows, (local, first) = opened.get_slice(name), local_rows(targets[name])
                low, high = max(first, start), min(first + len(local), start + rows.get_shape()[0])
                if low < high:
                    local[low - first : high - first].copy_(rows[low - start : high - start])
                    copied[name] += high - low
    for name, target in targets.items():
        local, _ = local_rows(target)
        if copied[name] != len(local):
            raise ValueError(f"{name} lacks rows")
        check_finite(name, local)


def check_fits(index: Mapping[str, Mapping[str, Any]], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the index has exactly the tensors of `state`, with the same shapes and dtypes."""
    for what, names in (("lacks", state.keys() - index.keys()), ("also has", index.keys() - state.keys())):
        if names:
            raise ValueError(f"checkpoint does not fit: it {what} {len(names)} tensors, such as {min(names)}")
    for name, tensor in state.items():
        saved = index[name]["dtype"], index[name]["shape"]
        if saved != (actual := (str(tensor.dtype), list(tensor.shape))):
            raise ValueError(
                f"checkpoint does not fit: {name} is {saved[0]} {saved[1]}, the module has {actual[0]} {actual[1]}"
            )


def check_part(path: Path, index: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError unless a part's file holds the tensors of the index, all finite except buffers."""
    pieces = {name: first for name, entry in index.items() for file, first in entry["pieces"] if file == path.name}
    try:
        with safe_open(path, framework="pt") as file:
            if pieces.keys() != set(file.keys()):
                raise ValueError(f"{path.name} holds other tensors than the index says")
            for name, first in pieces.items():
                local, shape = file.get_tensor(name), index[name]["shape"] or [1]
                actual = [str(local.dtype), *local.shape[1:]]
                if actual != [index[name]["dtype"], *shape[1:]] or first + len(local) > shape[0]:
                    raise ValueError(f"{path.name} does not hold {name} as the index says")
                check_finite(name, local)
    except SafetensorError as exc:
        raise ValueError(f"{path.name} is no safetensors file: {exc}") from exc


def _num_holders(tensor: Tensor) -> int:
    """Return the number of ranks that together hold one copy of the tensor."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def check_finite(name: str, local: Tensor) -> None:
    """Raise ValueError for NaN or infinity, except in buffers; a finite sum, which is faster, rules out both."""
    if not local.is_floating_point() or name.startswith("buffer/") or local.sum().isfinite():
        return
    if not local.isfinite().all():
        raise ValueError(f"a checkpoint must be finite, got NaN or infinity in {name}")
