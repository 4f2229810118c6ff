"""Second-order steps: diffusers' solver, closed-form ODEs, order of convergence; and which noise levels are left."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import compress_sigmas, dpmpp_2m_step, euler_step, linear_sigmas, shift_sigmas
from torch import Tensor

torch.set_num_threads(1)

Velocity = Callable[[Tensor, float], Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def solve(velocity: Velocity, x: Tensor, sigmas: Tensor) -> list[Tensor]:
    """x at every noise level of sigmas."""
    path, data, last_sigma = [x], None, None
    for sigma, sigma_next in pairwise(sigmas):
        out = velocity(path[-1], sigma.item())
        x_next, data = dpmpp_2m_step(out, path[-1], sigma, sigma_next, last_data=data, last_sigma=last_sigma)
        path.append(x_next)
        last_sigma = sigma
    return path


def gaussian_velocity(spread: float) -> Velocity:
    """The exact velocity where data is Normal(0, spread^2): linear in x, so the ODE has a closed form."""

    def velocity(x: Tensor, sigma: float) -> Tensor:
        return (sigma - (1 - sigma) * spread**2) / marginal_variance(spread, sigma) * x

    return velocity


def marginal_variance(spread: float, sigma: float) -> float:
    return (1 - sigma) ** 2 * spread**2 + sigma**2


def two_points(x: Tensor, sigma: float) -> Tensor:
    """The exact velocity where data is -1 or 1 with equal odds: not linear in x."""
    data = torch.tanh((1 - sigma) * x / sigma**2)
    return (x - data) / sigma


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [2, 3, 8, 20])
@pytest.mark.parametrize("velocity", [gaussian_velocity(0.5), two_points])
def test_it_is_diffusers_solver(velocity: Velocity, num_steps: int, shift: float) -> None:
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        flow_shift=shift,
        solver_order=2,
        solver_type="midpoint",
    )
    scheduler.set_timesteps(num_steps)
    x = theirs = draw(2, 3, 4)
    ours = solve(velocity, x, scheduler.sigmas)
    for i, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity(theirs, scheduler.sigmas[i].item()), timestep, theirs).prev_sample
        torch.testing.assert_close(ours[i + 1], theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sigma", [0.9, 0.5])
def test_the_weight_of_the_trend_is_the_papers(sigma: float) -> None:
    """-1/2 alpha_next (e^-h - 1) / r, r = h_last / h, as DPM-Solver++ writes it, in float64."""
    last_sigma, sigma_next = 0.95, 0.3
    velocity, x, last_data = draw(1, 6, seed=1), draw(1, 6), draw(1, 6, seed=2)
    lambdas = [math.log((1 - s) / s) for s in (last_sigma, sigma, sigma_next)]
    h_last, h = lambdas[1] - lambdas[0], lambdas[2] - lambdas[1]
    data = x.double() - sigma * velocity.double()
    expected = sigma_next / sigma * x.double() - (1 - sigma_next) * math.expm1(-h) * data
    expected -= 0.5 * (1 - sigma_next) * math.expm1(-h) * h / h_last * (data - last_data.double())
    x_next, got = dpmpp_2m_step(velocity, x, sigma, sigma_next, last_data=last_data, last_sigma=last_sigma)
    torch.testing.assert_close(x_next, expected.float())
    torch.testing.assert_close(got, data.float())


def test_the_first_step_is_eulers() -> None:
    velocity, x = draw(3, 4, 2), draw(3, 4, 2, seed=1)
    x_next, data = dpmpp_2m_step(velocity, x, 0.8, 0.6)
    assert torch.equal(x_next, euler_step(velocity, x, 0.8, 0.6))
    torch.testing.assert_close(data, x - 0.8 * velocity)


def test_to_zero_and_from_one_it_is_eulers_too() -> None:
    velocity, x, last_data = draw(3, 4), draw(3, 4, seed=1), draw(3, 4, seed=2)
    for last_sigma, sigma, sigma_next in ((0.6, 0.3, 0.0), (1.0, 0.7, 0.4), (1.0, 0.7, 0.0)):
        x_next, data = dpmpp_2m_step(velocity, x, sigma, sigma_next, last_data=last_data, last_sigma=last_sigma)
        assert torch.equal(x_next, euler_step(velocity, x, sigma, sigma_next))
    torch.testing.assert_close(x_next, data)  # to zero, all that is left is the data


@pytest.mark.parametrize("num_steps", [1, 2, 5, 30])
def test_a_single_data_point_is_reached_exactly_from_any_noise(num_steps: int) -> None:
    point = draw(2, 5, seed=3)
    path = solve(lambda x, sigma: (x - point) / sigma, draw(2, 5), linear_sigmas(num_steps))
    torch.testing.assert_close(path[-1], point, rtol=1e-5, atol=1e-5)


def error_on_the_gaussian(num_steps: int, spread: float, step: str) -> float:
    """Relative error at sigma 0.1 of the solution that starts at sigma 0.9, in even steps of sigma."""
    sigmas = torch.linspace(0.9, 0.1, num_steps + 1)
    velocity, x = gaussian_velocity(spread), torch.ones(1, 1)
    if step == "2m":
        x = solve(velocity, x, sigmas)[-1]
    else:
        for sigma, sigma_next in pairwise(sigmas.tolist()):
            x = euler_step(velocity(x, sigma), x, sigma, sigma_next)
    exact = math.sqrt(marginal_variance(spread, 0.1) / marginal_variance(spread, 0.9))
    return abs(x.item() / exact - 1)


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_the_error_falls_with_the_square_of_the_number_of_steps(spread: float) -> None:
    errors = [error_on_the_gaussian(num_steps, spread, "2m") for num_steps in (25, 50, 100)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.15)
    euler = [error_on_the_gaussian(num_steps, spread, "euler") for num_steps in (50, 100)]
    assert euler[0] / euler[1] == pytest.approx(2, rel=0.1)
    assert errors[1] < euler[1]


def test_it_is_scale_and_batch_equivariant_and_differentiable() -> None:
    velocity, x, last_data = draw(2, 3), draw(2, 3, seed=1), draw(2, 3, seed=2)
    levels: dict[str, Any] = {"sigma": torch.tensor([0.6, 0.5]), "sigma_next": torch.tensor([0.4, 0.1])}
    last: dict[str, Any] = {"last_data": last_data, "last_sigma": torch.tensor([0.8, 1.0])}
    velocity.requires_grad_()
    together, _ = dpmpp_2m_step(velocity, x, **levels, **last)
    for i in range(2):
        row = {name: value[i : i + 1] for name, value in (levels | last).items()}
        assert torch.equal(dpmpp_2m_step(velocity[i : i + 1], x[i : i + 1], **row)[0], together[i : i + 1])
    scaled, _ = dpmpp_2m_step(4 * velocity, 4 * x, **levels, **(last | {"last_data": 4 * last_data}))
    torch.testing.assert_close(scaled, 4 * together)
    together.sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"velocity": torch.zeros(2, 1)}, "velocity must have the shape of x"),
        ({"last_data": torch.zeros(2, 1)}, "last_data must have the shape of x"),
        ({"last_data": None}, "must be given together, got only last_sigma"),
        ({"last_sigma": None}, "must be given together, got only last_data"),
        ({"sigma_next": 0.6}, "0 <= sigma_next < sigma <= 1"),
        ({"last_sigma": 0.6}, "sigma < last_sigma <= 1"),
        ({"last_sigma": 1.1}, "sigma < last_sigma <= 1"),
        ({"last_sigma": torch.tensor([0.8, 0.5])}, "sigma < last_sigma <= 1"),
        ({"last_sigma": torch.ones(3)}, "last_sigma must be a scalar or .B."),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    x = torch.zeros(2, 3)
    arguments = {"velocity": x, "x": x, "sigma": 0.6, "sigma_next": 0.4, "last_data": x, "last_sigma": 0.8}
    with pytest.raises(ValueError, match=message):
        dpmpp_2m_step(**(arguments | changes))


@settings(deadline=None)
@given(num_steps=st.integers(1, 60), data=st.data(), percent=st.integers(1, 100))
def test_the_levels_left_are_of_the_schedule_and_evenly_spread(
    num_steps: int, data: st.DataObject, percent: int
) -> None:
    start = data.draw(st.integers(0, num_steps))
    sigmas = shift_sigmas(linear_sigmas(num_steps), 3.0)
    left = compress_sigmas(sigmas, start, percent / 100)
    later = num_steps - start
    assert len(left) - 1 == start + -(-percent * later // 100)
    assert torch.equal(left[: start + 1], sigmas[: start + 1])
    assert left[-1] == 0
    indices = [sigmas.tolist().index(level) for level in left.tolist()]
    gaps = {b - a for a, b in zip(indices[start:], indices[start + 1 :], strict=False)}
    assert all(gap >= 1 for gap in gaps)
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_flash_of_the_paper() -> None:
    """25 steps, the first window of 4: 9 of the 21 later steps at 0.4, 5 at 0.2."""
    sigmas = linear_sigmas(25)
    assert len(compress_sigmas(sigmas, 4, 0.4)) - 1 == 4 + 9
    assert len(compress_sigmas(sigmas, 4, 0.2)) - 1 == 4 + 5
    assert torch.equal(compress_sigmas(sigmas, 4, 1.0), sigmas)
    torch.testing.assert_close(
        compress_sigmas(linear_sigmas(10), 4, 0.5), torch.tensor([1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0])
    )


def test_nothing_after_the_start_leaves_the_schedule_as_it_is() -> None:
    sigmas = linear_sigmas(6)
    assert torch.equal(compress_sigmas(sigmas, 6, 0.1), sigmas)


def test_a_share_that_is_a_whole_number_up_to_rounding_is_that_number() -> None:
    assert 0.28 * 25 > 7
    assert len(compress_sigmas(linear_sigmas(25), 0, 0.28)) - 1 == 7


def test_levels_on_a_device_are_never_read_back() -> None:
    """Meta tensors have no values, so any read raises."""
    x, level = torch.empty(2, 3, device="meta"), torch.empty(2, device="meta")
    for sigma, last_sigma in ((level, level), (0.5, level), (level, 0.9)):
        x_next, data = dpmpp_2m_step(x, x, sigma, level, last_data=x, last_sigma=last_sigma)
        assert x_next.shape == data.shape == x.shape


def test_a_shortened_schedule_ends_closer_with_the_second_order_solver() -> None:
    sigmas = shift_sigmas(linear_sigmas(25), 3.0)
    short = compress_sigmas(sigmas, 4, 0.4)[4:]
    x, velocity = torch.ones(1, 1), gaussian_velocity(0.5)
    exact = 0.5 / math.sqrt(marginal_variance(0.5, short[0].item()))
    second = solve(velocity, x, short)[-1].item()
    for sigma, sigma_next in pairwise(short):
        x = euler_step(velocity(x, sigma.item()), x, sigma, sigma_next)
    assert abs(second - exact) < abs(x.item() - exact) / 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(1), 0, 0.5), r"sigmas must be \[S\+1\] with S >= 1, got shape \(1,\)"),
        ((torch.ones(3, 2), 0, 0.5), r"sigmas must be \[S\+1\]"),
        ((linear_sigmas(4), 5, 0.5), r"start must be in \[0, S = 4\], got 5"),
        ((linear_sigmas(4), -1, 0.5), r"start must be in \[0, S = 4\], got -1"),
        ((linear_sigmas(4), 1, 0.0), r"compress_ratio must be in \(0, 1\], got 0"),
        ((linear_sigmas(4), 1, 1.5), r"compress_ratio must be in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_compressions_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress_sigmas(*arguments)
