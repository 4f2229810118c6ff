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
    assert table.known == {(7, 3): (50 * 7, 120 * 7)}
    assert len(made) == 1
    calls = Counter({("rollout", False, (7, 3)): 6, ("update", True, (7, 3)): 4, ("update", False, (7, 3)): 1})
    assert table.total(calls) == {"rollout": 6 * 350, "update": 4 * 840 + 350}


def test_another_shape_is_counted_when_it_comes_again():
    real = net()
    table = FlopTable(lambda: net("meta"), real)
    real(torch.zeros(4, 7, 3))
    real(torch.zeros(4, 1, 3))
    calls = Counter({("update", False, (7, 3)): 4, ("update", False, (1, 3)): 4})
    assert table.total(calls) == table.total(calls) == {}
    real(torch.zeros(2, 1, 3))
    assert not real._forward_pre_hooks  # nothing is left in the way of further calls
    assert table.total(calls) == {"update": 4 * 350 + 4 * 50}


def test_frozen_weights_take_no_gradient():
    """LoRA of rank 1: B alone and A behind it, and the second layer's gradient of its input."""

    def make(device="meta"):
        module = net(device)
        add_lora(module, ["0", "1"], rank=1, alpha=1, seed=0)
        return module

    real = make("cpu")
    table = FlopTable(make, real)
    real(torch.zeros(1, 3))
    forward = 2 * (15 + 3 + 5 + 10 + 5 + 2)
    backward = 2 * (2 + 2 + 5 + 5 + 10) + 2 * (5 + 5 + 3)  # second layer: B, inner, A, input twice; first: B, inner, A
    assert table.known == {(3,): (forward, forward + backward)}


def test_what_is_not_trained_is_not_taken_for_what_is():
    """Of two experts of one shape the first that is called may be frozen."""
    trains, real = iter((False, True)), net()
    table = FlopTable(lambda: net("meta").requires_grad_(next(trains)), real)
    real(torch.zeros(4, 3))
    assert table.known == {}
    real(torch.zeros(4, 3))
    assert table.known == {(3,): (50, 120)}


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.0), ("Something New", None)],
)
def test_the_peak_follows_from_the_device_s_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda _: name))
    assert peak_tflops(torch.device("cpu")) == peak


def test_a_cpu_has_no_known_peak():
    assert peak_tflops(torch.device("cpu")) is None
