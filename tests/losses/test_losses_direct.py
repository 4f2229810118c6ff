"""SRPO: what direct alignment recovers, the direction in which it moves the velocity, the loss by hand."""

import math
from typing import Any

import pytest
import torch
from omni_losses import direct_align, srpo_loss
from torch import Tensor
from torch.autograd import gradcheck

torch.set_num_threads(1)

UP, DOWN = ([0.3, 0.5], [0.4, 0.9]), ([0.9, 0.4], [0.8, 0.0])  # inversion, denoising: sigma, sigma_next


def noised(sigma: list[float], seed: int = 0) -> dict[str, Tensor]:
    """A sample, its noise and what is between them at sigma, in float64."""
    generator = torch.Generator().manual_seed(seed)
    sample, noise = (torch.randn((2, 3, 4), generator=generator, dtype=torch.float64) for _ in range(2))
    level = torch.tensor(sigma, dtype=torch.float64).view(2, 1, 1)
    return {"sample": sample, "noise": noise, "x": (1 - level) * sample + level * noise}


def align(velocity: Tensor, parts: dict[str, Tensor], sigma: list[float], sigma_next: list[float]) -> Tensor:
    return direct_align(velocity, parts["x"], parts["noise"], torch.tensor(sigma), torch.tensor(sigma_next))


@pytest.mark.parametrize(("sigma", "sigma_next"), [UP, DOWN])
def test_with_the_true_velocity_the_sample_comes_back(sigma, sigma_next):
    parts = noised(sigma)
    got = align(parts["noise"] - parts["sample"], parts, sigma, sigma_next)
    torch.testing.assert_close(got, parts["sample"].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("sigma", "sigma_next"), [UP, DOWN])
def test_an_error_of_the_velocity_enters_by_the_share_of_the_step(sigma, sigma_next):
    parts, error = noised(sigma), torch.ones(2, 3, 4)
    got = align(parts["noise"] - parts["sample"] + error, parts, sigma, sigma_next) - parts["sample"]
    shares = [(after - now) / (1 - after) for now, after in zip(sigma, sigma_next, strict=True)]
    torch.testing.assert_close(got.mean(dim=(1, 2)), torch.tensor(shares).double(), rtol=1e-4, atol=1e-4)


def test_its_gradient():
    parts = noised(UP[0])
    assert gradcheck(
        lambda v: align(v, parts, *UP),
        torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_(),
        eps=1e-2,
        atol=1e-3,
        rtol=1e-2,
    )


def test_a_reward_at_the_threshold_is_enough():
    reward, discount = torch.tensor([0.5, 0.75], requires_grad=True), torch.zeros(2, requires_grad=True)
    out = srpo_loss(reward, torch.zeros(2), discount=discount, threshold=0.5)  # denoising unless told otherwise
    out.loss.backward()
    assert out.loss.item() == out.metrics["active_fraction"].item() == 0
    assert reward.grad.tolist() == [0.0, 0.0]
    assert discount.grad is None


@pytest.mark.parametrize(("sigma", "sigma_next", "inversion"), [(*UP, True), (*DOWN, False)])
def test_both_branches_move_the_velocity_the_same_way(sigma, sigma_next, inversion):
    """A denoised sample is x - sigma velocity, so a reward linear in it rises where the velocity falls along it."""
    parts, direction = noised(sigma), torch.randn((3, 4), generator=torch.Generator().manual_seed(7))
    velocity = (parts["noise"] - parts["sample"]).float().requires_grad_()
    recovered = align(velocity, parts, sigma, sigma_next)
    positive = (recovered * direction).flatten(1).mean(dim=1)
    srpo_loss(positive, -positive, discount=0.0, inversion=inversion, threshold=1e6).loss.backward()
    assert (-velocity.grad * direction).sum(dim=(1, 2)).lt(0).all()


def test_what_a_reward_likes_everywhere_cancels_but_for_the_discount():
    bias = torch.tensor([3.0, 5.0], requires_grad=True)  # added to every score, whatever the words
    for inversion in (False, True):
        for discount in (0.25, 0.0):
            bias.grad = None
            out = srpo_loss(bias + 0.1, bias - 0.1, discount=discount, inversion=inversion, threshold=100.0)
            out.loss.backward()
            assert bias.grad.tolist() == pytest.approx([-discount / 2] * 2, abs=1e-7)


@pytest.mark.parametrize(
    ("inversion", "relative"),
    [(False, [1.1 * 0.5 - 0.2, 1.1 * 0.9 - 0.1]), (True, [1.1 * 0.2 - 0.5, 1.1 * 0.1 - 0.9])],
)
def test_the_loss_by_hand(inversion, relative):
    positive, negative = torch.tensor([0.5, 0.9], requires_grad=True), torch.tensor([0.2, 0.1], requires_grad=True)
    out = srpo_loss(positive, negative, discount=0.1, inversion=inversion)
    out.loss.backward()
    losses = [max(0.0, 0.7 - r) for r in relative]
    assert out.loss.item() == pytest.approx(sum(losses) / 2)
    active = [float(loss > 0) / 2 for loss in losses]
    favored, opposed = (negative, positive) if inversion else (positive, negative)
    assert favored.grad.tolist() == pytest.approx([-1.1 * share for share in active])
    assert opposed.grad.tolist() == pytest.approx(active)
    assert {name: value.item() for name, value in out.metrics.items()} == pytest.approx(
        {
            "relative_reward": sum(relative) / 2,
            "positive_reward": 0.7,
            "negative_reward": 0.15,
            "active_fraction": sum(active),
        }
    )
    assert not any(value.requires_grad for value in out.metrics.values())


def test_a_discount_of_each_sample():
    rewards = torch.tensor([0.2, 0.2]), torch.tensor([0.1, 0.1])
    both = srpo_loss(*rewards, discount=torch.tensor([0.0, 0.5])).loss
    alone = [srpo_loss(*(r[:1] for r in rewards), discount=discount).loss for discount in (0.0, 0.5)]
    torch.testing.assert_close(both, sum(alone) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"velocity": torch.zeros(2)}, r"velocity must be \[B, ...\] with B >= 1, got shape \(2,\)"),
        ({"noise": torch.zeros(2, 4)}, r"noise must have velocity's shape \(2, 3\), got \(2, 4\)"),
        ({"sigma": torch.zeros(3)}, r"sigma must be \[B\] = \(2,\), got shape \(3,\)"),
        ({"sigma_next": torch.tensor([0.5, 1.0])}, r"sigma_next must be in \[0, 1\), got \[0.5, 1.0\]"),
        ({"sigma_next": torch.tensor([0.5, math.nan])}, r"sigma_next must be in \[0, 1\), got \[0.5, nan\]"),
    ],
)
def test_wrong_steps_are_named(changes: dict[str, Any], message: str):
    wide, levels = torch.zeros(2, 3), torch.full((2,), 0.5)
    arguments = {"velocity": wide, "x": wide, "noise": wide, "sigma": levels, "sigma_next": levels} | changes
    with pytest.raises(ValueError, match=message):
        direct_align(**arguments)


def test_wrong_rewards_are_named():
    two = torch.zeros(2)
    with pytest.raises(ValueError, match=r"positive_reward must be \[B\] with B >= 1"):
        srpo_loss(torch.zeros(()), two, discount=0.1)
    with pytest.raises(ValueError, match=r"negative_reward must have positive_reward's shape \(2,\), got \(3,\)"):
        srpo_loss(two, torch.zeros(3), discount=0.1)
    with pytest.raises(ValueError, match=r"discount must have positive_reward's shape \(2,\), got \(3,\)"):
        srpo_loss(two, two, discount=torch.zeros(3))
