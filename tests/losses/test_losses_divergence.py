"""Distances to a reference and a teacher: exact divergences of torch.distributions, closed forms, gradients."""

import math

import pytest
import torch
from omni_losses import distill_kl_loss, distill_velocity_loss, gaussian_kl, k3_kl, token_divergence, velocity_kl
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


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return kl_divergence(Categorical(logits=p, validate_args=False), Categorical(logits=q, validate_args=False))


def jsd(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    mean = Categorical(probs=(p.softmax(-1) + q.softmax(-1)) / 2).logits
    return (kl(p, mean) + kl(q, mean)) / 2


EXACT = {"reverse": kl, "forward": lambda p, q: kl(q, p), "jsd": jsd}
DIVERGENCES = pytest.mark.parametrize("divergence", EXACT)


@DIVERGENCES
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 50)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_token_divergences_are_those_of_categorical_distributions(divergence, shape, scale):
    student, teacher = scale * draw(*shape), scale * draw(*shape, seed=1)
    found = token_divergence(student.log_softmax(-1), teacher.log_softmax(-1), divergence=divergence)
    assert found.shape == shape[:-1]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), EXACT[divergence](student, teacher), rtol=1e-5, atol=1e-6)


def test_token_divergences_by_hand():
    """p = (1/2, 1/2) and q = (1/4, 3/4): the mixture is (3/8, 5/8)."""
    student, teacher = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    expected = {
        "reverse": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        "forward": 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2),
        "jsd": (math.log(4 / 3) + math.log(4 / 5)) / 4 + (math.log(2 / 3) / 4 + 3 * math.log(6 / 5) / 4) / 2,
    }
    for divergence, value in expected.items():
        assert token_divergence(student, teacher, divergence=divergence).item() == pytest.approx(value, rel=1e-5)


@DIVERGENCES
def test_equal_distributions_diverge_by_exactly_nothing(divergence):
    logits = draw(4, 9).float()
    logits[:, 2] = -math.inf
    logits = logits.log_softmax(-1)
    assert token_divergence(logits, logits, divergence=divergence).tolist() == [0.0] * 4


@DIVERGENCES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_suppressed_tokens_count_nothing_and_get_no_gradient(divergence, dtype):
    """The other tokens have the divergence and gradient of a vocabulary without them, of log-probs and of logits."""
    student, teacher = draw(3, 6).to(dtype), draw(3, 6, seed=1).to(dtype)
    suppressed, others = [1, 4], [0, 2, 3, 5]
    results = []
    for columns in (range(6), others):
        logits = student[:, columns].requires_grad_()
        banned = torch.tensor([i in suppressed for i in columns])
        log_probs, teacher_log_probs = (
            x.float().masked_fill(banned, -math.inf).log_softmax(-1) for x in (logits, teacher[:, columns])
        )
        log_probs.retain_grad()
        found = token_divergence(log_probs, teacher_log_probs, divergence=divergence)
        found.sum().backward()
        results.append((found, log_probs.grad, logits.grad))
    (whole, whole_grad, whole_logits), (part, part_grad, part_logits) = results
    torch.testing.assert_close(whole, part)
    torch.testing.assert_close(whole_grad[:, others], part_grad)
    torch.testing.assert_close(whole_logits[:, others], part_logits)
    assert whole_grad[:, suppressed].abs().max() == whole_logits[:, suppressed].abs().max() == 0


def test_tokens_that_only_one_excludes():
    """Disjoint halves: a KL is infinite where its second distribution excludes a token, jsd is half of its most."""
    left, both = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log()
    assert token_divergence(left, both, divergence="reverse").item() == pytest.approx(math.log(2))
    assert token_divergence(both, left, divergence="forward").item() == pytest.approx(math.log(2))
    assert token_divergence(both, left, divergence="reverse").item() == math.inf
    assert token_divergence(left, both, divergence="forward").item() == math.inf
    assert token_divergence(left, left.flip(0), divergence="jsd").item() == pytest.approx(math.log(2))
    expected = (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2
    for student, teacher in ((left, both), (both, left)):
        log_probs = student.clone().requires_grad_()
        found = token_divergence(log_probs, teacher, divergence="jsd")
        found.backward()
        assert found.item() == pytest.approx(expected)
        assert log_probs.grad.isfinite().all()


@DIVERGENCES
def test_probabilities_too_small_for_float32_are_not_nan(divergence):
    """exp(-200) is 0 in float32, where 0 * inf would be NaN; a NaN of the net itself is not hidden."""
    log_probs = torch.tensor([0.0, -200.0, -1e30], requires_grad=True)
    found = token_divergence(log_probs, torch.tensor([0.0, -math.inf, -math.inf]), divergence=divergence)
    found.backward()
    assert found.item() == 0
    assert log_probs.grad.isfinite().all()
    broken = torch.tensor([math.nan, -1.0])
    assert token_divergence(broken, torch.tensor([-1.0, -1.0]), divergence=divergence).isnan()


@DIVERGENCES
def test_gradients_of_logits_are_the_closed_ones(divergence):
    logits, teacher_logits = draw(3, 7).requires_grad_(), draw(3, 7, seed=1).requires_grad_()
    found = token_divergence(logits.log_softmax(-1), teacher_logits.log_softmax(-1), divergence=divergence)
    found.sum().backward()
    p, q = logits.detach().softmax(-1), teacher_logits.detach().softmax(-1)
    to_mean = (2 * p / (p + q)).log()
    expected = {
        "reverse": p * ((p / q).log() - (p * (p / q).log()).sum(-1, keepdim=True)),
        "forward": p - q,
        "jsd": p * (to_mean - (p * to_mean).sum(-1, keepdim=True)) / 2,
    }[divergence]
    torch.testing.assert_close(logits.grad, expected, rtol=1e-4, atol=1e-6)
    assert teacher_logits.grad is None


@DIVERGENCES
def test_gradients_of_log_probs_equal_finite_differences(divergence):
    teacher = draw(2, 5, seed=1).log_softmax(-1)
    assert gradcheck(
        lambda x: token_divergence(x, teacher, divergence=divergence), draw(2, 5).log_softmax(-1).requires_grad_(),
        eps=1e-2, atol=1e-3, rtol=1e-2,
    )  # fmt: skip


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
    with pytest.raises(ValueError, match=r"log_probs must be \[..., V\] with V >= 1, got shape \(\)"):
        token_divergence(torch.zeros(()), torch.zeros(()), divergence="reverse")
    with pytest.raises(ValueError, match=r"log_probs must be \[..., V\] with V >= 1, got shape \(2, 0\)"):
        token_divergence(torch.zeros(2, 0), torch.zeros(2, 0), divergence="reverse")
    with pytest.raises(ValueError, match=r"teacher_log_probs must have log_probs's shape \(2, 3\), got \(3,\)"):
        token_divergence(wide, torch.zeros(3), divergence="jsd")
    with pytest.raises(ValueError, match=r"divergence must be one of .*'jsd'.*, got 'kl'"):
        token_divergence(wide, wide, divergence="kl")
