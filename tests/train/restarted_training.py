"""Training of a tiny net under torchrun, of which the last rank is killed after its second step, once.

Each rank leaves `log-RANK`, a line a start and a step, in the working folder.
"""

import os
import signal
from pathlib import Path

import torch
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed, shutdown
from omni_train.optim import build_adamw, optimizer_step
from omni_train.shard import shard, sharded_backward
from torch import nn

STEPS = 4


def note(rank: int, line: str) -> None:
    """Add a line to the rank's log."""
    with Path(f"log-{rank}").open("a") as log:
        log.write(line + "\n")


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    dist = init_distributed(timeout_s=30.0)
    torch.manual_seed(0)
    net = shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), dist.mesh, mode="fsdp2", block_names=())
    params = list(net.parameters())
    optimizer, checkpoints = build_adamw(params, lr=0.1), Checkpoint("checkpoints", dist)
    if saved := checkpoints.latest():
        checkpoints.load(saved, net, optimizer)
    note(dist.rank, "start")
    for step in range(saved.step if saved else 0, STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * dist.world_size + dist.rank))
        loss = (net(x) - 1).square().mean() / dist.world_size
        sharded_backward(net, loss, is_last=True)
        optimizer_step(optimizer, params, lr=0.1, max_grad_norm=1.0, dist=dist)
        checkpoints.save(step + 1, net, optimizer, config={})
        note(dist.rank, str(step + 1))
        if step == 1 and dist.rank == dist.world_size - 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    shutdown()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as exc:  # the other rank is gone
        print(exc, flush=True)
        os._exit(1)
