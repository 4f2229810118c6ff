"""Noise added to a latent that has some: the forward process between two levels."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import add_noise, renoise
from torch import Tensor

SHAPE = (3, 4, 5)


def pair(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    return x, noise


@settings(deadline=None)
@given(st.floats(0, 0.984375, width=32), st.floats(0.0078125, 1, width=32))
def test_data_at_one_level_comes_to_the_other(sigma: float, share: float) -> None:
    """The shares of data and of noise, by their definition in float64: x = (1 - sigma) data + sigma noise."""
    sigma_to = float(torch.tensor(sigma + (1 - sigma) * share))
    ones = torch.ones(1, 1)
    data_share, _ = renoise((1 - sigma) * ones, 0 * ones, sigma, sigma_to)
    old_noise_share, std = renoise(sigma * ones, 0 * ones, sigma, sigma_to)
    assert data_share.item() == pytest.approx(1 - sigma_to, abs=1e-6)
    assert old_noise_share.item() ** 2 + std.item() ** 2 == pytest.approx(sigma_to**2, rel=1e-5)


def test_two_steps_add_as_much_noise_as_one() -> None:
    x, noise = torch.zeros(1, 1), torch.ones(1, 1)
    _, whole = renoise(x, noise, 0.2, 0.9)
    first, _ = renoise(x, noise, 0.2, 0.5)
    kept, second = renoise(first, 0 * noise, 0.5, 0.9)
    assert whole.item() ** 2 == pytest.approx(kept.item() ** 2 + second.item() ** 2, rel=1e-6)


def test_from_data_it_is_add_noise_and_to_level_1_only_the_new_noise() -> None:
    x, noise = pair()
    found, std = renoise(x, noise, 0.0, 0.3)
    assert torch.equal(found, add_noise(x, noise, 0.3))
    assert torch.equal(std, torch.full((3,), 0.3))
    assert torch.equal(renoise(x, noise, 0.4, 1.0)[0], noise)


@pytest.mark.parametrize("form", [lambda s: s, torch.tensor, lambda s: torch.full((3,), s)])
def test_scalar_and_vector_levels_agree_bit_for_bit(form: Callable[[float], float | Tensor]) -> None:
    x, noise = pair()
    assert torch.equal(renoise(x, noise, form(0.3), form(0.7))[0], renoise(x, noise, 0.3, 0.7)[0])


def test_half_precision_is_noised_in_float32() -> None:
    x, noise = pair(torch.bfloat16)
    assert torch.equal(renoise(x, noise, 0.3, 0.7)[0], renoise(x.float(), noise.float(), 0.3, 0.7)[0])


def test_levels_on_a_device_are_never_read_back() -> None:
    """Meta tensors have no values, so any read raises."""
    x, noise, sigma = (torch.empty(shape, device="meta") for shape in (SHAPE, SHAPE, (3,)))
    assert renoise(x, noise, sigma, sigma)[0].shape == SHAPE


def test_wrong_arguments_are_named() -> None:
    x, noise = pair()
    with pytest.raises(ValueError, match=r"noise must have the shape of x, \(3, 4, 5\), got \(1, 4, 5\)"):
        renoise(x, noise[:1], 0.2, 0.5)
    for sigma, sigma_to in ((0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)):
        with pytest.raises(ValueError, match="sigma and sigma_to must satisfy 0 <= sigma < sigma_to <= 1, got sigma="):
            renoise(x, noise, sigma, sigma_to)
