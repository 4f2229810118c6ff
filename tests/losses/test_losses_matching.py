"""Distribution matching, on normal distributions: all velocities and divergences have closed forms there."""

import math
from collections.abc import Callable

import pytest
import torch
from omni_losses import added_noise_error, distribution_matching_loss, velocity_error
from torch import Tensor
from torch.autograd import gradcheck

torch.set_num_threads(1)

MEAN, STD = 0.5, 0.8  # of the data


def clean(x: Tensor, sigma: float, mean: float, std: float) -> Tensor:
    """The mean of data from Normal(mean, std^2), given x = (1 - sigma) data + sigma noise."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    return mean + (1 - sigma) * std**2 / variance * (x - (1 - sigma) * mean)


def velocity_of(x: Tensor, sigma: float, mean: float, std: float) -> Tensor:
    """The true velocity of that data: x = clean + sigma velocity."""
    return (x - clean(x, sigma, mean, std)) / sigma


def quadrature(points: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Two independent standard normals and their probabilities, [points^2], in float64 (Gauss-Hermite)."""
    jacobi = torch.diag(torch.arange(1, points, dtype=torch.float64).sqrt(), 1)
    places, vectors = torch.linalg.eigh(jacobi + jacobi.T)
    shares = vectors[0].square()
    first, second = torch.meshgrid(places, places, indexing="ij")
    return first.flatten(), second.flatten(), torch.outer(shares, shares).flatten()


@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
def test_the_gradient_is_that_of_the_divergence_of_the_student_from_the_teacher(sigma):
    """The student samples Normal(mean, std^2); its scaled gradient by mean and std is that of the analytic KL."""
    z, noise, shares = quadrature()
    mean, std = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (-0.3, 1.1))
    x0 = (mean + std * z)[:, None]
    x = (1 - sigma) * x0.detach() + sigma * noise[:, None]
    fake, teacher = clean(x, sigma, mean.item(), std.item()), clean(x, sigma, MEAN, STD)
    divided_by = (x0.detach() - teacher).abs()[:, 0]
    weights = len(z) * shares * divided_by * (1 - sigma) ** 2 / sigma**2
    distribution_matching_loss(x0, fake, teacher, min_scale=1e-9, weights=weights).loss.backward()

    own, other = ((1 - sigma) ** 2 * s**2 + sigma**2 for s in (std, torch.tensor(STD, dtype=torch.float64)))
    kl = (own / other - 1 - (own / other).log() + ((1 - sigma) * (mean - MEAN)) ** 2 / other) / 2
    for found, expected in zip((mean.grad, std.grad), torch.autograd.grad(kl, (mean, std)), strict=True):
        assert found.item() == pytest.approx(expected.item(), rel=2e-4)


def test_a_student_whose_samples_are_the_teachers_has_no_gradient():
    x0 = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    prediction = clean(x0.detach() * 0.7 + 0.1, 0.3, MEAN, STD)
    out = distribution_matching_loss(x0, prediction, prediction)
    out.loss.backward()
    assert x0.grad.abs().max() == out.metrics["matching_error"] == out.loss.item() == 0


def test_a_worked_example_with_weights_and_the_floor():
    """Gradients are w g / (B elements): g is 1 / 2 and -1 / 0.5, by the mean distance, or by the floor."""
    x0 = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True)
    fake, teacher = torch.tensor([[1.0, 3.0], [-1.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    out = distribution_matching_loss(x0, fake, teacher, min_scale=0.5, weights=torch.tensor([4.0, 2.0]))
    out.loss.backward()
    torch.testing.assert_close(x0.grad, torch.tensor([[0.5, 0.5], [-1.0, 0.0]]))
    assert out.loss.item() == pytest.approx((4 * 0.125 + 2 * 1.0) / 2)
    assert out.metrics["matching_error"].item() == 0.75
    masked = distribution_matching_loss(x0, fake, teacher, weights=torch.zeros(2)).loss
    assert masked.item() == 0


def forward(x: Tensor, noise: Tensor, sigma: float, sigma_to: float) -> tuple[Tensor, Tensor]:
    """The forward process between two levels, written out."""
    share = (1 - sigma_to) / (1 - sigma)
    std = math.sqrt(sigma_to**2 - share**2 * sigma**2)
    return share * x + std * noise, torch.full(x.shape[:1], std, dtype=torch.float64)


@pytest.mark.parametrize(("sigma", "sigma_to"), [(0.0, 0.5), (0.2, 0.4), (0.6, 0.65), (0.6, 0.99)])
def test_the_best_velocity_is_the_true_one_also_of_samples_that_are_no_noised_data(sigma, sigma_to):
    """Latents at level sigma are Normal(1, 0.5^2), so the score of x is known, and the best velocity."""
    z, noise, shares = quadrature()
    x, std = forward((1 + 0.5 * z)[:, None], noise[:, None], sigma, sigma_to)
    share = (1 - sigma_to) / (1 - sigma)
    score = -(x - share) / (share**2 * 0.25 + std[0] ** 2)
    true = (-sigma_to * score - x) / (1 - sigma_to)  # noise_hat = x + (1 - sigma) velocity = -sigma score
    level = torch.full((len(z),), sigma_to, dtype=torch.float64)

    def expected(velocity: Tensor) -> Tensor:
        return (shares * added_noise_error(velocity, x, noise[:, None], level, std).double()).sum()

    offset, slope = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    for gradient in torch.autograd.grad(expected(true + offset + slope * x), (offset, slope)):
        assert abs(gradient.item()) < 1e-5
    least = expected(true)
    for other in (true + 0.5, true + 0.5 * x, 0.5 * true):
        assert expected(other) > least


@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
def test_of_noised_data_it_is_the_velocitys_error_but_for_a_factor(sigma):
    generator = torch.Generator().manual_seed(0)
    velocity, x0, noise = (torch.randn(3, 2, 4, generator=generator) for _ in range(3))
    level = torch.full((3,), sigma)
    found = added_noise_error(velocity, (1 - sigma) * x0 + sigma * noise, noise, level, level)
    torch.testing.assert_close(found, (1 - sigma) ** 2 * velocity_error(velocity, x0, noise), rtol=1e-5, atol=1e-6)


def test_the_true_velocity_of_noised_data_is_also_the_best_of_a_segment():
    """Latents at 0.4 that are data noised have, noised further to 0.7, the velocity of data at 0.7."""
    z, noise, shares = quadrature()
    sigma, sigma_to = 0.4, 0.7
    deviation = math.sqrt((1 - sigma) ** 2 * STD**2 + sigma**2)
    x, std = forward(((1 - sigma) * MEAN + deviation * z)[:, None], noise[:, None], sigma, sigma_to)
    true, level = velocity_of(x, sigma_to, MEAN, STD), torch.full((len(z),), sigma_to, dtype=torch.float64)
    moved = true.clone().requires_grad_()
    error = (shares * added_noise_error(moved, x, noise[:, None], level, std).double()).sum()
    (gradient,) = torch.autograd.grad(error, moved)
    assert abs(gradient.sum().item()) < 1e-5
    assert abs((gradient * x).sum().item()) < 1e-5


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "x0": lambda x: distribution_matching_loss(x, torch.zeros(3, 4), torch.ones(3, 4)).loss,
    "velocity": lambda v: added_noise_error(
        v, torch.ones(3, 4), torch.zeros(3, 4), torch.full((3,), 0.6), torch.full((3,), 0.5)
    ),
}


def test_the_errors_gradient():
    velocity = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert gradcheck(CHECKED["velocity"], velocity, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_wrong_arguments_are_named():
    x, level = torch.zeros(2, 3), torch.full((2,), 0.5)
    with pytest.raises(ValueError, match=r"teacher_x0 must have x0's shape \(2, 3\), got \(2, 4\)"):
        distribution_matching_loss(x, x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"weights must be \[B\] = \(2,\), got shape \(3,\)"):
        distribution_matching_loss(x, x, x, weights=torch.zeros(3))
    with pytest.raises(ValueError, match=r"min_scale must be > 0, got 0"):
        distribution_matching_loss(x, x, x, min_scale=0)
    with pytest.raises(ValueError, match=r"noise must have velocity's shape \(2, 3\), got \(2, 4\)"):
        added_noise_error(x, x, torch.zeros(2, 4), level, level)
    with pytest.raises(ValueError, match=r"std must be \[B\] = \(2,\), got shape \(\)"):
        added_noise_error(x, x, x, level, torch.tensor(0.5))
