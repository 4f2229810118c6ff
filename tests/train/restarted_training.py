"""Training of a tiny net under torchrun, whose last rank is killed once, after its second step.

Each rank leaves `log-RANK`, with a line per start and step, and `weights-RANK.json` in the working folder. With
`--checkpoint-url URL` the ranks need no shared folder.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import Dist, init_distributed, shutdown
from omni_train.optim import build_adamw, optimizer_step
from omni_train.shard import shard, sharded_backward
from torch import nn

STEPS = 4


def note(rank: int, line: str) -> None:
    """Add a line to the rank's log."""
    with Path(f"log-{rank}").open("a") as log:
        log.write(line + "\n")


def train(dist: Dist, url: str = "", *, is_killed: bool = True) -> None:
    """Train from the newest checkpoint, if any."""
    torch.manual_seed(0)
    net = shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), dist.mesh, mode="fsdp2", block_names=())
    params = list(net.parameters())
    optimizer, checkpoints = build_adamw(params, lr=0.1), Checkpoint("checkpoints", dist, url=url)
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
        if is_killed and step == 1 and dist.rank == dist.world_size - 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    weights = [param.full_tensor().tolist() for param in params]  # type: ignore[attr-defined]
    Path(f"weights-{dist.rank}.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    try:
        train(init_distributed(timeout_s=30.0), *sys.argv[2:])
        shutdown()
    except RuntimeError as exc:  # the other rank has ended
        print(exc, flush=True)
        os._exit(1)
