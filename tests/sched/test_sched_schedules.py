"""Schedules: closed forms, and the tables of diffusers' flow-matching scheduler bit for bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import exponential_shift_sigmas, linear_sigmas, resolution_mu, shift_sigmas, stretch_sigmas

STEPS = [1, 2, 3, 7, 10, 20, 28, 50, 100]


def diffusers_table(num_steps: int, mu: float | None = None, **config: object) -> torch.Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps), mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("num_steps", STEPS)
def test_linear_sigmas_are_the_nearest_floats_to_the_fractions(num_steps: int) -> None:
    expected = [float(Fraction(num_steps - i, num_steps)) for i in range(num_steps + 1)]
    assert torch.equal(linear_sigmas(num_steps), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 6.5, 0.7])
def test_static_shift_equals_diffusers(num_steps: int, shift: float) -> None:
    ours = shift_sigmas(linear_sigmas(num_steps), shift)
    assert torch.equal(ours, diffusers_table(num_steps, shift=shift))


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("mu", [0.5, 0.7351, 1.15, 2.02])
def test_dynamic_shift_equals_diffusers(num_steps: int, mu: float) -> None:
    ours = exponential_shift_sigmas(linear_sigmas(num_steps), mu)
    assert torch.equal(ours, diffusers_table(num_steps, mu, use_dynamic_shifting=True))


@pytest.mark.parametrize("num_steps", STEPS[1:])
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 6889])
def test_qwen_image_schedule_equals_diffusers(num_steps: int, tokens: int) -> None:
    mu = resolution_mu(tokens, max_tokens=8192, max_mu=0.9)
    ours = stretch_sigmas(exponential_shift_sigmas(linear_sigmas(num_steps), mu), 0.02)
    theirs = diffusers_table(
        num_steps,
        mu,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    assert torch.equal(ours, theirs)
    assert ours[-2].item() == pytest.approx(0.02, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(num_steps=st.integers(2, 60), shift=st.floats(0.5, 20), mu=st.floats(-3, 3), terminal=st.floats(0.005, 0.3))
def test_every_map_returns_a_schedule(num_steps: int, shift: float, mu: float, terminal: float) -> None:
    linear = linear_sigmas(num_steps)
    shifted = shift_sigmas(linear, shift)
    for sigmas in (shifted, exponential_shift_sigmas(linear, mu), stretch_sigmas(shifted, terminal)):
        assert sigmas.shape == (num_steps + 1,)
        assert sigmas.dtype == torch.float32
        assert 1 - 1e-6 < sigmas[0].item() <= 1
        assert sigmas[-1] == 0
        assert (sigmas.diff() < 0).all()


@settings(max_examples=50, deadline=None)
@given(first=st.floats(0.2, 8), second=st.floats(0.2, 8))
def test_two_shifts_compose_to_their_product(first: float, second: float) -> None:
    linear = linear_sigmas(20)
    twice = shift_sigmas(shift_sigmas(linear, first), second)
    torch.testing.assert_close(twice, shift_sigmas(linear, first * second), rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(mu=st.floats(-3, 3))
def test_exponential_shift_adds_mu_to_the_log_odds(mu: float) -> None:
    inner = linear_sigmas(12)[1:-1]
    torch.testing.assert_close(
        torch.logit(exponential_shift_sigmas(inner, mu)), torch.logit(inner) + mu, rtol=1e-4, atol=1e-4
    )


def test_resolution_mu_is_the_line_through_its_two_points() -> None:
    assert resolution_mu(256) == 0.5
    assert resolution_mu(4096) == pytest.approx(1.15)
    assert resolution_mu(2176) == pytest.approx((0.5 + 1.15) / 2)
    assert resolution_mu(8192) - resolution_mu(4352) == pytest.approx(0.65)  # goes on beyond max_tokens
    assert resolution_mu(8192, max_tokens=8192, max_mu=0.9) == pytest.approx(0.9)


def test_stretching_scales_the_signal_fraction_by_one_factor() -> None:
    sigmas = shift_sigmas(linear_sigmas(9), 3.0)
    ratio = (1 - stretch_sigmas(sigmas, 0.05)[1:-1]) / (1 - sigmas[1:-1])
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.95 / (1 - sigmas[-2].item())))


def test_inputs_are_left_alone() -> None:
    sigmas = linear_sigmas(5)
    before = sigmas.clone()
    shift_sigmas(sigmas, 3.0), exponential_shift_sigmas(sigmas, 1.0), stretch_sigmas(sigmas, 0.1)
    assert torch.equal(sigmas, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_sigmas(0), "num_steps must be >= 1, got 0"),
        (lambda: shift_sigmas(linear_sigmas(4), 0.0), "shift must be > 0 and finite, got 0.0"),
        (lambda: shift_sigmas(torch.tensor([1.5, 0.0]), 3.0), r"sigmas must be in \[0, 1\], got \[1.5, 0.0\]"),
        (lambda: exponential_shift_sigmas(linear_sigmas(4), math.inf), "mu must be in .*, got inf"),
        (lambda: exponential_shift_sigmas(torch.tensor([-0.1]), 1.0), r"sigmas must be in \[0, 1\]"),
        (lambda: resolution_mu(0), "num_tokens must be >= 1, got 0"),
        (lambda: resolution_mu(9, base_tokens=5, max_tokens=5), "base_tokens must be < max_tokens, got 5 and 5"),
        (lambda: stretch_sigmas(linear_sigmas(4), 1.0), r"terminal must be in \(0, 1\), got 1.0"),
        (lambda: stretch_sigmas(linear_sigmas(1), 0.02), r"sigmas must be \[S\+1\] with S >= 2, got shape \(2,\)"),
        (lambda: stretch_sigmas(linear_sigmas(4)[:-1], 0.02), r"sigmas must end with .* got \[0.5, 0.25\]"),
        (lambda: stretch_sigmas(torch.tensor([1.0, 1.0, 0.0]), 0.02), r"sigmas must end with .* got \[1.0, 0.0\]"),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_mu_stays_where_float32_holds_its_exponential() -> None:
    sigmas = linear_sigmas(4)
    for mu in (-79.9, 79.9):
        assert exponential_shift_sigmas(sigmas, mu).isfinite().all()
    for mu in (-80.0, 80.0):
        with pytest.raises(ValueError, match="mu must be in"):
            exponential_shift_sigmas(sigmas, mu)
