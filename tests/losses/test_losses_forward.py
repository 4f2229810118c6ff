"""DiffusionNFT: an independent float64 copy of its equations, closed-form gradients, the probability and the decays."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import diffusion_nft_loss, old_policy_decay, reward_probability, velocity_error
from torch import Tensor
from torch.autograd import gradcheck

torch.set_num_threads(1)


def batch(size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of the loss at noise levels 0.2, 0.5 and 1, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 2, 4)
    velocity, old, x0, noise, ref = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5))
    sigma = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)[:size]
    level = sigma.view(-1, 1, 1)
    reward_prob = torch.tensor([0.9, 0.25, 0.5], dtype=torch.float64)[:size]
    return {
        "velocity": velocity, "old_velocity": old, "x0": x0, "x_t": (1 - level) * x0 + level * noise,
        "sigma": sigma, "reward_prob": reward_prob, "ref_velocity": ref,
    }  # fmt: skip


def nft(arguments: dict[str, Tensor], **options: Any):
    names = ("velocity", "old_velocity", "x0", "x_t", "sigma", "reward_prob")
    return diffusion_nft_loss(*(arguments[name] for name in names), **({"nft_beta": 0.5} | options))


def by_the_paper(arguments: dict[str, Tensor], beta: float, adv_clip_max: float, kl_coef: float) -> Tensor:
    """The loss of every sample, element by element in float64."""
    losses = []
    for i in range(len(arguments["sigma"])):
        v, old, x0, x_t, ref = (
            arguments[name][i].flatten() for name in ("velocity", "old_velocity", "x0", "x_t", "ref_velocity")
        )
        sigma, prob = arguments["sigma"][i], arguments["reward_prob"][i]
        total = kl_coef * ((v - ref) ** 2).mean()
        for share, mixed in ((prob, (1 - beta) * old + beta * v), (1 - prob, (1 + beta) * old - beta * v)):
            error = x_t - sigma * mixed - x0
            weight = max(error.detach().abs().mean(), torch.tensor(1e-5))
            total = total + adv_clip_max * share / beta * (error**2).mean() / weight
        losses.append(total)
    return torch.stack(losses)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_it_is_the_papers_loss_with_its_gradient(beta):
    arguments = batch()
    ours, theirs = (arguments | {"velocity": arguments["velocity"].clone().requires_grad_()} for _ in range(2))
    loss = nft(ours, nft_beta=beta, adv_clip_max=4.0, ref_velocity=ours["ref_velocity"], kl_coef=0.3).loss
    expected = by_the_paper(theirs, beta, 4.0, 0.3).mean()
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours["velocity"].grad, theirs["velocity"].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_is_that_of_flow_matching_times_the_advantage(beta):
    """(2 q - 1) adv_clip_max sigma^2 / w times the gradient of the flow-matching error, for any beta."""
    arguments = batch()
    velocity = arguments["old_velocity"].clone().requires_grad_()
    nft(arguments | {"velocity": velocity}, nft_beta=beta, adv_clip_max=5.0).loss.backward()
    level = arguments["sigma"].view(-1, 1, 1)
    target = (arguments["x_t"] - arguments["x0"]) / level
    error = arguments["x_t"] - level * velocity.detach() - arguments["x0"]
    weight = error.abs().mean(dim=(1, 2)).view(-1, 1, 1)
    share = (2 * arguments["reward_prob"] - 1).view(-1, 1, 1)
    expected = 5.0 * share * level**2 / weight * 2 * (velocity.detach() - target) / 8 / 3
    torch.testing.assert_close(velocity.grad, expected, rtol=1e-4, atol=1e-6)


def test_one_step_moves_good_samples_to_the_data_and_bad_ones_away():
    arguments = batch()
    noise = (arguments["x_t"] - 0.8 * arguments["x0"])[:1] / 0.2
    one = {name: value[:1] for name, value in arguments.items()}
    before = velocity_error(one["old_velocity"], one["x0"], noise)
    for prob, closer in ((1.0, True), (0.0, False)):
        velocity = one["old_velocity"].clone().requires_grad_()
        nft(one | {"velocity": velocity, "reward_prob": torch.tensor([prob])}).loss.backward()
        after = velocity_error((velocity - 0.1 * velocity.grad).detach(), one["x0"], noise)
        assert bool(after < before) == closer


def test_with_probability_one_half_the_old_policy_is_where_it_stays():
    arguments = batch()
    velocity = arguments["old_velocity"].clone().requires_grad_()
    half = arguments | {"velocity": velocity, "reward_prob": torch.full((3,), 0.5)}
    out = nft(half)
    out.loss.backward()
    assert velocity.grad.abs().max() < 1e-6
    assert out.metrics["old_deviation"] == 0
    assert out.metrics["positive_loss"] == out.metrics["negative_loss"]


def test_the_weight_has_a_floor():
    """Where the prediction is the sample, l+ is 0 and not 0 / 0."""
    x0 = torch.randn((1, 3), generator=torch.Generator().manual_seed(0))
    velocity = (2 * x0).requires_grad_()
    arguments = {"velocity": velocity, "old_velocity": velocity, "x0": x0, "x_t": 2 * x0}
    out = nft(arguments | {"sigma": torch.tensor([0.5]), "reward_prob": torch.ones(1)})
    out.loss.backward()
    assert out.loss.item() == 0
    assert velocity.grad.abs().sum() == 0


def test_below_the_floor_the_error_is_divided_by_the_floor():
    """An error of 1e-6 in every element: 1e-12 over the default floor 1e-5, or over 1e-3."""
    shape, error = (1, 4), 1e-6
    arguments = {name: torch.zeros(shape) for name in ("velocity", "old_velocity", "x0")}
    arguments |= {"x_t": torch.full(shape, error), "sigma": torch.ones(1), "reward_prob": torch.ones(1)}
    assert nft(arguments).metrics["positive_loss"].item() == pytest.approx(1e-7, rel=1e-5)
    assert nft(arguments, min_weight=1e-3).metrics["positive_loss"].item() == pytest.approx(1e-9, rel=1e-5)


def test_the_default_scale_is_that_of_reward_probability():
    arguments = batch()
    assert torch.equal(nft(arguments).loss, nft(arguments, adv_clip_max=5.0).loss)


def test_weights_multiply_samples_and_the_divisor_stays():
    arguments = batch()
    alone = []
    for i in range(3):
        row = {name: value[i : i + 1] for name, value in arguments.items()}
        alone.append(nft(row, ref_velocity=row["ref_velocity"], kl_coef=0.3).loss)
    weights = torch.tensor([2.0, 0.0, 0.5])
    weighted = nft(arguments, ref_velocity=arguments["ref_velocity"], kl_coef=0.3, weights=weights).loss
    torch.testing.assert_close(weighted, (2 * alone[0] + 0.5 * alone[2]) / 3)


def test_gradient_of_the_error_by_differences():
    arguments = batch()
    assert gradcheck(
        lambda v: velocity_error(v, arguments["x0"], arguments["x_t"]), arguments["velocity"].clone().requires_grad_(),
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


def test_metrics():
    arguments = batch()
    out = nft(arguments, ref_velocity=arguments["ref_velocity"])
    expected = {
        "reward_prob_mean": arguments["reward_prob"].mean(),
        "old_deviation": (arguments["velocity"] - arguments["old_velocity"]).square().mean(),
        "velocity_kl": (arguments["velocity"] - arguments["ref_velocity"]).square().mean(),
    }
    for name, value in expected.items():
        assert out.metrics[name].item() == pytest.approx(value.item(), rel=1e-5)
    assert "velocity_kl" not in nft(arguments).metrics
    prob = arguments["reward_prob"]
    assert set(out.metrics) == {*expected, "positive_loss", "negative_loss"}
    one = nft(arguments | {"reward_prob": torch.ones_like(prob)}, nft_beta=0.5, adv_clip_max=1.0)
    assert one.loss.item() == pytest.approx(one.metrics["positive_loss"].item() / 0.5)
    assert all(value.shape == () and not value.requires_grad for value in out.metrics.values())
    assert out.loss.dtype == torch.float32


def test_order_does_not_matter():
    arguments, order = batch(), [2, 0, 1]
    torch.testing.assert_close(nft({k: v[order] for k, v in arguments.items()}).loss, nft(arguments).loss)


def test_reward_probability():
    advantages = torch.tensor([-9.0, -5.0, -2.0, 0.0, 2.0, 5.0, 9.0])
    assert reward_probability(advantages).tolist() == pytest.approx([0.0, 0.0, 0.3, 0.5, 0.7, 1.0, 1.0])
    assert not reward_probability(advantages.requires_grad_()).requires_grad
    assert reward_probability(advantages.sign(), adv_clip_max=1.0).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9), st.floats(0.1, 10))
def test_probabilities_are_monotone_and_symmetric(values, adv_clip_max):
    advantages = torch.tensor(sorted(values))
    prob, other = (reward_probability(sign * advantages, adv_clip_max=adv_clip_max) for sign in (1, -1))
    assert ((prob >= 0) & (prob <= 1)).all()
    assert (prob.diff() >= 0).all()
    torch.testing.assert_close(prob + other, torch.ones_like(prob))


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("copy", {0: 0.0, 10**6: 0.0}),
        ("linear", {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 10**6: 0.5}),
        ("delayed_linear", {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 10**6: 0.999}),
    ],
)
def test_old_policy_decay(schedule, points):
    for step, decay in points.items():
        assert old_policy_decay(step, schedule=schedule) == pytest.approx(decay, abs=1e-12)
    values = [old_policy_decay(step, schedule=schedule) for step in range(300)]
    assert values == sorted(values)
    assert all(0 <= value < 1 for value in values)


def test_velocity_error_is_zero_at_the_target_and_a_mean():
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn((2, 3, 4), generator=generator) for _ in range(2))
    assert velocity_error(noise - x0, x0, noise).tolist() == [0.0, 0.0]
    torch.testing.assert_close(velocity_error(noise - x0 + 2, x0, noise), torch.full((2,), 4.0))


def test_errors_name_the_argument():
    arguments = batch()
    for name in ("old_velocity", "x0", "x_t"):
        with pytest.raises(ValueError, match=rf"{name} must have velocity's shape \(3, 2, 4\), got \(3, 2\)"):
            nft(arguments | {name: torch.zeros(3, 2)})
    for name in ("sigma", "reward_prob"):
        with pytest.raises(ValueError, match=rf"{name} must be \[B\] = \(3,\), got shape \(2,\)"):
            nft(arguments | {name: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"velocity must be \[B, ...\] with B >= 1, got shape \(3,\)"):
        nft(arguments | {"velocity": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"ref_velocity must be given with kl_coef > 0, got None and 0\.1"):
        nft(arguments, kl_coef=0.1)
    with pytest.raises(ValueError, match="kl_coef must be >= 0, got -1"):
        nft(arguments, kl_coef=-1.0)
    for name in ("nft_beta", "adv_clip_max", "min_weight"):
        with pytest.raises(ValueError, match=f"{name} must be > 0, got nan"):
            nft(arguments, **{name: math.nan})
    with pytest.raises(ValueError, match="adv_clip_max must be > 0"):
        reward_probability(torch.zeros(1), adv_clip_max=0.0)
    with pytest.raises(ValueError, match=r"schedule must be one of .* got 'cosine'"):
        old_policy_decay(0, schedule="cosine")
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        old_policy_decay(-1, schedule="copy")
