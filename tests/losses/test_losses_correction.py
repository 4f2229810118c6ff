"""Rollout correction: worked examples, exact policies, and bounds in the unit of a mean over latent elements."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import grpo_loss, gspo_loss, rollout_weights, token_grpo_loss, token_rollout_weights
from torch.distributions import Normal, kl_divergence

torch.set_num_threads(1)

BOUNDS = {"low": 0.9, "high": 1.2}
OLD = torch.tensor([[1.1, 0.8, 1.0], [1.15, 1.15, 1.0]]).log()  # ratios of the steps, against a rollout of 0


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("step", "truncate", [[1.1, 0.9, 1.0], [1.15, 1.15, 1.0]]),
        ("step", "mask", [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
        ("trajectory", "truncate", [[0.9] * 3, [1.2] * 3]),  # products 0.88 and 1.3225
        ("trajectory", "mask", [[0.0] * 3, [0.0] * 3]),
    ],
)
def test_worked_weights(level, mode, expected):
    weights, metrics = rollout_weights(OLD, torch.zeros(2, 3), level=level, mode=mode, **BOUNDS)
    assert weights.tolist() == [pytest.approx(row) for row in expected]
    outside = {"step": 1 / 6, "trajectory": 1.0}[level]
    assert metrics["outside_fraction"].item() == pytest.approx(outside)
    assert metrics["weight_mean"].item() == pytest.approx(sum(map(sum, expected)) / 6)


def test_a_trajectory_inside_the_bounds_weighs_by_its_product():
    weights, _ = rollout_weights(OLD[:1], torch.zeros(1, 3), low=0.5, high=2.0)
    assert weights.tolist() == [pytest.approx([0.88] * 3)]


def test_equal_policies_weigh_exactly_one():
    log_prob = torch.randn((4, 3), generator=torch.Generator().manual_seed(0))
    for level in ("step", "trajectory"):
        for mode in ("truncate", "mask"):
            weights, metrics = rollout_weights(log_prob, log_prob.clone(), level=level, mode=mode, **BOUNDS)
            assert torch.equal(weights, torch.ones(4, 3))
            zeros = ("abs_diff_mean", "abs_diff_max", "kl", "k3_kl", "outside_fraction")
            assert [metrics[name].item() for name in zeros] == [0.0] * 5
            assert metrics["effective_fraction"] == metrics["ratio_min"] == metrics["ratio_max"] == 1


def test_metrics_of_the_worked_steps():
    _, metrics = rollout_weights(OLD, torch.zeros(2, 3), level="step", mode="truncate", **BOUNDS)
    logs = OLD.double().flatten()
    weights = torch.tensor([1.1, 0.9, 1.0, 1.15, 1.15, 1.0]).double()
    expected = {
        "abs_diff_mean": logs.abs().mean(), "abs_diff_max": logs.abs().max(), "kl": -logs.mean(),
        "k3_kl": (logs.exp() - 1 - logs).mean(), "ratio_min": 0.8, "ratio_max": 1.15,
        "effective_fraction": weights.mean() ** 2 / weights.square().mean(),
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(float(value), rel=1e-4)


def test_kl_estimates_the_engines_kl_per_element():
    generator, std = torch.Generator().manual_seed(0), 0.5
    engine, trainer = Normal(torch.zeros(8), std), Normal(torch.full((8,), 0.1), std)
    x = std * torch.randn((40_000, 8), generator=generator)
    old, rollout = (policy.log_prob(x).mean(dim=1, keepdim=True) for policy in (trainer, engine))
    _, metrics = rollout_weights(old, rollout, low=0.0, high=math.inf)
    assert metrics["kl"].item() == pytest.approx(kl_divergence(engine, trainer).mean().item(), rel=0.05)


def test_single_tokens_reweigh_the_engines_mean_to_the_trainers():
    """With whole log-probabilities and no bounds, truncation is importance sampling: unbiased."""
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    token = torch.multinomial(engine, 50_000, replacement=True, generator=torch.Generator().manual_seed(0))
    old, rollout = (p.log()[token].view(-1, 1) for p in (trainer, engine))
    weights, _ = rollout_weights(old, rollout, low=0.0, high=math.inf)
    for i in range(3):
        assert (weights[:, 0] * (token == i)).mean().item() == pytest.approx(trainer[i].item(), abs=0.02)


def test_bounds_of_tokens_never_act_on_means_over_elements():
    """A broken step, 3e-3 nats per element away where the others are 3e-5: seen at 1 +- 1e-3, not at 0.5 to 2."""
    gap = 3e-5 * torch.randn((64, 2), generator=torch.Generator().manual_seed(0))
    gap[5, 1] = 3e-3
    zero = torch.zeros(64, 2)
    for level, dropped in (("step", 1), ("trajectory", 2)):
        tight, _ = rollout_weights(gap, zero, level=level, mode="mask", low=0.999, high=1.001)
        loose, metrics = rollout_weights(gap, zero, level=level, mode="mask", low=0.5, high=2.0)
        assert (tight == 0).sum() == dropped
        assert tight[5, 1] == 0
        assert (loose == 1).all()
        assert metrics["abs_diff_max"].item() == pytest.approx(3e-3)


def test_weights_enter_a_loss_step_by_step_without_gradient():
    old, rollout = OLD.clone().requires_grad_(), torch.zeros((2, 3), requires_grad=True)
    for one, other in ((old, rollout.detach()), (old.detach(), rollout)):
        weights, metrics = rollout_weights(one, other, level="step", mode="truncate", **BOUNDS)
        assert not any(value.requires_grad for value in (weights, *metrics.values()))
    weights, _ = rollout_weights(old, rollout, level="step", mode="mask", **BOUNDS)
    out = grpo_loss(torch.zeros(2), torch.zeros(2), torch.ones(2), clip_range=0.1, weights=weights[:, 1])
    assert out.loss.item() == -0.5


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=2), min_size=1, max_size=6),
    st.floats(0, 0.99), st.floats(1.01, 9), st.sampled_from(["step", "trajectory"]),
)  # fmt: skip
def test_weights_stay_inside_their_bounds_and_ignore_order(rows, low, high, level):
    old, zero = torch.tensor(rows), torch.zeros(len(rows), 2)
    weights, metrics = rollout_weights(old, zero, level=level, mode="truncate", low=low, high=high)
    assert ((weights >= low - 1e-6) & (weights <= high + 1e-6)).all()
    assert 0 <= metrics["effective_fraction"] <= 1 + 1e-5
    kept, _ = rollout_weights(old, zero, level=level, mode="mask", low=low, high=high)
    assert set(kept.flatten().tolist()) <= {0.0, 1.0}
    assert torch.equal(rollout_weights(old.flip(0), zero, level=level, low=low, high=high)[0], weights.flip(0))


def test_without_bounds_nothing_is_rejected():
    """Not even a ratio that float32 rounds to 0 or to infinity."""
    far = torch.tensor([[200.0], [-200.0]])
    weights, metrics = rollout_weights(far, torch.zeros(2, 1), mode="mask", low=0.0, high=math.inf)
    assert weights.tolist() == [[1.0], [1.0]]
    assert metrics["outside_fraction"] == 0


def test_nothing_left_is_no_division_by_zero():
    _, metrics = rollout_weights(torch.ones(1, 2), torch.zeros(1, 2), mode="mask", **BOUNDS)
    assert metrics["effective_fraction"] == 0


def test_errors_name_the_argument():
    wide = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"old_log_prob must be \[B, K\] with B, K >= 1, got shape \(2,\)"):
        rollout_weights(torch.zeros(2), torch.zeros(2), **BOUNDS)
    with pytest.raises(ValueError, match=r"rollout_log_prob must have old_log_prob's shape \(2, 3\), got \(3, 2\)"):
        rollout_weights(wide, wide.T, **BOUNDS)
    with pytest.raises(ValueError, match=r"level must be one of .* got 'token'"):
        rollout_weights(wide, wide, level="token", **BOUNDS)
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'clip'"):
        rollout_weights(wide, wide, mode="clip", **BOUNDS)
    for low, high in ((1.0, 2.0), (0.5, 1.0), (-0.1, 2.0), (math.nan, 2.0)):
        with pytest.raises(ValueError, match=f"0 <= low < 1 < high, got {low} and {high}"):
            rollout_weights(wide, wide, low=low, high=high)


TOKENS = torch.tensor([[0.0, math.log(3), 9.0], [math.log(0.5), math.log(1.5), math.log(2.0)]])
CHOSEN = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[1, 2, 1], [0.5, 1.5, 2]]),
        ("token_mask", [[1, 0, 1], [0.5, 1.5, 2]]),
        ("sequence_truncate", [[2, 2, 1], [1.5, 1.5, 1.5]]),
        ("sequence_mask", [[0, 0, 1], [1.5, 1.5, 1.5]]),
    ],
)
def test_worked_weights_of_tokens(mode, expected):
    junk = torch.where(CHOSEN, -1.0, math.nan)
    weights, metrics = token_rollout_weights(junk + TOKENS, junk, CHOSEN, mode=mode, cap=2.0 + 1e-6)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)
    diff = TOKENS[CHOSEN]
    assert metrics["abs_diff_mean"].item() == pytest.approx(diff.abs().mean().item(), rel=1e-5)
    assert metrics["abs_diff_max"].item() == pytest.approx(math.log(3), rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(-diff.mean().item(), rel=1e-5)


def test_weights_of_tokens_make_a_sampler_s_mean_the_trainer_s():
    """The mean over what one distribution draws, weighted, is that over the other one, without a cap."""
    trainer, sampler = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
    tokens, values = torch.arange(3)[:, None], torch.tensor([1.0, -2.0, 5.0])
    weights, _ = token_rollout_weights(trainer[tokens], sampler[tokens], tokens >= 0, mode="token_mask", cap=math.inf)
    assert (sampler.exp() * weights[:, 0] * values).sum().item() == pytest.approx((trainer.exp() * values).sum().item())


def test_weights_of_each_token_enter_a_loss_of_tokens():
    log_prob = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.arange(6.0).view(2, 3)
    out = token_grpo_loss(log_prob, log_prob.detach(), torch.tensor([1.0, -2.0]), CHOSEN, weights=weights)
    out.loss.backward()
    torch.testing.assert_close(log_prob.grad, -weights * torch.tensor([[1.0], [-2.0]]) * CHOSEN)
    with pytest.raises(ValueError, match="weights must be"):
        gspo_loss(log_prob, log_prob, torch.zeros(2), CHOSEN, weights=weights)


def test_errors_of_weights_of_tokens_name_the_argument():
    for wrong in ({"mode": "token"}, {"cap": 0.5}, {"mask": CHOSEN & False}):
        with pytest.raises(ValueError, match=r"mode must be one of .* cap >= 1, and mask must hold a token, got"):
            token_rollout_weights(TOKENS, TOKENS, **({"mask": CHOSEN} | wrong))
