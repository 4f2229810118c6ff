"""Distances to a reference and a teacher: exact divergences of torch.distributions, closed forms, gradients."""

import math

import pytest
import torch
from omni_losses import distill_kl_loss, distill_velocity_loss, gaussian_kl, k3_kl, velocity_kl
from omni_sched import sde_step
from torch.autograd import gradcheck
from torch.distributions import Categorical, Normal, kl_divergence

torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_worked_example():
    mean = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    ref_mean = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert gaussian_kl(mean, ref_mean, torch.tensor([0.5, 2.0])).tolist() == [5.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 7), (3, 4, 2, 5), (3, 2, 2, 2, 2)])
def test_it_is_the_kl_of_normal_distributions_per_element(shape):
    generator = torch.Generator().manual_seed(0)
    mean, ref_mean = (torch.randn(shape, generator=generator) for _ in range(2))
    std = torch.tensor([0.1, 0.7, 3.0])
    wide = std.view(3, *[1] * (len(shape) - 1))
    expected = kl_divergence(Normal(mean, wide), Normal(ref_mean, wide)).flatten(1).mean(dim=1)
    torch.testing.assert_close(gaussian_kl(mean, ref_mean, std), expected)


def test_its_gradient_points_from_the_reference_to_the_mean():
    mean, ref_mean = torch.tensor([[1.0, 3.0]], requires_grad=True), torch.tensor([[0.0, 1.0]], requires_grad=True)
    std = torch.tensor([0.5], requires_grad=True)
    gaussian_kl(mean, ref_mean, std).sum().backward()
    assert mean.grad.tolist() == [[2.0, 4.0]]  # difference / (elements * std^2)
    assert ref_mean.grad is std.grad is None


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"must both be \[B, ...\], got shapes \(2, 3\) and \(2, 1\)"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2))
    with pytest.raises(ValueError, match=r"must both be \[B, ...\]"):
        gaussian_kl(torch.zeros(2), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"std must be \[B\] = \(2,\), got shape \(2, 1\)"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 1))


def test_velocity_kl_by_hand():
    velocity, ref = torch.tensor([[1.0, 3.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert velocity_kl(velocity, ref).tolist() == [2.5, 0.0]


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.9, 0.8), (0.5, 0.45), (0.2, 0.1)])
@pytest.mark.parametrize("noise_level", [0.01, 0.7])
def test_velocity_kl_is_the_steps_kl_up_to_a_known_factor(sigma, sigma_next, noise_level):
    """mean moves by dt (1 + S^2 (1 - sigma) / (2 sigma)) for each unit of velocity; for small S by dt."""
    velocity, ref, x = draw(2, 6), draw(2, 6, seed=1), draw(2, 6, seed=2)
    options = {"noise_level": noise_level, "noise": torch.zeros(2, 6)}
    move, ref_move = (sde_step(v, x, sigma, sigma_next, **options) for v in (velocity, ref))
    dt, coefficient = sigma - sigma_next, noise_level * math.sqrt(sigma / (1 - sigma))
    factor = dt * (1 + coefficient**2 * (1 - sigma) / (2 * sigma))
    expected = velocity_kl(velocity, ref) * factor**2 / (2 * coefficient**2 * dt)
    torch.testing.assert_close(gaussian_kl(move.mean, ref_move.mean, move.std), expected, rtol=1e-3, atol=0)
    if noise_level == 0.01:
        small = velocity_kl(velocity, ref) * dt / (2 * coefficient**2)
        torch.testing.assert_close(small, expected, rtol=1e-3, atol=0)


def test_k3_by_hand_and_its_sign():
    log_prob, ref = torch.tensor([0.0, 0.5, -0.5, 0.0]), torch.tensor([0.0, 0.0, 0.0, math.log(2)])
    expected = [0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 1 - math.log(2)]
    assert k3_kl(log_prob, ref).tolist() == pytest.approx(expected)
    assert (k3_kl(draw(100), draw(100, seed=1)) >= 0).all()


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    """exp(d) - 1 - d is d^2 / 2 there; taken apart, float32 would leave nothing of it."""
    for d in (1e-3, 1e-2):
        assert k3_kl(torch.zeros(1), torch.tensor([d])).item() == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)


def test_k3_averages_to_the_kl_of_tokens():
    policy, ref = Categorical(torch.tensor([0.5, 0.3, 0.2])), Categorical(torch.tensor([0.2, 0.3, 0.5]))
    tokens = torch.multinomial(policy.probs, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    estimate = k3_kl(policy.log_prob(tokens), ref.log_prob(tokens)).mean()
    assert estimate.item() == pytest.approx(kl_divergence(policy, ref).item(), rel=0.02)


def test_distill_kl_is_the_mean_of_the_steps_kl():
    mean, teacher, std = draw(3, 4), draw(3, 4, seed=1), torch.tensor([0.1, 0.5, 2.0])
    out = distill_kl_loss(mean, teacher, std)
    expected = kl_divergence(Normal(mean, std[:, None]), Normal(teacher, std[:, None])).mean(dim=1)
    assert out.loss.item() == pytest.approx(expected.mean().item(), rel=1e-5)
    assert out.metrics["distill_kl"].item() == pytest.approx(expected.mean().item(), rel=1e-5)
    weighted = distill_kl_loss(mean, teacher, std, weights=torch.tensor([2.0, 0.0, 1.0]))
    assert weighted.loss.item() == pytest.approx((2 * expected[0] + expected[2]).item() / 3, rel=1e-5)
    assert weighted.metrics["distill_kl"] == out.metrics["distill_kl"]


def test_distill_velocity_by_hand():
    student, teacher = torch.tensor([[1.0, 3.0], [0.0, 2.0]], requires_grad=True), torch.zeros(2, 2)
    out = distill_velocity_loss(student, teacher, weights=torch.tensor([1.0, 0.5]))
    out.loss.backward()
    assert out.loss.item() == (5 + 0.5 * 2) / 2
    assert out.metrics["distill_velocity_error"].item() == 3.5
    assert student.grad.tolist() == [[0.5, 1.5], [0.0, 0.5]]


def test_a_step_down_the_gradient_brings_the_student_to_the_teacher():
    student, teacher = draw(2, 3).float().requires_grad_(), draw(2, 3, seed=1).float()
    distill_velocity_loss(student, teacher).loss.backward()
    torch.testing.assert_close(student - 3 * student.grad, teacher)  # half the curvature: 2 / (B D)


@pytest.mark.parametrize("name", ["velocity_kl", "k3_kl", "distill_kl_loss", "distill_velocity_loss"])
def test_gradients(name):
    other, std = draw(2, 3, seed=1), torch.tensor([0.5, 1.0])
    function = {
        "velocity_kl": lambda x: velocity_kl(x, other),
        "k3_kl": lambda x: k3_kl(x, other),
        "distill_kl_loss": lambda x: distill_kl_loss(x, other, std).loss,
        "distill_velocity_loss": lambda x: distill_velocity_loss(x, other).loss,
    }[name]
    assert gradcheck(function, draw(2, 3).requires_grad_(), eps=1e-2, atol=1e-3, rtol=1e-2)


def test_wrong_shapes_are_named():
    wide = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"velocity must be \[B, ...\] with B >= 1, got shape \(2,\)"):
        velocity_kl(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"ref_velocity must have velocity's shape \(2, 3\), got \(2, 1\)"):
        velocity_kl(wide, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"ref_log_prob must have log_prob's shape \(2, 3\), got \(2,\)"):
        k3_kl(wide, torch.zeros(2))
    with pytest.raises(ValueError, match=r"weights must have std's shape \(2,\), got \(3,\)"):
        distill_kl_loss(wide, wide, torch.ones(2), weights=torch.ones(3))
    with pytest.raises(ValueError, match=r"weights must be \[B\] = \(2,\), got shape \(3,\)"):
        distill_velocity_loss(wide, wide, weights=torch.ones(3))
