"""One denoising step from sigma to sigma_next, deterministic or stochastic, and the log-probability of where it landed.

Letters: B samples; x is [B, ...] with any latent axes behind B, in latent units. sigma is the noise level in [0, 1],
1 = noise, 0 = data, and falls: `dt = sigma_next - sigma < 0`. `velocity = dx/dsigma = noise - data`, so a sample is
predicted to hold

    data_hat  = x - sigma * velocity
    noise_hat = x + (1 - sigma) * velocity

and all stochastic steps are one form, an Euler step that gives up part of the predicted noise for fresh noise z:

    mean = x + dt * velocity - pull * noise_hat        x_next = mean + std * z

They differ in `std` and `pull` alone. For `sde_step` and `dance_step`, `pull = std^2 / (2 sigma)` keeps the marginal
of the ODE as dt goes to 0; for `cps_step`, pull is such that the noise in x_next has amplitude sigma_next at any dt.

A step either samples (`noise` given) or scores (`x_next` given). Both end in the same code, so scoring what was sampled
returns the same log-probability bit for bit, and gradients flow through `mean` only. `log_prob` is in nats per latent
element: a MEAN over elements, so multiply by their number for the log-density of the sample (not so for `cps_step`,
whose log_prob is no density). `std` is the standard deviation of x_next given x, with sqrt(-dt) included; some released
code reports it without.

Everything is float32, whatever comes in: at bfloat16 the rounding of x_next is as large as the noise of a late step.

sigma and sigma_next are scalars or [B]. Their values are checked when both are Python numbers or CPU tensors. Values on
an accelerator are not read back, since that would stall its queue once per step; there, a sample with sigma_next = 0
gets log_prob NaN. For x on an accelerator, pass scalars from the host or vectors that are already beside x: only a [B]
tensor on the CPU costs a copy that waits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_sched._levels import Level, check_shapes, levels, on_cpu, on_host, over, per_sample

# UniPC schedules for flow models start at 0.99999899, where sqrt(sigma / (1 - sigma)) is 993: a test for exactly 1
# would let that through and turn the first step into pure noise.
SIGMA_ONE_TOLERANCE = 1e-3

LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x_next, mean, std) -> [B]


@dataclass(frozen=True, eq=False)
class Transition:
    """Where one stochastic step went, and how likely that was.

    x_next: [B, ...], latent units, detached: the draw, or the value that was scored.
    mean: [B, ...], latent units: of x_next given x; carries the gradient.
    std: [B], latent units: true standard deviation of x_next given x.
    log_prob: [B], nats per latent element (`cps_step`: see there); None where the density degenerates, that is at
        noise_level 0, or if any sigma_next is 0.
    """

    x_next: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor | None


def euler_step(velocity: Tensor, x: Tensor, sigma: Level, sigma_next: Level) -> Tensor:
    """x_next, one Euler step of the probability-flow ODE: `x + (sigma_next - sigma) * velocity`.

    Args:
        velocity: [B, ...], latent units; the model's prediction of noise - data.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise level before and after.

    Returns:
        [B, ...], float32, differentiable in velocity and x.

    Raises:
        ValueError: shapes differ, or not 0 <= sigma_next < sigma <= 1.
    """
    check_shapes(x, velocity=velocity)
    sigma, sigma_next = levels(x, sigma, sigma_next)
    return _mean(velocity.float(), x.float(), sigma, sigma_next)


def sde_step(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    *,
    noise_level: float,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
    sigma_max: Level | None = None,
) -> Transition:
    """Transition of Flow-GRPO's SDE, whose injected noise grows with sigma.

        S    = noise_level * sqrt(sigma / (1 - sigma))
        mean = x + dt * (velocity + S^2 / (2 sigma) * noise_hat)        std = S * sqrt(-dt)

    `1 - sigma` vanishes at the start. Within 1e-3 of 1, sigma is therefore capped at sigma_max in that one place, and
    the std of the first step is noise_level for every schedule. It stays large for the next few however many steps
    there are, so the ODE's marginal is kept only some way below sigma = 1.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise level before and after.
        noise_level: >= 0, dimensionless; 0 is exactly `euler_step`. Flow-GRPO uses 0.7.
        noise: [B, ...], standard normal: draw x_next with it. Exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.
        sigma_max: scalar or [B], the schedule's second entry, in (0, 1). None takes sigma_next, which at the first
            step is that entry.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; sigma_max outside (0, 1); noise_level < 0; both or
            neither of noise and x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    Flow-GRPO, arXiv 2505.05470, its SDE update rule. The released code guards `sigma == 1` exactly and returns S as the
    standard deviation, without sqrt(-dt).
    """
    has_density = _check_call(x, velocity, sigma_next, noise_level, noise, x_next)
    sigma, sigma_next = levels(x, sigma, sigma_next)
    cap = sigma_next if sigma_max is None else _second_sigma(x, sigma_max)
    guarded = torch.where(sigma > 1 - SIGMA_ONE_TOLERANCE, torch.minimum(sigma, cap), sigma)
    std = noise_level * (sigma * (sigma - sigma_next) / (1 - guarded)).sqrt()
    mean = _mean(velocity.float(), x.float(), sigma, sigma_next, pull=std.square() / (2 * sigma))
    return _transition(mean, std, sigma_next, noise, x_next, _gaussian_log_prob if has_density else None)


def cps_step(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    *,
    noise_level: float,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
) -> Transition:
    """Transition of coefficients-preserving sampling: the noise left in x_next has amplitude sigma_next exactly.

        std  = sigma_next * sin(noise_level * pi / 2)
        mean = (1 - sigma_next) * data_hat + sigma_next * cos(noise_level * pi / 2) * noise_hat

    computed as the Euler step minus `sigma_next * (1 - cos(noise_level * pi / 2)) * noise_hat`, which is the same and
    exact at noise_level 0. std does not shrink with dt, so many small steps do not keep the ODE's marginal.

    log_prob is the released, unnormalised `-mean((x_next - mean)^2)`: no 1 / (2 std^2), no constant. Its differences
    are 2 std^2 times those of a Gaussian log-density, so clip ranges do not carry over from `sde_step`, and its unit is
    not nats but squared latent units.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise level before and after.
        noise_level: in [0, 1], dimensionless; 0 is exactly `euler_step`, 1 replaces all noise.
        noise: [B, ...], standard normal: draw x_next with it. Exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; noise_level outside [0, 1]; both or neither of
            noise and x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    Flow-CPS, arXiv 2509.05952. The log_prob is that of the released code.
    """
    if noise_level > 1:
        raise ValueError(f"noise_level must be <= 1 for cps_step, got {noise_level}")
    has_density = _check_call(x, velocity, sigma_next, noise_level, noise, x_next)
    sigma, sigma_next = levels(x, sigma, sigma_next)
    angle = noise_level * math.pi / 2
    std = sigma_next * math.sin(angle)
    pull = sigma_next * (2 * math.sin(angle / 2) ** 2)  # 1 - cos(angle) without its cancellation at small angles
    mean = _mean(velocity.float(), x.float(), sigma, sigma_next, pull=pull)
    return _transition(mean, std, sigma_next, noise, x_next, _cps_log_prob if has_density else None)


def dance_step(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    *,
    noise_level: float,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
) -> Transition:
    """Transition of DanceGRPO's SDE, whose injected noise is the same at every sigma.

        mean = x + dt * (velocity + noise_level^2 / (2 sigma) * noise_hat)        std = noise_level * sqrt(-dt)

    `-noise_hat / sigma` is the score, so this is `sde_step` with S = noise_level.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise level before and after.
        noise_level: >= 0, dimensionless; 0 is exactly `euler_step`. DanceGRPO uses 0.3.
        noise: [B, ...], standard normal: draw x_next with it. Exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; noise_level < 0; both or neither of noise and
            x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    DanceGRPO, arXiv 2505.07818, its SDE for rectified flows. MixGRPO's released copy of this step evaluates the
    normalising constants of the log-probability and drops them; here they are kept.
    """
    has_density = _check_call(x, velocity, sigma_next, noise_level, noise, x_next)
    sigma, sigma_next = levels(x, sigma, sigma_next)
    std = noise_level * (sigma - sigma_next).sqrt()
    mean = _mean(velocity.float(), x.float(), sigma, sigma_next, pull=std.square() / (2 * sigma))
    return _transition(mean, std, sigma_next, noise, x_next, _gaussian_log_prob if has_density else None)


def _mean(velocity: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, pull: Tensor | None = None) -> Tensor:
    """[B, ...]: the Euler step, less `pull` [B] of the predicted noise."""
    euler = x + over(sigma_next - sigma, x) * velocity
    if pull is None:
        return euler
    noise_hat = x + over(1 - sigma, x) * velocity
    return euler - over(pull, x) * noise_hat


def _transition(
    mean: Tensor, std: Tensor, sigma_next: Tensor, noise: Tensor | None, x_next: Tensor | None, log_prob: LogProb | None
) -> Transition:
    """The step's record; sampling and scoring share every operation from here on."""
    if noise is not None:
        x_next = mean + over(std, mean) * noise.float()
    assert x_next is not None  # _check_call saw exactly one of the two
    x_next = x_next.detach().float()
    if log_prob is None:
        return Transition(x_next, mean, std, None)
    # Values on an accelerator were not checked; NaN cannot be mistaken for the score of a degenerate density.
    scores = torch.where(sigma_next > 0, log_prob(x_next, mean, std), math.nan)
    return Transition(x_next, mean, std, scores)


def _gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B]: log-density of Normal(mean, std) at x_next, mean over elements."""
    return -_squared_error(x_next, mean) / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def _cps_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B]: minus the squared distance, mean over elements; std takes no part."""
    return -_squared_error(x_next, mean)


def _squared_error(x_next: Tensor, mean: Tensor) -> Tensor:
    return (x_next - mean).square().flatten(1).mean(1)


def _second_sigma(x: Tensor, sigma_max: Level) -> Tensor:
    """sigma_max as [B] float32 beside x."""
    if on_host(sigma_max) and not ((on_cpu(sigma_max) > 0) & (on_cpu(sigma_max) < 1)).all():
        raise ValueError(f"sigma_max must be in (0, 1), got {sigma_max}")
    return per_sample(x, "sigma_max", sigma_max)


def _check_call(
    x: Tensor, velocity: Tensor, sigma_next: Level, noise_level: float, noise: Tensor | None, x_next: Tensor | None
) -> bool:
    """Whether x_next has a density here; refuses wrong calls, and scoring where it has none."""
    if (noise is None) == (x_next is None):
        raise ValueError(f"exactly one of noise and x_next must be given, got {'neither' if noise is None else 'both'}")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level must be >= 0 and finite, got {noise_level}")
    check_shapes(x, velocity=velocity, noise=noise, x_next=x_next)
    ends_at_zero = on_host(sigma_next) and bool((on_cpu(sigma_next) == 0).any())
    if x_next is not None and noise_level == 0:
        raise ValueError("noise_level must be > 0 to score x_next: the step is deterministic, got 0")
    if x_next is not None and ends_at_zero:
        raise ValueError(f"sigma_next must be > 0 to score x_next: the density degenerates there, got {sigma_next}")
    return noise_level > 0 and not ends_at_zero
