"""A layer with an adapter: what it computes, in which operations, and that it is peft's in float32."""

from collections import Counter

import pytest
import torch
from helpers import sampled
from omni_train.lora import adapter, adapter_params, add_lora, ema_update, reference
from omni_train.optim import build_adamw
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"t", "view", "_unsafe_view", "detach", "empty_like", "alias", "transpose"}


class Ops(TorchDispatchMode):
    """The kernels that run, by name, each with the dtypes it reads, and the bytes that all of them read and write."""

    def __init__(self):
        super().__init__()
        self.seen, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            read = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.seen.append((name, {arg.dtype for arg in read}))
            self.bytes += sum(tensor.nbytes for tensor in [*read, out])
        return out

    def names(self):
        return [name for name, _ in self.seen]


class Block(nn.Module):
    """Three layers that read the same input, as those of attention do, and one that reads what they give."""

    def __init__(self, width=24):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


TARGETS = ["q", "k", "v", "out"]


def make(dtype=torch.bfloat16, alpha=8, spread=0.3, **own):
    torch.manual_seed(0)
    net = Block().to(dtype)
    add_lora(net, TARGETS, rank=6, alpha=alpha, seed=1, **own)
    with torch.no_grad():
        for p in adapter_params(net, "default"):
            p.add_(spread * torch.randn_like(p))
    return net


def sample(dtype=torch.bfloat16):
    return torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [6, 8], ids=["scale 1", "scale 4/3"])
def test_in_float32_outputs_and_gradients_are_those_of_peft_to_the_bit(alpha, dtype):
    """In bfloat16 where the product of A and B is asked for in float32."""
    from peft import LoraConfig, inject_adapter_in_model

    ours = make(dtype, alpha, in_float32=dtype == torch.bfloat16)
    torch.manual_seed(0)
    theirs = inject_adapter_in_model(LoraConfig(r=6, lora_alpha=alpha, target_modules=TARGETS), Block().to(dtype))
    for name, p in theirs.named_parameters():
        p.data = p.data.float() if ".lora_" in name else p.data
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert list(mine) == list(trained)
    results = []
    for net, params in ((ours, mine), (theirs, trained)):
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(mine[name])
        x = sample(dtype)
        out = net(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in params.values())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_are_those_of_the_formula(dtype):
    """In float64, where nothing is rounded, to 12 digits; in bfloat16 as near as its 8 bits are."""
    net, x = make(dtype), sample(dtype)
    layer = net.q
    if dtype == torch.float64:
        layer.double()
    down, up = adapter_params(net, "default")[:2]
    upstream = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    layer(x).backward(upstream.to(dtype))
    plain = [tensor.detach().double().requires_grad_() for tensor in (x, down, up)]
    wide = linear(plain[0], layer.weight.double(), layer.bias.double())
    (wide + 8 / 6 * plain[0] @ plain[1].T @ plain[2].T).backward(upstream)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.1}
    for got, expected in zip((x, down, up), plain, strict=True):
        assert got.grad.dtype == got.dtype
        torch.testing.assert_close(got.grad.double(), expected.grad, **tolerance)


def test_in_bfloat16_the_output_is_rounded_twice_and_no_more():
    """After the product of W, and after the sum; and before them A and B, and the inner vector."""
    net, x = make(), sample()
    down, up = (p.bfloat16().float() for p in adapter_params(net, "default")[:2])
    inner = (x.float() @ down.T).bfloat16().float()
    base = linear(x, net.q.weight, net.q.bias).float()
    torch.testing.assert_close(net.q(x).float(), (base + 8 / 6 * inner @ up.T).bfloat16().float(), rtol=8e-3, atol=1e-6)


def wide_linear():
    """The size of a Qwen-Image layer and of 16 guided images: 34,816 tokens, 3072 to 3072."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3072, 3072, dtype=torch.bfloat16))
        return net, torch.empty(34816, 3072, dtype=torch.bfloat16, requires_grad=True)


def in_float32(layer):
    """peft's factors in float32, over a base that is not."""
    if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
        layer.float()


def run(net, x):
    with torch.no_grad(), Ops() as ops:
        net(x)
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_no_rows_and_gradients_of_zero(dtype):
    net, x = make(dtype), torch.zeros(2, 0, 24, dtype=dtype, requires_grad=True)
    out = net(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == (2, 0, 24)
    assert not any(p.grad.any() for p in adapter_params(net, "default"))


def test_an_adapter_in_bfloat16_costs_two_kernels_and_the_rounding_of_its_factors():
    from peft import LoraConfig, inject_adapter_in_model

    net, x = wide_linear()
    base = run(net, x)
    config = LoraConfig(r=64, lora_alpha=128, target_modules=["0"])
    theirs = run(inject_adapter_in_model(config, wide_linear()[0]).apply(in_float32), x)
    add_lora(net, ["0"], rank=64, alpha=128, seed=0)
    ours = run(net, x)
    assert base.names() == ["addmm"]
    assert ours.seen[:2] == [("_to_copy", {torch.float32})] * 2  # of A and B, which are small
    assert ours.seen[2:] == [(name, {torch.bfloat16}) for name in ("mm", "addmm", "addmm_")]
    assert len(theirs.names()) == 7
    gigabytes = [round(ops.bytes / 1e9, 2) for ops in (base, ours, theirs)]
    assert gigabytes == [0.45, 1.1, 4.53]


def test_a_backward_in_bfloat16_has_five_products_and_one_pass_for_the_gradient_of_x():
    net, x = wide_linear()
    add_lora(net, ["0"], rank=64, alpha=128, seed=0)
    out = net(x)
    with Ops() as ops:
        out.backward(torch.empty_like(out))
    products = [dtypes for name, dtypes in ops.seen if name in ("mm", "addmm_")]
    assert products == [{torch.bfloat16}] * 5
    small = Counter(ops.names()) - Counter({"mm": 4, "addmm_": 1})
    assert small == {"mul_": 2, "_to_copy": 2}  # of A's and B's gradients


@pytest.mark.parametrize("change", ["step", "ema", "in_place"])
def test_a_layer_called_past_its_module_computes_with_the_factors_of_now(change):
    """Also in bfloat16, where it rounds them."""
    net, x = make(), sample()
    add_lora(net, TARGETS, rank=6, alpha=8, adapter="old", seed=1)
    net(x).float().sum().backward()
    with torch.no_grad(), adapter(net, "old" if change == "ema" else "default"):
        before = net.q(x)
        if change == "step":
            build_adamw(net, lr=0.1).step()
        elif change == "ema":
            ema_update(net, "default", "old", 0.0)
        else:
            adapter_params(net, "default")[1].mul_(3.0)
        after = net.q(x)
        net(x)
        assert not torch.equal(before, after)
        assert torch.equal(net.q(x), after)


KINDS = {"LoRA": {}, "DoRA": {"use_dora": True}, "in float32": {"in_float32": True}}
COMPILED = [
    (kind, dtype, name) for kind in KINDS for dtype in ("float32", "bfloat16") for name in ("default", "old", "")
]


@pytest.mark.parametrize("case", [case for kind in KINDS for case in sampled([c for c in COMPILED if c[0] == kind], 1)])
def test_a_compiled_block_is_one_graph(case):
    kind, dtype, name = case
    own, dtype = KINDS[kind], getattr(torch, dtype)
    net, x = nn.Sequential(make(dtype, **own)), sample(dtype)
    add_lora(net, ["q", "v"], rank=6, alpha=8, adapter="old", seed=1, **own)

    def gradients():
        net.zero_grad()
        x.grad = None
        out = net(x)
        out.square().sum().backward()
        return [out, x.grad, *(p.grad for p in adapter_params(net, "default") if p.grad is not None)]

    with adapter(net, name) if name else reference(net):
        expected = gradients()
        torch._dynamo.reset()
        net[0].compile(backend="aot_eager", fullgraph=True, dynamic=True)  # as blocks are
        got = gradients()
        with torch.no_grad():
            for p in adapter_params(net, "default"):
                p.mul_(0.5)
        with torch._dynamo.config.patch(error_on_recompile=True):
            gradients()  # as after an optimizer step
    assert len(got) == (2 + (12 if "use_dora" in own else 8) if name == "default" else 2)
    assert all(map(torch.equal, got, expected))


@pytest.mark.slow
def test_a_compiled_layer_adds_into_the_base_output_too():
    """By torch's own compiler: the products of a layer that is not compiled, and its bits."""
    found = []
    for compiled in (False, True):
        net, x = make(), sample()
        layer = torch.compile(net.q, fullgraph=True, dynamic=True) if compiled else net.q
        layer(x).sum().backward()  # compiles
        x.grad = None
        with torch.profiler.profile() as profile:
            out = layer(x)
            out.backward(torch.ones_like(out))
        kernels = Counter({event.key: event.count for event in profile.key_averages()})
        found.append(({name: kernels[f"aten::{name}"] for name in ("mm", "addmm", "addmm_")}, out, x.grad))
    (eager, *expected), (graph, *got) = found
    assert graph == eager == {"mm": 5, "addmm": 1, "addmm_": 2}
    assert all(map(torch.equal, got, expected))
