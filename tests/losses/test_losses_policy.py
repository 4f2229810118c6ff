"""The clipped loss: worked examples, and where its gradient acts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import grpo_loss

torch.set_num_threads(1)


def loss_and_gradient(ratio, advantage, **options):
    """Loss and its derivative by log_prob of one sample."""
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    out = grpo_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), **({"clip_range": 0.2} | options))
    out.loss.backward()
    return out.loss.item(), log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # good, and already likelier than the bound: no more
        (1.5, -2.0, 3.0, 3.0),  # bad, and likelier: push down in full
        (0.5, 2.0, -1.0, -1.0),  # good, and less likely: push up in full
        (0.5, -2.0, 1.6, 0.0),  # bad, and already less likely than the bound: no more
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 9.0, -5.0, -5.0),  # advantages are clamped to 5
        (1.0, -9.0, 5.0, 5.0),
    ],
)
def test_worked_examples(ratio, advantage, loss, gradient):
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize(("ratio", "gradient"), [(1.15, 0.0), (1.05, -1.05), (0.75, -0.75)])
def test_the_upper_bound_may_differ_for_good_samples(ratio, gradient):
    assert loss_and_gradient(ratio, 1.0, clip_range=(0.3, 0.1))[1] == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("ratio", "gradient"), [(0.65, 0.0), (0.75, 0.75), (1.15, 1.15)])
def test_the_lower_bound_may_differ_for_bad_samples(ratio, gradient):
    assert loss_and_gradient(ratio, -1.0, clip_range=(0.3, 0.1))[1] == pytest.approx(gradient, abs=1e-6)


def test_before_any_update_it_is_the_policy_gradient():
    log_prob = torch.tensor([-1.3, 0.2, 4.0, -7.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0])
    grpo_loss(log_prob, log_prob.detach(), advantages, clip_range=1e-5).loss.backward()
    assert torch.equal(log_prob.grad, -advantages / 4)


def test_weights_multiply_each_sample_and_the_divisor_stays():
    log_prob = torch.zeros(4, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 3.0, 4.0])
    out = grpo_loss(log_prob, torch.zeros(4), advantages, clip_range=0.1, weights=torch.tensor([1.0, 0.5, 0.0, 0.0]))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert log_prob.grad.tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_metrics_of_a_worked_batch():
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.25])
    out = grpo_loss(ratios.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 0.0]), clip_range=(0.4, 0.2))
    logs = [math.log(r) for r in ratios.tolist()]
    assert {name: value.item() for name, value in out.metrics.items()} == pytest.approx(
        {
            "ratio_mean": 1.0625,
            "ratio_std": math.sqrt(sum((r - 1.0625) ** 2 for r in (1.0, 1.5, 0.5, 1.25)) / 4),
            "ratio_max_dev": 0.5,
            "clip_fraction": 0.75,
            "clip_fraction_low": 0.25,
            "clip_fraction_high": 0.5,
            "approx_kl": sum(x * x for x in logs) / 8,
            "ppo_kl": -sum(logs) / 4,
        }
    )


def test_ratios_inside_the_range_count_as_unclipped():
    ratios = torch.tensor([0.7, 1.0, 1.1])
    metrics = grpo_loss(ratios.log(), torch.zeros(3), torch.ones(3), clip_range=(0.4, 0.2)).metrics
    assert metrics["clip_fraction"] == metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
    assert metrics["ratio_max_dev"].item() == pytest.approx(0.3)  # of the one below 1


def test_equal_log_probs_deviate_by_nothing_at_all():
    log_prob = torch.randn(8, generator=torch.Generator().manual_seed(0))
    metrics = grpo_loss(log_prob, log_prob.clone(), torch.ones(8), clip_range=1e-6).metrics
    assert metrics["ratio_max_dev"] == 0
    assert metrics["ratio_std"] == 0
    assert metrics["clip_fraction"] == 0


floats = st.floats(-0.5, 0.5, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(floats, floats, st.floats(-8, 8, width=32)), min_size=1, max_size=8), st.floats(1e-5, 0.9))
def test_the_loss_bounds_the_unclipped_one_and_ignores_order(rows, clip_range):
    log_prob, old, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    loss = grpo_loss(log_prob, old, advantages, clip_range=clip_range).loss
    unclipped = (-advantages.clamp(-5, 5) * (log_prob - old).exp()).mean()
    assert loss >= unclipped - 1e-5
    backwards = grpo_loss(log_prob.flip(0), old.flip(0), advantages.flip(0), clip_range=clip_range).loss
    torch.testing.assert_close(backwards, loss)


def test_halves_of_a_batch_average_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    batch = [0.1 * torch.randn(6, generator=generator) for _ in range(3)]
    whole = grpo_loss(*batch, clip_range=0.05).loss
    halves = [grpo_loss(*(x[half] for x in batch), clip_range=0.05).loss for half in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(sum(halves) / 2, whole)


@pytest.mark.parametrize("clip_range", [1e-6, 2e-6, 3e-6, 1e-4])
def test_bounds_of_any_clip_range_that_is_taken_are_those_asked_for_within_half_a_step_of_float32(clip_range):
    high = -loss_and_gradient(2.0, 1.0, clip_range=clip_range)[0]
    low = loss_and_gradient(0.5, -1.0, clip_range=clip_range)[0]
    assert high - 1 == pytest.approx(clip_range, abs=2.0**-24)
    assert 1 - low == pytest.approx(clip_range, abs=2.0**-25)
    assert 0.06 * clip_range > 2.0**-24


def test_errors_name_the_argument():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"log_prob must be \[B\] with B >= 1, got shape \(2, 1\)"):
        grpo_loss(torch.zeros(2, 1), two, two, clip_range=0.1)
    with pytest.raises(ValueError, match=r"B >= 1, got shape \(0,\)"):
        grpo_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), clip_range=0.1)
    for name, tensors in {"old_log_prob": (two, one, two), "advantages": (two, two, one)}.items():
        with pytest.raises(ValueError, match=rf"{name} must have log_prob's shape \(2,\), got \(1,\)"):
            grpo_loss(*tensors, clip_range=0.1)
    with pytest.raises(ValueError, match=r"weights must have log_prob's shape \(2,\), got \(1,\)"):
        grpo_loss(two, two, two, clip_range=0.1, weights=one)
    for clip_range in (0.0, -0.1, (0.1, 0.0), (1e-9, 0.1), 5e-8, 2.0**-24, 1e-7, 9.9e-7, math.nan):
        with pytest.raises(ValueError, match=r"clip_range must be >= 1e-06, as float32 has steps of 1.2e-07 at 1, got"):
            grpo_loss(two, two, two, clip_range=clip_range)
    with pytest.raises(ValueError, match="adv_clip_max must be > 0, got 0"):
        grpo_loss(two, two, two, clip_range=0.1, adv_clip_max=0.0)
