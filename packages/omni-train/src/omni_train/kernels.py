"""Attention kernels and compiled blocks that give the same bits in sampling and training.

By default, torch chooses attention kernels at every call, and may choose different ones in sampling than in training.
If they round differently, the ratio before the first update is not 1.

A compiled block is one graph. A net with compiled blocks samples with gradients enabled, so that the same tensors
require gradients as in training and each block runs the same code; the tensors that a block saves are freed at its
end. The bits are then equal, whatever the compiler fuses. All sizes are dynamic from the start, so the choice of graph
never depends on earlier calls. New text lengths, image sizes and batch sizes need no further graph.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from omni_train.dist import deterministic

# Named after torch's SDPBackend. auto excludes cuDNN, whose plan depends on whether gradients are required.
BACKENDS = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}
# The first rounds as without a compiler, and fuses no product with a sum; with the second, no benchmark or register
# count determines the order of sums; with the third, no product is padded, which a heuristic may choose otherwise.
EXACT = {"emulate_precision_casts": True, "deterministic": True, "shape_padding": False}
MAX_GRAPHS = 64  # graphs per class of blocks: inputs with gradients, adapters, masks, inputs that are views, sizes of 1
_IS_SAMPLING = ContextVar("is_sampling", default=False)  # True while a net with compiled blocks samples


def check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run the kernels on a few tokens, forward and backward, with auto also with a mask.

    Raises:
        ValueError: they do not run on the device or in the dtype, or the device has its own attention kernels, which
            only auto selects.
    """
    if name != "auto" and has_own_attention(device):
        raise ValueError(f"attention must be auto on {device.type}, whose own kernels compute it, got {name}")
    x, mask = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype), torch.ones(1, 1, 1, 16, device=device).bool()
    q = x.clone().requires_grad_()
    try:
        with sdpa_kernel(BACKENDS[name]):
            for attn_mask in [None, mask] if name == "auto" else [None]:  # the others need not take masks
                scaled_dot_product_attention(x, x, x, attn_mask=attn_mask)
                torch.autograd.grad(scaled_dot_product_attention(q, q, q, attn_mask=attn_mask).sum(), q)
    except RuntimeError as exc:
        where, words = f"{str(dtype).removeprefix('torch.')} on {device.type}", str(exc).strip().partition("\n")[0]
        raise ValueError(f"attention must have kernels that run in {where}, got {name}: {words:.200}") from exc


def has_own_attention(device: torch.device) -> bool:
    """True if a device computes attention with its own kernels, whichever of torch's are chosen."""
    x = torch.zeros(1, 1, 16, 64, device=device)
    with suppress(RuntimeError), sdpa_kernel([]):
        scaled_dot_product_attention(x, x, x)
        return True
    return False


def check_float8(device: torch.device) -> None:
    """Raise ValueError if a device has no float8, such as Ascend's 910B."""
    try:
        torch.ones(1, device=device).to(torch.float8_e4m3fn).float()
    except RuntimeError as exc:
        raise ValueError(f"memory.base-dtype must be int8 or nf4 on {device.type}, which has no fp8, got fp8") from exc


def check_float16(device: torch.device) -> None:
    """Raise ValueError unless a device lacks bfloat16, as NVIDIA's V100 and T4 do, and float16 overflows to inf."""
    supports = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: True)
    if supports(*[False] * len(signature(supports).parameters)):  # whether to count emulation, where that is asked
        raise ValueError(f"dtype must be bfloat16 or float32 on {device.type}, which has bfloat16, got float16")
    if not (torch.full((1,), 6e4, dtype=torch.float16, device=device) * 2).isinf():
        raise ValueError(f"dtype must be float32 on {device.type}, whose float16 saturates, got float16")


def check_compiler(device: torch.device) -> None:
    """Compile a sum, which takes seconds if the device has a compiler.

    Raises:
        ValueError: the device has no compiler.
    """
    try:
        torch.compile(torch.add)(torch.ones(8, device=device), 1.0)
    except (RuntimeError, OSError) as exc:
        lines = str(exc).strip().splitlines()
        raise ValueError(f"compile must be off where torch cannot compile for {device.type}: {lines[0]:.200}") from exc


def compile_blocks(module: nn.Module, block_names: Collection[str], *, attention: str) -> None:
    """Compile the blocks of a module, each class once, when they first run. Call it before `choose_attention`.

    A block that is not a single graph raises an error when it first runs.

    block_names: class names of these modules. attention: the backend that will be chosen, part of the cache key of
    graphs on disk.
    """
    torch.compiler.config.cache_key_tag = attention
    symbols.use_duck_shape = False  # sizes that happen to be equal may differ later
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]  # of graphs that fit, the first
    for block in _blocks(module, block_names):
        compiled = torch.compile(  # type: ignore[call-overload]  # its types omit the limit
            block.forward, fullgraph=True, dynamic=True, recompile_limit=MAX_GRAPHS, options=EXACT
        )
        # torch rejects deterministic algorithms in a graph's backward pass unless it was captured with them
        block.forward = partial(_detach_outputs, deterministic("warn")(compiled))
    module.forward = partial(_run_net, module.forward)


def is_sampling() -> bool:
    """True in a forward pass without gradients of a net with compiled blocks, although gradients are enabled there."""
    return _IS_SAMPLING.get()


def _run_net(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a net's forward pass; with gradients disabled, run it as in training, but without keeping blocks' history."""
    if torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = _IS_SAMPLING.set(True)
    try:
        with torch.enable_grad():
            return tree_map_only(Tensor, Tensor.detach, forward(*args, **kwargs))
    finally:
        _IS_SAMPLING.reset(before)


def _detach_outputs(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block; in sampling, its outputs have no history, but require gradients as in training."""
    out = forward(*args, **kwargs)
    if not is_sampling():
        return out
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), out)


def choose_attention(module: nn.Module, name: str, block_names: Collection[str]) -> None:
    """Restrict the attention of a module's blocks to these kernels, in the backward pass too.

    name: a key of BACKENDS. block_names: class names of the modules that hold all attention.
    """
    for block in _blocks(module, block_names):
        block.forward = sdpa_kernel(BACKENDS[name])(block.forward)


def _blocks(module: nn.Module, block_names: Collection[str]) -> list[nn.Module]:
    """Return the blocks of a module, sharded or not."""
    return [block for block in module.modules() if type(block).__name__.removeprefix("FSDP") in block_names]
