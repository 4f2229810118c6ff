"""Losses of single tokens: loops written out, means over batches, worked examples."""

import math

import pytest
import torch
from omni_losses import gspo_loss, overlong_penalty, token_cispo_loss, token_grpo_loss, token_nll_loss, token_weights
from torch.autograd import gradcheck
from torch.nn.functional import cross_entropy

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
COUNTS, ADVANTAGES = MASK.sum(dim=1), torch.tensor([1.0, -0.5, 2.0])


def drawn():
    """Log-probs of the weights being trained, and of those before, far enough apart that some ratios are clipped."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(MASK.shape, generator=generator)
    return (old + 0.3 * torch.randn(MASK.shape, generator=generator)).requires_grad_(), old


def loop(term, weights):
    """The loss one token at a time: `term(log_prob, old, advantage)`."""
    log_prob, old = drawn()
    total = torch.zeros(())
    for i, count in enumerate(COUNTS.tolist()):
        for t in range(count):
            total = total + weights[i] * term(log_prob[i, t], old[i, t], ADVANTAGES[i])
    total.backward()
    return total.item(), log_prob.grad


def clipped(log_prob, old, advantage):
    ratio = (log_prob - old).exp()
    bounded = min(max(ratio.item(), 0.8), 1.28)
    kept = -advantage * ratio
    return kept if kept.item() >= -advantage.item() * bounded else -advantage * torch.tensor(bounded)


def weighed(log_prob, old, advantage):
    return -min((log_prob - old).exp().item(), 1.5) * advantage * log_prob


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
@pytest.mark.parametrize(
    ("term", "loss", "options"),
    [
        (clipped, token_grpo_loss, {"clip_low": 0.2, "clip_high": 0.28}),
        (weighed, token_cispo_loss, {"clip_high": 0.5}),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_a_loop_over_tokens(term, loss, options, mean):
    log_prob, old = drawn()
    weights = token_weights(COUNTS, mean=mean, max_tokens=8)
    out = loss(log_prob, old, ADVANTAGES, MASK, weights=weights, **options)
    out.loss.backward()
    value, gradient = loop(term, weights.tolist())
    assert out.loss.item() == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(log_prob.grad, gradient)


def test_weights_are_the_means_of_the_papers():
    assert token_weights(torch.tensor([4, 2]), mean="sequence").tolist() == [1 / 8, 1 / 4]
    assert token_weights(torch.tensor([4, 2]), mean="token").tolist() == pytest.approx([1 / 6, 1 / 6])
    assert token_weights(torch.tensor([4, 2]), mean="constant", max_tokens=8).tolist() == [1 / 16, 1 / 16]
    assert token_weights(torch.tensor([4, 0]), mean="sequence").tolist() == [1 / 8, 0.0]


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
@pytest.mark.parametrize("loss", [token_grpo_loss, token_cispo_loss, gspo_loss])
def test_batches_add_up_to_the_whole(loss, mean):
    log_prob, old = drawn()
    weights = token_weights(COUNTS, mean=mean, max_tokens=8)
    whole = loss(log_prob, old, ADVANTAGES, MASK, weights=weights).loss
    parts = [loss(log_prob[r], old[r], ADVANTAGES[r], MASK[r], weights=weights[r]).loss for r in ([0], [1, 2])]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("loss", [token_grpo_loss, token_cispo_loss, gspo_loss])
def test_before_any_update_the_gradient_is_the_policy_gradient(loss):
    log_prob, _ = drawn()
    out = loss(log_prob, log_prob.detach(), ADVANTAGES, MASK)
    out.loss.backward()
    assert out.metrics["ratio_max_dev"] == 0
    torch.testing.assert_close(log_prob.grad, -ADVANTAGES[:, None] * MASK / (3 * COUNTS[:, None]))


@pytest.mark.parametrize("loss", [token_grpo_loss, token_cispo_loss])
def test_padding_changes_nothing_whatever_it_holds(loss):
    log_prob, old = drawn()
    junk = torch.where(MASK.bool(), log_prob, math.nan)
    out = loss(junk, torch.where(MASK.bool(), old, math.inf), ADVANTAGES, MASK)
    out.loss.backward()
    torch.testing.assert_close(out.loss, loss(log_prob, old, ADVANTAGES, MASK).loss)
    assert log_prob.grad.isfinite().all()


def test_a_token_beyond_the_bound_keeps_its_gradient_under_cispo_alone():
    for loss, moved in ((token_grpo_loss, False), (token_cispo_loss, True)):
        log_prob = torch.tensor([[2.0]], requires_grad=True)  # a ratio of 7.4
        loss(log_prob, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1)).loss.backward()
        assert bool(log_prob.grad) == moved


def answers():
    """Logits [3, 5, 7] of answers, and their tokens as labels, -100 where there is none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*MASK.shape, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, MASK.shape, generator=generator).where(MASK.bool(), -100)
    return logits.requires_grad_(), labels


def log_probs_of(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def test_the_likelihood_of_all_tokens_is_the_cross_entropy_of_language_models_and_has_its_gradient():
    logits, labels = answers()
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    (gradient,) = torch.autograd.grad(expected, logits)
    out = token_nll_loss(log_probs_of(logits, labels), MASK, weights=token_weights(COUNTS, mean="token"))
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert out.metrics["nll"].item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
def test_the_likelihood_is_weighed_as_other_losses_of_tokens_are_and_its_metric_is_not(mean):
    """At ratio 1 with advantage 1, the policy gradient of an answer is that of its likelihood."""
    log_prob, _ = drawn()
    weights = token_weights(COUNTS, mean=mean, max_tokens=8)
    out = token_nll_loss(log_prob, MASK, weights=weights)
    (gradient,) = torch.autograd.grad(out.loss, log_prob)
    policy = token_grpo_loss(log_prob, log_prob.detach(), torch.ones(3), MASK, weights=weights)
    (expected,) = torch.autograd.grad(policy.loss, log_prob)
    assert torch.equal(gradient, expected)
    chosen = [log_prob[i, :count].sum().item() for i, count in enumerate(COUNTS.tolist())]
    assert out.loss.item() == pytest.approx(-sum(w * c for w, c in zip(weights.tolist(), chosen, strict=True)))
    assert out.metrics["nll"].item() == pytest.approx(-sum(chosen) / 11)
    assert out.metrics["tokens_mean"].item() == pytest.approx(11 / 3)
    parts = [token_nll_loss(log_prob[r], MASK[r], weights=weights[r]).loss for r in ([0], [1, 2])]
    torch.testing.assert_close(sum(parts), out.loss)


def test_the_likelihood_ignores_padding_whatever_it_holds():
    log_prob, _ = drawn()
    junk = torch.where(MASK.bool(), log_prob, torch.tensor([math.nan, math.inf, -math.inf, math.nan, -math.inf]))
    weights = token_weights(COUNTS, mean="token")
    out = token_nll_loss(junk, MASK, weights=weights)
    out.loss.backward()
    assert torch.equal(out.loss, token_nll_loss(log_prob, MASK, weights=weights).loss)
    assert torch.equal(log_prob.grad, -weights[:, None] * MASK)


def test_the_gradient_of_the_likelihood_equals_finite_differences():
    logits, labels = answers()
    weights = token_weights(COUNTS, mean="sequence")
    assert gradcheck(
        lambda x: token_nll_loss(log_probs_of(x, labels), MASK, weights=weights).loss, logits,
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


def test_an_answer_is_punished_as_it_comes_near_its_greatest_length():
    penalty = overlong_penalty(torch.tensor([1, 80, 90, 100]), max_tokens=100, buffer=20)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0]


def test_errors_name_the_argument():
    wide, one = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"weights must be \[N\] = \(2,\), got shape \(3,\)"):
        token_grpo_loss(wide, wide, one, torch.ones(2, 3), weights=torch.zeros(3))
    with pytest.raises(ValueError, match="mask must hold at least one token, got none"):
        token_cispo_loss(wide, wide, one, wide)
    with pytest.raises(ValueError, match=r"log_prob must be \[N, T\] with N >= 1, got shape \(2,\)"):
        token_nll_loss(one, one, weights=one)
    with pytest.raises(ValueError, match=r"mask must have log_prob's shape \(2, 3\), got \(2,\)"):
        token_nll_loss(wide, one, weights=one)
    with pytest.raises(ValueError, match=r"weights must be \[N\] = \(2,\), got shape \(2, 3\)"):
        token_nll_loss(wide, torch.ones(2, 3), weights=wide)
    with pytest.raises(ValueError, match="mask must hold at least one token, got none"):
        token_nll_loss(wide, wide, weights=one)
    with pytest.raises(ValueError, match=r"mean one of .*, got .* 'tokens' and 1"):
        token_weights(one, mean="tokens")
    with pytest.raises(ValueError, match=r"buffer must be from 1 to max_tokens \(8\), got 9"):
        overlong_penalty(one, max_tokens=8, buffer=9)
