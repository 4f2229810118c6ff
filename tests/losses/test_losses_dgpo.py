"""DGPO: the released arithmetic in plain numbers, the likelihood that it climbs, and the ratios that stop it."""

import math

import pytest
import torch
from omni_losses import dgpo_loss, velocity_error

torch.set_num_threads(1)

GROUPS = torch.tensor([7, 3, 7, 3, 7, 3])
ADVANTAGES = torch.tensor([1.0, -2.0, -0.5, 0.5, -0.5, 1.5])


def errors(seed=0):
    """Velocities of three policies, and their flow-matching errors, of six samples in two groups that share noise."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn((6, 3, 4), generator=generator)
    noise = torch.randn((2, 3, 4), generator=generator)[(GROUPS == 7).long()]
    velocities = [(noise - x0 + 0.3 * torch.randn((6, 3, 4), generator=generator)).requires_grad_() for _ in range(3)]
    return velocities, [velocity_error(v, x0, noise) for v in velocities], noise - x0


def by_hand(velocities, target, *, beta, clip):
    """The gradient in plain loops of float64: sigmoid(s) A_i d error_i / B, error_i a mean over 12 elements."""
    now, ref, old = (((v.detach() - target).double() ** 2).flatten(1).mean(dim=1).tolist() for v in velocities)
    gradient, loss = torch.zeros_like(target, dtype=torch.float64), 0.0
    for i in range(6):
        members = [j for j in range(6) if GROUPS[j] == GROUPS[i]]
        score = sum(ADVANTAGES[j].item() * beta * (now[j] - ref[j]) / len(members) for j in members)
        weight, advantage = 1 / (1 + math.exp(-score)), ADVANTAGES[i].item()
        loss += weight * advantage * now[i] / 6
        ratio = math.exp(old[i] - now[i])
        if not (ratio > 1 + clip if advantage > 0 else ratio < 1 - clip):
            gradient[i] = weight * advantage * 2 * (velocities[0].detach() - target)[i].double() / 12 / 6
    return loss, gradient


@pytest.mark.parametrize("clip", [10.0, 1e-2, 1e-5])
@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_loss_and_gradient_are_those_of_the_released_arithmetic(beta, clip):
    velocities, (now, ref, old), target = errors()
    out = dgpo_loss(now, ref, old, ADVANTAGES, GROUPS, dgpo_beta=beta, clip_range=clip)
    out.loss.backward()
    loss, gradient = by_hand(velocities, target, beta=beta, clip=clip)
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(velocities[0].grad.double(), gradient, rtol=1e-4, atol=1e-7)
    assert velocities[1].grad is velocities[2].grad is None
    stopped = gradient.flatten(1).abs().sum(dim=1) == 0
    assert stopped.any() == (clip < 1)
    assert not stopped.all()


def test_it_climbs_the_likelihood_that_the_better_part_of_a_group_is_preferred():
    """-log sigmoid(R+ - R-), R a sum over a part of |A_i| beta (ref_i - error_i) / |G|, by autograd alone."""
    velocities, (now, ref, old), _ = errors()
    beta, size = 4.0, 3
    reward = beta / size * ADVANTAGES.abs() * (ref - now)
    better, worse = ((reward * (sign * ADVANTAGES > 0)) for sign in (1, -1))
    losses = [-torch.nn.functional.logsigmoid((better - worse)[group == GROUPS].sum()) for group in (3, 7)]
    (expected,) = torch.autograd.grad(sum(losses), velocities[0], retain_graph=True)
    dgpo_loss(now, ref, old, ADVANTAGES, GROUPS, dgpo_beta=beta, clip_range=10.0).loss.backward()
    torch.testing.assert_close(velocities[0].grad * 6 * beta / size, expected, rtol=1e-4, atol=1e-6)


def test_a_group_weighs_a_half_at_the_reference_and_as_much_wherever_its_samples_are():
    now = errors()[1][0]
    out = dgpo_loss(now, now, now, ADVANTAGES, GROUPS, dgpo_beta=100.0)
    assert out.metrics["group_weight"] == 0.5
    assert out.metrics["ratio_max_dev"] == 0
    torch.testing.assert_close(out.loss, (0.5 * ADVANTAGES * now).mean())
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    ref = now.detach() + torch.linspace(-0.01, 0.01, 6)
    shuffled = (each[order] for each in (now, ref, now, ADVANTAGES, GROUPS))
    assert dgpo_loss(*shuffled, dgpo_beta=50.0).loss.item() == pytest.approx(
        dgpo_loss(now, ref, now, ADVANTAGES, GROUPS, dgpo_beta=50.0).loss.item(), rel=1e-5
    )
    large = dgpo_loss(now, now, now, 100 * ADVANTAGES, GROUPS, dgpo_beta=1.0, adv_clip_max=2.0).loss
    torch.testing.assert_close(large, (0.5 * 2 * ADVANTAGES.sign() * now).mean())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dgpo_beta": 0.0}, "dgpo_beta must be > 0, got 0.0"),
        ({"groups": GROUPS[:3]}, r"groups must have error's shape \(6,\), got \(3,\)"),
        ({"advantages": ADVANTAGES[None]}, r"advantages must have error's shape \(6,\), got \(1, 6\)"),
        ({"clip_range": 1e-9}, "clip_range must be >= 1e-06"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    now = torch.ones(6)
    given = {"ref_error": now, "old_error": now, "advantages": ADVANTAGES, "groups": GROUPS, "dgpo_beta": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        dgpo_loss(now, **given)
