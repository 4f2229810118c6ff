"""How often sharded weights are gathered and gradients summed, and that no bit depends on it."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import shard_mesh
from omni_train.lora import add_lora
from omni_train.optim import SummedBackward, build_adamw, optimizer_step, reduce_gradients
from omni_train.shard import gathered, shard, sharded_backward
from omni_train.weights.full import save_weights
from omni_train.weights.snapshot import Ema
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

UNITS = 3  # two blocks, and what is around them
BATCHES, STEPS, TRAINED = 2, 10, 2
EVERY = BATCHES * TRAINED * UNITS  # sums of gradients where every backward pass has its own


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * 2


class Collectives(TorchDispatchMode):
    """The number of collectives between devices by their kinds, and the bytes that a rank gives to them."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce"}
        if func.namespace == "c10d" and (name := kind.get(func.overloadpacket.__name__)):
            self.calls[name] += 1
            given = args[0] if name == "reduce" else [args[1]]
            self.bytes[name] += sum(tensor.nbytes for tensor in given)
        return func(*args, **(kwargs or {}))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def build(mesh, *, lora, mode="fsdp2"):
    """A net whose weights are trained, or in bfloat16 under adapters that are."""
    torch.manual_seed(0)
    net = Net()
    if lora:
        net.bfloat16()
        add_lora(net, ["inner"], rank=3, alpha=4, seed=3)
        for p in net.parameters():
            p.data += 0.1 * p.requires_grad  # else one factor has no gradient
    dtype = torch.bfloat16 if lora and mode == "fsdp2" else None
    return shard(net, mesh, mode=mode, block_names=("Block",), compute_dtype=dtype)


def loss_of(net, dist, *, lora, calls):
    """A rank's own loss, of as many calls of the net."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.rank))
    outs = [net((x * (1 + i)).to(torch.bfloat16 if lora else torch.float32)).float() for i in range(calls)]
    return torch.stack(outs).square().mean()


def step(net, dist, *, unshard="", lora, calls=1):
    """A rollout and the gradients of an update, as a trainer has them; all outputs and gradients."""
    outs = []
    with torch.no_grad(), gathered(net) if unshard else nullcontext():
        for _ in range(BATCHES * STEPS):
            outs.append(loss_of(net, dist, lora=lora, calls=calls))
    with gathered(net) if unshard == "all" else nullcontext():
        for i in range(BATCHES * TRAINED):
            loss = loss_of(net, dist, lora=lora, calls=calls) * (i + 1)
            outs.append(loss.detach())
            sharded_backward(net, loss, is_last=i == BATCHES * TRAINED - 1)
    return outs + [p.grad for p in net.parameters() if p.grad is not None]


def test_weights_are_gathered_once_in_a_phase_and_no_bit_depends_on_it(run_ranks):
    """Ten steps for each of two batches, and two of them trained: 24 calls of the net, or 48 with guidance."""

    def work(dist):
        counts = []
        for lora, calls in ((False, 1), (False, 2), (True, 1)):
            results = []
            for unshard in ("", "rollout", "all"):
                net = build(dist.mesh, lora=lora)
                with Collectives() as seen:
                    results.append(step(net, dist, unshard=unshard, lora=lora, calls=calls))
                counts.append([seen.calls["gather"], seen.calls["scatter"]])
            assert all(isinstance(p, DTensor) for p in net.parameters())
            for other in results[1:]:
                assert len(results[0]) == len(other)
                assert all(torch.equal(full(a), full(b)) for a, b in zip(results[0], other, strict=True))
        return counts

    for plain, rollout, both, guided, guided_rollout, guided_both, *adapters in run_ranks(work, 4):
        assert [plain, rollout, both] == [[28 * UNITS, EVERY], [9 * UNITS, EVERY], [2 * UNITS, EVERY]]
        assert guided[0] > 50 * UNITS  # each of two calls gathers anew
        assert guided[0] - guided_rollout[0] == 39 * UNITS
        assert guided_both == [2 * UNITS, EVERY]
        assert adapters == [[gathers, UNITS - 1] for gathers, _ in (plain, rollout, both)]  # once, and of blocks alone


def test_gradients_of_adapters_are_summed_once_to_the_bits_of_ddp(run_ranks):
    """After four backward passes, with as many bytes as after one; frozen weights send none."""

    def work(dist):
        net, plain = (build(dist.mesh, lora=True, mode=mode) for mode in ("fsdp2", "ddp"))
        with Collectives() as seen:
            step(net, dist, lora=True)
        step(plain, dist, lora=True)
        reduce_gradients(plain, dist.mesh, mode="ddp")
        trained, expected = ([p for p in n.parameters() if p.requires_grad] for n in (net, plain))
        assert seen.bytes["scatter"] == sum(4 * 2 * -(-len(p) // 2) * p[0].numel() for p in expected)  # rows in pairs
        follows_an_optimizer_step(dist)
        return [len(expected), sum(torch.equal(full(p.grad), e.grad) for p, e in zip(trained, expected, strict=True))]

    for num_tensors, num_equal in run_ranks(work):
        assert num_tensors == num_equal == 4


def test_copies_on_a_two_by_two_mesh_train_as_one(run_ranks, tmp_path, monkeypatch):
    """Hybrid sharding: norms, weights, averages, checkpoints and exports are those of one copy on two ranks."""

    monkeypatch.setattr("omni_train.checkpoint.parts.SHARE_BYTES", 100)  # so that both copies write

    def trained(dist, mesh, lora, rows):
        """Two steps on the samples of four ranks, of which this one has some."""
        net = build(mesh, lora=lora)
        params = [p for p in net.parameters() if p.requires_grad]
        optimizer, ema, norms = build_adamw(params, lr=0.01), Ema(params, decay=0.5), []
        backward = SummedBackward(net, mesh, mode="fsdp2")
        for number in range(2):
            for row in rows:
                backward(loss_of(net, replace(dist, rank=row), lora=lora, calls=1), of=len(rows))
            norms.append(optimizer_step(optimizer, params, lr=0.01, max_grad_norm=0.1, dist=dist).grad_norm)
            ema.update(number)
        return net, optimizer, ema, norms

    def numbers(net, ema):
        return [full(p).tolist() for p in net.parameters()] + [full(copy).tolist() for _, copy in ema.pairs()]

    def work(dist):
        mesh, found = shard_mesh(dist, 2), []
        for lora in (False, True):
            with Collectives() as seen:
                net, optimizer, ema, norms = trained(dist, mesh, lora, [dist.rank, dist.rank])
            assert seen.calls["scatter"] == 2 * (UNITS - 1 if lora else 2 * UNITS)
            assert seen.calls["reduce"] == 2 * 2  # between copies once a step: which have a gradient, and all of them
            before = numbers(net, ema)
            checkpoints = Checkpoint(tmp_path / f"checkpoints-{lora}", dist)
            checkpoints.save(1, net, optimizer, ema, config={})
            for other in (mesh, dist.mesh):
                net, optimizer, ema, _ = trained(dist, other, lora, [0])
                checkpoints.load(checkpoints.latest(), net, optimizer, ema)
                assert numbers(net, ema) == before
            if lora:
                save_weights(net, tmp_path / "weights", dist, part="net")
            found.append([norms, before])
        return found

    first, *others = run_ranks(work, 4)
    assert others == [first] * 3
    names = [path.name for path in (tmp_path / "checkpoints-False/step-00000001").iterdir()]
    assert sorted(names) == ["checkpoint.json", *(f"rank-0000{rank}-000.safetensors" for rank in range(4))]

    def alone(dist):
        own = [2 * dist.rank] * 2 + [2 * dist.rank + 1] * 2
        net, _, ema, norms = trained(dist, dist.mesh, False, own)
        return norms, numbers(net, ema)

    norms, weights = run_ranks(alone)[0]
    assert norms == pytest.approx(first[0][0], rel=1e-5)
    for ours, theirs in zip(first[0][1], weights, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-5)


def follows_an_optimizer_step(dist):
    """What is gathered is out of date after a step, and is gathered anew once it is freed."""
    losses = []
    for keeps in (False, True):
        net = build(dist.mesh, lora=False)
        params = list(net.parameters())
        optimizer = build_adamw(params, lr=0.01)
        with gathered(net) if keeps else nullcontext():
            for _ in range(3):
                loss = loss_of(net, dist, lora=False, calls=1)
                sharded_backward(net, loss, is_last=True)
                optimizer_step(optimizer, params, lr=0.01, max_grad_norm=1.0, dist=dist)
                losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3
