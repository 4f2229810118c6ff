"""What a backward pass computes again, and that no bit depends on it."""

import pytest
import torch
from helpers import in_turn, sampled
from omni_train.lora import adapter_params, add_lora
from omni_train.memory.recompute import Recompute
from omni_train.shard import shard
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MORE_THAN_ENOUGH = 1e9


def gradients(tiny_qwen, budget, *, dtype=torch.float32, lora=True, calls=1, net=None):
    """Of an adapter, or of all weights; with the FLOPs of the matrix products and what was left of the budget."""
    net = net or build(tiny_qwen, dtype, lora)
    recompute = Recompute(budget) if budget is not None else None
    if recompute:
        net.enable_gradient_checkpointing(recompute)
    for _ in range(2):  # the first measures the blocks
        net.zero_grad()
        with FlopCounterMode(display=False) as counter:
            loss = sum(tiny_qwen.run(net, dtype=dtype).float().square().sum() for _ in range(calls))
            loss.backward()
    return [p.grad for p in net.parameters() if p.requires_grad], counter.get_total_flops(), recompute


def build(tiny_qwen, dtype=torch.float32, lora=True):
    net = tiny_qwen.build().to(dtype)
    if lora:
        add_lora(net, tiny_qwen.targets, rank=4, alpha=6, seed=3)
        with torch.no_grad():
            for p in adapter_params(net, "default"):
                p.add_(0.05)
    return net


@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], 1))
@pytest.mark.parametrize("lora", [True, False])
def test_gradients_are_the_same_to_the_bit_whatever_is_kept(tiny_qwen, dtype, lora):
    dtype = getattr(torch, dtype)
    plain, least, _ = gradients(tiny_qwen, None, dtype=dtype, lora=lora)
    assert any(grad is not None and grad.any() for grad in plain)
    for budget in (0, 60_000, MORE_THAN_ENOUGH):
        got, flops, recompute = gradients(tiny_qwen, budget, dtype=dtype, lora=lora)
        for ours, expected in zip(got, plain, strict=True):
            assert (ours is None and expected is None) or torch.equal(ours, expected)
        assert (flops == least) == (budget == MORE_THAN_ENOUGH)
        assert recompute.room == budget


@in_turn(1, 2)
def test_as_many_blocks_keep_their_products_as_the_budget_holds(tiny_qwen):
    flops = []
    _, least, recompute = gradients(tiny_qwen, MORE_THAN_ENOUGH)
    (size,) = recompute.sizes.values()
    for budget in (0, size - 1, size, 2 * size - 1, 2 * size):
        flops.append(gradients(tiny_qwen, budget)[1] - least)
    assert flops[0] == flops[1] == 2 * flops[2] == 2 * flops[3] > flops[4] == 0


def test_forwards_that_wait_for_one_backward_share_the_budget(tiny_qwen):
    """As the two halves of guidance do."""
    _, least, recompute = gradients(tiny_qwen, MORE_THAN_ENOUGH, calls=2)
    (size,) = recompute.sizes.values()
    none, three = (gradients(tiny_qwen, budget, calls=2)[1] - least for budget in (0, 3 * size))
    assert none == 4 * three > 0


def test_a_block_that_writes_into_a_kept_product_is_an_error():
    class Block(nn.Linear):
        def forward(self, x):
            return super().forward(x).mul_(2)

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="must not write into a product"):
        Recompute(MORE_THAN_ENOUGH)(Block(3, 3), x)


def test_sharded_blocks_keep_their_products_too(run_ranks, tiny_qwen):
    def work(dist):
        found = []
        for budget in (None, 0, MORE_THAN_ENOUGH):
            net = shard(build(tiny_qwen), dist.mesh, mode="fsdp2", block_names=tiny_qwen.block_names)
            grads, flops, _ = gradients(tiny_qwen, budget, net=net)
            found.append([[grad.full_tensor().tolist() for grad in grads], flops])
        return found

    for plain, none, kept in run_ranks(work):
        assert plain[0] == none[0] == kept[0]
        assert plain[1] == kept[1] < none[1]
