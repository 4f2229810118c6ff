"""Prepare a net for a run: one list of steps, in order.

`adapt` is the first part, which selects the trained weights; a net without weights needs only this part.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Adapters as made by `add_lora`: the trained one, "default", and `others`, which are frozen copies."""

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
    """The steps that prepare a net.

    block_names: class names of its blocks. dtype: dtype of frozen weights, and in which sharded weights are gathered.
    lora: None trains the weights themselves, unless `is_trained` is False. is_frozen: True for the name of a weight
    that is never trained. mesh: mesh over which weights are sharded, if any. expert_names: class names of the experts
    that stay on their rank, as in `shard`. whole: submodules that every rank holds whole, as in `shard`.
    context_mesh: mesh of ranks that compute each forward pass together, if any; share: applies it to the net.
    base_dtype: quantized dtype of frozen weights, or "auto". run_on: device on which blocks run, if their weights are
    stored on another.
    """

    device: torch.device
    block_names: Collection[str]
    dtype: torch.dtype
    lora: Lora | None = None
    is_trained: bool = True
    is_frozen: Callable[[str], bool] = lambda name: False
    mesh: DeviceMesh | None = None
    expert_names: Collection[str] = ()
    whole: Mapping[str, torch.dtype] = field(default_factory=dict)
    context_mesh: DeviceMesh | None = None
    share: Callable[[nn.Module, DeviceMesh], None] = lambda net, mesh: None
    base_dtype: Literal["auto", "int8", "fp8", "nf4"] = "auto"
    attention: str = "auto"
    compile: bool = False
    recompute: Recompute | None = None
    run_on: torch.device | None = None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the net's own weights; trained weights are float32."""
        return torch.float32 if self.is_trained and self.lora is None else self.dtype

    def frozen(self) -> "Preparation":
        """Return the preparation of another net that is never trained."""
        return replace(self, lora=None, is_trained=False, recompute=None)


def adapt(net: nn.Module, preparation: Preparation) -> nn.Module:
    """Add the net's adapters or make its weights trainable, except those never trained; return the same object."""
    if preparation.lora:
        options = {
            key: value for key, value in vars(preparation.lora).items() if key != "others"
        }  # arguments of `add_lora`
        for name in preparation.lora.names:
            lora.add_lora(net, adapter=name, **options)
    elif preparation.is_trained:
        net.requires_grad_(True)
    for name, weight in net.named_parameters(remove_duplicate=False):
        if preparation.is_frozen(name):
            weight.requires_grad_(False)
    return net


def adapt_like(net: nn.Module, preparation: Preparation, real: nn.Module) -> nn.Module:
    """Return a net on the meta device with its adapters, as in `adapt`, and with the dtypes of a prepared net.

    real: the result of `prepare`. Sharded weights have the dtype in which they are gathered, quantized weights that of
    their values.
    """
    adapt(net, preparation)
    real_tensors = dict(chain(real.named_parameters(), real.named_buffers()))
    for name, tensor in chain(net.named_parameters(), net.named_buffers()):
        if tensor.is_floating_point():
            is_whole = name in real_tensors and not isinstance(real_tensors[name], DTensor)
            tensor.data = tensor.data.to(real_tensors[name].dtype if is_whole else preparation.dtype)
    return net


def prepare(
    net: nn.Module,
    preparation: Preparation,
    files: Mapping[str, Sequence[Path]] | None = None,
    *,
    begin: Callable[[nn.Module], None] = lambda net: None,
) -> nn.Module:
    """Return the net as used in a run. It calls no collective: call it inside `same_error`.

    Args:
        net: on the meta device, or with its weights.
        preparation: the steps.
        files: files with the weights of a net on the meta device, by submodule; None leaves the values undefined.
        begin: sets the initial values of adapters; new adapters have them already.

    Raises:
        ValueError: files or adapters do not match the net.
    """
    is_empty = any(p.is_meta for p in net.parameters())
    adapt(net, preparation)
    if preparation.context_mesh:
        preparation.share(net, preparation.context_mesh)
    if is_empty:  # each rank reads only its rows
        net = load_sharded(
            net,
            files,
            preparation.mesh,
            block_names=preparation.block_names,
            compute_dtype=preparation.dtype if preparation.mesh else None,
            param_dtype=preparation.weight_dtype,
            device=preparation.device if preparation.base_dtype == "auto" else "cpu",
            expert_names=preparation.expert_names,
            whole=preparation.whole,
        )
    if is_empty and files and preparation.lora and preparation.lora.init == "pissa":
        lora.extract_principal(net, seed=preparation.lora.seed)  # before the rest is quantized
    if preparation.base_dtype != "auto":
        net = quantize_blocks(
            net,
            preparation.base_dtype,
            preparation.block_names,
            preparation.run_on or preparation.device,
            home=preparation.device,
        )
    if preparation.mesh is None:
        net = net.to(preparation.device)
    elif not is_empty:
        net = shard(
            net,
            preparation.mesh,
            mode="fsdp2",
            block_names=preparation.block_names,
            compute_dtype=preparation.dtype,
            expert_names=preparation.expert_names,
            whole=preparation.whole,
        )
    if preparation.lora:
        # Uninitialized values have no largest part.
        init: lora.Init = preparation.lora.init if files or not is_empty else "default"
        for name in preparation.lora.names:
            lora.init_adapter(net, name, seed=preparation.lora.seed, init=init)
    begin(net)
    if preparation.compile:
        compile_blocks(net, preparation.block_names, attention=preparation.attention)
    choose_attention(net, preparation.attention, preparation.block_names)
    if preparation.recompute:
        recompute_blocks(net, preparation.recompute)
    return net.eval()
