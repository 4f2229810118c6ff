"""Pairs, Diffusion-DPO and DPO of answers: worked examples, invariances, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import best_worst_pairs, diffusion_dpo_loss, sequence_dpo_loss
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import Categorical
from torch.nn.functional import binary_cross_entropy_with_logits

torch.set_num_threads(1)


def errors(pairs: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(pairs, generator=generator, dtype=torch.float64) for _ in range(4)]


def test_a_worked_pair():
    """The policy gained 0.03 on the reference at the winner and lost 0.01 at the loser: margin 50 * 0.04."""
    numbers = (0.47, 0.61, 0.50, 0.60)
    out = diffusion_dpo_loss(*(torch.tensor([x]) for x in numbers), dpo_beta=100.0)
    assert out.loss.item() == pytest.approx(math.log1p(math.exp(-2.0)), rel=1e-5)
    metrics = {name: value.item() for name, value in out.metrics.items()}
    assert metrics == pytest.approx(
        {"accuracy": 1.0, "chosen_reward": 1.5, "rejected_reward": -0.5, "margin": 2.0}, rel=1e-4
    )


def test_metrics_are_means_over_pairs():
    """Margins 0.5 and -1.5 at dpo_beta 2: the first pair is ordered as preferred."""
    win, lose = torch.tensor([0.25, 1.0], requires_grad=True), torch.tensor([0.75, 0.5])
    out = diffusion_dpo_loss(win, lose, torch.tensor([0.5, 0.5]), torch.tensor([0.5, 1.5]), dpo_beta=2.0)
    assert not any(value.requires_grad for value in out.metrics.values())
    assert {name: value.item() for name, value in out.metrics.items()} == {
        "accuracy": 0.5,
        "chosen_reward": (0.25 - 0.5) / 2,
        "rejected_reward": (-0.25 + 1.0) / 2,
        "margin": (0.5 - 1.5) / 2,
    }


def test_at_the_reference_it_is_log_two_and_moves_both_errors_alike():
    win, lose = (x.requires_grad_() for x in errors()[:2])
    out = diffusion_dpo_loss(win, lose, win.detach(), lose.detach(), dpo_beta=2000.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(win.grad, torch.full_like(win, 2000 / 2 / 2 / 4))  # down: a smaller error at the winner
    torch.testing.assert_close(lose.grad, -win.grad)
    assert out.metrics["accuracy"] == 0  # a tie is not the right order


def test_it_is_logistic_regression_on_the_margin():
    win, lose, ref_win, ref_lose = errors()
    margin = 25.0 / 2 * ((ref_win - win) - (ref_lose - lose))
    expected = binary_cross_entropy_with_logits(margin, torch.ones_like(margin))
    torch.testing.assert_close(
        diffusion_dpo_loss(win, lose, ref_win, ref_lose, dpo_beta=25.0).loss.double(), expected, rtol=1e-5, atol=1e-6
    )


def test_gradient():
    win, lose, ref_win, ref_lose = errors()
    assert gradcheck(
        lambda w, x: diffusion_dpo_loss(w, x, ref_win, ref_lose, dpo_beta=3.0).loss,
        (win.requires_grad_(), lose.requires_grad_()), eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


def test_a_large_margin_neither_overflows_nor_vanishes():
    win = torch.tensor([0.0, 1.0], requires_grad=True)
    zero = torch.zeros(2)
    out = diffusion_dpo_loss(win, torch.tensor([1.0, 0.0]), zero, zero, dpo_beta=5000.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(2500 / 2)
    assert win.grad.tolist() == pytest.approx([0.0, 1250.0])


def test_common_offsets_cancel_and_order_does_not_matter():
    win, lose, ref_win, ref_lose = errors()
    plain = diffusion_dpo_loss(win, lose, ref_win, ref_lose, dpo_beta=10.0).loss
    shifted = diffusion_dpo_loss(win + 0.3, lose + 0.3, ref_win, ref_lose, dpo_beta=10.0).loss
    torch.testing.assert_close(shifted, plain)
    flipped = diffusion_dpo_loss(*(x.flip(0) for x in (win, lose, ref_win, ref_lose)), dpo_beta=10.0).loss
    torch.testing.assert_close(flipped, plain)


def test_a_worked_pair_of_answers():
    """The preferred answer gained 3 nats on the reference and the other one lost 1: margin 0.5 * 4."""
    out = sequence_dpo_loss(*(torch.tensor([x]) for x in (-20.0, -31.0, -23.0, -30.0)), dpo_beta=0.5)
    assert out.loss.item() == pytest.approx(math.log1p(math.exp(-2.0)), rel=1e-6)
    metrics = {name: value.item() for name, value in out.metrics.items()}
    assert metrics == {"accuracy": 1.0, "chosen_reward": 1.5, "rejected_reward": -0.5, "margin": 2.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [1, 2, 5, 8, 64])
def test_answers_of_the_reference_itself_lose_exactly_log_two(pairs: int, dtype: torch.dtype):
    win, lose = ((-300 * x).to(dtype).requires_grad_() for x in errors(pairs)[:2])
    out = sequence_dpo_loss(win, lose, win.detach(), lose.detach(), dpo_beta=0.1)
    out.loss.backward()
    assert torch.equal(out.loss, torch.tensor(2.0).log())
    assert out.metrics["margin"] == out.metrics["accuracy"] == 0
    expected = torch.full((pairs,), 0.1 / 2 / pairs, dtype=dtype)  # up: a more probable preferred answer
    torch.testing.assert_close(-win.grad, expected)
    torch.testing.assert_close(lose.grad, expected)


def test_it_is_the_bradley_terry_likelihood_of_implicit_rewards_of_token_distributions():
    """Answers of 6 tokens by categorical distributions: p(win over lose) = e^r_w / (e^r_w + e^r_l)."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        Categorical(logits=torch.randn(3, 6, 11, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    tokens = [torch.randint(11, (3, 6), generator=generator) for _ in range(2)]
    win, lose = (policy.log_prob(x).sum(dim=1) for x in tokens)
    ref_win, ref_lose = (reference.log_prob(x).sum(dim=1) for x in tokens)
    win_score, lose_score = (((p - r) * 0.25).exp() for p, r in ((win, ref_win), (lose, ref_lose)))
    expected = -(win_score / (win_score + lose_score)).log().mean()
    out = sequence_dpo_loss(win, lose, ref_win, ref_lose, dpo_beta=0.25)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_gradient_of_answers_is_that_of_the_paper_and_of_finite_differences():
    """Eq. 7's gradient weighs each pair by dpo_beta sigmoid(-margin)."""
    win, lose, ref_win, ref_lose = (-4 * x for x in errors())
    win, lose = win.requires_grad_(), lose.requires_grad_()
    sequence_dpo_loss(win, lose, ref_win, ref_lose, dpo_beta=0.5).loss.backward()
    margin = 0.5 * ((win - ref_win) - (lose - ref_lose))
    expected = (0.5 / (1 + margin.exp()) / 4).detach()
    torch.testing.assert_close(-win.grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lose.grad, expected, rtol=1e-5, atol=1e-7)
    assert gradcheck(
        lambda w, x: sequence_dpo_loss(w, x, ref_win, ref_lose, dpo_beta=0.5).loss, (win, lose),
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


def test_pairs_of_a_worked_batch():
    nan = math.nan
    rewards = torch.tensor([1.0, 5.0, nan, 2.0, 7.0, 7.0, 3.0, nan, nan, 4.0, 9.0, 5.0])
    groups = torch.tensor([4, 9, 4, 4, 2, 2, 8, 8, 6, 9, 9, 4])
    assert best_worst_pairs(rewards, groups) == [(11, 0), (10, 9)]  # 2 ties, 8 has one score, 6 has none
    assert best_worst_pairs(torch.tensor([nan, 1.0, 2.0]), torch.tensor([0, 0, 0])) == [(2, 1)]


def test_of_equal_rewards_the_first_sample_is_taken():
    assert best_worst_pairs(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.long)) == [(0, 1)]


def test_nothing_to_pair():
    assert best_worst_pairs(torch.tensor([]), torch.tensor([], dtype=torch.long)) == []
    assert best_worst_pairs(torch.tensor([math.nan] * 3), torch.tensor([0, 0, 0])) == []


samples = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 3)), min_size=1, max_size=16)


@settings(deadline=None)
@given(samples, st.randoms(use_true_random=False))
def test_pairs_are_extremes_of_their_groups_in_any_order(rows, random):
    rewards, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    pairs = best_worst_pairs(rewards / 8, groups)
    for best, worst in pairs:
        members = rewards[groups == groups[best]]
        assert groups[best] == groups[worst]
        assert (rewards[best], rewards[worst]) == (members.max(), members.min())
    varied = {int(g) for g in groups if rewards[groups == g].max() > rewards[groups == g].min()}
    assert {int(groups[best]) for best, _ in pairs} == varied
    order = random.sample(range(len(rows)), len(rows))
    again = [(order[best], order[worst]) for best, worst in best_worst_pairs(rewards[order] / 8, groups[order])]
    values, values_again = (
        sorted((int(groups[b]), int(rewards[b]), int(rewards[w])) for b, w in found) for found in (pairs, again)
    )
    assert values == values_again


def test_errors_name_the_argument():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"win_error must be \[B\] with B >= 1, got shape \(0,\)"):
        diffusion_dpo_loss(*[torch.zeros(0)] * 4, dpo_beta=1.0)
    with pytest.raises(ValueError, match=r"ref_lose_error must have win_error's shape \(2,\), got \(1,\)"):
        diffusion_dpo_loss(two, two, two, one, dpo_beta=1.0)
    with pytest.raises(ValueError, match="dpo_beta must be > 0, got 0"):
        diffusion_dpo_loss(two, two, two, two, dpo_beta=0.0)
    with pytest.raises(ValueError, match=r"win must be \[B\] with B >= 1, got shape \(2, 1\)"):
        sequence_dpo_loss(*[two[:, None]] * 4, dpo_beta=0.1)
    with pytest.raises(ValueError, match=r"ref_win must have win's shape \(2,\), got \(1,\)"):
        sequence_dpo_loss(two, two, one, two, dpo_beta=0.1)
    with pytest.raises(ValueError, match="dpo_beta must be > 0, got -1"):
        sequence_dpo_loss(two, two, two, two, dpo_beta=-1.0)
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        best_worst_pairs(two, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="groups must hold integers"):
        best_worst_pairs(two, two)
    with pytest.raises(ValueError, match="got 1 infinite"):
        best_worst_pairs(torch.tensor([0.0, math.inf]), torch.zeros(2, dtype=torch.long))
