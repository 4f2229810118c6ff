"""Seconds that a checkpoint takes of a training step: copied and written beside training, against waiting for the disk.

python benchmarks/checkpoint.py
python benchmarks/checkpoint.py --gb 5

The state is weights and AdamW's two moments, on the accelerator if there is one. Copy: what `async_save` takes of the
step, which the first time also takes the memory. Until complete: from there until the checkpoint is on the disk. Work:
matrix products on the training's device, alone and while a checkpoint is written.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import engines
import torch
from omni_train.checkpoint.parts import host_memory
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import Dist, init_distributed, synchronize
from torch import nn

ROWS = 1024  # of each weight


def make_state(gb: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Square weights and an optimizer with its moments, all together of that size."""
    count = max(1, round(gb * 1e9 / (12 * ROWS * ROWS)))
    net = nn.ParameterList([torch.randn(ROWS, ROWS, device=device) for _ in range(count)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for p in net:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def clock(call: Callable[[], object]) -> float:
    """Seconds of a call, with what it leaves to the device."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def work(device: torch.device, seconds: float) -> float:
    """Matrix products a second, over so many seconds."""
    a, count, start = torch.randn(512, 512, device=device), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        synchronize()
        count += 10
    return count / (time.perf_counter() - start)


@contextmanager
def folder(place: str | None) -> Iterator[Path]:
    """A folder for the checkpoints."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


def measure(gb: float, saves: int, place: str | None, dist: Dist) -> dict[str, float]:
    """Seconds and ratios by their names; of several saves the fastest counts."""
    net, optimizer = make_state(gb, dist.device)
    with folder(place) as home:
        waited, beside = Checkpoint(home / "waited", dist, keep=1), Checkpoint(home / "beside", dist, keep=1)
        blocking = [clock(lambda n=n: waited.save(n, net, optimizer, config={})) for n in range(saves)]
        copies, bare, complete, alone, while_written = [], [], [], 0.0, 0.0
        flat = torch.ones(sum(3 * p.nbytes for p in net.parameters()), dtype=torch.uint8, device=dist.device)
        memory = host_memory(len(flat), dist.device).fill_(0)
        for n in range(saves + 1):
            bare.append(clock(lambda: memory.copy_(flat, non_blocking=True)))
            copies.append(clock(lambda n=n: beside.async_save(n, net, optimizer, config={})))
            complete.append(clock(beside.wait))
        alone = work(dist.device, 1.0)
        beside.async_save(saves + 1, net, optimizer, config={})
        while_written = work(dist.device, min(1.0, min(complete)))
        beside.wait()
    return {
        "save that training waits for, s": min(blocking),
        "copy, first time, s": copies[0],
        "copy, s": min(copies[1:]),
        "copy / bare copy": min(copies[1:]) / min(bare[1:]),
        "copy / save that training waits for": min(copies[1:]) / min(blocking),
        "until complete, s": min(complete),
        "work while it is written / alone": while_written / alone,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 10^9 bytes")
    parser.add_argument("--saves", type=int, default=3, help="checkpoints of each kind")
    parser.add_argument("--folder", help="where to write; a folder of the system for temporary files if not given")
    args = parser.parse_args(argv)
    dist = init_distributed()
    print(engines.stamp(f"{args.gb:g} GB"))
    print("| what | value |", "| --- | --- |", sep="\n")
    for name, value in measure(args.gb, args.saves, args.folder, dist).items():
        print(f"| {name} | {value:.3g} |")


if __name__ == "__main__":
    main()
