"""Noised data: the straight line from data to noise, at each sample's own level."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import add_noise, euler_step
from torch import Tensor

SHAPE = (3, 4, 5, 6)


def pair(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    return x0, noise


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3))
def test_each_sample_is_mixed_at_its_own_level(levels: list[float]) -> None:
    x0, noise = pair()
    mixed = add_noise(x0, noise, torch.tensor(levels))
    for b, level in enumerate(levels):
        expected = (1 - level) * x0[b].double() + level * noise[b].double()
        torch.testing.assert_close(mixed[b].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_ends_are_the_data_and_the_noise() -> None:
    x0, noise = pair()
    assert torch.equal(add_noise(x0, noise, 0.0), x0)
    assert torch.equal(add_noise(x0, noise, 1.0), noise)


def test_the_true_velocity_leads_from_one_level_to_the_other() -> None:
    x0, noise = pair()
    moved = euler_step(noise - x0, add_noise(x0, noise, 0.75), 0.75, 0.25)
    torch.testing.assert_close(moved, add_noise(x0, noise, 0.25))


@pytest.mark.parametrize("form", [lambda s: s, torch.tensor, lambda s: torch.full((3,), s)])
def test_scalar_and_vector_levels_agree_bit_for_bit(form: Callable[[float], float | Tensor]) -> None:
    x0, noise = pair()
    assert torch.equal(add_noise(x0, noise, form(0.3)), add_noise(x0, noise, 0.3))


def test_half_precision_is_mixed_in_float32() -> None:
    x0, noise = pair(torch.bfloat16)
    mixed = add_noise(x0, noise, 0.3)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, add_noise(x0.float(), noise.float(), 0.3))


def test_levels_on_a_device_are_never_read_back() -> None:
    """Meta tensors have no values, so any read raises."""
    x0, noise, sigma = (torch.empty(shape, device="meta") for shape in (SHAPE, SHAPE, (3,)))
    assert add_noise(x0, noise, sigma).shape == SHAPE


def test_wrong_arguments_are_named() -> None:
    x0, noise = pair()
    with pytest.raises(ValueError, match=r"noise must have the shape of x, \(3, 4, 5, 6\), got \(1, 4, 5, 6\)"):
        add_noise(x0, noise[:1], 0.5)
    with pytest.raises(ValueError, match=r"sigma must be a scalar or \[B\] = \[3\], got shape \(2,\)"):
        add_noise(x0, noise, torch.full((2,), 0.5))
    for sigma in (-0.1, 1.1, float("nan"), torch.tensor([0.1, 0.2, 1.5])):
        with pytest.raises(ValueError, match=r"sigma must be in \[0, 1\], got"):
            add_noise(x0, noise, sigma)
