"""Algorithms that repeat their bits: in the backward pass, and nowhere else."""

import os

import pytest
import torch
from omni_train.dist import deterministic, init_distributed
from omni_train.memory.recompute import Recompute
from torch import nn


class Noted(torch.autograd.Function):
    """The identity, which notes torch's mode of deterministic algorithms, forward and backward."""

    seen: list[tuple[str, int]]

    @staticmethod
    def forward(ctx, x):
        Noted.seen.append(("forward", torch.get_deterministic_debug_mode()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Noted.seen.append(("backward", torch.get_deterministic_debug_mode()))
        return grad


class Block(nn.Module):
    def forward(self, x):
        return Noted.apply(x).square()


@pytest.fixture(autouse=True)
def fresh():
    Noted.seen = []
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("budget", [0.0, 1e9])
@pytest.mark.parametrize("always", ["default", "warn", "error"])
def test_recomputed_blocks_run_as_in_the_forward_pass_and_gradients_repeat_their_bits(budget, always):
    torch.set_deterministic_debug_mode(always)  # by a user, for all that a process does
    loss = Recompute(budget)(Block(), torch.ones(2, requires_grad=True)).sum()
    deterministic()(torch.Tensor.backward)(loss)
    now = torch.get_deterministic_debug_mode()
    assert now == ["default", "warn", "error"].index(always)
    assert Noted.seen == [("forward", now), ("forward", now), ("backward", 2)]


def test_an_error_leaves_the_algorithms_as_they_were():
    with pytest.raises(ZeroDivisionError), deterministic():
        1 / 0  # noqa: B018
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_a_process_repeats_its_products_and_rounds_float32_as_a_cpu_before_a_device_starts(monkeypatch, own):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    seen = []
    monkeypatch.setattr("omni_train.dist.local_device", lambda rank: seen.append(settings()) or torch.device("cpu"))
    torch.backends.cudnn.allow_tf32 = True

    def settings():
        return os.environ["CUBLAS_WORKSPACE_CONFIG"], torch.backends.cudnn.conv.fp32_precision == "tf32"

    init_distributed()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # which would take time
    assert seen == [(own or ":4096:8", False)]
