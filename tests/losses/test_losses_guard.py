"""GRPO-Guard, Flow-DPPO and TempFlow's weights: closed forms of Gaussian steps, worked examples, gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from omni_losses import flow_dppo_loss, gaussian_kl, grpo_guard_loss, grpo_loss, tempflow_weights
from omni_sched import linear_sigmas, sde_step, shift_sigmas
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import Normal

torch.set_num_threads(1)


def gaussian_steps(batch: int = 3, elements: int = 6, shift: float = 0.05, seed: int = 0) -> dict[str, Tensor]:
    """Steps drawn from an old policy, and what both policies say about them, in float64."""
    generator = torch.Generator().manual_seed(seed)
    noise, drift = (torch.randn((batch, elements), generator=generator, dtype=torch.float64) for _ in range(2))
    old_mean = torch.randn((batch, elements), generator=generator, dtype=torch.float64)
    std = torch.tensor([0.7, 0.3, 0.1], dtype=torch.float64)[:batch]
    mean = old_mean + shift * drift
    x_next = old_mean + std[:, None] * noise
    return {"noise": noise, "mean": mean, "old_mean": old_mean, "std": std, "x_next": x_next}


def log_density(steps: dict[str, Tensor], mean: Tensor) -> Tensor:
    return Normal(mean, steps["std"][:, None]).log_prob(steps["x_next"]).mean(dim=1)


def guard(steps: dict[str, Tensor], advantages: Tensor, mean: Tensor | None = None, **options: Any):
    mean = steps["mean"] if mean is None else mean
    options = {"sqrt_dt": torch.ones(len(advantages)), "clip_range": 1e9} | options
    return grpo_guard_loss(
        log_density(steps, mean), log_density(steps, steps["old_mean"]), advantages,
        mean=mean, old_mean=steps["old_mean"], std=steps["std"], **options,
    )  # fmt: skip


def dppo(steps: dict[str, Tensor], advantages: Tensor, **options: Any):
    log_prob, old = log_density(steps, steps["mean"]), log_density(steps, steps["old_mean"])
    moments = {name: steps[name] for name in ("mean", "old_mean", "std")}
    return flow_dppo_loss(log_prob, old, advantages, **moments, **options)


def test_guards_ratio_is_the_mean_of_noise_times_shift():
    steps = gaussian_steps()
    ratios = (steps["noise"] * (steps["mean"] - steps["old_mean"])).mean(dim=1).exp()
    for i in range(3):
        row = {name: value[i : i + 1] for name, value in steps.items()}
        out = guard(row, torch.ones(1))
        assert out.loss.item() == pytest.approx(-ratios[i].item(), rel=1e-5)
        assert out.metrics["ratio_mean"].item() == pytest.approx(ratios[i].item(), rel=1e-5)


def test_guards_ratio_is_centered_and_spreads_alike_at_every_std_where_the_plain_one_is_neither():
    """Over many draws the log-ratio of a fixed shift d is Normal(0, mean(d^2) / D), whatever std is."""
    generator, (batch, elements) = torch.Generator().manual_seed(1), (20_000, 8)
    noise = torch.randn((batch, elements), generator=generator, dtype=torch.float64)
    shift = torch.full((batch, elements), 0.2, dtype=torch.float64)
    spread = 0.2 / math.sqrt(elements)
    for std in (0.1, 1.0):
        steps = {"mean": shift, "old_mean": torch.zeros_like(shift), "std": torch.full((batch,), std).double()}
        steps |= {"noise": noise, "x_next": std * noise}
        plain = log_density(steps, shift) - log_density(steps, steps["old_mean"])
        assert plain.mean().item() == pytest.approx(-(0.2**2) / (2 * std**2), abs=4 * spread / std / math.sqrt(batch))
        metrics = guard(steps, torch.ones(batch)).metrics
        assert metrics["ratio_mean"].log().item() == pytest.approx(spread**2 / 2, abs=4 * spread / math.sqrt(batch))
        assert metrics["ratio_std"].item() == pytest.approx(spread, rel=0.03)
        assert metrics["ppo_kl"].item() == pytest.approx(-plain.mean().item(), rel=1e-3)
        assert metrics["mean_shift_kl"].item() == pytest.approx(0.2**2 / (2 * std**2), rel=1e-5)


def test_guards_gradient_by_the_mean_is_the_noise():
    """log r = mean(noise * (mean - old_mean)): at r = 1 the gradient is -A noise / (D B sqrt_dt^2)."""
    steps = gaussian_steps(shift=0.0)
    mean = steps["mean"].clone().requires_grad_()
    advantages, sqrt_dt = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.5, 0.2, 1.0])
    guard(steps, advantages, mean, sqrt_dt=sqrt_dt, clip_range=1e-6).loss.backward()
    expected = -(advantages / sqrt_dt.square())[:, None] * steps["noise"] / (3 * 6)
    torch.testing.assert_close(mean.grad, expected, rtol=1e-4, atol=1e-5)


def test_guards_gradient_away_from_the_old_policy():
    steps = gaussian_steps(shift=0.3)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    assert gradcheck(
        lambda mean: guard(steps, advantages, mean).loss, steps["mean"].clone().requires_grad_(),
        eps=1e-2, atol=2e-3, rtol=2e-2,
    )  # fmt: skip


def test_the_bias_is_each_samples_own():
    """Upstream averages it over the batch: there, the second sample's shift would move the first one's ratio."""
    steps = gaussian_steps(batch=2, shift=0.0)
    moved = steps | {"mean": steps["mean"] + torch.tensor([[0.0], [0.5]])}
    moved["x_next"] = steps["x_next"]
    advantages = torch.tensor([1.0, 0.0])
    assert guard(moved, advantages).loss.item() == guard(steps, advantages).loss.item() == -0.5


def test_guard_is_one_before_the_update_and_each_step_weighs_by_its_dt():
    steps = gaussian_steps(shift=0.0)
    out = guard(steps, torch.tensor([1.0, 1.0, 1.0]), sqrt_dt=torch.tensor([0.1, 0.2, 0.5]))
    assert out.loss.item() == pytest.approx(-(100 + 25 + 4) / 3)
    assert out.metrics["ratio_max_dev"] == 0


def test_guard_without_sqrt_dt_leaves_the_weight_of_a_step_to_weights():
    steps, sqrt_dt = gaussian_steps(shift=0.1), torch.tensor([0.25, 0.5, 1.0])
    advantages, weights = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 0.5, 2.0])
    divided = guard(steps, advantages, sqrt_dt=sqrt_dt, weights=weights)
    weighted = guard(steps, advantages, sqrt_dt=None, weights=weights / sqrt_dt.square())
    assert torch.equal(weighted.loss, divided.loss)
    assert weighted.metrics == divided.metrics
    assert not torch.equal(guard(steps, advantages, sqrt_dt=None, weights=weights).loss, divided.loss)


def test_a_loss_bound_to_its_settings_takes_the_step_and_its_moments():
    """How a row of a trainer's table calls it: the same words for every loss, moments where it asks for them."""
    steps = gaussian_steps(shift=0.1)
    moments = {name: steps[name] for name in ("mean", "old_mean", "std")}
    log_probs = log_density(steps, steps["mean"]), log_density(steps, steps["old_mean"])
    for loss, its_moments in (
        (partial(grpo_loss, clip_range=1e-4, adv_clip_max=5.0), {}),
        (partial(grpo_guard_loss, clip_range=2e-6), moments),
        (partial(flow_dppo_loss, kl_threshold=1e-5), moments),
    ):
        zero, one, none = (
            loss(*log_probs, torch.ones(3), weights=w, **its_moments) for w in (torch.zeros(3), torch.ones(3), None)
        )
        assert zero.loss == 0
        assert one.loss == none.loss != 0


def test_guard_clips_as_grpo_does():
    """The same loss as grpo_loss on the guarded log-ratio, with asymmetric bounds, clamped advantages and weights."""
    steps = gaussian_steps(shift=0.5)
    log_ratio = (steps["noise"] * (steps["mean"] - steps["old_mean"])).mean(dim=1)
    advantages, weights = torch.tensor([9.0, -1.0, 2.0]), torch.tensor([1.0, 0.5, 0.0])
    options = {"clip_range": (0.01, 0.02), "adv_clip_max": 3.0, "weights": weights}
    plain = grpo_loss(log_ratio, torch.zeros(3), advantages, **options)
    out = guard(steps, advantages, **options)
    assert out.loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)
    for name in ("clip_fraction", "clip_fraction_low", "clip_fraction_high"):
        assert out.metrics[name] == plain.metrics[name]


def test_guard_clamps_advantages_at_five_by_default():
    assert guard(gaussian_steps(batch=2, shift=0.0), torch.tensor([9.0, -7.0])).loss.item() == (-5 + 5) / 2
    assert guard(gaussian_steps(batch=2, shift=0.0), torch.tensor([9.0, 1.0])).loss.item() == (-5 - 1) / 2


def two_steps(moved: float, advantages: tuple[float, float], **options: Any):
    """Two samples whose log-ratios are +0.1 and -0.1 and whose means moved alike, std 1: k = moved^2 / 2."""
    log_prob = torch.tensor([0.1, -0.1], requires_grad=True)
    moments = {"mean": torch.full((2, 3), moved), "old_mean": torch.zeros(2, 3), "std": torch.ones(2)}
    out = flow_dppo_loss(log_prob, torch.zeros(2), torch.tensor(advantages), **moments, **options)
    out.loss.backward()
    return out, log_prob.grad.tolist()


@pytest.mark.parametrize(
    ("moved", "advantages", "kept"),
    [
        (0.1, (1.0, -1.0), (False, False)),  # outside the region, and both would go further
        (0.1, (-1.0, 1.0), (True, True)),  # outside, and both come back
        (0.1, (1.0, 1.0), (False, True)),
        (0.01, (1.0, -1.0), (True, True)),  # inside the region
        (0.1, (0.0, 0.0), (True, True)),  # nothing to drop
    ],
)
def test_dppo_drops_what_is_outside_and_moves_away(moved, advantages, kept):
    out, gradient = two_steps(moved, advantages, kl_threshold=0.001)
    ratios = (math.exp(0.1), math.exp(-0.1))
    losses = [-a * r if keep else 0.0 for a, r, keep in zip(advantages, ratios, kept, strict=True)]
    assert out.loss.item() == pytest.approx(sum(losses) / 2)
    assert gradient == pytest.approx([loss / 2 for loss in losses])
    assert out.metrics["drop_fraction"].item() == 1 - sum(kept) / 2
    assert out.metrics["kl_fraction"].item() == float(moved == 0.1)


def test_dppo_measures_the_exact_kl_of_the_step():
    steps = gaussian_steps(shift=0.2)
    metrics = dppo(steps, torch.ones(3)).metrics
    kl = gaussian_kl(steps["mean"], steps["old_mean"], steps["std"])
    assert metrics["kl_mean"].item() == pytest.approx(kl.mean().item())
    assert metrics["kl_max"].item() == pytest.approx(kl.max().item())
    threshold = kl.median().item()  # at the threshold counts as outside
    assert dppo(steps, torch.ones(3), kl_threshold=threshold).metrics["kl_fraction"].item() == pytest.approx(2 / 3)


def test_the_default_region_of_dppo_is_the_published_one():
    """k = moved^2 / 2 against 1e-5."""
    for moved, kept in ((math.sqrt(1.9e-5), True), (math.sqrt(2.1e-5), False)):
        _, gradient = two_steps(moved, (1.0, -1.0))
        assert [value != 0 for value in gradient] == [kept, kept]


def test_dppo_does_not_clamp_advantages_and_weighs_samples():
    out, gradient = two_steps(0.0, (100.0, 3.0), weights=torch.tensor([1.0, 0.0]))
    assert out.loss.item() == pytest.approx(-100 * math.exp(0.1) / 2)
    assert gradient[1] == 0


def test_before_the_update_dppo_is_the_policy_gradient():
    log_prob = torch.tensor([-1.3, 0.2, 4.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    moments = {"mean": torch.ones(3, 2), "old_mean": torch.ones(3, 2), "std": torch.ones(3)}
    out = flow_dppo_loss(log_prob, log_prob.detach(), advantages, **moments)
    out.loss.backward()
    assert torch.equal(log_prob.grad, -advantages / 3)
    assert out.metrics["ratio_max_dev"] == out.metrics["kl_max"] == out.metrics["drop_fraction"] == 0


@pytest.mark.parametrize("loss", [guard, dppo])
def test_order_does_not_matter_and_halves_average_to_the_whole(loss):
    first, second = gaussian_steps(shift=0.1), gaussian_steps(shift=0.2, seed=5)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.1, 0.2])
    whole = loss(both, advantages).loss
    torch.testing.assert_close((loss(first, advantages[:3]).loss + loss(second, advantages[3:]).loss) / 2, whole)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    torch.testing.assert_close(loss({name: both[name][order] for name in both}, advantages[order]).loss, whole)


def test_tempflow_weights_average_one_on_the_papers_schedule():
    """Ten steps with shift 3 and noise 0.7, the last left out: 2.25 is 1 over their mean standard deviation."""
    sigmas, zero = shift_sigmas(linear_sigmas(10), 3.0), torch.zeros(1, 1)
    steps = [sde_step(zero, zero, sigmas[i], sigmas[i + 1], noise_level=0.7, noise=zero) for i in range(9)]
    weights = tempflow_weights(torch.cat([step.std for step in steps]))
    assert weights.mean().item() == pytest.approx(1, abs=0.005)
    assert weights[0].item() == pytest.approx(2.25 * 0.7)
    half = tempflow_weights(torch.tensor([2.0], requires_grad=True), scale=0.5)
    assert half.item() == 1.0
    assert not half.requires_grad


def test_errors_name_the_argument():
    two, wide = torch.zeros(2), torch.zeros(2, 3)
    moments = {"mean": wide, "old_mean": wide, "std": torch.ones(2)}
    for loss, options in ((grpo_guard_loss, {"sqrt_dt": two, "clip_range": 0.1}), (flow_dppo_loss, {})):
        with pytest.raises(ValueError, match=r"log_prob must be \[B\] with B >= 1"):
            loss(wide, two, two, **moments, **options)
        with pytest.raises(ValueError, match=r"advantages must have log_prob's shape \(2,\), got \(1,\)"):
            loss(two, two, torch.zeros(1), **moments, **options)
        with pytest.raises(ValueError, match=r"std must have log_prob's shape \(2,\), got \(3,\)"):
            loss(two, two, two, **(moments | {"std": torch.ones(3)}), **options)
        with pytest.raises(ValueError, match=r"mean and ref_mean must both be \[B, ...\]"):
            loss(two, two, two, **(moments | {"old_mean": torch.zeros(2, 4)}), **options)
    with pytest.raises(ValueError, match=r"sqrt_dt must have log_prob's shape"):
        grpo_guard_loss(two, two, two, **moments, sqrt_dt=torch.ones(3), clip_range=0.1)
    with pytest.raises(ValueError, match=r"clip_range must be >= 1e-06"):
        grpo_guard_loss(two, two, two, **moments, sqrt_dt=two, clip_range=0.0)
    with pytest.raises(ValueError, match="kl_threshold must be > 0, got 0"):
        flow_dppo_loss(two, two, two, **moments, kl_threshold=0.0)
    with pytest.raises(ValueError, match="scale must be > 0"):
        tempflow_weights(two, scale=0.0)
