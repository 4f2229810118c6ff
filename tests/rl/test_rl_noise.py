"""Noise that float32 keeps: the bounds of --noise-level, from the standard deviations of the steps that are trained."""

from dataclasses import dataclass

import pytest
import torch
from helpers import sampled
from omni_rl.run.media import MIN_NOISE, check_noise
from omni_sched import cps_step, dance_step, linear_sigmas, sde_step, shift_sigmas

RULES = {"sde": (sde_step, 1.5), "dance": (dance_step, 0.3), "cps": (cps_step, 1.0)}  # with the largest published level
SIGMAS = {
    "3 steps": linear_sigmas(3),
    "10 steps": linear_sigmas(10),
    "28 steps, shift 3": shift_sigmas(linear_sigmas(28), 3.0),
    "50 steps, shift 5": shift_sigmas(linear_sigmas(50), 5.0),
}


@dataclass(frozen=True)
class Settings:
    noise_level: float
    window_size: int | None = None


def fault(rule, sigmas, level, window=None, steps=None):
    """What is said of a level, or "" where it is taken."""
    try:
        check_noise(Settings(level, window), rule, sigmas, steps or (0, len(sigmas) - 2))
    except ValueError as exc:
        return str(exc)
    return ""


def rounding(rule, sigmas, level, steps):
    """The largest error, relative to its size, of the noise that the latents of a step give back, by one of the steps.

    The latents are float32. There is no velocity, so that each step's mean is known without a net.
    """
    generator, errors = torch.Generator().manual_seed(0), []
    x = torch.randn(1, 4096, generator=generator)
    for k in range(*steps):
        noise = torch.randn(x.shape, generator=generator)
        step = rule(torch.zeros_like(x), x, sigmas[k], sigmas[k + 1], noise_level=level, noise=noise)
        found = (step.x_next.double() - step.mean.double()) / step.std.double()
        errors.append((found - noise).square().mean().sqrt().item())
        x = step.x_next
    return max(errors)


@pytest.mark.parametrize("sigmas", SIGMAS)
@pytest.mark.parametrize("rule", RULES)
def test_published_levels_and_those_near_them_are_taken(rule, sigmas):
    take, largest = RULES[rule]
    for level in (0.05, 0.3, largest):
        assert fault(take, SIGMAS[sigmas], level) == ""


@pytest.mark.parametrize("sigmas", sampled(SIGMAS, 1))
@pytest.mark.parametrize("rule", RULES)
def test_of_a_level_that_is_taken_float32_keeps_the_noise(rule, sigmas):
    """Of each power of two: taken levels lose less than a thousandth, and those with a loss of a tenth are refused."""
    take, levels, seen = RULES[rule][0], SIGMAS[sigmas], set()
    for level in (2.0**power for power in range(-26, 1 if rule == "cps" else 24)):
        told, lost = fault(take, levels, level), rounding(take, levels, level, (0, len(levels) - 2))
        seen.add(told.partition(",")[0])
        assert told or lost < 1e-3, level
        assert told or lost < 1 / MIN_NOISE
        assert not (lost > 0.1 and not told), level
    wanted = {"", "--noise-level must be higher", "--noise-level must be lower"}
    assert seen == (wanted - {"--noise-level must be lower"} if rule == "cps" else wanted)


def test_only_the_steps_that_may_be_trained_count():
    """The late steps of a schedule have the least noise, and few steps in a row let the latents grow less."""
    levels = SIGMAS["50 steps, shift 5"]
    assert "step 48" in fault(sde_step, levels, 5e-4)
    assert fault(sde_step, levels, 5e-4, steps=(0, 10)) == ""
    assert "--noise-level must be lower" in fault(sde_step, levels, 8.0)
    assert fault(sde_step, levels, 8.0, window=2) == ""


@pytest.mark.parametrize("level", [1e10, 1e30, 3e38])
def test_a_level_whose_square_overflows_is_too_high(level):
    assert fault(sde_step, SIGMAS["10 steps"], level).startswith("--noise-level must be lower")
