"""One denoising step from sigma to sigma_next, deterministic or stochastic, with its noise and log-probability.

Notation: B samples; x is [B, ...], any latent axes after B, in latent units. sigma is the noise level in [0, 1],
1 = noise, 0 = data, and falls: `dt = sigma_next - sigma < 0`. `velocity = dx/dsigma = noise - data`, so the predicted
data and noise of a sample are

    data_hat  = x - sigma * velocity
    noise_hat = x + (1 - sigma) * velocity

All stochastic steps have the same form, an Euler step that replaces part of the predicted noise by fresh noise z:

    mean = x + dt * velocity - pull * noise_hat        x_next = mean + std * z

They differ only in `std` and `pull`, and each is written out in full. For `sde_step` and `dance_step`, `pull = std^2 /
(2 sigma)` keeps the marginal of the ODE as dt goes to 0; for `cps_step`, pull is such that the noise in x_next has
amplitude sigma_next at any dt.

A step either samples (`noise` given) or scores (`x_next` given), with the same operations, so scoring a sampled step
returns its log-probability bit for bit; gradients flow through `mean` only. `log_prob` is in nats per latent element: a
MEAN over elements, so multiply by their number for the log-density of the sample. For `cps_step`, log_prob is not a
density, but `gaussian_log_prob` of its x_next, mean and std is. `std` is the standard deviation of x_next given x,
including sqrt(-dt); some released code reports it without.

Everything is computed in float32 for any input dtype: in bfloat16, the rounding of x_next would be as large as the
noise of a late step.

sigma and sigma_next are scalars or [B]. Their values are checked if both are Python numbers or CPU tensors. Values on
an accelerator are not read back, since that would stall its queue once per step; there, scoring at sigma_next = 0 is
not rejected and gives log_prob NaN. For x on an accelerator, pass host scalars or vectors that are already on its
device: only a [B] tensor on the CPU needs a blocking copy.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Level = float | Tensor

INITIAL_NOISE = -1  # the step of the noise at sigma = 1, before step 0
NOISE_CHUNK = 2**16  # noise values generated together, so that small samples do not each launch 16 operators

# UniPC schedules for flow models start at 0.99999899, where sqrt(sigma / (1 - sigma)) is 993: a test for exactly 1
# would miss it and turn the first step into pure noise.
SIGMA_ONE_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Transition:
    """One stochastic step: its result, the result's distribution, and its log-probability.

    x_next: [B, ...], latent units, detached: the sample, or the value that was scored.
    mean: [B, ...], latent units: of x_next given x; carries the gradient.
    std: [B], latent units: true standard deviation of x_next given x.
    log_prob: [B], nats per latent element (except `cps_step`); NaN where the density degenerates, that is, at
        noise_level 0 and where sigma_next is 0.
    """

    x_next: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor


def euler_step(velocity: Tensor, x: Tensor, sigma: Level, sigma_next: Level) -> Tensor:
    """Take one Euler step of the probability-flow ODE: `x_next = x + (sigma_next - sigma) * velocity`.

    Args:
        velocity: [B, ...], latent units; the model's prediction of noise - data.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise levels before and after.

    Returns:
        [B, ...], float32, differentiable in velocity and x.

    Raises:
        ValueError: shapes differ, or not 0 <= sigma_next < sigma <= 1.
    """
    check_shapes(x, velocity=velocity)
    sigma, sigma_next = expand_levels(x, sigma, sigma_next)
    return x.float() + expand_like(sigma_next - sigma, x) * velocity.float()


def ode_step(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    *,
    noise_level: float = 0.0,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
) -> Transition:
    """Take one Euler step as a transition, for trajectories that keep the latents of deterministic steps.

    Args:
        velocity, x, sigma, sigma_next: as for `euler_step`.
            noise_level, noise, x_next: ignored; they give it the interface of the stochastic steps.

        Returns:
            x_next, its value with the gradient as mean, std 0, and log_prob NaN, as there is no density.

    Raises:
        ValueError: as in `euler_step`.
    """
    end = euler_step(velocity, x, sigma, sigma_next)
    return Transition(end.detach(), end, end.new_zeros(len(end)), end.new_full((len(end),), math.nan))


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
    """Sample or score a step of Flow-GRPO's SDE, whose injected noise grows with sigma.

        S    = noise_level * sqrt(sigma / (1 - sigma))
        mean = x + dt * (velocity + S^2 / (2 sigma) * noise_hat)        std = S * sqrt(-dt)

    `1 - sigma` vanishes at the start. Therefore, a sigma within 1e-3 of 1 is capped at sigma_max in this place only,
    and the std of the first step is noise_level for every schedule. It stays large for the next few steps at any number
    of steps, so the ODE's marginal is kept only some way below sigma = 1.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise levels before and after.
        noise_level: >= 0, dimensionless; 0 is exactly `euler_step`. Flow-GRPO uses 0.7.
        noise: [B, ...], standard normal: sample x_next with it. Pass exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.
        sigma_max: scalar or [B], the schedule's second entry, in (0, 1). None means sigma_next, which is that entry at
            the first step.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; sigma_max outside (0, 1); noise_level < 0; both or
            neither of noise and x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    Flow-GRPO, arXiv 2505.05470, its SDE update rule. The released code handles only `sigma == 1` exactly and returns S
    as the standard deviation, without sqrt(-dt).
    """
    velocity, x, sigma, sigma_next = _inputs(velocity, x, sigma, sigma_next, noise_level, noise, x_next)
    if sigma_max is not None and on_host(sigma_max) and not ((to_cpu(sigma_max) > 0) & (to_cpu(sigma_max) < 1)).all():
        raise ValueError(f"sigma_max must be in (0, 1), got {sigma_max}")
    cap = sigma_next if sigma_max is None else expand_level(x, "sigma_max", sigma_max)
    guarded = torch.where(sigma > 1 - SIGMA_ONE_TOLERANCE, torch.minimum(sigma, cap), sigma)
    std = noise_level * (sigma * (sigma - sigma_next) / (1 - guarded)).sqrt()
    noise_hat = x + expand_like(1 - sigma, x) * velocity
    mean = x + expand_like(sigma_next - sigma, x) * velocity - expand_like(std.square() / (2 * sigma), x) * noise_hat
    x_next = _sample_or_reuse(mean, std, noise, x_next)
    log_prob = torch.where(sigma_next > 0, gaussian_log_prob(x_next, mean, std), math.nan)
    return Transition(x_next, mean, std, log_prob)


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
    """Sample or score a step of coefficients-preserving sampling: the noise in x_next has amplitude sigma_next exactly.

        std  = sigma_next * sin(noise_level * pi / 2)
        mean = (1 - sigma_next) * data_hat + sigma_next * cos(noise_level * pi / 2) * noise_hat

    computed as the Euler step minus `sigma_next * (1 - cos(noise_level * pi / 2)) * noise_hat`, which is equivalent and
    exact at noise_level 0. std does not shrink with dt, so many small steps do not keep the ODE's marginal.

    log_prob is the released, unnormalized `-mean((x_next - mean)^2)`: no 1 / (2 std^2), no constant. Its differences
    are 2 std^2 times those of a Gaussian log-density, so clip ranges do not carry over from `sde_step`, and its unit is
    squared latent units, not nats. Its ratios are not importance weights: use `gaussian_log_prob` for those.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise levels before and after.
        noise_level: in [0, 1], dimensionless; 0 is exactly `euler_step`, 1 replaces all noise.
        noise: [B, ...], standard normal: sample x_next with it. Pass exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; noise_level outside [0, 1]; both or neither of
            noise and x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    Flow-CPS, arXiv 2509.05952. log_prob is that of the released code.
    """
    if noise_level > 1:
        raise ValueError(f"noise_level must be <= 1 for cps_step, got {noise_level}")
    velocity, x, sigma, sigma_next = _inputs(velocity, x, sigma, sigma_next, noise_level, noise, x_next)
    angle = noise_level * math.pi / 2
    std = sigma_next * math.sin(angle)
    pull = sigma_next * (2 * math.sin(angle / 2) ** 2)  # 1 - cos(angle) without its cancellation at small angles
    noise_hat = x + expand_like(1 - sigma, x) * velocity
    mean = x + expand_like(sigma_next - sigma, x) * velocity - expand_like(pull, x) * noise_hat
    x_next = _sample_or_reuse(mean, std, noise, x_next)
    log_prob = torch.where(std > 0, -(x_next - mean).square().flatten(1).mean(1), math.nan)
    return Transition(x_next, mean, std, log_prob)


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
    """Sample or score a step of DanceGRPO's SDE, whose injected noise is the same at every sigma.

        mean = x + dt * (velocity + noise_level^2 / (2 sigma) * noise_hat)        std = noise_level * sqrt(-dt)

    `-noise_hat / sigma` is the score, so this is `sde_step` with S = noise_level.

    Args:
        velocity: [B, ...], latent units.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise levels before and after.
        noise_level: >= 0, dimensionless; 0 is exactly `euler_step`. DanceGRPO uses 0.3.
        noise: [B, ...], standard normal: sample x_next with it. Pass exactly one of noise and x_next.
        x_next: [B, ...], latent units: score it.

    Raises:
        ValueError: shapes differ; not 0 <= sigma_next < sigma <= 1; noise_level < 0; both or neither of noise and
            x_next; or scoring at noise_level 0 or sigma_next 0, where the density degenerates.

    DanceGRPO, arXiv 2505.07818, its SDE for rectified flows. MixGRPO's released copy of this step computes the
    normalizing constants of the log-probability and drops them; here they are kept.
    """
    velocity, x, sigma, sigma_next = _inputs(velocity, x, sigma, sigma_next, noise_level, noise, x_next)
    std = noise_level * (sigma - sigma_next).sqrt()
    noise_hat = x + expand_like(1 - sigma, x) * velocity
    mean = x + expand_like(sigma_next - sigma, x) * velocity - expand_like(std.square() / (2 * sigma), x) * noise_hat
    x_next = _sample_or_reuse(mean, std, noise, x_next)
    log_prob = torch.where(sigma_next > 0, gaussian_log_prob(x_next, mean, std), math.nan)
    return Transition(x_next, mean, std, log_prob)


@dataclass(frozen=True)
class StreamStep:
    """A stochastic step with a log-probability for each of M streams, which are concatenated in x [B, n].

    rule: for example `sde_step`. sizes: number of elements of each stream in x, n in total.
    """

    rule: Callable[..., Transition]
    sizes: tuple[int, ...]

    def __call__(
        self, velocity: Tensor, x: Tensor, sigma: Level, sigma_next: Level, *, noise_level: float, **end: Tensor
    ) -> Transition:
        """Return the transition of `rule`, bit for bit, except log_prob: [B, M], in nats per element of a stream.

        end: noise or x_next, [B, n], as accepted by `rule`.
        """
        streams = zip(*(tensor.split(self.sizes, dim=1) for tensor in (velocity, x, *end.values())), strict=True)
        steps = [
            self.rule(*args[:2], sigma, sigma_next, noise_level=noise_level, **dict(zip(end, args[2:], strict=True)))
            for args in streams
        ]
        x_next, mean = (torch.cat(parts, dim=1) for parts in zip(*((s.x_next, s.mean) for s in steps), strict=True))
        return Transition(x_next, mean, steps[0].std, torch.stack([step.log_prob for step in steps], dim=1))


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of Normal(mean, std^2) at x_next, [B], nats per latent element (mean over elements).

        log p = -mean((x_next - mean)^2) / (2 std^2) - log(std) - log(2 pi) / 2

    It is the log_prob of `sde_step` and `dance_step`. With the moments of any step, it gives true log-probabilities, as
    required for an importance correction.

    Args:
        x_next, mean: [B, ...], latent units; differentiable in both.
        std: [B], latent units, > 0; the result is NaN where it is 0.

    Raises:
        ValueError: shapes do not match.
    """
    if x_next.ndim < 2 or mean.shape != x_next.shape or std.shape != x_next.shape[:1]:
        shapes = f"{tuple(x_next.shape)}, {tuple(mean.shape)} and {tuple(std.shape)}"
        raise ValueError(f"x_next and mean must both be [B, ...], and std [B], got shapes {shapes}")
    error, std = (x_next.float() - mean.float()).square().flatten(1).mean(1), std.float()
    return -error / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def step_noise(seeds: Sequence[int], step: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal noise for one step of B samples; row b depends only on seeds[b] and step.

    It does not depend on the batch, order, rank or device of a sample: it is made on the CPU, and the caller moves it.
    A smaller shape gets the first elements of a larger one, in row-major order.

    The random bits are SHAKE-128 of the pair (seed, step), converted to normals by Box-Muller in float64 and rounded to
    float32 once. `torch.Generator` is not used, for three reasons. Its CPU engine keeps only the low 32 bits of a seed,
    so different seeds may give the same noise. Accelerators have their own generators and streams. And torch guarantees
    the same normals neither across versions nor across kinds of CPU. Here, distinct pairs get unrelated bits. Two kinds
    of CPU can differ only if their float64 log, sin or cos differ and the difference survives rounding to float32: by
    one unit in the last place, in about one of 10^8 elements.

    Args:
        seeds: B integers of any size and sign, one per sample; equal seeds give equal rows.
        step: index of the denoising step, or INITIAL_NOISE.
        shape: shape of one sample, without B.

    Returns:
        [B, *shape], float32, on the CPU, dimensionless.

    Raises:
        ValueError: no seeds, step < INITIAL_NOISE, or a negative size in shape.
        TypeError: a seed or step is not an integer.
    """
    if len(seeds) == 0:
        raise ValueError("seeds must hold at least one seed, got none")
    if operator.index(step) < INITIAL_NOISE:
        raise ValueError(f"step must be >= {INITIAL_NOISE} (the initial noise), got {step}")
    if min(shape, default=0) < 0:
        raise ValueError(f"shape must hold sizes >= 0, got {tuple(shape)}")
    keys = [f"step_noise {operator.index(seed)} {operator.index(step)}" for seed in seeds]
    count = math.prod(shape)
    at_once = max(1, NOISE_CHUNK // max(count, 1))
    rows = [_normal(keys[i : i + at_once], count) for i in range(0, len(keys), at_once)]
    return torch.cat(rows).view(len(keys), *shape)


def add_noise(x0: Tensor, noise: Tensor, sigma: Level) -> Tensor:
    """Noise data to level sigma: `(1 - sigma) * x0 + sigma * noise`.

    Args:
        x0: [B, ...], latent units: data.
        noise: [B, ...], standard normal.
        sigma: scalar or [B], noise level in [0, 1].

    Returns:
        [B, ...], float32, differentiable in x0 and noise.

    Raises:
        ValueError: shapes differ; or, checked on the CPU only, a sigma outside [0, 1].

    The forward process of rectified flow, arXiv 2209.03003, eq. 1; there, data is at time 1.
    """
    check_shapes(x0, noise=noise)
    if on_host(sigma) and not ((to_cpu(sigma) >= 0) & (to_cpu(sigma) <= 1)).all():
        raise ValueError(f"sigma must be in [0, 1], got {sigma}")
    level = expand_like(expand_level(x0, "sigma", sigma), x0)
    return (1 - level) * x0.float() + level * noise.float()


def renoise(x: Tensor, noise: Tensor, sigma: Level, sigma_to: Level) -> tuple[Tensor, Tensor]:
    """Add noise to a latent to raise its level from sigma to sigma_to.

        a = (1 - sigma_to) / (1 - sigma),   std^2 = sigma_to^2 - a^2 sigma^2,   x_to = a x + std noise

    x_to has the distribution of `add_noise` at sigma_to if x has it at sigma. From sigma 0 it is `add_noise`.

    Args:
        x: [B, ...], latent units, at level sigma.
        noise: [B, ...], standard normal, independent of x.
        sigma: scalar or [B], noise level of x, in [0, 1).
        sigma_to: scalar or [B], in (sigma, 1].

    Returns:
        x_to [B, ...], float32, differentiable in x, and std [B].

    Raises:
        ValueError: shapes differ, or not 0 <= sigma < sigma_to <= 1.

    The transition of the forward process between two levels, with which TDM (arXiv 2503.06674) noises its trajectories.
    """
    check_shapes(x, noise=noise)
    if on_host(sigma) and on_host(sigma_to):
        current, target = to_cpu(sigma), to_cpu(sigma_to)
        if not ((current >= 0) & (current < target) & (target <= 1)).all():
            rule = "sigma and sigma_to must satisfy 0 <= sigma < sigma_to <= 1"
            raise ValueError(f"{rule}, got sigma={current.tolist()}, sigma_to={target.tolist()}")
    lower, upper = expand_level(x, "sigma", sigma), expand_level(x, "sigma_to", sigma_to)
    share = (1 - upper) / (1 - lower)
    std = ((upper - lower) / (1 - lower) * (upper + share * lower)).sqrt()  # the same, without cancellation
    return expand_like(share, x) * x.float() + expand_like(std, x) * noise.float(), std


def _inputs(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    noise_level: float,
    noise: Tensor | None,
    x_next: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return velocity and x in float32, sigma and sigma_next as [B]; reject wrong calls and scoring without density."""
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level must be >= 0 and finite, got {noise_level}")
    check_shapes(x, velocity=velocity, noise=noise, x_next=x_next)
    if x_next is not None and noise_level == 0:
        raise ValueError("noise_level must be > 0 to score x_next: the step is deterministic, got 0")
    if x_next is not None and on_host(sigma_next) and bool((to_cpu(sigma_next) == 0).any()):
        raise ValueError(f"sigma_next must be > 0 to score x_next: the density degenerates there, got {sigma_next}")
    return velocity.float(), x.float(), *expand_levels(x, sigma, sigma_next)


def _sample_or_reuse(mean: Tensor, std: Tensor, noise: Tensor | None, x_next: Tensor | None) -> Tensor:
    """Return mean + std * noise, or x_next if it is given: [B, ...], detached, float32."""
    if noise is not None and x_next is None:
        return (mean + expand_like(std, mean) * noise.float()).detach()
    if x_next is not None and noise is None:
        return x_next.detach().float()
    raise ValueError(f"exactly one of noise and x_next must be given, got {'neither' if noise is None else 'both'}")


def _normal(keys: Sequence[str], count: int) -> Tensor:
    """Return [keys, count] standard normals, float32, each row from the bits of its key."""
    num_pairs = max((count + 1) // 2, 1)
    bits = bytearray(b"".join(hashlib.shake_128(key.encode()).digest(8 * num_pairs) for key in keys))
    words = torch.frombuffer(bits, dtype=torch.int32).double()
    uniform = (words + (2**31 + 0.5)) / 2**32  # inside (0, 1), so the logarithm is finite and |normal| < 6.8
    first, second = uniform.view(len(keys), num_pairs, 2).unbind(2)
    radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2).flatten(1)[:, :count].float()


def expand_levels(x: Tensor, sigma: Level, sigma_next: Level) -> tuple[Tensor, Tensor]:
    """Return sigma and sigma_next as [B] float32 on x's device, so scalars and vectors take the same operations."""
    both = expand_level(x, "sigma", sigma), expand_level(x, "sigma_next", sigma_next)
    if on_host(sigma) and on_host(sigma_next):
        current, following = to_cpu(sigma), to_cpu(sigma_next)
        if not ((following >= 0) & (following < current) & (current <= 1)).all():
            rule = "sigma and sigma_next must satisfy 0 <= sigma_next < sigma <= 1"
            raise ValueError(f"{rule}, got sigma={current.tolist()}, sigma_next={following.tolist()}")
    return both


def expand_level(x: Tensor, name: str, level: Level) -> Tensor:
    """Return level as [B] float32 on x's device."""
    if isinstance(level, Tensor) and level.shape not in (torch.Size(), x.shape[:1]):
        raise ValueError(f"{name} must be a scalar or [B] = [{x.shape[0]}], got shape {tuple(level.shape)}")
    if not isinstance(level, Tensor) or (level.ndim == 0 and on_host(level)):
        # A fill is queued like any kernel; a copy from pageable host memory would wait for the queue to drain.
        return torch.full(x.shape[:1], float(level), dtype=torch.float32, device=x.device)
    return level.to(x.device, torch.float32).expand(x.shape[0])


def expand_like(value: Tensor, x: Tensor) -> Tensor:
    """Return value [B] reshaped to broadcast with x [B, ...]."""
    return value.view(-1, *[1] * (x.ndim - 1))


def check_shapes(x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if x has no axis after B, or if others differ in shape from x; None is skipped."""
    if x.ndim < 2:
        raise ValueError(f"x must be [B, ...] with at least one axis behind B, got shape {tuple(x.shape)}")
    for name, other in others.items():
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(other.shape)}")


def on_host(level: Level) -> bool:
    """True if the value of level can be read without synchronization: a number, or a tensor on the CPU."""
    return not isinstance(level, Tensor) or level.device.type == "cpu"


def to_cpu(level: Level) -> Tensor:
    """Return level on the CPU, float32."""
    # Checked as float32, the precision of the step: two levels that round to the same value are not a step.
    return torch.as_tensor(level, dtype=torch.float32, device="cpu")
