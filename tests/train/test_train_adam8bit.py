"""AdamW with moments in 8 bits: torchao's own steps, on any ranks, saved as plain tensors."""

import math

import pytest
import torch
from helpers import load_newest
from omni_train.checkpoint.state import train_state
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.optim import build_adamw, optimizer_step, reduce_gradients
from omni_train.shard import shard
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

SHAPE = (64, 128)


def test_steps_are_torchaos_own_to_the_bit(alone):
    """Of a weight in 8 bits and of one that is too small, at a learning rate that changes."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.randn(100))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer, reference = build_adamw(ours, lr=0.0, in_8bit=True, **settings), AdamW8bit(theirs, lr=0.0, **settings)
    for step in range(1, 5):
        for p, other in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            other.grad = p.grad.clone()
        optimizer_step(optimizer, ours, lr=0.1 / step, max_grad_norm=math.inf, dist=alone)
        reference.param_groups[0]["lr"].fill_(0.1 / step)
        reference.step()
    assert all(map(torch.equal, ours, theirs))
    assert [type(optimizer.state[p]["exp_avg"]) for p in ours] == [OptimState8bit, torch.Tensor]
    assert {p.dtype for p in ours} == {torch.float32}


def test_a_quadratic_is_descended_as_by_adamw_within_the_rounding_of_moments():
    """The tenfold range below a block's largest number has 64 codes of a sign, or 128 of numbers without one.

    A moment is rounded by half of their distance, and a mean of rounded and exact numbers of one sign is off by no
    larger a share than they are. A gradient is off by as much as the weight is.
    """
    generator, lr, num_steps = torch.Generator().manual_seed(0), 0.01, 10
    middle = (1 + torch.rand(SHAPE, generator=generator)) * torch.randn(SHAPE, generator=generator).sign()
    params = [nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)]
    optimizers = [build_adamw([p], lr=lr, weight_decay=0.0, in_8bit=p is params[1]) for p in params]
    most, off = 0.0, {"exp_avg": 0.0, "exp_avg_sq": 0.0}  # of the weights, and the shares of the stored moments
    for _ in range(num_steps):
        before = params[0].detach().clone()
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = p.detach() - middle
            optimizer.step()
        gradient_off = most / params[0].grad.abs().min().item()
        off = {name: max(share, (1 + gradient_off) ** 2 - 1) for name, share in off.items()}
        taken = (params[0].detach() - before).abs().max().item()
        most += taken * ((1 + off["exp_avg"]) / math.sqrt(1 - off["exp_avg_sq"]) - 1) + 1e-6  # of float32
        for name, codes in (("exp_avg", 64), ("exp_avg_sq", 128)):
            blocks = optimizers[0].state[params[0]][name].abs().view(-1, 256)
            least = (blocks.amin(1) / blocks.amax(1)).min().item() * (1 - off[name]) / (1 + off[name])
            assert least > 0.1
            off[name] = (1 + off[name]) * (1 + 0.9 / codes / 2 / least) - 1
    found = (params[0] - params[1]).abs().max().item()
    assert 1e-5 < found < most < 0.3 * lr * num_steps, (found, most)


def train(dist, mode, steps=2, shape=(81, 256)):
    """A layer whose rows two ranks and three share unevenly, its optimizer, and its weights."""
    torch.manual_seed(0)
    net = shard(nn.Linear(shape[1], shape[0], bias=False), dist.mesh, mode=mode)
    optimizer, params = build_adamw(net, lr=0.01, in_8bit=True), list(net.parameters())
    for step in range(steps):
        for i in [dist.rank] if dist.world_size > 1 else [0, 1]:
            net(
                torch.randn(4, shape[1], generator=torch.Generator().manual_seed(10 * step + i))
            ).square().sum().backward()
        reduce_gradients(net, dist.mesh, mode=mode)
        optimizer_step(optimizer, params, lr=0.01, max_grad_norm=math.inf, dist=dist)
    return net, optimizer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def test_compiled_steps_of_sharded_weights_are_those_of_whole_ones(run_ranks):
    """The blocks of a shard are those of the whole, so that scales and codes are alike."""

    def work(dist):
        net, optimizer = train(dist, "fsdp2")
        state = train_state(net, optimizer, None)
        return {name: [str(t.dtype), list(t.shape), whole(t).tolist()] for name, t in state.items()}

    expected = train_state(*train(init_distributed(), "none"), None)
    for found in run_ranks(work):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            dtype, shape, values = found[name]
            assert (dtype, shape) == (str(tensor.dtype), list(tensor.shape)), name
            torch.testing.assert_close(
                torch.tensor(values, dtype=tensor.dtype),
                tensor.detach(),
                rtol=1e-5,
                atol=1.0 if dtype == "torch.uint8" else 1e-8,
            )
    assert {name.partition("/")[0]: (t.dtype, tuple(t.shape)) for name, t in expected.items()} == {
        "weight": (torch.float32, (81, 256)),
        "optimizer.step": (torch.float32, ()),
        "optimizer.exp_avg.codes": (torch.uint8, (81, 256)),
        "optimizer.exp_avg.scale": (torch.float32, (81, 1)),
        "optimizer.exp_avg_sq.codes": (torch.uint8, (81, 256)),
        "optimizer.exp_avg_sq.scale": (torch.float32, (81, 1)),
    }


@pytest.mark.parametrize(
    ("shape", "ranks", "kind"),
    [
        ((81, 256), 3, "OptimState8bit"),
        ((48, 256), 3, "OptimState8bit"),  # 4,096 numbers on each rank
        ((47, 256), 3, "Tensor"),  # 3,840 on the last
        ((64, 80), 2, "Tensor"),
        ((129, 128), 2, "Tensor"),  # the first has half a block
        ((2, 8192), 3, "Tensor"),  # the last has none
    ],
)
def test_all_ranks_keep_a_moment_in_the_same_form(run_ranks, shape, ranks, kind):
    def work(dist):
        with torch.compiler.set_stance("force_eager"):
            net, optimizer = train(dist, "fsdp2", steps=1, shape=shape)
        moments = [optimizer.state[net.weight][name].to_local() for name in ("exp_avg", "exp_avg_sq")]
        return [type(moment).__name__ for moment in moments]

    assert run_ranks(work, ranks) == [[kind] * 2] * ranks


def test_saved_codes_need_an_optimizer_that_has_them_and_ranks_of_whole_blocks(run_ranks, tmp_path, alone):
    """Rows of 80 numbers: three of 16 rows are five blocks, and two ranks have 32 each, three 22."""
    with torch.compiler.set_stance("force_eager"):
        net, optimizer = train(alone, "none", shape=(64, 80))
    Checkpoint(tmp_path, alone).save(2, net, optimizer, config={})
    message = r"optimizer.exp_avg.codes/weight is in 8 bits: the optimizer must be AdamW in 8 bits, got AdamW$"
    with pytest.raises(ValueError, match=message):
        load_newest(Checkpoint(tmp_path, alone), net, build_adamw(net, lr=0.1))

    def work(dist):
        sharded = shard(nn.Linear(80, 64, bias=False), dist.mesh, mode="fsdp2")
        fresh = build_adamw(sharded, lr=0.1, in_8bit=True)
        try:
            load_newest(Checkpoint(tmp_path, dist), sharded, fresh)
        except ValueError as exc:
            return str(exc)
        return all(
            torch.equal(whole(t), whole(train_state(net, optimizer, None)[name]))
            for name, t in train_state(sharded, fresh, None).items()
        )

    assert run_ranks(work, 2) == [True, True]
    rule = "each rank must have rows of whole blocks of 256 numbers of a moment in 8 bits"
    for message in run_ranks(work, 3):
        assert message == f"rank 0: {rule}, got the shape [64, 80] on 3 ranks: take as many as were saved"
