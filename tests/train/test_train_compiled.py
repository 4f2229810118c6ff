"""Compiled blocks: one graph each, few of them whatever comes, and the same code in sampling and in training."""

import importlib
import inspect
from collections import Counter
from functools import partial

import pytest
import torch
import torch.fx.experimental._config as symbols
from helpers import capture_graphs, in_turn, sampled
from omni_train.dist import Dist
from omni_train.kernels import EXACT, MAX_GRAPHS, check_compiler, choose_attention, compile_blocks
from omni_train.lora import adapter, adapter_params, add_lora
from omni_train.memory.recompute import Recompute
from omni_train.shard import shard
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch._subclasses import FakeTensorMode

LENGTHS = (5, 7, 12, 30)  # of texts; 12 is that of the pictures too


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test, and options of torch that do not stay."""
    torch._dynamo.reset()
    counters.clear()
    with symbols.patch(use_duck_shape=True), torch.compiler.config.patch(cache_key_tag=""):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are captured, which run as they are: no compiler's seconds."""
    return capture_graphs(monkeypatch)[0]


def test_a_graph_gets_the_options_that_keep_the_order_of_sums(tiny_qwen, monkeypatch):
    seen = []

    def keep(graph, inputs, *, config_patches, **others):
        seen.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep)
    net = build(tiny_qwen)
    with torch.no_grad():
        run(net)
    run(net).sum().backward()
    (options,) = seen
    assert EXACT.items() <= options.items()
    source = inspect.getsource(importlib.import_module("torch._inductor.codegen.triton"))
    assert '"enable_fp_fusion": not config.emulate_precision_casts' in source  # kernels that no CPU has


def test_no_product_is_padded_on_a_card(monkeypatch):
    """Which torch would choose by the graph's other operators, deterministic or not."""
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with FakeTensorMode():
        x, weight = (torch.empty(1075, 3071, device="cuda").bfloat16(), torch.empty(3071, 8, device="cuda").bfloat16())
    for options, may_pad in ((EXACT, False), (EXACT | {"shape_padding": True}, True)):
        with config.patch(options):
            assert pad_mm.can_pad(x, weight, torch.ops.aten.mm) is may_pad


def build(tiny_qwen, dtype=torch.float32, rank=4, compiled=True, num_blocks=1):
    net = tiny_qwen.build().to(dtype)
    del net.transformer_blocks[num_blocks:]
    if rank:
        for name in ("default", "old"):
            add_lora(net, tiny_qwen.targets, rank=rank, alpha=8, adapter=name, seed=3)
        with torch.no_grad():
            for p in adapter_params(net, "default"):
                p.add_(0.05)
    if compiled:
        compile_blocks(net, tiny_qwen.block_names, attention="auto")
        choose_attention(net, "auto", tiny_qwen.block_names)
    return net


def run(net, length=5, samples=2, masked=False):
    """The velocity at inputs that depend on the sizes alone."""
    generator = torch.Generator().manual_seed(length)
    dtype = net.img_in.weight.dtype
    x, text = (torch.randn(samples, *size, generator=generator).to(dtype) for size in ((12, 64), (length, 32)))
    mask = torch.arange(length) < torch.arange(length - samples + 1, length + 1)[:, None] if masked else None
    shapes = [[(1, 2, 6)]] * samples
    levels = torch.linspace(0.9, 0.5, samples)
    return net(x, text, mask, levels, shapes, return_dict=False)[0]


def test_a_block_is_one_graph_and_few_are_made_whatever_comes(tiny_qwen, graphs):
    """Of the policy, of the old one, and masked: three, with gradients or without."""
    net = build(tiny_qwen)

    def everything():
        for length in LENGTHS:
            for samples in (2, 3):
                with torch.no_grad():
                    run(net, length, samples)
                    with adapter(net, "old"):
                        run(net, length, samples)
                    run(net, length, samples, masked=True)
                run(net, length, samples).sum().backward()

    everything()
    assert len(graphs) == 3 < MAX_GRAPHS
    assert counters["graph_break"] == {}
    with torch._dynamo.config.patch(error_on_recompile=True):  # as in all further steps
        with torch.no_grad():
            for p in adapter_params(net, "default"):
                p.mul_(0.5)
        everything()


BUDGETS = {"kept": None, "recomputed": 0, "kept within a budget": 1e9}


@pytest.mark.parametrize("kept", sampled(BUDGETS, 1))
@pytest.mark.parametrize("rank", [0, 4])
def test_each_block_samples_by_the_graph_that_is_trained_and_keeps_nothing(tiny_qwen, monkeypatch, rank, kept):
    """The first block, whose inputs need no gradients with LoRA, and the second; sampled before and after training."""
    graphs, ran = capture_graphs(monkeypatch)
    net, budget = build(tiny_qwen, rank=rank, num_blocks=2), BUDGETS[kept]
    if not rank:
        net.requires_grad_(True)
    recompute = Recompute(budget or 0, compiled=True)
    if budget is not None:
        net.enable_gradient_checkpointing(recompute)
    sampled, trained = [], []
    for _ in range(2):
        ran.clear()
        with torch.no_grad():
            out = run(net)
        sampled.append(list(ran))
        assert not out.requires_grad
        assert recompute.room == (budget or 0)
        ran.clear()
        again = run(net)
        trained.append(list(ran))
        assert torch.equal(out, again)
        again.sum().backward()
    assert sampled == trained
    assert [len(each) for each in sampled] == [2, 2]
    assert len(graphs) == 2  # the first block's inputs need no gradients with LoRA, and are views without


def test_the_history_of_a_sampled_block_is_dropped_before_the_next_one(tiny_qwen, graphs):
    net, alive = build(tiny_qwen, num_blocks=2), []
    for block in net.transformer_blocks:
        block.register_forward_hook(lambda _, args, out: alive.append([each.grad_fn for each in out]))
    with torch.no_grad():
        run(net)
    run(net)
    sampled, trained = alive[:2], alive[2:]
    assert sampled == [[None, None]] * 2
    assert all(fn is not None for each in trained for fn in each)


def test_a_block_that_is_no_single_graph_is_an_error(tiny_qwen, graphs):
    net = build(tiny_qwen, compiled=False)
    net.transformer_blocks[0].img_mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compile_blocks(net, tiny_qwen.block_names, attention="auto")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(net)


@pytest.mark.slow  # the gate of test_app_train_flowgrpo.py compiles a block for good in every run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_gradients_or_not_and_recomputed_or_not_the_bits_are_the_same(tiny_qwen, name):
    """By torch's own compiler. Float32 is also as near to what is not compiled as rounding allows."""
    dtype = getattr(torch, name)
    net, plain = build(tiny_qwen, dtype), build(tiny_qwen, dtype, compiled=False)
    found = []
    for recompute in (None, Recompute(0)):
        if recompute:
            net.enable_gradient_checkpointing(recompute)
        net.zero_grad()
        for length in LENGTHS[:2]:
            with torch.no_grad():
                sampled = run(net, length)
            trained = run(net, length)
            assert torch.equal(sampled, trained)
            trained.float().square().sum().backward()
        found.append([p.grad for p in adapter_params(net, "default")])
    assert counters["stats"]["unique_graphs"] == 1
    with_gradient = [(a, b) for a, b in zip(*found, strict=True) if a is not None]
    assert len(with_gradient) == 8  # A and B of four layers
    assert all(map(torch.equal, *zip(*with_gradient, strict=True)))
    if dtype == torch.float32:
        for length in LENGTHS[:2]:
            out = run(plain, length)
            torch.testing.assert_close(run(net, length), out, rtol=1e-4, atol=1e-5)
            out.square().sum().backward()
        for p, grad in zip(adapter_params(plain, "default"), found[0], strict=True):
            if grad is not None:
                torch.testing.assert_close(grad, p.grad, rtol=1e-3, atol=1e-5)


@in_turn(0, 2)
def test_as_many_compiled_blocks_keep_what_they_need_as_the_budget_holds(tiny_qwen, graphs):
    """The others are computed again, with the same bits, and the room is there again after the backward pass."""
    net, again, found = build(tiny_qwen, rank=0, num_blocks=2), Counter(), []
    for i, block in enumerate(net.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, i=i: again.update([i]))
    measured = Recompute(1e9, compiled=True)
    net.enable_gradient_checkpointing(measured)
    run(net).sum().backward()
    (size,) = measured.sizes.values()
    assert measured.room == 1e9
    for budget in (0, size - 1, size, 2 * size - 1, 2 * size):
        recompute = Recompute(budget, compiled=True)
        recompute.sizes |= measured.sizes
        net.enable_gradient_checkpointing(recompute)
        net.zero_grad()
        again.clear()
        out = run(net)
        assert recompute.room == budget - size * min(budget // size, 2)
        out.square().sum().backward()
        assert recompute.room == budget
        assert [again[0], again[1]] == [2 - (budget >= size), 2 - (budget >= 2 * size)]
        found.append([p.grad for p in net.parameters() if p.grad is not None])
    assert len(graphs) == 2
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@pytest.mark.parametrize("case", sampled([(name, rank) for name in ("bfloat16", "float32") for rank in (0, 4)], 1))
def test_a_compiled_block_keeps_no_more_than_without_a_compiler(tiny_qwen, monkeypatch, case):
    """So that plans, which have none, count enough. As torch's compiler chooses, without its code."""
    choose = lookup_backend("aot_eager_decomp_partition")
    backend = partial(torch.compile, backend=lambda graph, inputs, **_: choose(graph, inputs))
    monkeypatch.setattr(torch, "compile", backend)
    (name, rank), kept = case, []
    for compiled in (False, True):
        net, recompute = build(tiny_qwen, getattr(torch, name), rank, compiled), Recompute(1e9, compiled=True)
        if not rank:
            net.requires_grad_(True)
        net.enable_gradient_checkpointing(recompute)
        run(net).sum().backward()
        kept += recompute.sizes.values()
    plain, by_compiler = kept
    assert 0 < by_compiler <= plain


@pytest.mark.parametrize("rank", sampled([0, 4], 1))
def test_sharded_blocks_are_compiled_too(run_ranks, tiny_qwen, graphs, rank):
    """Before they are sharded, as with LoRA, or after, as of all weights."""

    def work(dist: Dist) -> int:
        plain = run(build(tiny_qwen, rank=rank, compiled=False))
        net = build(tiny_qwen, rank=rank, compiled=bool(rank))
        shard(net, dist.mesh, mode="fsdp2", block_names=tiny_qwen.block_names)
        if not rank:
            compile_blocks(net, tiny_qwen.block_names, attention="auto")
        with torch.no_grad():
            sampled = run(net)
        trained = run(net)
        trained.sum().backward()
        assert torch.equal(sampled, trained)
        torch.testing.assert_close(trained, plain)
        return len(graphs)

    assert run_ranks(work, 1) == [1]


def test_a_machine_that_cannot_compile_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    without = torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",))
    with without, pytest.raises(ValueError, match=r"^compile must be off where torch cannot compile for cpu: "):
        check_compiler(torch.device("cpu"))
