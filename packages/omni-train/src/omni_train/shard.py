"""Sharding of a module's parameters over ranks.

Three modes. `none`: one rank holds everything. `ddp`: every rank holds everything, and `reduce_gradients` of
`omni_train.optim` sums the gradients once per optimizer step. `fsdp2`: each rank holds a shard of every parameter
(`fully_shard`), and the backward pass itself sums the gradients.

Gradients are SUMMED over ranks in every mode. Divide the loss by the number of samples of all ranks together: the
gradient is then that of the mean over all samples, in any mode, for any number of ranks and any split of samples.

A sharded module unshards one block at a time, and reshards it after its part of a forward or backward pass; within
`gathered`, all of it stays unsharded. With adapters, `sharded_backward` sums gradients over ranks only in the last
backward pass before an optimizer step: each rank accumulates its own first, as in mode `ddp`, with the same bits.

In mode `fsdp2`, every rank must run the same number of forward and backward passes, even without samples, and must not
change a module's output in place, which would drop the hook that unshards parameters for the backward pass.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from omni_train.dist import default_compute_dtype
from omni_train.experts import shard_experts
from omni_train.lora import all_factors, lora_layers

Mode = Literal["none", "ddp", "fsdp2"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def shard(
    module: ModuleT,
    mesh: DeviceMesh | None,
    *,
    mode: Mode,
    block_names: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    expert_names: Collection[str] = (),
    whole: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> ModuleT:
    """Shard a module over the ranks of `mesh`; return the same module, with the same attributes and `forward`.

    Add LoRA first: later adapters would not be sharded.

    Args:
        module: parameters on this rank's device (`fsdp2` moves them, except those on the meta device); equal on every
            rank for `fsdp2`, while `ddp` copies those of the first rank to the others.
        mesh: 1-D, or None for a single process without a process group. In mode `fsdp2` also 2-D, from
            `omni_train.dist.shard_mesh`: each of its rows holds a copy, sharded over its ranks (hybrid sharding), and
            `reduce_gradients` sums over copies.
        mode: see the module's docstring.
        block_names: class names of the modules that `fsdp2` unshards one at a time, such as
            "QwenImageTransformerBlock".
        compute_dtype: dtype of unsharded parameters in `fsdp2`; gradients are summed in float32 and parameters keep
            their dtype, except frozen weights under adapters, which are stored in it. None means the device's default.
            Inputs are never cast: a timestep rounded to bfloat16 (999 becomes 1000) would give a log-probability
            different from the rollout's.
        expert_names: class names of the modules of experts that stay on their rank (`omni_train.experts`), in mode
            `fsdp2` with a 1-D mesh.
        whole: submodules that not every rank runs in a forward pass, and the dtype of their parameters. In `fsdp2`
            every rank holds them whole; one with trained weights is sharded, and every rank must run it.

    Raises:
        ValueError: mode and mesh do not match, a block name matches no module, or `compute_dtype` is set without
            `fsdp2`.
    """
    _check(mesh, mode, compute_dtype)
    if expert_names and (mode != "fsdp2" or (mesh is not None and mesh.ndim > 1)):
        raise ValueError(f"expert_names need mode 'fsdp2' and a 1-D mesh, got mode {mode!r} and {mesh}")
    if mode == "fsdp2" and mesh is not None:
        # torch's own hybrid sharding would sum over copies in every backward pass.
        _fully_shard(module, mesh["shard"] if mesh.ndim > 1 else mesh, block_names, compute_dtype, expert_names, whole)
    elif mode == "ddp" and mesh is not None:
        with torch.no_grad():
            for tensor in chain(module.parameters(), module.buffers()):
                torch_dist.broadcast(tensor, group=mesh.get_group(), group_src=0)
    return module


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Unshard all weights of a module once for the `with` block, and reshard them afterwards.

    Code that changes the rows must call `reshard`: the next forward pass then unshards again, as it does after the last
    backward pass before an optimizer step.
    """
    units = _units(module)
    _set_kept(units, True)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        _set_kept(units, False)
        reshard(module)


def reshard(module: nn.Module) -> None:
    """Free the unsharded weights of a module."""
    for unit in _units(module):
        unit.reshard()


def sharded_backward(module: nn.Module, loss: Tensor, *, is_last: bool) -> None:
    """Add the gradients of a sharded module.

    Gradients of adapters are summed over ranks only in the last pass. Gradients of all weights are too large to keep
    unsharded, so every pass sums them.

    Args:
        module: a module in mode `fsdp2`.
        loss: loss of this rank.
        is_last: True if an optimizer step follows.
    """
    if isinstance(module, FSDPModule) and lora_layers(module):
        module.set_requires_gradient_sync(is_last)
        _accumulate_in_float32(module)
    loss.backward()
    if is_last:
        reshard(module)


def _units(module: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 unshards one at a time."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def _accumulate_in_float32(module: nn.Module) -> None:
    """Accumulate gradients of unsharded adapters in float32, since FSDP2 sums those of a unit in one dtype.

    Otherwise, a layer used only in the last pass before an optimizer step would have a gradient in that pass's dtype.
    """
    for unit in _units(module):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)  # None before the first forward
                if unsharded is not None and unsharded.requires_grad:
                    unsharded.grad_dtype = torch.float32


def _set_kept(units: Sequence[FSDPModule], is_kept: bool) -> None:
    for unit in units:
        unit.set_reshard_after_forward(not is_kept, recurse=False)
        unit.set_reshard_after_backward(not is_kept, recurse=False)


def _check(mesh: DeviceMesh | None, mode: Mode, compute_dtype: torch.dtype | None) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
    if mode == "fsdp2" and mesh is None:
        raise ValueError("mesh must be a device mesh in mode 'fsdp2' (start the program with torchrun), got None")
    if mode == "none" and mesh is not None and mesh.size() > 1:
        raise ValueError(f"mode 'none' leaves ranks unsynchronized, so mesh must have 1 rank, got {mesh.size()}")
    if mesh is not None and mesh.ndim > 1 + (mode == "fsdp2"):
        raise ValueError(f"mesh must be 1-D, or 2-D in mode 'fsdp2', got {mesh.ndim} dimensions in mode {mode!r}")
    if mode != "fsdp2" and compute_dtype is not None:
        raise ValueError(f"compute_dtype acts in mode 'fsdp2' only, got {compute_dtype} in mode {mode!r}")


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    block_names: Collection[str],
    compute_dtype: torch.dtype | None,
    expert_names: Collection[str],
    whole: Mapping[str, torch.dtype],
) -> None:
    named = [m for m in module.modules() if type(m).__name__ in block_names]
    missing = set(block_names) - {type(m).__name__ for m in named}
    if missing:
        raise ValueError(f"block_names must be class names of submodules, found none named {sorted(missing)}")
    policy = _precision(module, mesh, compute_dtype)
    ignored = shard_experts(module, expert_names, mesh, policy.param_dtype) if expert_names else set[nn.Parameter]()
    kept = set[nn.Module]()
    for name, dtype in whole.items():
        part = module.get_submodule(name)
        if not any(param.requires_grad for param in part.parameters()):
            _keep_whole(part, torch.device(mesh.device_type), dtype)
            kept.update(part.modules())
            ignored.update(part.parameters())
    for unit in [*(m for m in named if m not in kept), module]:
        _move(unit, torch.device(mesh.device_type))
        # Resharding the root too keeps the registered parameters the sharded ones between forwards, so that adapters
        # can be copied, averaged and switched at any time.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=ignored)
    for sharded in _units(module):
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # else it would multiply by 1.0, unsupported by gloo


def _keep_whole(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Cast the parameters to this dtype, and move the module to the device, where FSDP2 moves only what it shards."""
    for param in module.parameters():
        param.data = param.data.to(dtype)
    if not any(param.is_meta for param in module.parameters()):
        module.to(device)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers in place to an out-of-tree accelerator, for which FSDP2 itself cannot."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):  # expert parameters, already on the device
            continue
        if torch._has_compatible_shallow_copy_type(tensor, tensor.new_empty(0, device=device)):
            continue
        moved = tensor.detach().to(device)
        is_weight = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_weight else moved)


def _precision(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the dtypes of unsharded parameters and summed gradients; cast frozen weights under adapters now."""
    dtype = compute_dtype or default_compute_dtype(torch.device(mesh.device_type))
    if dtype == torch.float32 and compute_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    adapters = all_factors(module)
    if dtype != torch.float32 and any(layer.lora_magnitude_vector for layer in lora_layers(module).values()):
        raise ValueError(f"compute_dtype must be float32 with DoRA, whose magnitudes it would round, got {dtype}")
    for p in module.parameters() if adapters else ():
        p.data = p.data if p in adapters else p.data.to(dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
