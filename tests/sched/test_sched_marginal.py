"""On Gaussian data, whose velocity is known in closed form, the steps keep the marginals they promise.

Data ~ Normal(MEAN, SPREAD^2): x at sigma is Normal((1 - sigma) MEAN, (1 - sigma)^2 SPREAD^2 + sigma^2).
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from omni_sched import Transition, cps_step, dance_step, euler_step, linear_sigmas, sde_step, shift_sigmas
from torch import Tensor

MEAN, SPREAD = 0.8, 0.5
Step = Callable[..., Transition]
SDES = pytest.mark.parametrize(
    ("step", "eta"), [(sde_step, 0.3), (sde_step, 0.7), (dance_step, 0.3), (dance_step, 1.0)]
)


def variance(sigma: Tensor, spread: float = SPREAD) -> Tensor:
    return (1 - sigma) ** 2 * spread**2 + sigma**2


def velocity(x: Tensor, sigma: Tensor, spread: float = SPREAD) -> Tensor:
    """E[noise - data | x]."""
    centred = x - (1 - sigma) * MEAN
    return (sigma - (1 - sigma) * spread**2) / variance(sigma, spread) * centred - MEAN


def moments(step: Step | None, eta: float, sigmas: Tensor, spread: float = SPREAD) -> list[tuple[float, float]]:
    """(mean, variance) of x at every sigma, without sampling error: each step is affine in x, plus noise.

    The first and the last step follow the ODE: as an SDE the first step alone is of finite size at any S.
    """
    mean, var, table = 0.0, 1.0, [(0.0, 1.0)]
    probes, zeros = torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1)
    for i, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        v = velocity(probes, sigma, spread)
        if step is None or i in (0, len(sigmas) - 2):
            image, std = euler_step(v, probes, sigma, sigma_next), 0.0
        else:
            out = step(v, probes, sigma, sigma_next, noise_level=eta, noise=zeros)
            image, std = out.mean, out.std[0].item()
        offset, slope = image[0].item(), (image[1] - image[0]).item()
        mean, var = offset + slope * mean, slope**2 * var + std**2
        table.append((mean, var))
    return table


def worst_error(step: Step | None, eta: float, num_steps: int, sigma_from: float = 1.0) -> float:
    """Largest error of mean or std at any sigma <= sigma_from."""
    sigmas = shift_sigmas(linear_sigmas(num_steps), 3.0)
    errors = [0.0]
    for sigma, (mean, var) in zip(sigmas, moments(step, eta, sigmas), strict=True):
        if sigma <= sigma_from:
            errors += [abs(mean - (1 - sigma.item()) * MEAN), abs(math.sqrt(var) - variance(sigma).sqrt().item())]
    return max(errors)


@pytest.mark.parametrize(
    ("step", "eta"), [(None, 0.0), (sde_step, 0.3), (sde_step, 0.7), (dance_step, 0.3), (dance_step, 1.0)]
)
def test_ode_and_sdes_keep_the_marginal_to_first_order(step: Step | None, eta: float) -> None:
    """At every sigma <= 0.5: nearer to 1 the diffusion of sde grows without bound, and no step is small."""
    coarse, fine = worst_error(step, eta, 100, 0.5), worst_error(step, eta, 200, 0.5)
    assert fine < 0.01
    assert fine == pytest.approx(coarse / 2, rel=0.12)


@SDES
def test_sdes_stay_near_the_marginal_from_the_first_step_on(step: Step, eta: float) -> None:
    assert worst_error(step, eta, 200) < 0.04


@SDES
def test_many_samples_end_as_the_data(step: Step, eta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    count = 20000
    sigmas = linear_sigmas(200)
    x = torch.randn(1, count, generator=generator)
    for i in range(200):
        v, (sigma, sigma_next) = velocity(x, sigmas[i]), sigmas[i : i + 2]
        if i in (0, 199):
            x = euler_step(v, x, sigma, sigma_next)
        else:
            noise = torch.randn(1, count, generator=generator)
            x = step(v, x, sigma, sigma_next, noise_level=eta, noise=noise).x_next
    assert x.mean().item() == pytest.approx(MEAN, abs=0.015)
    assert x.std().item() == pytest.approx(SPREAD, rel=0.02)


@pytest.mark.parametrize("num_steps", [3, 10, 200])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_cps_keeps_the_marginal_of_one_data_point_at_any_step_count(num_steps: int, eta: float) -> None:
    """With one data point the velocity determines data and noise, so keeping the coefficients keeps the marginal."""
    sigmas = shift_sigmas(linear_sigmas(num_steps), 3.0)
    for sigma, (mean, var) in zip(sigmas, moments(cps_step, eta, sigmas, spread=0.0), strict=True):
        assert mean == pytest.approx((1 - sigma.item()) * MEAN, abs=1e-5)
        assert math.sqrt(var) == pytest.approx(sigma.item(), abs=1e-5)


def test_cps_noise_does_not_vanish_with_the_step_size() -> None:
    """Why there is no first-order test for cps: on spread data its error does not fall with more steps."""
    assert worst_error(cps_step, 0.5, 200) > 0.8 * worst_error(cps_step, 0.5, 100) > 0.01
