"""AWM: its weightings by hand, their gradients, and flow matching as the limit."""

import math

import pytest
import torch
from omni_losses import awm_log_prob, awm_loss, grpo_loss, velocity_error
from torch import Tensor
from torch.autograd import gradcheck

torch.set_num_threads(1)

WEIGHTINGS = ["uniform", "t", "t2", "huber", "ghuber"]


def samples(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """velocity, x0, noise and sigma of three samples, in float64."""
    generator = torch.Generator().manual_seed(seed)
    velocity, x0, noise = (torch.randn((3, 2, 4), generator=generator, dtype=torch.float64) for _ in range(3))
    return velocity, x0, noise, torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [  # of an error of 16 at sigma 1/2
        ("uniform", -16.0),
        ("t", -8.0),
        ("t2", -4.0),
        ("huber", -0.5 * (4 - 1e-5)),
        ("ghuber", -0.5 * 4 * (2 - 10**-2.5)),
    ],
)
def test_weightings_by_hand(weighting, expected):
    x0, noise = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 5.0]])
    velocity = noise - x0 + torch.tensor([[4.0, -4.0]])
    got = awm_log_prob(velocity, x0, noise, torch.tensor([0.5]), weighting=weighting)
    assert got.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_it_is_zero_at_the_target_with_a_finite_gradient(weighting):
    _, x0, noise, sigma = (tensor.float() for tensor in samples())  # in float32, so that the error is exactly 0
    velocity = (noise - x0).requires_grad_()
    log_prob = awm_log_prob(velocity, x0, noise, sigma, weighting=weighting)
    log_prob.sum().backward()
    assert log_prob.tolist() == pytest.approx([0.0] * 3, abs=1e-5)
    assert velocity.grad.isfinite().all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_gradient(weighting):
    velocity, x0, noise, sigma = samples()
    assert gradcheck(
        lambda v: awm_log_prob(v, x0, noise, sigma, weighting=weighting), velocity.requires_grad_(),
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


@pytest.mark.parametrize(("weighting", "power"), [("uniform", 1.0), ("huber", 0.5), ("ghuber", 0.25)])
def test_ten_times_the_error_counts_by_the_power_of_the_weighting(weighting, power):
    _, x0, noise, sigma = samples()
    offset = torch.ones_like(x0)
    near, far = (awm_log_prob(noise - x0 + size * offset, x0, noise, sigma, weighting=weighting) for size in (1, 10))
    torch.testing.assert_close(far / near, torch.full((3,), 100.0**power), rtol=5e-3, atol=0)


def test_on_policy_the_loss_is_flow_matching_weighted_by_the_advantage():
    velocity, x0, noise, sigma = samples()
    advantages = torch.tensor([1.0, -2.0, 0.5])
    ours, theirs = velocity.clone().requires_grad_(), velocity.clone().requires_grad_()
    log_prob = awm_log_prob(ours, x0, noise, sigma, weighting="t")
    awm_loss(log_prob, log_prob.detach(), advantages).loss.backward()
    (advantages * sigma * velocity_error(theirs, x0, noise)).mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_the_default_clips_at_two_and_never_from_below():
    for ratio, advantage, kept in ((1.9, 1.0, True), (2.1, 1.0, False), (0.01, -1.0, True), (9.0, -1.0, True)):
        log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
        awm_loss(log_prob, torch.zeros(1), torch.tensor([advantage])).loss.backward()
        assert bool(log_prob.grad != 0) == kept


def test_advantages_are_clamped_at_five_by_default():
    out = awm_loss(torch.zeros(2), torch.zeros(2), torch.tensor([9.0, -1.0]))
    assert out.loss.item() == (-5 + 1) / 2


def test_it_is_grpo_on_these_log_probs():
    log_prob, old, advantages = (torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    options = {"clip_range": (0.1, 0.2), "adv_clip_max": 0.5, "weights": torch.tensor([1.0, 0.0, 2.0, 1.0])}
    ours = awm_loss(log_prob, old, advantages, **options)
    theirs = grpo_loss(log_prob, old, advantages, **options)
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.metrics == theirs.metrics


def test_errors_name_the_argument():
    velocity, x0, noise, sigma = samples()
    with pytest.raises(ValueError, match=r"weighting must be one of .* got 't\*\*2'"):
        awm_log_prob(velocity, x0, noise, sigma, weighting="t**2")
    with pytest.raises(ValueError, match=r"noise must have velocity's shape"):
        awm_log_prob(velocity, x0, noise[:1], sigma)
    with pytest.raises(ValueError, match=r"sigma must be \[B\] = \(3,\), got shape \(2,\)"):
        awm_log_prob(velocity, x0, noise, sigma[:2])
