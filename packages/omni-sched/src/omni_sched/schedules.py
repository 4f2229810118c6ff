"""Noise schedules: the sigmas of a sampler, functions that shift them, and the window of trained steps.

Notation: S denoising steps, numbered 0 (from sigma = 1) to S-1 (to sigma = 0). A schedule is [S+1], float32, strictly
decreasing, from 1 (noise) to exactly 0 (data); sigma is dimensionless: `x = (1 - sigma) * data + sigma * noise`.

The functions compute in float32 with the same operations as diffusers' `FlowMatchEulerDiscreteScheduler`, so that a
schedule built here equals the table of a published pipeline bit for bit, except that no sigma exceeds 1. Values are
checked on the CPU only: reading them back from an accelerator would stall its queue.

A window is the set of K steps of an iteration that are stochastic and trained; the others are deterministic. It is a
pure function of the iteration: every rank computes the same window without communication, and a resumed run needs no
saved state. The global random state is neither read nor changed.
"""

import math
import random
from bisect import bisect_right
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

MAX_ABS_MU = 80.0  # e^mu stays within float32

Strategy = Literal["all", "fixed", "random", "sliding", "decay", "exp_decay", "subset"]

SLIDING = ("sliding", "decay", "exp_decay")
EXP_DECAY_START = 0.52  # fraction of the schedule: step 13 of 25, as published
EXP_DECAY_RATE = 2.5  # over the whole schedule: 0.1 for each of 25 steps, as published


def linear_sigmas(num_steps: int) -> Tensor:
    """Return evenly spaced sigmas 1, (S-1)/S, ..., 1/S, 0.

    Args:
        num_steps: S, at least 1.

    Returns:
        [S+1], float32, on the CPU.

    Raises:
        ValueError: num_steps < 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    # The spacing is computed in float64 and rounded once, as numpy's linspace followed by a cast would be.
    levels = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64, device="cpu")
    return torch.cat([levels, levels.new_zeros(1)]).float()


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Shift sigmas towards 1 by a constant factor: `s' = shift * s / (1 + (shift - 1) * s)`.

    0 stays 0, 1 stays 1 up to rounding, shift 1 changes nothing, and two shifts compose to their product.

    Args:
        sigmas: noise levels in [0, 1], any shape.
        shift: > 0, dimensionless; SD3.5 uses 3.

    Returns:
        Shifted noise levels, same shape, float32.

    Raises:
        ValueError: shift <= 0, or a sigma outside [0, 1].

    Esser et al., "Scaling Rectified Flow Transformers", arXiv 2403.03206, section on resolution-dependent shifting.
    """
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0 and finite, got {shift}")
    sigmas = _float_levels(sigmas)
    # At sigma 1, rounding can make the quotient 1.0000001, and 1 - sigma must not be negative.
    return (shift * sigmas / (1 + (shift - 1) * sigmas)).clamp(max=1)


def exponential_shift_sigmas(sigmas: Tensor, mu: float) -> Tensor:
    """Shift sigmas towards 1 in log-odds: `s' = e^mu / (e^mu + 1/s - 1)`, equal to `shift_sigmas` with shift e^mu.

    Args:
        sigmas: noise levels in [0, 1], any shape.
        mu: log of the shift, usually from `resolution_mu`.

    Returns:
        Shifted noise levels, same shape, float32.

    Raises:
        ValueError: |mu| >= 80 (e^mu would leave float32), or a sigma outside [0, 1].

    Dynamic shifting as used by FLUX and Qwen-Image.
    """
    if not abs(mu) < MAX_ABS_MU:
        raise ValueError(f"mu must be in (-{MAX_ABS_MU}, {MAX_ABS_MU}), got {mu}")
    sigmas = _float_levels(sigmas)
    # torch evaluates `float / tensor` as a product with the reciprocal, which rounds twice; a 0-d tensor divides once.
    # sigma 0 needs no special case: 1/0 is inf, and e^mu / inf is exactly 0.
    odds = torch.tensor(math.exp(mu), dtype=torch.float32, device="cpu")
    return odds / (odds + (1 / sigmas - 1))


def resolution_mu(
    num_tokens: int, *, base_tokens: int = 256, max_tokens: int = 4096, base_mu: float = 0.5, max_mu: float = 1.15
) -> float:
    """Return mu for num_tokens tokens, on the line through (base_tokens, base_mu) and (max_tokens, max_mu).

    It is not clamped: a latent with more than max_tokens tokens gets a mu above max_mu.

    Args:
        num_tokens: number of image tokens in the transformer, (height / 16) * (width / 16) for FLUX and Qwen-Image.
        base_tokens, max_tokens, base_mu, max_mu: the two points of the line. The defaults are FLUX's; Qwen-Image uses
            max_tokens 8192 and max_mu 0.9.

    Raises:
        ValueError: num_tokens < 1, or base_tokens >= max_tokens.

    Source: FLUX's released code; diffusers' `calculate_shift`.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
    if base_tokens >= max_tokens:
        raise ValueError(f"base_tokens must be < max_tokens, got {base_tokens} and {max_tokens}")
    return base_mu + (max_mu - base_mu) * (num_tokens - base_tokens) / (max_tokens - base_tokens)


def stretch_sigmas(sigmas: Tensor, terminal: float) -> Tensor:
    """Rescale a schedule so that its last non-zero sigma, s_last, becomes `terminal`.

    `1 - s' = (1 - s) * (1 - terminal) / (1 - s_last)`: 1 stays 1, and the final 0 stays 0. diffusers calls this
    `shift_terminal`; Qwen-Image uses 0.02, after the exponential shift.

    Args:
        sigmas: [S+1], a complete schedule that ends with 0; S at least 2.
        terminal: the last non-zero sigma of the result, in (0, 1).

    Returns:
        [S+1], float32.

    Raises:
        ValueError: terminal is outside (0, 1), or sigmas does not end with an entry in (0, 1) and then 0.
    """
    if not 0 < terminal < 1:
        raise ValueError(f"terminal must be in (0, 1), got {terminal}")
    if sigmas.ndim != 1 or len(sigmas) < 3:
        raise ValueError(f"sigmas must be [S+1] with S >= 2, got shape {tuple(sigmas.shape)}")
    sigmas = _float_levels(sigmas)
    if sigmas.device.type == "cpu" and not (sigmas[-1] == 0 and 0 < sigmas[-2] < 1):
        raise ValueError(f"sigmas must end with an entry in (0, 1) and then 0, got {sigmas[-2:].tolist()}")
    signal = 1 - sigmas
    stretched = 1 - signal / (signal[-2] / (1 - terminal))
    stretched[-1] = 0
    return stretched


def sde_window(  # noqa: PLR0913 - one call names everything a window depends on; all but two are keyword-only
    num_steps: int,
    size: int | None = None,
    *,
    low: int = 0,
    high: int | None = None,
    strategy: Strategy = "random",
    iteration: int = 0,
    seed: int = 0,
    iters_per_window: int = 1,
    stride: int = 1,
) -> tuple[int, ...]:
    """Return the ascending indices of the stochastic steps, at least one, all in [low, high).

    strategy is one of
        all: the whole range [low, high);
        fixed: the first `size` steps of the range;
        random: `size` consecutive steps, start uniform over the range;
        sliding: `size` consecutive steps, start moved by `stride` every iters_per_window iterations; the last window
            ends exactly at high and is followed by the first again, so every step is covered;
        decay: sliding, but a window stays for fewer iterations the later it starts, linearly
            from iters_per_window at low to 1 at high;
        exp_decay: sliding, with iters_per_window * exp(-2.5 * (start / S - 0.52)) iterations, rounded up, for windows
            that start past 0.52 of the schedule;
        subset: `size` random steps of the range, not consecutive.

    random and subset also choose anew every iters_per_window iterations.

    Args:
        num_steps: S, at least 2.
        size: K; None takes the whole range.
        low, high: the range, high exclusive. high is at most S-1, the default with None: the last step, to sigma = 0,
            has no useful density to train on.
        iteration: iteration of the training loop, from 0.
        seed: any integer; determines the random sequence of windows.
        iters_per_window: number of iterations that share a window; with the decays, that of the first window.
        stride: number of steps by which a sliding window moves, at most size (a larger stride would skip steps).

    Raises:
        ValueError: an argument outside the ranges above.

    sliding, decay and exp_decay are MixGRPO's `progressive`, `decay` and `exp_decay`, arXiv 2507.21802; fixed is the
    window of MixGRPO-Flash*. In the released code, the window shrinks at the end of the schedule and, unless configured
    to roll back, becomes empty past it; its high is S - 2; and its exp_decay counts 0.1 for each step past 13 at every
    S, which matches exp_decay here at the published 25 steps. random is the window of Flow-GRPO-Fast, arXiv 2505.05470.
    subset is the share of timesteps that DanceGRPO, arXiv 2505.07818, trains on; DanceGRPO chooses it per sample.
    """
    high = num_steps - 1 if high is None else high
    size = high - low if size is None else size
    _require(
        (num_steps >= 2, f"num_steps must be >= 2, because the last step is never stochastic, got {num_steps}"),
        (high < num_steps, f"high must be <= num_steps - 1 = {num_steps - 1}, the last step is excluded, got {high}"),
        (0 <= low < high, f"low must be in [0, high = {high}), got {low}"),
        (1 <= size <= high - low, f"size must be in [1, high - low = {high - low}], got {size}"),
        (strategy in get_args(Strategy), f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"),
        (iteration >= 0, f"iteration must be >= 0, got {iteration}"),
        (iters_per_window >= 1, f"iters_per_window must be >= 1, got {iters_per_window}"),
        (stride >= 1, f"stride must be >= 1, got {stride}"),
        (strategy != "all" or size == high - low, f"size must be None with strategy 'all', got {size}"),
    )
    start, turn = low, iteration // iters_per_window
    if strategy == "subset":
        return tuple(sorted(_rng(seed, turn).sample(range(low, high), size)))
    if strategy == "random":
        start = _rng(seed, turn).randint(low, high - size)
    elif strategy in SLIDING:
        start = _window_start(strategy, iteration, low, high, size, stride, num_steps, iters_per_window)
    return tuple(range(start, start + size))


def _window_start(
    strategy: str, iteration: int, low: int, high: int, size: int, stride: int, num_steps: int, iters_per_window: int
) -> int:
    """Return the first step of a sliding window; the arguments are those of `sde_window`."""
    _require((stride <= size, f"stride must be <= size with strategy {strategy!r}, got {stride=}, {size=}"))
    starts = [*range(low, high - size, stride), high - size]  # a last, shorter move ends exactly at high
    ends = list(
        accumulate(_num_iterations(strategy, place, low, high, num_steps, iters_per_window) for place in starts)
    )
    return starts[bisect_right(ends, iteration % ends[-1])]


def _require(*rules: tuple[bool, str]) -> None:
    """Raise ValueError with the message of the first rule that does not hold."""
    if broken := [message for holds, message in rules if not holds]:
        raise ValueError(broken[0])


def _float_levels(sigmas: Tensor) -> Tensor:
    """Return sigmas in float32; raise ValueError for values outside [0, 1], checked on the CPU only."""
    sigmas = sigmas.float()
    if sigmas.device.type == "cpu" and not ((sigmas >= 0) & (sigmas <= 1)).all():
        raise ValueError(f"sigmas must be in [0, 1], got {sigmas.tolist()}")
    return sigmas


def _num_iterations(strategy: str, start: int, low: int, high: int, num_steps: int, iters_per_window: int) -> int:
    """Return the number of iterations, at least 1, that a sliding window stays at start."""
    if strategy == "decay":
        return (iters_per_window * (high - start) + start - low) // (high - low)
    if strategy == "exp_decay":
        excess = max(0.0, start / num_steps - EXP_DECAY_START)
        return math.ceil(iters_per_window * math.exp(-EXP_DECAY_RATE * excess))
    return iters_per_window


def _rng(seed: int, turn: int) -> random.Random:
    # SHA-512 hashes all bits of a string seed, so neighbouring pairs give unrelated streams; it does not depend on
    # Python's per-process string hash.
    return random.Random(f"sde_window {seed} {turn}")
