"""Which kernels compute attention: those that were chosen, with gradients and without, and again in a backward pass."""

from collections import Counter

import pytest
import torch
from omni_train.kernels import BACKENDS, check_attention, choose_attention
from omni_train.memory.recompute import Recompute
from omni_train.shard import shard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
MATH = "_safe_softmax", "_softmax"


class Kernels(TorchDispatchMode):
    """The names of the operators that ran."""

    def __enter__(self):
        self.found = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.__name__.partition(".")[0]] += 1
        return func(*args, **kwargs or {})


def attentions(run):
    """How often `run` computes attention: with the fused kernel, and with plain products."""
    with Kernels() as kernels:
        run()
    return kernels.found[FLASH], sum(kernels.found[name] for name in MATH)


@pytest.mark.parametrize(("name", "fused"), [("auto", True), ("flash", True), ("math", False)])
def test_the_chosen_kernels_run_in_both_phases_and_when_a_block_is_computed_again(tiny_qwen, name, fused):
    net = tiny_qwen.build()
    choose_attention(net, name, tiny_qwen.block_names)
    with torch.no_grad():
        assert attentions(lambda: tiny_qwen.run(net)) == ((2, 0) if fused else (0, 2))
    for recompute, times in ((None, 2), (Recompute(0), 4)):
        if recompute:
            net.enable_gradient_checkpointing(recompute)
        found = attentions(lambda: tiny_qwen.run(net).sum().backward())
        assert found == ((times, 0) if fused else (0, times))


def test_what_is_not_in_a_block_keeps_torch_s_own_choice(tiny_qwen):
    net, x = tiny_qwen.build(), torch.zeros(1, 1, 4, 8)
    choose_attention(net, "math", tiny_qwen.block_names)
    tiny_qwen.run(net)
    assert attentions(lambda: scaled_dot_product_attention(x, x, x)) == (1, 0)


def test_on_a_cpu_auto_is_torch_s_own_choice_to_the_bit(tiny_qwen):
    net = tiny_qwen.build()
    expected = tiny_qwen.run(net)
    choose_attention(net, "auto", tiny_qwen.block_names)
    assert torch.equal(tiny_qwen.run(net), expected)


def test_sharded_blocks_have_the_chosen_kernels(run_ranks, tiny_qwen):
    def work(dist):
        counts = []
        for sharded_first in (False, True):
            net = tiny_qwen.build()
            steps = [
                lambda net=net: choose_attention(net, "math", tiny_qwen.block_names),
                lambda net=net: shard(net, dist.mesh, mode="fsdp2", block_names=tiny_qwen.block_names),
            ]
            for step in reversed(steps) if sharded_first else steps:
                step()
            with Kernels() as kernels:
                tiny_qwen.run(net).sum().backward()
            counts.append([kernels.found[FLASH], sum(kernels.found[name] for name in MATH)])
        return counts

    assert run_ranks(work) == [[[0, 2], [0, 2]]] * 2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_the_device_lacks_are_refused(name, dtype):
    if name in ("cudnn", "efficient"):
        kind = str(dtype).removeprefix("torch.")
        with pytest.raises(
            ValueError, match=f"^attention must have kernels that run in {kind} on cpu, got {name}: No "
        ):
            check_attention(name, torch.device("cpu"), dtype)
    else:
        check_attention(name, torch.device("cpu"), dtype)
