"""Step noise: a function of (seed, step) alone, standard normal, and independent between pairs."""

import hashlib
import math
import random
import struct

import numpy as np
import pytest
import torch
from omni_sched import INITIAL_NOISE, step_noise

SEEDS = [0, 1, -1, 2, 2**31, 2**32, 2**32 + 1, 2**63, 2**64, 2**64 + 1, -(2**64)]


@pytest.mark.parametrize("shape", [(4, 5), (7,), (4001,), (9, 1000), (70_001,)], ids=str)
def test_rows_do_not_depend_on_batch_or_order(shape: tuple[int, ...]) -> None:
    """In one piece, in some, and each alone."""
    together = step_noise(SEEDS, 3, shape)
    for seed, row in zip(SEEDS, together, strict=True):
        assert torch.equal(step_noise([seed], 3, shape)[0], row)
    assert torch.equal(step_noise(SEEDS[::-1], 3, shape), together.flip(0))


def test_equal_seeds_give_equal_rows() -> None:
    assert torch.equal(step_noise([7, 7], 0, (3,))[0], step_noise([7, 7], 0, (3,))[1])


def test_shape_and_type() -> None:
    noise = step_noise([1, 2], 0, (3, 5, 7))
    assert noise.shape == (2, 3, 5, 7)
    assert noise.dtype == torch.float32
    assert noise.device.type == "cpu"
    assert step_noise([1], 0, ()).shape == (1,)
    assert step_noise([1], 0, (0, 4)).shape == (1, 0, 4)


def test_a_smaller_shape_is_the_beginning_of_a_larger_one() -> None:
    large = step_noise([5], 2, (1000,))
    for count in (1, 2, 15, 16, 17, 999):
        assert torch.equal(step_noise([5], 2, (count,)), large[:, :count])
    assert torch.equal(step_noise([5], 2, (10, 100)).flatten(1), large)


def test_number_of_threads_and_defaults_change_nothing() -> None:
    threads = torch.get_num_threads()
    noise = step_noise([11], 4, (100_001,))
    try:
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            again = step_noise([11], 4, (100_001,))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert again.dtype == torch.float32
    assert torch.equal(noise, again)


def test_global_random_state_is_neither_read_nor_changed() -> None:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    first = step_noise([3], 1, (50,))
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    torch.rand(5)
    assert torch.equal(step_noise([3], 1, (50,)), first)


def test_values_follow_the_documented_construction() -> None:
    """SHAKE-128 words through Box-Muller in plain Python; float64 libraries may differ in the last float32 bit."""
    words = struct.unpack("<200i", hashlib.shake_128(b"step_noise -5 17").digest(800))
    expected = []
    for first, second in zip(words[::2], words[1::2], strict=True):
        radius = math.sqrt(-2 * math.log((first + 2**31 + 0.5) / 2**32))
        angle = 2 * math.pi * (second + 2**31 + 0.5) / 2**32
        expected += [radius * math.cos(angle), radius * math.sin(angle)]
    torch.testing.assert_close(step_noise([-5], 17, (200,))[0], torch.tensor(expected), rtol=1.2e-7, atol=1e-9)


def test_different_seeds_and_steps_are_uncorrelated() -> None:
    """Seeds that agree in their low 32 or 64 bits, or differ in sign, are among them."""
    count = 2**13
    rows = torch.cat([step_noise(SEEDS, step, (count,)) for step in (INITIAL_NOISE, 0, 1, 11)]).double()
    correlation = rows @ rows.T / count
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert off_diagonal.abs().max() < 5.5 / math.sqrt(count)  # largest of 946 pairs


def test_neighbours_in_a_row_are_uncorrelated_also_in_size() -> None:
    noise = step_noise([9], INITIAL_NOISE, (2**18,))[0].double()
    for values in (noise, noise.square() - 1):
        for lag in (1, 2, 3, 64):
            product = values[lag:] * values[:-lag]
            assert product.mean().abs() < 4.5 * product.std() / math.sqrt(len(product))


def test_a_large_sample_is_standard_normal() -> None:
    count = 2**18
    noise = step_noise([2**40 + 123], INITIAL_NOISE, (count,))[0].double()
    assert noise.mean().abs() < 4 / math.sqrt(count)
    assert (noise.var() - 1).abs() < 4 * math.sqrt(2 / count)
    assert noise.pow(3).mean().abs() < 4 * math.sqrt(15 / count)
    assert (noise.pow(4).mean() - 3).abs() < 4 * math.sqrt(96 / count)
    cdf = torch.special.ndtr(noise.sort().values)
    distance = (cdf - (torch.arange(count, dtype=torch.float64) + 0.5) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 0.1 %
    beyond = (noise.abs() > 3).double().mean().item()
    expected = math.erfc(3 / math.sqrt(2))
    assert beyond == pytest.approx(expected, abs=5 * math.sqrt(expected / count))
    assert noise.isfinite().all()


def test_integers_of_other_libraries_are_the_same_seeds() -> None:
    plain = step_noise([3, 4], 2, (6,))
    assert torch.equal(step_noise(np.array([3, 4]), np.int64(2), (6,)), plain)
    assert torch.equal(step_noise(torch.tensor([3, 4]), 2, torch.Size([6])), plain)


def test_initial_noise_is_the_step_before_the_first() -> None:
    assert INITIAL_NOISE == -1
    assert not torch.equal(step_noise([0], INITIAL_NOISE, (4,)), step_noise([0], 0, (4,)))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="seeds must hold at least one seed, got none"):
        step_noise([], 0, (2,))
    with pytest.raises(ValueError, match=r"step must be >= -1 .* got -2"):
        step_noise([1], -2, (2,))
    with pytest.raises(ValueError, match=r"shape must hold sizes >= 0, got \(-1,\)"):
        step_noise([1], 0, (-1,))
    with pytest.raises(TypeError):
        step_noise([1.5], 0, (2,))  # type: ignore[list-item]
