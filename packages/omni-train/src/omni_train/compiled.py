"""Compiled blocks, with the same arithmetic whether gradients are wanted or not.

A block is one graph without gradients, while sampling, and another with them. For both to give the same bits, rounding
stays where it is without a compiler, and all sizes are open from the start: which graph runs never depends on what came
before. Text lengths, pictures' sizes and batches then need no further graph.
"""

from collections.abc import Collection

import torch
import torch.fx.experimental._config as symbols
from torch import nn

MAX_GRAPHS = 64  # of a class of blocks: by gradients, adapters, masks, inputs that are views, sizes of 1


def check_compiler(device: torch.device) -> None:
    """Compile a sum, which takes seconds where there is a compiler for the device.

    Raises:
        ValueError: there is none.
    """
    try:
        torch.compile(torch.add)(torch.ones(8, device=device), 1.0)
    except (RuntimeError, OSError) as exc:
        lines = str(exc).strip().splitlines()
        raise ValueError(f"compile must be off where torch cannot compile for {device.type}: {lines[0]:.200}") from exc


def compile_blocks(module: nn.Module, block_names: Collection[str], *, attention: str) -> None:
    """Have the blocks of a module compiled, each class once, when they first run. Call it before `choose_attention`.

    A block that is no single graph is an error when it first runs.

    block_names: class names of these modules. attention: what will be chosen, by which graphs on disk are told apart.
    """
    torch.compiler.config.cache_key_tag = attention
    symbols.use_duck_shape = False  # sizes that happen to be equal need not stay so
    for block in module.modules():
        if type(block).__name__.removeprefix("FSDP") in block_names:
            block.forward = torch.compile(  # type: ignore[call-overload]  # whose types lack the limit
                block.forward,
                fullgraph=True,
                dynamic=True,
                recompile_limit=MAX_GRAPHS,
                options={"emulate_precision_casts": True},
            )
