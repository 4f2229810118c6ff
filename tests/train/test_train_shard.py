"""One gradient whatever the mode, the number of ranks and the split of samples."""

import copy

import pytest
import torch
from helpers import sampled
from omni_train.checkpoint.state import in_batches
from omni_train.lora import add_lora
from omni_train.optim import SummedBackward, build_adamw, reduce_gradients
from omni_train.shard import shard
from torch import nn
from torch.distributed.tensor import DTensor

NUM_SAMPLES = 6


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.unused = nn.Linear(width, 1)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.last = nn.Linear(width, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def samples():
    return torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(5))


def gradients(net, dist, mode, per_rank):
    """Gradients of the mean over all samples, each rank working on `per_rank[rank]` of them, two backwards each."""
    for x in samples()[per_rank[dist.rank]].chunk(2):
        (net(x).square().sum() / NUM_SAMPLES).backward()
    reduce_gradients(net, dist.mesh, mode=mode)
    return {name: full(p.grad).tolist() for name, p in net.named_parameters() if p.grad is not None}


def expected_gradients(net):
    net(samples()).square().mean().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_agree(got, expected):
    for name, grad in expected.items():
        torch.testing.assert_close(torch.tensor(got[name]), grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", sampled(["ddp 3", "ddp 4", "fsdp2 3", "fsdp2 4"], 2))
def test_two_ranks_sum_to_the_gradient_of_one(run_ranks, case):
    mode, first = case.split()[0], int(case[-1])
    split = slice(0, first), slice(first, 6)

    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode, block_names=("Block",))
        return gradients(net, dist, mode, split)

    expected = expected_gradients(make_net())
    for got in run_ranks(work):
        assert_agree(got, expected)


@pytest.mark.parametrize("mode", sampled(["none", "ddp", "fsdp2"], 1))
def test_one_rank_with_a_mesh_has_the_plain_gradient(run_ranks, mode):
    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode)
        return gradients(net, dist, mode, [slice(0, 6)])

    (got,) = run_ranks(work, world_size=1)
    assert_agree(got, expected_gradients(make_net()))


@pytest.mark.parametrize("mode", sampled(["ddp", "fsdp2"], 1))
def test_module_keeps_identity_names_and_outputs(run_ranks, mode):
    net = make_net()
    names = [name for name, _ in net.named_parameters()]
    expected = net(samples())

    def work(dist):
        net = make_net()
        sharded = shard(net, dist.mesh, mode=mode, block_names=("Block",))
        assert sharded is net
        assert [name for name, _ in net.named_parameters()] == names
        assert net.blocks[0].inner.out_features == 5
        return net(samples()).tolist()

    for got in run_ranks(work):
        assert torch.equal(torch.tensor(got), expected)


def test_ddp_starts_from_the_first_rank(run_ranks):
    def work(dist):
        net = make_net(seed=dist.rank)
        net.scale.fill_(dist.rank + 2.0)
        shard(net, dist.mesh, mode="ddp")
        return net(samples()).tolist()

    first, second = run_ranks(work)
    assert first == second
    assert torch.equal(torch.tensor(first), make_net()(samples()))


def test_ddp_counts_a_missing_gradient_as_zero(run_ranks):
    def work(dist):
        net = shard(make_net(), dist.mesh, mode="ddp")
        if dist.is_main:
            net(samples()).sum().backward()
        reduce_gradients(net.parameters(), dist.mesh, mode="ddp")
        return [p.grad.tolist() for p in net.parameters() if p.grad is not None]

    first, second = run_ranks(work)
    assert first == second
    net = make_net()
    net(samples()).sum().backward()
    assert torch.equal(torch.tensor(first[0]), net.first.weight.grad)


@pytest.mark.parametrize("mode", sampled(["ddp", "fsdp2"], 1))
def test_weight_decay_leaves_a_parameter_alone_that_no_rank_has_a_gradient_for(run_ranks, mode):
    """As on one rank, where a parameter without gradient is none of the optimizer's business."""

    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode, block_names=("Block",))
        optimizer = build_adamw(net, lr=0.1, weight_decay=0.5)
        net(samples()).sum().backward()
        reduce_gradients(net, dist.mesh, mode=mode)
        optimizer.step()
        return {name: full(p).tolist() for name, p in net.named_parameters()}

    before = dict(make_net().named_parameters())
    for after in run_ranks(work):
        alone = [name for name in before if torch.equal(torch.tensor(after[name]), before[name])]
        assert alone == [f"blocks.{i}.unused.{part}" for i in (0, 1) for part in ("weight", "bias")]


def test_a_frozen_part_that_is_kept_whole_runs_on_one_rank_alone_and_before_the_net(run_ranks):
    """As a tower for images does, where another rank's batch has none."""
    expected = {name: grad for name, grad in expected_gradients(make_net()).items() if not name.startswith("first")}

    def work(dist):
        net = make_net()
        net.first.requires_grad_(False)
        net = shard(net, dist.mesh, mode="fsdp2", block_names=("Block",), whole={"first": torch.float32})
        alone = net.first(samples()).tolist() if dist.rank else None
        return alone, gradients(net, dist, "fsdp2", (slice(0, 4), slice(4, 6)))

    found = run_ranks(work)
    assert [alone for alone, _ in found] == [None, make_net().first(samples()).tolist()]
    for _, got in found:
        assert got.keys() == expected.keys()
        assert_agree(got, expected)


def test_a_part_that_is_trained_is_sharded_though_others_like_it_are_kept_whole(run_ranks):
    def work(dist):
        net = make_net()
        net.blocks[0].requires_grad_(False)
        net = shard(
            net,
            dist.mesh,
            mode="fsdp2",
            block_names=("Block",),
            whole=dict.fromkeys(("blocks.0", "blocks.1"), torch.float32),
        )
        sharded = [isinstance(block.inner.weight, DTensor) for block in net.blocks]
        return sharded, gradients(net, dist, "fsdp2", (slice(0, 3), slice(3, 6)))

    expected = expected_gradients(make_net())
    for sharded, got in run_ranks(work):
        assert sharded == [False, True]
        assert_agree(got, {name: grad for name, grad in expected.items() if not name.startswith("blocks.0")})


def test_compute_dtype_acts_on_parameters_and_leaves_inputs_alone(run_ranks):
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            self.seen = x.dtype, self.linear.weight.dtype
            return self.linear(x.to(self.linear.weight.dtype))

    def work(dist):
        net = shard(Probe(), dist.mesh, mode="fsdp2", compute_dtype=torch.bfloat16)
        net(torch.ones(1, 2)).float().sum().backward()
        return [str(dtype) for dtype in (*net.seen, net.linear.weight.dtype, net.linear.weight.grad.dtype)]

    for seen in run_ranks(work, world_size=1):
        assert seen == ["torch.float32", "torch.bfloat16", "torch.float32", "torch.float32"]


def test_gathering_in_bfloat16_gives_the_output_of_a_bfloat16_model(run_ranks, tiny_qwen):
    def work(dist):
        model = shard(
            tiny_qwen.build(), dist.mesh, mode="fsdp2", block_names=tiny_qwen.block_names, compute_dtype=torch.bfloat16
        )
        with torch.no_grad():
            return tiny_qwen.run(model, dtype=torch.bfloat16).float().tolist()

    with torch.no_grad():
        expected = tiny_qwen.run(tiny_qwen.build().to(torch.bfloat16), dtype=torch.bfloat16).float()
    for got in run_ranks(work):
        assert torch.equal(torch.tensor(got), expected)


def test_transformer_with_lora_has_the_same_gradient_in_every_mode(run_ranks, tiny_qwen):
    def lora_gradients(dist_mode):
        def work(dist):
            model = tiny_qwen.build()
            add_lora(model, tiny_qwen.targets, rank=4, alpha=8, seed=3)
            shard(model, dist.mesh, mode=dist_mode, block_names=tiny_qwen.block_names)
            own = slice(0, 2) if dist.world_size == 1 else slice(dist.rank, dist.rank + 1)
            out = tiny_qwen.run(model, own)
            (out.square().sum() / 2).backward()
            reduce_gradients(model, dist.mesh, mode=dist_mode)
            return {name: full(p.grad).tolist() for name, p in model.named_parameters() if p.requires_grad}

        return work

    (alone,) = run_ranks(lora_gradients("none"), world_size=1)
    expected = {name: torch.tensor(grad) for name, grad in alone.items()}
    assert len(expected) == 16
    assert any(grad.abs().max() > 1e-4 for grad in expected.values())
    for mode in ("ddp", "fsdp2"):
        for got in run_ranks(lora_gradients(mode)):
            assert got.keys() == alone.keys()
            assert_agree(got, expected)


def test_layers_that_different_passes_reach_have_their_gradients_in_bfloat16_too(run_ranks):
    """One layer by the first pass, one by the last, one by both, one by none: as in a model of text and images."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("first", "last", "both", "never"):
                setattr(self, name, nn.Linear(4, 4))

        def forward(self, x, name):
            return self.both(getattr(self, name)(x.bfloat16()))

    def work(mode):
        def rank(dist):
            torch.manual_seed(3)
            net = Unit() if mode == "fsdp2" else Unit().bfloat16()
            add_lora(net, ["first", "last", "both", "never"], rank=2, alpha=4, seed=3)
            for p in net.parameters():
                p.data += 0.01 * p.requires_grad
            shard(net, dist.mesh, mode=mode, compute_dtype=torch.bfloat16 if mode == "fsdp2" else None)
            backward, x = SummedBackward(net, dist.mesh, mode=mode), samples()[:, [0, 1, 2, 0]]
            for name in ("first", "last"):
                backward(net(x, name).float().square().sum() * (dist.rank + 1), of=2)
            return {name: full(p.grad).tolist() for name, p in net.named_parameters() if p.grad is not None}

        return rank

    expected = run_ranks(work("ddp"))[0]
    assert len(expected) == 6
    assert run_ranks(work("fsdp2")) == [expected] * 2


def test_adapters_over_bfloat16_weights_have_the_same_gradient_in_every_mode_to_the_bit(run_ranks, tiny_qwen):
    """On one rank from two forwards of a sample each, as on two ranks; the scale is no power of two."""

    def lora_gradients(dist_mode):
        def work(dist):
            model = tiny_qwen.build()
            if dist_mode != "fsdp2":
                model.bfloat16()
            add_lora(model, tiny_qwen.targets, rank=6, alpha=8, seed=3)
            for p in model.parameters():
                p.data += 0.01 * p.requires_grad  # else one factor has no gradient
            compute_dtype = torch.bfloat16 if dist_mode == "fsdp2" else None
            shard(model, dist.mesh, mode=dist_mode, block_names=tiny_qwen.block_names, compute_dtype=compute_dtype)
            assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
            assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
            for i in (0, 1) if dist.world_size == 1 else (dist.rank,):
                tiny_qwen.run(model, slice(i, i + 1), dtype=torch.bfloat16).float().square().sum().backward()
            reduce_gradients(model, dist.mesh, mode=dist_mode)
            return {name: full(p.grad).tolist() for name, p in model.named_parameters() if p.requires_grad}

        return work

    (alone,) = run_ranks(lora_gradients("none"), world_size=1)
    assert len(alone) == 16
    assert any(torch.tensor(grad).abs().max() > 1e-4 for grad in alone.values())
    for mode in ("ddp", "fsdp2"):
        assert run_ranks(lora_gradients(mode)) == [alone, alone]


def test_a_batch_holds_consecutive_items_up_to_its_limit_or_one_larger_one():
    def batches(*sizes):
        return list(in_batches(sizes, 5, num_bytes=int))

    assert batches(3, 2, 1, 4, 1) == [[3, 2], [1, 4], [1]]
    assert batches(9, 9, 1) == [[9], [9], [1]]
    assert batches() == []


def test_modes_and_meshes_that_do_not_fit_are_errors(run_ranks):
    with pytest.raises(ValueError, match=r"mode must be one of .*got 'fsdp'"):
        shard(make_net(), None, mode="fsdp")
    with pytest.raises(ValueError, match="torchrun"):
        shard(make_net(), None, mode="fsdp2")
    with pytest.raises(ValueError, match="compute_dtype"):
        shard(make_net(), None, mode="none", compute_dtype=torch.bfloat16)

    def work(dist):
        with pytest.raises(ValueError, match="1 rank, got 2"):
            shard(make_net(), dist.mesh, mode="none")
        with pytest.raises(ValueError, match=r"found none named \['Blokc'\]"):
            shard(make_net(), dist.mesh, mode="fsdp2", block_names=("Blokc",))

    run_ranks(work)


def test_without_ranks_ddp_and_none_change_nothing():
    for mode in ("none", "ddp"):
        net = make_net()
        expected = copy.deepcopy(net.state_dict())
        assert shard(net, None, mode=mode) is net
        reduce_gradients(net, None, mode=mode)
        assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
