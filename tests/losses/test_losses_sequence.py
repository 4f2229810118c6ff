"""GSPO: worked examples, padding, lengths, gradients."""

import math

import pytest
import torch
from omni_losses import gspo_loss
from torch.autograd import gradcheck

torch.set_num_threads(1)


def test_a_worked_batch():
    """Sequence ratios exp(0.2) and exp(-0.1): the first is clipped at 1.1, the second is kept."""
    log_prob = torch.tensor([[0.1, 0.3, 9.0], [-0.1, 9.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    out = gspo_loss(log_prob, torch.zeros(2, 3), torch.tensor([1.0, 2.0]), mask, clip_low=0.2, clip_high=0.1)
    out.loss.backward()
    assert out.loss.item() == pytest.approx((-1.1 - 2 * math.exp(-0.1)) / 2)
    assert log_prob.grad.tolist()[0] == [0.0, 0.0, 0.0]
    assert log_prob.grad.tolist()[1] == pytest.approx([-math.exp(-0.1), 0.0, 0.0])
    ratios = (math.exp(0.2), math.exp(-0.1))
    assert out.metrics["ratio_mean"].item() == pytest.approx(sum(ratios) / 2)
    assert out.metrics["ratio_max_dev"].item() == pytest.approx(ratios[0] - 1)
    assert out.metrics["clip_fraction_high"].item() == 0.5
    assert out.metrics["clip_fraction_low"].item() == 0.0
    assert out.metrics["ppo_kl"].item() == pytest.approx(-0.05)
    assert out.metrics["tokens_mean"].item() == 1.5
    assert not any(value.requires_grad for value in out.metrics.values())


@pytest.mark.parametrize(("ratio", "kept"), [(1 - 2.9e-4, True), (1 - 3.1e-4, False), (1 + 1.0, True)])
def test_the_default_range_is_the_papers_below(ratio, kept):
    log_prob = torch.full((1, 5), math.log(ratio), requires_grad=True)
    gspo_loss(log_prob, torch.zeros(1, 5), torch.tensor([-1.0]), torch.ones(1, 5)).loss.backward()
    assert bool(log_prob.grad.abs().sum() > 0) == kept


@pytest.mark.parametrize(("ratio", "kept"), [(1 + 3.9e-4, True), (1 + 4.1e-4, False)])
def test_and_above(ratio, kept):
    log_prob = torch.full((1, 5), math.log(ratio), requires_grad=True)
    gspo_loss(log_prob, torch.zeros(1, 5), torch.tensor([1.0]), torch.ones(1, 5)).loss.backward()
    assert bool(log_prob.grad.abs().sum() > 0) == kept


def test_before_any_update_each_token_gets_its_share_of_the_advantage():
    log_prob = torch.randn((2, 4), generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[True, True, True, True], [False, True, True, False]])
    advantages = torch.tensor([3.0, -1.0])
    out = gspo_loss(log_prob, log_prob.detach(), advantages, mask)
    out.loss.backward()
    assert log_prob.grad.tolist() == [[-3 / 8] * 4, [0.0, 0.25, 0.25, 0.0]]
    assert out.metrics["ratio_max_dev"] == 0


def test_length_does_not_change_the_ratio():
    """A sequence repeated twice is the same sequence to GSPO; a product of ratios would be squared."""
    generator = torch.Generator().manual_seed(0)
    log_prob, old = (0.1 * torch.randn((3, 4), generator=generator) for _ in range(2))
    advantages, ones = torch.tensor([1.0, -1.0, 2.0]), torch.ones(3, 4)
    once = gspo_loss(log_prob, old, advantages, ones)
    twice = gspo_loss(*(x.repeat(1, 2) for x in (log_prob, old)), advantages, ones.repeat(1, 2))
    torch.testing.assert_close(twice.loss, once.loss)


def test_padding_changes_nothing_whatever_it_holds():
    generator = torch.Generator().manual_seed(0)
    log_prob, old = (0.1 * torch.randn((2, 3), generator=generator) for _ in range(2))
    advantages = torch.tensor([1.0, -1.0])
    plain = gspo_loss(log_prob, old, advantages, torch.ones(2, 3)).loss
    junk = torch.tensor([[math.nan, -math.inf], [math.inf, 7.0]])
    padded = torch.cat([junk, log_prob], dim=1).requires_grad_()
    mask = torch.cat([torch.zeros(2, 2), torch.ones(2, 3)], dim=1)
    loss = gspo_loss(padded, torch.cat([junk, old], dim=1), advantages, mask).loss
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert padded.grad[:, :2].tolist() == [[0.0, 0.0]] * 2
    assert padded.grad.isfinite().all()


def test_a_sequence_without_tokens_has_no_loss():
    log_prob = torch.zeros((2, 3), requires_grad=True)
    out = gspo_loss(log_prob, torch.zeros(2, 3), torch.tensor([4.0, 2.0]), torch.tensor([[0, 0, 0], [1, 1, 0]]))
    out.loss.backward()
    assert out.loss.item() == -1.0  # -2 over both sequences
    assert log_prob.grad[0].tolist() == [0.0] * 3
    assert out.metrics["ratio_mean"] == 1
    assert out.metrics["ratio_max_dev"] == 0


def test_gradient():
    generator = torch.Generator().manual_seed(0)
    log_prob = (0.3 * torch.randn((2, 3), generator=generator, dtype=torch.float64)).requires_grad_()
    advantages, mask = torch.tensor([1.0, -2.0]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    options = {"clip_low": 0.99, "clip_high": 99.0}
    assert gradcheck(
        lambda x: gspo_loss(x, torch.zeros(2, 3), advantages, mask, **options).loss, log_prob,
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


def test_errors_name_the_argument():
    wide, one = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"log_prob must be \[N, T\] with N >= 1, got shape \(2,\)"):
        gspo_loss(one, one, one, one)
    with pytest.raises(ValueError, match=r"mask must have log_prob's shape \(2, 3\), got \(2,\)"):
        gspo_loss(wide, wide, one, one)
    with pytest.raises(ValueError, match=r"advantages must be \[N\] = \(2,\), got shape \(3,\)"):
        gspo_loss(wide, wide, torch.zeros(3), wide)
    with pytest.raises(ValueError, match=r"clip_high must be >= 1e-06, .* got 0"):
        gspo_loss(wide, wide, one, wide, clip_high=0.0)
