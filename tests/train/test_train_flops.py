"""Floating-point operations are counted once for each shape, without recomputation; devices are known by name."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from omni_train.flops import FlopTable, peak_tflops
from omni_train.lora import add_lora
from torch import nn


def net(device="cpu"):
    """Two layers, 3 to 5 to 2, of which the first makes no gradient for its input."""
    return nn.Sequential(nn.Linear(3, 5, device=device), nn.Linear(5, 2, device=device))


def test_operations_are_those_of_the_products():
    """Of n rows: 2 * 15n and 2 * 10n; backward 2 * 15n for the first weight, and for the second 2 * 10n twice."""
    made, real = [], net()

    def make():
        made.append(net("meta"))
        return made[-1]

    table = FlopTable(make, real)
    with torch.no_grad():
        for samples in (4, 2):
            real(torch.zeros(samples, 7, 3))
    assert not made  # no call waits for its count
    table.total(Counter())
    assert table.known == {(7, 3): (50 * 7, 120 * 7)}
    assert len(made) == 1
    calls = Counter({("rollout", False, (7, 3)): 6, ("update", True, (7, 3)): 4, ("update", False, (7, 3)): 1})
    assert table.total(calls) == {"rollout": 6 * 350, "update": 4 * 840 + 350}


def test_another_shape_is_counted_when_it_comes_again():
    real = net()
    table = FlopTable(lambda: net("meta"), real)
    real(torch.zeros(4, 7, 3))
    table.total(Counter({("update", False, (7, 3)): 4}))
    real(torch.zeros(4, 1, 3))  # nothing looks at it
    calls = Counter({("update", False, (7, 3)): 4, ("update", False, (1, 3)): 4})
    assert table.total(calls) == table.total(calls) == {}
    real(torch.zeros(2, 1, 3))
    assert table.total(calls) == {"update": 4 * 350 + 4 * 50}
    assert not real._forward_pre_hooks  # nothing is left in the way of further calls


def test_all_shapes_of_a_step_are_counted_at_its_end():
    real = net()
    table = FlopTable(lambda: net("meta"), real)
    assert table.total(Counter()) == {}  # before the first step
    for length in (7, 1, 7):
        real(torch.zeros(4, length, 3))
    calls = Counter({("update", False, (7, 3)): 8, ("update", False, (1, 3)): 4})
    assert table.total(calls) == {"update": 8 * 350 + 4 * 50}


def test_frozen_weights_take_no_gradient():
    """LoRA of rank 1: B alone and A behind it, and the second layer's gradient of its input."""

    def make(device="meta"):
        module = net(device)
        add_lora(module, ["0", "1"], rank=1, alpha=1, seed=0)
        return module

    real = make("cpu")
    table = FlopTable(make, real)
    real(torch.zeros(1, 3))
    table.total(Counter())
    forward = 2 * (15 + 3 + 5 + 10 + 5 + 2)
    backward = 2 * (2 + 2 + 5 + 5 + 10) + 2 * (5 + 5 + 3)  # second layer: B, inner, A, input twice; first: B, inner, A
    assert table.known == {(3,): (forward, forward + backward)}


def test_what_is_not_trained_is_not_taken_for_what_is():
    """Of two experts of one shape the first that is called may be frozen."""
    trains, real = iter((False, True)), net()
    calls = Counter({("update", False, (3,)): 1})
    table = FlopTable(lambda: net("meta").requires_grad_(next(trains)), real)
    real(torch.zeros(4, 3))
    assert table.total(calls) == {}
    real(torch.zeros(4, 3))
    assert table.total(calls) == {"update": 50}
    assert table.known == {(3,): (50, 120)}


def test_the_expert_that_is_trained_is_counted_though_the_frozen_one_comes_first():
    def make(device="meta"):
        experts = nn.ModuleDict({"high": net(device).requires_grad_(False), "low": net(device)})
        experts.forward = lambda *, x, expert: experts[expert](x)
        return experts

    real = make("cpu")
    table = FlopTable(make, real)
    for expert in ("high", "high", "low"):
        real(x=torch.zeros(4, 3), expert=expert)
    assert table.total(Counter({("update", True, (3,)): 1})) == {"update": 120}


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.0), ("Something New", None)],
)
def test_the_peak_follows_from_the_device_s_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda _: name))
    assert peak_tflops(torch.device("cpu")) == peak


def test_a_cpu_has_no_known_peak():
    assert peak_tflops(torch.device("cpu")) is None
