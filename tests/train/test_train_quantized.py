"""Weights in fewer bits: what is lost, and that forward, backward and adapters are those of the weight that is left."""

import copy

import pytest
import torch
from helpers import sampled
from omni_train.lora import add_lora, lora_layers, reference
from omni_train.memory.quantized import NF4, QuantizedLinear, compiled_dequantize, quantize, quantize_blocks
from omni_train.memory.recompute import Recompute
from omni_train.prepare import Lora, Preparation, prepare
from safetensors.torch import save_file
from torch import nn
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
MOST = {"int8": 0.5 / 127, "fp8": 16 / 448, "nf4": (NF4[1] - NF4[0]) / 2}  # of an error, of the largest number in a row


class Block(nn.Module):
    """Two linear layers, one of which gets adapters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(128, 192), nn.Linear(192, 128, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu())


def build(dtype=torch.float32):
    """A net with adapters in its block, whose B is not zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 128), Block(), nn.Linear(128, 4)).to(dtype)
    add_lora(net, ["first"], rank=4, alpha=8, seed=0)
    nn.init.normal_(lora_layers(net)["1.first"].lora_B["default"].weight, std=0.1)
    return net


def in_full(net):
    """The same net, with the weights that are left as ordinary ones."""
    full = build(net[0].weight.dtype)
    with torch.no_grad():
        for name in ("first", "second"):
            getattr(full[1], name).weight.copy_(getattr(net[1], name).weight)
    return full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", MOST)
def test_forward_and_gradients_are_those_of_the_weight_that_is_left(bits, dtype):
    net = quantize_blocks(build(dtype), bits, ["Block"], CPU)
    full, x = in_full(net), torch.randn(5, 16).to(dtype)
    outs = [each(x) for each in (net, full)]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    grads = [[p.grad for p in each.parameters() if p.requires_grad] for each in (net, full)]
    assert len(grads[0]) == 2
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("bits", MOST)
def test_no_number_is_further_off_than_half_a_step(bits):
    before = build()
    after = quantize_blocks(copy.deepcopy(before), bits, ["Block"], CPU)
    for name in ("first", "second"):
        old, new = getattr(before[1], name).weight, getattr(after[1], name).weight
        shape = (-1, 64) if bits == "nf4" else (len(old), -1)
        error, most = (old - new).reshape(shape).abs(), old.reshape(shape).abs().amax(dim=1, keepdim=True)
        assert (error <= most * MOST[bits] * 1.001).all()
    x = torch.randn(64, 16)
    assert (after(x) - before(x)).norm() / before(x).norm() < {"int8": 0.02, "fp8": 0.05, "nf4": 0.15}[bits]


@pytest.mark.parametrize(("bits", "most"), [("int8", 1.05), ("fp8", 1.05), ("nf4", 0.57)])
def test_a_weight_takes_its_bits_and_its_scales(bits, most):
    codes, scales = quantize(torch.randn(256, 512), bits)
    assert codes.nbytes + scales.nbytes <= most * 256 * 512


def test_nf4_keeps_its_own_values_and_a_row_of_zeros():
    weight = torch.tensor(NF4).repeat(4, 4) * 3
    weight[1] = 0
    layer = nn.Sequential(Block())
    layer[0].first = nn.Linear(64, 4, bias=False)
    layer[0].first.weight.data = weight
    quantize_blocks(layer, "nf4", ["Block"], CPU)
    assert torch.equal(layer[0].first.weight, weight)


def test_what_is_outside_of_blocks_or_does_not_fit_stays():
    net = build()
    net[1].odd = nn.Linear(65, 2)
    reduced = ("1.first.base_layer.weight", "1.second.weight")
    kept = {name: p for name, p in net.named_parameters() if name not in reduced}
    quantize_blocks(net, "nf4", ["Block"], CPU)
    assert dict(net.named_parameters()).items() == kept.items()
    assert not {"1.first.base_layer.codes", "1.first.base_layer.scales"} & net.state_dict().keys()


def layer_of(bits, rows=192, columns=320):
    """A layer with a quantized weight in bfloat16."""
    block = nn.Sequential(Block())
    block[0].first = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    return quantize_blocks(block, bits, ["Block"], CPU)[0].first


@pytest.mark.parametrize("bits", MOST)
def test_a_weight_is_the_product_of_value_and_scale_in_float32_rounded_once(bits):
    layer = layer_of(bits)
    if bits == "nf4":
        places = torch.stack([layer.codes // 16, layer.codes % 16], dim=-1).long()
        values = torch.tensor(NF4)[places].view(-1, 64)
    else:
        values = layer.codes.view(torch.int8 if bits == "int8" else torch.float8_e4m3fn).double()
    products = values.double() * layer.scales.double()  # exact: 24 bits times 24
    assert torch.equal(layer.weight, products.float().bfloat16().view(192, 320))


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write; views do neither."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            self.num_bytes += sum(t.nbytes for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.parametrize(
    ("bits", "most"), [("int8", 3.1), ("fp8", 19.5), ("nf4", 15.0)]
)  # 19, 19 and 23 in more passes
def test_operators_move_few_bytes_to_bring_back_a_weight(bits, most):
    layer = layer_of(bits, 512, 512)
    with Traffic() as traffic:
        assert layer.weight.shape == (512, 512)
    assert traffic.num_bytes / 512**2 < most


@pytest.mark.parametrize("bits", sampled(MOST, 1))
def test_one_kernel_brings_back_a_weight_with_the_same_bits_and_graphs_for_all_shapes(bits):
    compiled = compiled_dequantize()
    for number, (rows, columns) in enumerate([(192, 320), (128, 64), (64, 256)]):
        layer = layer_of(bits, rows, columns)
        expected = layer.weight
        layer.dequantize = compiled
        metrics.reset()
        assert torch.equal(layer.weight, expected)
        with torch.no_grad():
            assert torch.equal(layer.weight, expected)
        assert metrics.generated_kernel_count == (0 if number else 1)


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_a_block_with_compiled_weights_trains_with_the_same_bits(budget):
    nets = [quantize_blocks(build(torch.bfloat16), "nf4", ["Block"], CPU) for _ in range(2)]
    x, compiled = torch.randn(5, 16).bfloat16(), compiled_dequantize()
    for layer in nets[1].modules():
        if isinstance(layer, QuantizedLinear):
            layer.dequantize = compiled
    found = []
    for net in nets:
        run = Recompute(budget)
        for _ in range(2):  # the second keeps products, where the budget has room
            net[2](run(net[1], net[0](x))).square().sum().backward()
        found.append([p.grad for p in net.parameters() if p.requires_grad])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bits", MOST)
@pytest.mark.parametrize("own", [{"init": "pissa"}, {"use_dora": True}], ids=["PiSSA", "DoRA"])
@pytest.mark.parametrize("from_files", [False, True], ids=["in memory", "from files"])
def test_pissa_and_dora_begin_as_the_reference_of_what_is_left(tmp_path, bits, own, from_files):
    """PiSSA takes its part out of a weight once, before the rest is rounded."""
    plain, x = nn.Sequential(build()[0], Block(), nn.Linear(128, 4)), torch.randn(5, 16)
    how = Preparation(
        CPU, ["Block"], torch.float32, Lora(["first"], 16, 16, **({"init": "default"} | own), seed=0), base_dtype=bits
    )
    net, files = copy.deepcopy(plain), None
    if from_files:
        save_file(plain.state_dict(), tmp_path / "weights.safetensors")
        net, files = net.to("meta"), {"": [tmp_path / "weights.safetensors"]}
    net = prepare(net, how, files)
    with reference(net):
        expected = net(x)
    assert torch.equal(net(x), expected)
    assert (expected - plain(x)).norm() / plain(x).norm() < {"int8": 0.02, "fp8": 0.05, "nf4": 0.2}[bits]
