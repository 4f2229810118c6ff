"""torchao's AdamW with moments in 8 bits: codes, and a scale for each 256 of them (arXiv 2110.02861).

Moments of fewer than 4,096 numbers stay float32, and on every rank those of which some rank has no whole blocks or
fewer numbers. Saved, the scales have a row for each run of rows of the parameter that is whole blocks.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao import optim
from torchao.optim.subclass_8bit import OptimState8bit

from omni_train.checkpoint.state import sharded_like

BLOCK, LEAST = 256, 4096  # numbers with a scale, and of a moment in 8 bits


class AdamW8bit(optim.AdamW8bit):
    """AdamW with moments in 8 bits, in the same form on every rank. Its learning rates are tensors of the host."""

    def step(self, closure: None = None) -> None:
        """Take a step of AdamW."""
        # Torch's cache of graphs on disk knows a sharded tensor by its whole shape: ranks of uneven shards would share.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            super().step()

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        return self.zeros(p, signed) if least_shard(p) >= LEAST else torch.zeros_like(p)

    def zeros(self, p: Tensor, signed: bool) -> Tensor:
        """Return zeros in 8 bits, of the shape of a parameter and sharded as it.

        Raises:
            ValueError: some rank has no whole blocks.
        """
        if not least_shard(p):
            ranks = p.device_mesh.size() if isinstance(p, DTensor) else 1
            rule = f"each rank must have rows of whole blocks of {BLOCK} numbers of a moment in 8 bits"
            raise ValueError(f"{rule}, got the shape {list(p.shape)} on {ranks} ranks: take as many as were saved")
        local = p.to_local() if isinstance(p, DTensor) else p
        return sharded_like(p, OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, local.dtype), p.shape)


def least_shard(p: Tensor) -> int:
    """Return the fewest numbers of a parameter that a rank holds; 0 unless all ranks hold whole blocks."""
    if not isinstance(p, DTensor):
        return 0 if p.numel() % BLOCK else p.numel()
    ranks, full = p.device_mesh.size(), -(-p.shape[0] // p.device_mesh.size()) * p.shape[1:].numel()
    return 0 if full % BLOCK or p.numel() % BLOCK else max(0, p.numel() - full * (ranks - 1))
