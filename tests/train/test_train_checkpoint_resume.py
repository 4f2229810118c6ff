"""A run that stops and continues ends where one that never stopped does, to the last bit, on any number of ranks."""

from dataclasses import dataclass

import pytest
import torch
from helpers import load_newest, sampled
from omni_train.checkpoint.state import train_state
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.lora import add_lora, ema_update
from omni_train.optim import build_adamw, optimizer_step, reduce_gradients
from omni_train.shard import shard
from omni_train.weights.snapshot import Ema
from torch import nn
from torch.distributed.tensor import DTensor

NUM_SAMPLES = 2  # a sum of two has one order: ranks and a single process round alike


@dataclass
class Training:
    """A tiny net with its optimizer and average; layers of 7 and 1 rows, which two ranks share unevenly."""

    dist: object
    kind: str
    mode: str

    def __post_init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.BatchNorm1d(7, affine=False), nn.Linear(7, 1))
        if self.kind == "lora":
            add_lora(self.net, ["0", "3"], rank=2, alpha=4, seed=1)
            add_lora(self.net, ["0", "3"], rank=2, alpha=4, seed=2, adapter="old")
        self.net[2].eval()  # its statistics are a buffer that training leaves alone
        shard(self.net, self.dist.mesh, mode=self.mode)
        self.optimizer = build_adamw(self.net, lr=0.1, weight_decay=0.01)
        self.ema = Ema([p for p in self.net.parameters() if p.requires_grad], decay=0.5)
        self.parts = (self.net, self.optimizer, self.ema)

    def run(self, steps):
        for step in steps:
            for i in range(self.dist.rank, NUM_SAMPLES, self.dist.world_size):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + i))
                (self.net(x) - x.sum()).square().mean().backward()
            reduce_gradients(self.net, self.dist.mesh, mode=self.mode)
            params = [p for p in self.net.parameters() if p.requires_grad]
            optimizer_step(self.optimizer, params, lr=0.1, max_grad_norm=torch.inf, dist=self.dist)
            self.ema.update(step)
            if self.kind == "lora":
                ema_update(self.net, "default", "old", decay=0.9)

    def state(self):
        """Everything that training changes, whole, as numbers that JSON keeps exactly."""
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in train_state(*self.parts).items()}
        return {name: tensor.tolist() for name, tensor in whole.items()}


def uninterrupted(kind, num_steps):
    training = Training(init_distributed(), kind, "none")
    training.run(range(num_steps))
    return training.state()


SPREADS = [  # of who saves and of who loads
    (("none", 1), ("none", 1)),
    (("ddp", 2), ("ddp", 2)),
    (("fsdp2", 2), ("fsdp2", 2)),
    (("fsdp2", 2), ("none", 1)),
    (("none", 1), ("fsdp2", 2)),
    (("ddp", 2), ("none", 1)),
    (("none", 1), ("ddp", 2)),
    (("fsdp2", 2), ("ddp", 2)),
    (("fsdp2", 3), ("fsdp2", 2)),
]
ALWAYS = ["full fsdp2 3, fsdp2 2"]
LAYOUTS = {
    f"{kind} {saver[0]} {saver[1]}, {loader[0]} {loader[1]}": (kind, saver, loader)
    for kind in ("full", "lora")
    for saver, loader in SPREADS
}


@pytest.mark.parametrize("case", sampled(LAYOUTS, 2, always=ALWAYS))
def test_continuing_is_bitwise_the_uninterrupted_run(run_ranks, tmp_path, monkeypatch, case):
    kind, saver, loader = LAYOUTS[case]
    monkeypatch.setattr("omni_train.checkpoint.parts.FILE_BYTES", 100)  # several files a rank

    def first_life(dist):
        training = Training(dist, kind, saver[0])
        training.run(range(3 if saver[1] <= NUM_SAMPLES else 0))
        Checkpoint(tmp_path, dist).save(3, *training.parts, config={})
        return training.state()

    def second_life(dist):
        training = Training(dist, kind, loader[0])
        with torch.no_grad():
            for p in training.net.parameters():
                p.mul_(1.5 if p.requires_grad else 1.0)  # whatever the fresh one holds must not matter
        saved = load_newest(Checkpoint(tmp_path, dist), *training.parts)
        restored = training.state()
        training.run(range(saved.step, 6))
        return [restored, training.state()]

    saved = run_ranks(first_life, saver[1])[0]
    for restored, final in run_ranks(second_life, loader[1]):
        assert restored == saved
        if saver[1] <= NUM_SAMPLES:
            assert final == uninterrupted(kind, 6)


def test_a_parameter_that_was_never_updated_has_no_optimizer_state(tmp_path):
    dist = init_distributed()
    net = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    optimizer = build_adamw(net, lr=0.1)
    net["used"](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, dist).save(1, net, optimizer, config={})
    fresh = build_adamw(net, lr=0.1)
    load_newest(Checkpoint(tmp_path, dist), net, fresh)
    assert set(fresh.state) == set(net["used"].parameters())
    assert {name for state in fresh.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_saved_run_of_another_kind_of_optimizer_keeps_its_state(tmp_path):
    dist, net = init_distributed(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, dist).save(1, net, optimizer, config={})
    fresh = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    load_newest(Checkpoint(tmp_path, dist), net, fresh)
    for p in net.parameters():
        assert torch.equal(fresh.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
