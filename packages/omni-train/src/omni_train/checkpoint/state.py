"""The contents of a checkpoint: the tensors that training changes, by names that do not depend on sharding.

Names: `weight/NAME` for a trained parameter or a factor of any adapter, `buffer/NAME`, `optimizer.KEY/NAME` (AdamW's
keys are exp_avg, exp_avg_sq and step; in 8 bits exp_avg.codes, exp_avg.scale and so on), `ema/NAME` for a moving
average, and a snapshot's name in place of `ema`. NAME is that of the parameter in the module.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from omni_train.lora import all_factors
from omni_train.weights.snapshot import Snapshot

T = TypeVar("T")
Copies = Snapshot | Sequence[Snapshot] | None  # averages and snapshots of the weights


def train_state(module: nn.Module, optimizer: Optimizer | None, ema: Copies) -> dict[str, Tensor]:
    """Return the tensors themselves, by name, in the same order on every rank; DTensors where they are sharded.

    Frozen parameters are left out, as they come with the base model; the factors of frozen adapters are included.

    Raises:
        ValueError: the optimizer, an average or a snapshot holds a parameter that is not the module's.
    """
    names = {param: name for name, param in module.named_parameters()}
    adapters = all_factors(module)
    kept = module.state_dict(keep_vars=True).keys()
    state: dict[str, Tensor] = {f"weight/{name}": p for p, name in names.items() if p.requires_grad or p in adapters}
    state |= {f"buffer/{name}": b for name, b in module.named_buffers() if name in kept}
    for param in _params(optimizer):
        found = optimizer.state.get(param, {}) if optimizer else {}
        tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
        pieces = {key + end: piece for key, value in tensors.items() for end, piece in _pieces(value).items()}
        state |= {f"optimizer.{key}/{_name(names, param)}": piece for key, piece in pieces.items()}
    copies = [ema] if isinstance(ema, Snapshot) else ema or []
    return state | {f"{each.name}/{_name(names, param)}": copy for each in copies for param, copy in each.pairs()}


def allocate_optimizer(module: nn.Module, optimizer: Optimizer, shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace the optimizer's state by zeros under those names of `shapes` that are its own, sharded as its parameters.

    Raises:
        ValueError: a shape is neither that of its parameter nor of a single number, as AdamW's step is. Or a moment is
            in 8 bits, and the optimizer has none such, or not on so many ranks.
    """
    names = dict(module.named_parameters())
    places = {param: i for i, param in enumerate(_params(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        key, _, param_name = name.removeprefix("optimizer.").partition("/")
        param = names.get(param_name)
        key, _, end = key.partition(".")
        if name.startswith("optimizer.") and param in places and end != "scale":  # which the codes bring
            is_number = list(param.shape) != list(shape)
            if is_number and math.prod(shape) != 1:
                raise ValueError(f"{name} must have the shape {list(param.shape)} or be one number, got {list(shape)}")
            own, zeros = state.setdefault(places[param], {}), getattr(optimizer, "zeros", None)
            if end and not zeros:
                kind = type(optimizer).__name__
                raise ValueError(f"{name} is in 8 bits: the optimizer must be AdamW in 8 bits, got {kind}")
            if end and zeros:
                own[key] = zeros(param, signed=key == "exp_avg")
            else:
                own[key] = torch.zeros(shape) if is_number else torch.zeros_like(param)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def sharded_like(tensor: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Return this rank's rows of a tensor of that shape as one that is sharded as `tensor`, if that is."""
    if not isinstance(tensor, DTensor):
        return local
    whole, strides = torch.Size(shape), torch.empty(shape, device="meta").stride()
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole, stride=strides)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the rows that this rank holds, [rows, ...], sharing memory with `tensor`, and the first one's number.

    A single number counts as one row.

    Raises:
        ValueError: the tensor is not sharded by rows over one mesh dimension.
    """
    if not isinstance(tensor, DTensor):
        return (tensor if tensor.ndim else tensor.view(1)), 0
    if tensor.placements != (Shard(0),):
        raise ValueError(f"tensors must be sharded by rows over one mesh dimension, got {tensor.placements}")
    mesh, num_rows, local = tensor.device_mesh, tensor.shape[0], tensor.to_local()
    if len(local) == num_rows:  # also those of an expert that this rank owns
        return local, 0
    per_rank = -(-num_rows // mesh.size())  # the last ranks may have fewer, or none
    return local, min(mesh.get_local_rank() * per_rank, num_rows)


def in_batches(items: Iterable[T], limit: int, *, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of consecutive items of at most `limit` bytes in total, or a single larger item."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + num_bytes(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes(item)
    if batch:
        yield batch


def _pieces(value: Tensor) -> dict[str, Tensor]:
    """Return a value of an optimizer's state; of a moment in 8 bits its codes, and the scales of its runs of rows."""
    local = value.to_local() if isinstance(value, DTensor) else value
    codes, scale = (getattr(local, name, None) for name in ("codes", "scale"))  # of torchao's OptimState8bit
    if codes is None or scale is None:
        return {"": value}
    block, row = codes.numel() // scale.numel(), value.shape[1:].numel()
    rows = block // math.gcd(row, block)  # that are whole blocks
    shape = [value.shape[0] // rows, row * rows // block]
    scales = scale.view(-1, shape[1])
    return {".codes": sharded_like(value, codes, value.shape), ".scale": sharded_like(value, scales, shape)}


def _params(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]] if optimizer else []


def _name(names: Mapping[nn.Parameter, str], param: Tensor) -> str:
    if not isinstance(param, nn.Parameter) or param not in names:
        raise ValueError(f"optimizer and ema must hold parameters of the module, got one of shape {tuple(param.shape)}")
    return names[param]
