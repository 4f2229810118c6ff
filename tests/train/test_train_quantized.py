"""Weights in fewer bits: what is lost, and that forward, backward and adapters are those of the weight that is left."""

import copy

import pytest
import torch
from omni_train.lora import add_lora, lora_layers
from omni_train.memory.quantized import NF4, quantize, quantize_blocks
from torch import nn

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
