"""Single steps: closed forms, torch.distributions, diffusers, and what is refused."""

import math
from collections.abc import Callable

import numpy as np
import omni_sched.steps
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import (
    StreamStep,
    Transition,
    cps_step,
    dance_step,
    euler_step,
    exponential_shift_sigmas,
    linear_sigmas,
    ode_step,
    sde_step,
    shift_sigmas,
)
from torch import Tensor

RULES = pytest.mark.parametrize("step", [sde_step, cps_step, dance_step])
GAUSSIAN_RULES = pytest.mark.parametrize("step", [sde_step, dance_step])
PAIRS = pytest.mark.parametrize(("sigma", "sigma_next"), [(0.9, 0.75), (0.5, 0.4375), (0.13, 0.02)])
Step = Callable[..., Transition]


def tensors(count: int, shape: tuple[int, ...] = (3, 4, 5, 6), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def paper_moments(
    rule: Step, velocity: Tensor, x: Tensor, sigma: float, sigma_next: float, eta: float
) -> tuple[Tensor, float]:
    """(mean, std) in float64, each rule as its own paper writes it."""
    velocity, x, dt = velocity.double(), x.double(), sigma_next - sigma
    data, noise = x - sigma * velocity, x + (1 - sigma) * velocity
    if rule is cps_step:
        std = sigma_next * math.sin(eta * math.pi / 2)
        return (1 - sigma_next) * data + math.sqrt(sigma_next**2 - std**2) * noise, std
    if rule is dance_step:
        score = -(x - (1 - sigma) * data) / sigma**2
        return x + dt * velocity - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt)
    diffusion = eta * math.sqrt(sigma / (1 - sigma))
    half = diffusion**2 / (2 * sigma)
    return x * (1 + half * dt) + velocity * (1 + half * (1 - sigma)) * dt, diffusion * math.sqrt(-dt)


@RULES
@PAIRS
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_mean_and_std_are_the_papers(step: Step, sigma: float, sigma_next: float, eta: float) -> None:
    velocity, x, noise = tensors(3)
    mean, std = paper_moments(step, velocity, x, sigma, sigma_next, eta)
    out = step(velocity, x, sigma, sigma_next, noise_level=eta, noise=noise)
    torch.testing.assert_close(out.mean.double(), mean, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out.std.double(), torch.full((3,), std, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(out.x_next.double(), mean + std * noise, rtol=1e-5, atol=2e-6)


def test_euler_follows_a_straight_line_to_the_data() -> None:
    data, noise = tensors(2)
    x = 0.75 * noise + 0.25 * data
    torch.testing.assert_close(euler_step(noise - data, x, 0.75, 0.25), 0.25 * noise + 0.75 * data)
    torch.testing.assert_close(euler_step(noise - data, x, 0.75, 0.0), data)


@pytest.mark.parametrize("mu", [None, 0.8])
def test_zero_noise_trajectories_equal_diffusers_bit_for_bit(mu: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=mu is not None)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10), mu=mu)
    linear = linear_sigmas(10)
    sigmas = shift_sigmas(linear, 3.0) if mu is None else exponential_shift_sigmas(linear, mu)
    x, noise = tensors(2)
    theirs, ours = x, dict.fromkeys((sde_step, cps_step, dance_step), x)
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = torch.tanh(theirs + i)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        for step, here in ours.items():
            ours[step] = step(velocity, here, sigmas[i], sigmas[i + 1], noise_level=0.0, noise=noise).x_next
            assert torch.equal(ours[step], theirs)


@RULES
def test_without_noise_there_is_no_density(step: Step) -> None:
    velocity, x, noise = tensors(3)
    out = step(velocity, x, 0.6, 0.5, noise_level=0.0, noise=noise)
    assert torch.equal(out.x_next, euler_step(velocity, x, 0.6, 0.5))
    assert torch.equal(out.std, torch.zeros(3))
    assert out.log_prob.isnan().tolist() == [True] * 3


@RULES
def test_small_noise_tends_to_euler(step: Step) -> None:
    velocity, x, noise = tensors(3)
    euler = euler_step(velocity, x, 0.6, 0.5)
    gaps = [(step(velocity, x, 0.6, 0.5, noise_level=e, noise=noise).x_next - euler).norm() for e in (0.1, 0.01)]
    assert gaps[1] < 0.2 * gaps[0]


LEVELS: list[tuple[float | Tensor, float | Tensor]] = [
    (1.0, 0.9),
    (torch.tensor(0.7), torch.tensor(0.55)),
    (torch.tensor([1.0, 0.5, 0.2]), torch.tensor([0.9, 0.4, 0.1])),
    (torch.tensor([0.9, 0.5, 0.2]), 0.1),
]


@RULES
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_a_sampled_step_returns_its_log_prob_bit_for_bit(
    step: Step, sigma: float | Tensor, sigma_next: float | Tensor, dtype: torch.dtype
) -> None:
    velocity, x, noise = (tensor.to(dtype) for tensor in tensors(3))
    drawn = step(velocity, x, sigma, sigma_next, noise_level=0.7, noise=noise)
    scored = step(velocity, x, sigma, sigma_next, noise_level=0.7, x_next=drawn.x_next)
    for name in ("x_next", "mean", "std", "log_prob"):
        assert torch.equal(getattr(drawn, name), getattr(scored, name))
        assert getattr(drawn, name).dtype == torch.float32


@RULES
def test_scalar_and_vector_levels_agree_bit_for_bit(step: Step) -> None:
    velocity, x, noise = tensors(3)
    forms = [(0.7, 0.6), (torch.tensor(0.7), torch.tensor(0.6)), (torch.full((3,), 0.7), torch.full((3,), 0.6))]
    first, *others = (step(velocity, x, *form, noise_level=0.5, noise=noise) for form in forms)
    for other in others:
        assert torch.equal(first.x_next, other.x_next)
        assert torch.equal(first.log_prob, other.log_prob)


@RULES
def test_each_sample_has_its_own_level(step: Step) -> None:
    velocity, x, noise = tensors(3)
    sigma, sigma_next = torch.tensor([1.0, 0.5, 0.2]), torch.tensor([0.8, 0.3, 0.1])
    together = step(velocity, x, sigma, sigma_next, noise_level=0.6, noise=noise)
    for b in range(3):
        row = slice(b, b + 1)
        alone = step(velocity[row], x[row], sigma[b], sigma_next[b], noise_level=0.6, noise=noise[row])
        torch.testing.assert_close(together.x_next[row], alone.x_next)
        torch.testing.assert_close(together.std[row], alone.std)
        torch.testing.assert_close(together.log_prob[row], alone.log_prob)


@GAUSSIAN_RULES
@PAIRS
def test_log_prob_times_elements_is_the_normal_log_density(step: Step, sigma: float, sigma_next: float) -> None:
    velocity, x, x_next = tensors(3)
    out = step(velocity, x, sigma, sigma_next, noise_level=0.7, x_next=x_next)
    normal = torch.distributions.Normal(out.mean.double(), out.std.double().view(-1, 1, 1, 1))
    expected = normal.log_prob(x_next.double()).flatten(1).sum(1)
    torch.testing.assert_close(out.log_prob.double() * x[0].numel(), expected, rtol=1e-5, atol=0)


def test_cps_log_prob_is_minus_the_mean_squared_distance() -> None:
    velocity, x, x_next = tensors(3)
    out = cps_step(velocity, x, 0.5, 0.4, noise_level=0.7, x_next=x_next)
    expected = torch.stack([-((a - b) ** 2).mean() for a, b in zip(x_next, out.mean, strict=True)])
    torch.testing.assert_close(out.log_prob, expected)
    at_mean = cps_step(velocity, x, 0.5, 0.4, noise_level=0.7, x_next=out.mean)
    assert torch.equal(at_mean.log_prob, torch.zeros(3))


@RULES
def test_gradient_flows_through_the_mean_only(step: Step) -> None:
    velocity, x, noise = tensors(3)
    velocity.requires_grad_()
    out = step(velocity, x, 0.5, 0.4, noise_level=0.7, noise=noise)
    assert not out.x_next.requires_grad
    (grad,) = torch.autograd.grad(out.log_prob.sum(), velocity, retain_graph=True)
    # d log_prob / d mean by hand, then through the mean alone.
    weight = 1.0 if step is cps_step else 1 / (2 * out.std.view(-1, 1, 1, 1) ** 2)
    by_hand = 2 * weight * (out.x_next - out.mean.detach()) / x[0].numel()
    (expected,) = torch.autograd.grad(out.mean, velocity, by_hand)
    torch.testing.assert_close(grad, expected)
    assert grad.abs().max() > 0


@RULES
def test_scoring_sends_no_gradient_into_x_next(step: Step) -> None:
    velocity, x, x_next = tensors(3)
    x_next.requires_grad_()
    out = step(velocity, x, 0.5, 0.4, noise_level=0.7, x_next=x_next)
    assert not out.x_next.requires_grad
    assert not out.log_prob.requires_grad


@RULES
def test_on_policy_score_has_zero_mean_gradient(step: Step) -> None:
    """E[d log_prob / d velocity] = 0 under the sampling policy, the identity policy gradients rest on."""
    velocity = torch.full((1, 1), 0.3).expand(10000, 1).clone().requires_grad_()
    x, noise = torch.full((10000, 1), 0.8), tensors(1, (10000, 1))[0]
    out = step(velocity, x, 0.5, 0.4, noise_level=0.7, noise=noise)
    (grad,) = torch.autograd.grad(out.log_prob.sum(), velocity)
    assert grad.mean().abs() < 4 * grad.std() / math.sqrt(10000)


@settings(max_examples=50, deadline=None)
@given(num_steps=st.integers(2, 100), shift=st.floats(0.5, 12), eta=st.floats(0.05, 2))
def test_first_sde_step_has_std_noise_level_for_every_schedule(num_steps: int, shift: float, eta: float) -> None:
    velocity, x, noise = tensors(3, (2, 3))
    sigmas = shift_sigmas(linear_sigmas(num_steps), shift)
    implicit = sde_step(velocity, x, 1.0, sigmas[1], noise_level=eta, noise=noise)
    explicit = sde_step(velocity, x, 1.0, sigmas[1], noise_level=eta, noise=noise, sigma_max=sigmas[1])
    torch.testing.assert_close(implicit.std, torch.full((2,), eta), rtol=1e-6, atol=0)
    assert torch.equal(implicit.x_next, explicit.x_next)


@pytest.mark.parametrize("num_steps", [20, 50])
def test_unipc_flow_schedules_that_start_just_below_one_are_guarded(num_steps: int) -> None:
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(num_steps)
    sigma, sigma_next = scheduler.sigmas[0], scheduler.sigmas[1]
    assert sigma < 1  # a test for exactly 1 would not see it
    velocity, x, noise = tensors(3, (2, 3))
    out = sde_step(velocity, x, sigma, sigma_next, noise_level=0.7, noise=noise)
    torch.testing.assert_close(out.std, torch.full((2,), 0.7), rtol=1e-4, atol=0)


def test_sigma_max_acts_near_one_only() -> None:
    velocity, x, noise = tensors(3)
    plain = sde_step(velocity, x, 0.95, 0.9, noise_level=0.7, noise=noise)
    capped = sde_step(velocity, x, 0.95, 0.9, noise_level=0.7, noise=noise, sigma_max=0.5)
    assert torch.equal(plain.x_next, capped.x_next)
    start = sde_step(velocity, x, 1.0, 0.9, noise_level=0.7, noise=noise, sigma_max=0.5)
    torch.testing.assert_close(start.std, torch.full((3,), 0.7 * math.sqrt(1 / 0.5 * 0.1)))


def test_within_a_thousandth_of_one_is_near_one() -> None:
    velocity, x, noise = tensors(3)
    for sigma, capped in ((1 - 0.9e-3, True), (1 - 1.1e-3, False)):
        out = sde_step(velocity, x, sigma, 0.9, noise_level=0.7, noise=noise)
        level = 0.9 if capped else sigma
        expected = 0.7 * math.sqrt(sigma / (1 - level) * (sigma - 0.9))
        torch.testing.assert_close(out.std, torch.full((3,), expected), rtol=1e-3, atol=0)


@PAIRS
def test_sde_with_its_diffusion_equal_to_eta_is_dance(sigma: float, sigma_next: float) -> None:
    velocity, x, x_next = tensors(3)
    eta = 0.3
    level = eta / math.sqrt(sigma / (1 - sigma))
    sde = sde_step(velocity, x, sigma, sigma_next, noise_level=level, x_next=x_next)
    dance = dance_step(velocity, x, sigma, sigma_next, noise_level=eta, x_next=x_next)
    torch.testing.assert_close(sde.mean, dance.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sde.std, dance.std)
    torch.testing.assert_close(sde.log_prob, dance.log_prob, rtol=1e-4, atol=1e-4)


def coefficients(step: Step, sigma: float, sigma_next: float, eta: float) -> tuple[float, float]:
    """How much data, and how much noise in total, x_next holds when the velocity is exact."""
    unit, zero = torch.ones(1, 1), torch.zeros(1, 1)
    of_data = step(-unit, (1 - sigma) * unit, sigma, sigma_next, noise_level=eta, noise=zero).mean
    of_noise = step(unit, sigma * unit, sigma, sigma_next, noise_level=eta, noise=zero)
    return of_data.item(), math.hypot(of_noise.mean.item(), of_noise.std.item())


@PAIRS
@pytest.mark.parametrize("eta", [0.2, 0.7, 1.0])
def test_cps_keeps_both_coefficients_and_the_sdes_overshoot_the_noise(
    sigma: float, sigma_next: float, eta: float
) -> None:
    assert coefficients(cps_step, sigma, sigma_next, eta) == pytest.approx((1 - sigma_next, sigma_next), rel=1e-5)
    for step in (sde_step, dance_step):
        data, noise = coefficients(step, sigma, sigma_next, eta)
        assert data == pytest.approx(1 - sigma_next, rel=1e-5)
        assert noise > sigma_next * (1 + 1e-4)


def test_cps_at_full_noise_level_replaces_all_noise() -> None:
    velocity, x, noise = tensors(3)
    out = cps_step(velocity, x, 0.6, 0.5, noise_level=1.0, noise=noise)
    torch.testing.assert_close(out.mean, 0.5 * (x - 0.6 * velocity))
    torch.testing.assert_close(out.std, torch.full((3,), 0.5))


@RULES
def test_samples_have_the_stated_mean_and_std(step: Step) -> None:
    velocity, x = (torch.full((1, 50000), value) for value in (0.4, -1.1))
    out = step(velocity, x, 0.6, 0.5, noise_level=0.7, noise=tensors(1, (1, 50000))[0])
    error = (out.x_next - out.mean)[0]
    assert error.mean().abs() < 4 * out.std.item() / math.sqrt(50000)
    assert error.std().item() == pytest.approx(out.std.item(), rel=0.01)


@RULES
def test_last_step_can_be_sampled_but_has_no_log_prob(step: Step) -> None:
    velocity, x, noise = tensors(3)
    out = step(velocity, x, 0.1, 0.0, noise_level=0.7, noise=noise)
    assert out.log_prob.isnan().tolist() == [True] * 3
    torch.testing.assert_close(out.x_next, out.mean + out.std.view(-1, 1, 1, 1) * noise)
    if step is cps_step:
        assert torch.equal(out.x_next, euler_step(velocity, x, 0.1, 0.0))
        assert torch.equal(out.std, torch.zeros(3))


@RULES
def test_a_sample_at_its_last_step_takes_no_log_prob_from_the_others(step: Step) -> None:
    velocity, x, noise = tensors(3)
    together = step(velocity, x, 0.2, torch.tensor([0.1, 0.0, 0.1]), noise_level=0.7, noise=noise)
    alone = step(velocity, x, 0.2, 0.1, noise_level=0.7, noise=noise)
    assert together.log_prob.isnan().tolist() == [False, True, False]
    assert torch.equal(together.log_prob[[0, 2]], alone.log_prob[[0, 2]])


@RULES
def test_values_on_a_device_are_never_read_back(step: Step) -> None:
    """Meta tensors have no values, so any read raises."""
    velocity, x, noise = (torch.empty(2, 3, 4, device="meta") for _ in range(3))
    sigma, sigma_next = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    out = step(velocity, x, sigma, sigma_next, noise_level=0.7, noise=noise)
    assert out.log_prob.shape == out.std.shape == (2,)
    mixed = step(velocity, x, 0.5, 0.4, noise_level=0.7, x_next=out.x_next)
    assert mixed.log_prob.device.type == "meta"


@RULES
def test_unchecked_degenerate_rows_score_nan(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omni_sched.steps, "on_host", lambda level: False)  # as if the levels were on an accelerator
    velocity, x, x_next = tensors(3)
    sigma_next = torch.tensor([0.1, 0.0, 0.05])
    out = step(velocity, x, 0.2, sigma_next, noise_level=0.7, x_next=x_next)
    assert out.log_prob.isnan().tolist() == [False, True, False]


def test_transitions_are_frozen() -> None:
    velocity, x, noise = tensors(3)
    out = sde_step(velocity, x, 0.5, 0.4, noise_level=0.7, noise=noise)
    with pytest.raises(AttributeError):
        out.log_prob = None  # type: ignore[misc]


@RULES
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of noise and x_next must be given, got neither"),
        ({"noise": (3, 4), "x_next": (3, 4)}, "exactly one of noise and x_next must be given, got both"),
        ({"noise": (3, 1)}, r"noise must have the shape of x, \(3, 4\), got \(3, 1\)"),
        ({"x_next": (1, 4)}, r"x_next must have the shape of x, \(3, 4\), got \(1, 4\)"),
        ({"velocity": (3, 1), "noise": (3, 4)}, r"velocity must have the shape of x, \(3, 4\), got \(3, 1\)"),
        ({"velocity": (3,), "x": (3,), "noise": (3,)}, r"x must be \[B, ...\] .* got shape \(3,\)"),
        ({"noise": (3, 4), "noise_level": -0.1}, "noise_level must be >= 0 and finite, got -0.1"),
        ({"noise": (3, 4), "noise_level": math.inf}, "noise_level must be .* got inf"),
        ({"noise": (3, 4), "noise_level": math.nan}, "noise_level must be >= 0 and finite, got nan"),
        ({"x_next": (3, 4), "noise_level": 0.0}, "noise_level must be > 0 to score x_next: .* got 0"),
        ({"x_next": (3, 4), "sigma_next": 0.0}, "sigma_next must be > 0 to score x_next: .* got 0.0"),
        ({"x_next": (3, 4), "sigma_next": torch.tensor([0.1, 0.0, 0.2])}, "sigma_next must be > 0 to score x_next"),
        ({"noise": (3, 4), "sigma_next": 0.5}, "0 <= sigma_next < sigma <= 1, got sigma=0.5, sigma_next=0.5"),
        ({"noise": (3, 4), "sigma_next": 0.5 - 1e-12}, "0 <= sigma_next < sigma <= 1"),
        ({"noise": (3, 4), "sigma": 1.01}, "0 <= sigma_next < sigma <= 1, got sigma=1.0"),
        ({"noise": (3, 4), "sigma_next": -0.1}, "0 <= sigma_next < sigma <= 1"),
        (
            {"noise": (3, 4), "sigma": torch.full((2,), 0.5)},
            r"sigma must be a scalar or \[B\] = \[3\], got shape \(2,\)",
        ),
        (
            {"noise": (3, 4), "sigma": torch.full((2,), 0.5), "sigma_next": torch.full((3,), 0.4)},
            "sigma must be a scalar",
        ),
        ({"noise": (3, 4), "sigma_next": torch.full((1,), 0.4)}, r"sigma_next must be a scalar or \[B\] = \[3\]"),
    ],
)
def test_wrong_arguments_are_named(step: Step, arguments: dict, message: str) -> None:
    call = {"velocity": (3, 4), "x": (3, 4), "sigma": 0.5, "sigma_next": 0.4, "noise_level": 0.7} | arguments
    call = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in call.items()}
    with pytest.raises(ValueError, match=message):
        step(**call)


def test_wrong_arguments_of_single_rules_are_named() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"noise_level must be <= 1 for cps_step, got 1.2"):
        cps_step(zeros, zeros, 0.5, 0.4, noise_level=1.2, noise=zeros)
    for sigma_max in (1.0, 0.0, torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match=r"sigma_max must be in \(0, 1\), got"):
            sde_step(zeros, zeros, 1.0, 0.9, noise_level=0.7, noise=zeros, sigma_max=sigma_max)
    with pytest.raises(ValueError, match="velocity must have the shape of x"):
        euler_step(zeros[:1], zeros, 0.5, 0.4)
    with pytest.raises(ValueError, match="0 <= sigma_next < sigma <= 1"):
        euler_step(zeros, zeros, 0.4, 0.5)


@RULES
def test_a_step_of_streams_is_the_step_itself_and_its_log_prob_that_of_each_stream(step):
    """The mean over all elements is that over each stream's, by their numbers."""
    velocity, x, noise = tensors(3, (3, 10))
    sizes, levels = (7, 3), {"sigma": 0.7, "sigma_next": 0.5, "noise_level": 0.6}
    whole = step(velocity, x, **levels, noise=noise)
    for taken in ({"noise": noise}, {"x_next": whole.x_next}):
        apart = StreamStep(step, sizes)(velocity, x, **levels, **taken)
        for name in ("x_next", "mean", "std"):
            assert torch.equal(getattr(apart, name), getattr(whole, name))
        assert apart.log_prob.shape == (3, 2)
        torch.testing.assert_close(apart.log_prob @ torch.tensor([0.7, 0.3]), whole.log_prob)
    if step is not cps_step:
        errors = whole.x_next[:, 7:], whole.mean[:, 7:], whole.std[:, None]
        theirs = torch.distributions.Normal(errors[1], errors[2]).log_prob(errors[0]).mean(1)
        torch.testing.assert_close(apart.log_prob[:, 1], theirs)


def test_a_deterministic_step_as_a_transition_has_no_density() -> None:
    velocity, x, noise = tensors(3)
    velocity.requires_grad_()
    out = ode_step(velocity, x, 0.5, 0.25, noise_level=1.0, noise=noise)
    assert torch.equal(out.x_next, euler_step(velocity, x, 0.5, 0.25))
    assert torch.equal(out.mean, out.x_next)
    assert out.mean.requires_grad
    assert not out.x_next.requires_grad
    assert not out.std.any()
    assert out.log_prob.isnan().all()
