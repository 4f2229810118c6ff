"""The contents of a checkpoint: the tensors that training changes, by names that do not depend on sharding.

Names: `weight/NAME` for a trained parameter or a factor of any adapter, `buffer/NAME` for a buffer of a layer in
training mode, `optimizer.KEY/NAME` (AdamW's keys are exp_avg, exp_avg_sq and step), `ema/NAME` for a moving average,
and the name of a snapshot instead of `ema` for a snapshot. NAME is the parameter's name in the module. `kept/NAME` is
additional state of a run, under its own name.
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
KEPT = "kept/"  # prefix for the additional state of a run


def train_state(module: nn.Module, optimizer: Optimizer | None, ema: Copies) -> dict[str, Tensor]:
    """Return the tensors themselves, by name, in the same order on every rank; sharded tensors are DTensors.

    Frozen parameters are omitted, as they come with the base model; the factors of frozen adapters are included. So are
    persistent buffers, such as running means, of layers in training mode; in evaluation mode they do not change.

    Raises:
        ValueError: the optimizer, an average or a snapshot holds a parameter that is not the module's.
    """
    names = {param: name for name, param in module.named_parameters()}
    adapters = all_factors(module)
    training = {path for path, layer in module.named_modules() if layer.training}
    kept = {name for name in module.state_dict(keep_vars=True) if name.rpartition(".")[0] in training}
    state: dict[str, Tensor] = {f"weight/{name}": p for p, name in names.items() if p.requires_grad or p in adapters}
    state |= {f"buffer/{name}": b for name, b in module.named_buffers() if name in kept}
    for param in _params(optimizer):
        slots = optimizer.state.get(param, {}) if optimizer else {}
        tensors = {key: value for key, value in slots.items() if isinstance(value, Tensor)}
        state |= {f"optimizer.{key}/{_name(names, param)}": value for key, value in tensors.items()}
    copies = [ema] if isinstance(ema, Snapshot) else ema or []
    return state | {
        f"{snapshot.name}/{_name(names, param)}": copy for snapshot in copies for param, copy in snapshot.pairs()
    }


def kept_state(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the additional state of a run, under the names in a checkpoint.

    Raises:
        ValueError: a tensor is not float32.
    """
    if invalid := sorted(name for name, tensor in kept.items() if tensor.dtype != torch.float32):
        raise ValueError(f"kept must be float32, got {kept[invalid[0]].dtype} in {invalid[0]}")
    return {KEPT + name: tensor for name, tensor in kept.items()}


def allocate_kept(shapes: Mapping[str, Sequence[int]], num_bytes: int) -> dict[str, Tensor]:
    """Allocate host memory for the additional state of a run; return it by its own names.

    shapes: those of a checkpoint, whose files have `num_bytes`.

    Raises:
        ValueError: the files are too small for one of the tensors.
    """
    kept_shapes = {name: shape for name, shape in shapes.items() if name.startswith(KEPT)}
    if invalid := [name for name, shape in kept_shapes.items() if 4 * math.prod(shape) > num_bytes]:
        raise ValueError(f"{invalid[0]} lacks rows")
    return {name.removeprefix(KEPT): torch.empty(tuple(shape)) for name, shape in kept_shapes.items()}


def allocate_optimizer(module: nn.Module, optimizer: Optimizer, shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace the optimizer's state with zeros for its names in `shapes`, sharded like its parameters.

    Raises:
        ValueError: a shape is neither that of its parameter nor that of a scalar, as for AdamW's step.
    """
    names = dict(module.named_parameters())
    places = {param: i for i, param in enumerate(_params(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        key, _, param_name = name.removeprefix("optimizer.").partition("/")
        param = names.get(param_name)
        if name.startswith("optimizer.") and param in places:
            is_number = list(param.shape) != list(shape)
            if is_number and math.prod(shape) != 1:
                raise ValueError(f"{name} must have the shape {list(param.shape)} or be one number, got {list(shape)}")
            state.setdefault(places[param], {})[key] = torch.zeros(shape) if is_number else torch.zeros_like(param)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows, [rows, ...], which share memory with `tensor`, and the number of the first row.

    A scalar counts as one row.

    Raises:
        ValueError: the tensor is not sharded by rows over one mesh dimension.
    """
    if not isinstance(tensor, DTensor):
        return (tensor if tensor.ndim else tensor.view(1)), 0
    if tensor.placements != (Shard(0),):
        raise ValueError(f"tensors must be sharded by rows over one mesh dimension, got {tensor.placements}")
    mesh, num_rows, local = tensor.device_mesh, tensor.shape[0], tensor.to_local()
    if len(local) == num_rows:  # also for an expert that this rank owns
        return local, 0
    per_rank = -(-num_rows // mesh.size())  # the last ranks may have fewer, or none
    return local, min(mesh.get_local_rank() * per_rank, num_rows)


def in_batches(items: Iterable[T], limit: int, *, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items of at most `limit` bytes in total, or a single larger item."""
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


def _params(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]] if optimizer else []


def _name(names: Mapping[nn.Parameter, str], param: Tensor) -> str:
    if not isinstance(param, nn.Parameter) or param not in names:
        raise ValueError(f"optimizer and ema must hold parameters of the module, got one of shape {tuple(param.shape)}")
    return names[param]
