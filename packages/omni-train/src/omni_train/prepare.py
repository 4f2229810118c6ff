"""Prepare a net for a run: one list of steps, in order.

`adapt` is the first part, which selects the trained weights; a net without weights needs only this part.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from omni_train import lora
from omni_train.kernels import choose_attention, compile_blocks
from omni_train.memory.quantized import quantize_blocks
from omni_train.memory.recompute import Recompute, recompute_blocks
from omni_train.shard import shard
from omni_train.weights.load import load_sharded


@dataclass(frozen=True)
class Lora:
    """Adapters as `add_lora` makes them: the trained one, "default", and `others`, which are frozen copies."""

    targets: Sequence[str] | str
    rank: int
    alpha: float
    init: lora.Init
    seed: int
    exclude: Sequence[str] = ()
    parameters: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False
    in_float32: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return ("default", *self.others)


@dataclass(frozen=True)
class Preparation:
    """Preparation of a net.

    block_names: class names of its blocks. dtype: of frozen weights, and of what sharded ones are gathered in. lora:
    None trains the weights themselves, unless `is_trained` is False. is_frozen: True for the name of a weight that is
    never trained. mesh: over which weights are sharded, if they are. expert_names: of the experts that stay on their
    rank, as for `shard`. context_mesh: of ranks that compute each forward together, if they do; share: has them do so.
    base_dtype: bits of frozen weights, or "auto". run_on: the device that blocks come to, if they are kept on another.
    """

    device: torch.device
    block_names: Collection[str]
    dtype: torch.dtype
    lora: Lora | None = None
    is_trained: bool = True
    is_frozen: Callable[[str], bool] = lambda name: False
    mesh: DeviceMesh | None = None
    expert_names: Collection[str] = ()
    context_mesh: DeviceMesh | None = None
    share: Callable[[nn.Module, DeviceMesh], None] = lambda net, mesh: None
    base_dtype: Literal["auto", "int8", "fp8", "nf4"] = "auto"
    attention: str = "auto"
    compile: bool = False
    recompute: Recompute | None = None
    run_on: torch.device | None = None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The data type of the net's own weights: trained ones are float32."""
        return torch.float32 if self.is_trained and self.lora is None else self.dtype

    def frozen(self) -> "Preparation":
        """Return what is done to a net beside this one that is never trained."""
        return replace(self, lora=None, is_trained=False, recompute=None)


def adapt(net: nn.Module, how: Preparation) -> nn.Module:
    """Give the net its adapters, or have its weights trained, except those that never are; the same object."""
    if how.lora:
        options = {key: value for key, value in vars(how.lora).items() if key != "others"}  # as `add_lora` has them
        for name in how.lora.names:
            lora.add_lora(net, adapter=name, **options)
    elif how.is_trained:
        net.requires_grad_(True)
    for name, weight in net.named_parameters(remove_duplicate=False):
        if how.is_frozen(name):
            weight.requires_grad_(False)
    return net


def adapt_like(net: nn.Module, how: Preparation, real: nn.Module) -> nn.Module:
    """Return a net on the meta device with its adapters, as `adapt`, and with the data types of another one.

    real: made by `prepare`. Sharded weights have the type in which they are gathered, quantized ones that of their
    values.
    """
    adapt(net, how)
    own = dict(chain(real.named_parameters(), real.named_buffers()))
    for name, tensor in chain(net.named_parameters(), net.named_buffers()):
        if tensor.is_floating_point():
            is_whole = name in own and not isinstance(own[name], DTensor)
            tensor.data = tensor.data.to(own[name].dtype if is_whole else how.dtype)
    return net


def prepare(
    net: nn.Module,
    how: Preparation,
    files: Mapping[str, Sequence[Path]] | None = None,
    *,
    begin: Callable[[nn.Module], None] = lambda net: None,
) -> nn.Module:
    """Return the net as a run uses it. There is no collective in it: call it inside `same_error`.

    Args:
        net: on the meta device, or with its weights.
        how: what is done to it.
        files: with the weights of a net on the meta device, by submodule; None leaves their values open.
        begin: gives adapters the values that they begin with; fresh ones have theirs already.

    Raises:
        ValueError: files or adapters do not fit the net.
    """
    is_empty = any(p.is_meta for p in net.parameters())
    adapt(net, how)
    if how.context_mesh:
        how.share(net, how.context_mesh)
    if is_empty:  # each rank reads only its rows
        net = load_sharded(
            net,
            files,
            how.mesh,
            block_names=how.block_names,
            compute_dtype=how.dtype if how.mesh else None,
            param_dtype=how.weight_dtype,
            device=how.device if how.base_dtype == "auto" else "cpu",
            expert_names=how.expert_names,
        )
    if is_empty and files and how.lora and how.lora.init == "pissa":
        lora.take_out_largest(net, seed=how.lora.seed)  # before the rest is quantized
    if how.base_dtype != "auto":
        net = quantize_blocks(net, how.base_dtype, how.block_names, how.run_on or how.device, home=how.device)
    if how.mesh is None:
        net = net.to(how.device)
    elif not is_empty:
        own = {"block_names": how.block_names, "expert_names": how.expert_names}
        net = shard(net, how.mesh, mode="fsdp2", compute_dtype=how.dtype, **own)
    if how.lora:
        init: lora.Init = how.lora.init if files or not is_empty else "default"  # values that are open have no largest
        for name in how.lora.names:
            lora.init_adapter(net, name, seed=how.lora.seed, init=init)
    begin(net)
    if how.compile:
        compile_blocks(net, how.block_names, attention=how.attention)
    choose_attention(net, how.attention, how.block_names)
    if how.recompute:
        recompute_blocks(net, how.recompute)
    return net.eval()
