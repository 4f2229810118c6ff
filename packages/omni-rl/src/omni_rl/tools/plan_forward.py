"""One forward of a dry run: the net on the meta device, with the data types and input shapes of a run.

Encoders run on a planned device, because the shapes of their outputs depend on the text. The net has no values, and
takes a few seconds at most. Products of two data types raise an error, as on a real device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from omni_rollout import Model, Params
from omni_rollout.conditioning import TextCache
from omni_rollout.model import wrap
from omni_rollout.sampler import Sampler
from omni_rollout.types import Cond
from omni_train.planned import PLANNED, PlannedDevice, read_values
from omni_train.prompts.files import PromptRecord
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from omni_rl.flow.sampling import expand_groups


def count_forward(model: Model, net: nn.Module, dtype: torch.dtype, params: Params, record: PromptRecord) -> int:
    """Return the floating-point operations of a forward of one sample.

    model: a model that reads no weights. net: the run's net, on the meta device. dtype: data type of the model's other
    parts. params: sampling parameters. record: the prompt.

    Raises:
        ValueError: the forward fails.
    """
    counter = FlopCounterMode(display=False)
    try:
        inputs = first_inputs(model, net, dtype, params, record)
        with on_meta(net), counter, SingleDtypeMode():
            model.predict_velocity(net, *inputs)
    except Exception as exc:  # models may raise anything
        message = " ".join(str(exc).split())
        raise ValueError(f"a forward of the net fails: {type(exc).__name__}: {message}") from exc
    return int(counter.get_total_flops())


@contextmanager
def on_meta(net: nn.Module) -> Iterator[None]:
    """In the `with` block, move inputs of the net to the meta device, and its outputs back to the host as zeros."""

    def move_inputs(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))

    def move_outputs(module: nn.Module, args: tuple[object, ...], out: object) -> Any:
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), out)

    with net.register_forward_pre_hook(move_inputs, with_kwargs=True), net.register_forward_hook(move_outputs):
        yield


def first_inputs(
    model: Model, net: nn.Module, dtype: torch.dtype, params: Params, record: PromptRecord
) -> tuple[Tensor, Tensor, Cond, Params]:
    """Return the inputs of the first forward of a prompt's sample, except the net, on the host."""
    (prompt,) = expand_groups([record], 1, seed=0, step=0)
    params = replace(params.of_size(prompt.size), guidance_scale=1.0, decode=False, sde_steps=())
    calls: list[tuple[Tensor, Tensor, Cond, Params]] = []

    def predict(net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        calls.append((copy_to_host(x), copy_to_host(sigma), tree_map_only(Tensor, copy_to_host, dict(cond)), params))
        return torch.zeros_like(x)

    model.host_encoders = False
    with PlannedDevice():
        parts = model.load(device=PLANNED, dtype=dtype, net=net)
        sampler = Sampler(wrap(model, predict_velocity=predict), parts, TextCache(0.0, ""))
        sampler.sample([prompt], params, weight_version=0)
        return calls[0]


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor of the planned device to the host, with its data type."""
    return read_values(tensor).to(tensor.dtype)


class SingleDtypeMode(TorchDispatchMode):
    """Dispatch mode that refuses products of two data types, as all devices except the meta device do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if func._overloadpacket in flop_registry:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            dtypes = {str(tensor.dtype).removeprefix("torch."): None for tensor in tensors}
            if len(dtypes) > 1:
                raise TypeError(f"{func._overloadpacket.__name__} must have one data type, got {' and '.join(dtypes)}")
        return func(*args, **(kwargs or {}))
