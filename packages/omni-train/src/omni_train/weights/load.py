"""Loading large weights: the net is built without weights, sharded, and each rank's rows are read from the files.

No rank ever holds a full copy, on its device or its host: the files are memory-mapped, and the rows of one tensor are
copied at a time.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from omni_train.checkpoint.state import local_rows
from omni_train.files import check_fetched
from omni_train.lora import all_factors, base_name
from omni_train.progress import advance
from omni_train.shard import shard

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MAX_WEIGHT = 1e18  # its square fits into float32; sums with larger weights overflow


def load_sharded(  # noqa: PLR0913 - all but three are keyword-only, and four are those of `shard`
    net: ModuleT,
    files: Sequence[str | Path] | Mapping[str, Sequence[str | Path]] | None,
    mesh: DeviceMesh | None,
    *,
    block_names: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expert_names: Collection[str] = (),
    whole: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> ModuleT:
    """Load the files' weights into a net, sharded over `mesh` (mode `fsdp2` of `shard`) if given; return the same net.

    It calls no collective, and ranks read different rows: call it inside `omni_train.dist.same_error`.

    Args:
        net: parameters on the meta device; buffers and other tensors real, as built by `accelerate.init_empty_weights(
            include_buffers=False)`. Adapters of `add_lora` keep their dtype and have no values afterwards: fill them
            with `init_adapter` or `load_adapter`.
        files: safetensors files that together hold each parameter and persistent buffer once, under its name, and
            otherwise only names that `check_files` ignores; or such files by submodule of the net. None leaves the
            values uninitialized.
        mesh: as in `shard`, or None for weights that are not sharded (`shard(..., mode="ddp")` may follow).
        block_names, compute_dtype, expert_names, whole: as in `shard`.
        param_dtype: dtype of the parameters; under adapters also of buffers, as diffusers has one dtype for all frozen
            tensors. A frozen copy in bfloat16 can be the reference of a net trained in float32; its buffers stay.
        device: device of weights that are not sharded; a mesh has its own.

    Raises:
        ValueError: a file is damaged, a tensor is missing, unexpected or has another shape, or it holds NaN or
            infinity; the message names file and tensor. Or the net is not built as required.
        OSError: a file cannot be read.
    """
    _check_built(net)
    by_module = {} if files is None else files if isinstance(files, Mapping) else {"": files}
    for name, paths in by_module.items():
        check_files(net.get_submodule(name), paths)
    adapters = all_factors(net)
    # diffusers leaves buffers unchanged if a class keeps some of its modules in float32.
    keeps_float32 = any(getattr(module, "_keep_in_fp32_modules", None) for module in net.modules())
    for t in chain(net.parameters(), net.buffers() if adapters and not keeps_float32 else ()):
        if t not in adapters and t.is_floating_point():
            t.data = t.data.to(param_dtype)
    if mesh is not None:
        names = {"block_names": block_names, "expert_names": expert_names}
        shard(net, mesh, mode="fsdp2", compute_dtype=compute_dtype, whole=whole, **names)
    place = torch.device(mesh.device_type) if mesh is not None else device
    net._apply(lambda t: torch.empty_like(t, device=place) if t.is_meta else t.to(place))
    for name, paths in by_module.items():
        read_tensors(_base_state(net.get_submodule(name)), paths)
    return net


def check_files(net: nn.Module, files: Sequence[str | Path]) -> None:
    """Raise ValueError unless the files hold the net's parameters and persistent buffers; read no values.

    Other tensors in them are also an error, unless the class ignores their names, as in diffusers and transformers: by
    the regular expressions in `_keys_to_ignore_on_load_unexpected`.
    """
    expected, kind = _base_state(net), type(net).__name__
    ignored = getattr(net, "_keys_to_ignore_on_load_unexpected", None) or ()
    with ExitStack() as stack:
        sources = _open(stack, files)
        if missing := expected.keys() - sources.keys():
            where = ", ".join(sorted({str(file.parent) for file, _ in sources.values()})) or "files"
            raise ValueError(f"{where} must hold all weights of {kind}, lacks {len(missing)} such as {min(missing)}")
        for name, (file, opened) in sources.items():
            if name not in expected:
                if any(re.search(pattern, name) for pattern in ignored):
                    continue
                raise ValueError(f"{file} must hold only weights of {kind}, got {name}")
            actual, shape = opened.get_slice(name).get_shape(), list(expected[name].shape)
            if actual != shape:
                raise ValueError(f"{file} does not fit {kind}: {name} is {actual}, must be {shape}")


def read_shapes(file: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file.

    Raises:
        ValueError: the file is damaged.
    """
    with ExitStack() as stack:
        sources = _open(stack, [file])
        return {name: tuple(opened.get_slice(name).get_shape()) for name, (_, opened) in sources.items()}


@torch.no_grad()
def read_tensors(targets: Mapping[str, Tensor], files: Sequence[str | Path]) -> None:
    """Fill each target, or this rank's rows of it, with the tensor of that name and shape in the files.

    Raises:
        ValueError: a tensor holds NaN or infinity, or a weight above MAX_WEIGHT; the message names file and tensor.
    """
    with ExitStack() as stack:
        sources = _open(stack, files)
        for name, target in targets.items():
            file, opened = sources[name]
            local, first = local_rows(target)
            rows = opened.get_slice(name)[first : first + len(local)] if target.ndim else opened.get_tensor(name)
            if len(rows) if target.ndim else True:
                local.copy_(rows)
            advance(target.numel() * rows.itemsize)
            if local.is_floating_point():
                check_numbers(file, name, local, MAX_WEIGHT if isinstance(target, nn.Parameter) else math.inf)


def check_numbers(file: str | Path, name: str, tensor: Tensor, most: float = MAX_WEIGHT) -> None:
    """Raise ValueError for NaN, infinity or an absolute value above `most`; the message names file and tensor."""
    size = max(abs(end.item()) for end in tensor.aminmax()) if tensor.numel() else 0.0  # both are NaN if any value is
    if not math.isfinite(size):
        raise ValueError(f"{file} must be finite, got NaN or infinity in {name}")
    if size > most:
        raise ValueError(f"{file} must hold numbers of at most {most:g} in size, got {size:g} in {name}")


def _base_state(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by name, without adapters."""
    adapters = all_factors(net)
    return {base_name(name): t for name, t in net.state_dict(keep_vars=True).items() if t not in adapters}


def _check_built(net: nn.Module) -> None:
    if real := [name for name, p in net.named_parameters() if not p.is_meta]:
        raise ValueError(f"net must have its parameters on the meta device, got a real {real[0]}")
    for path, module in net.named_modules():
        others = vars(module) | module._buffers
        for name in [name for name, value in others.items() if isinstance(value, Tensor) and value.is_meta]:
            raise ValueError(f"net must have real tensors besides its parameters, got {path}.{name} on the meta device")


def _open(stack: ExitStack, files: Sequence[str | Path]) -> dict[str, tuple[Path, Any]]:
    """Return the file and its open handle for each tensor's name."""
    sources: dict[str, tuple[Path, Any]] = {}
    for file in map(Path, files):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))  # mapped, not read
        except SafetensorError as exc:
            check_fetched(file)
            raise ValueError(f"{file} is no whole safetensors file: {exc}") from exc
        for name in opened.keys():  # noqa: SIM118 - the file is not a dict
            if name in sources:
                raise ValueError(f"files must hold each tensor once, but {name} is in {sources[name][0]} and {file}")
            sources[name] = file, opened
    return sources
