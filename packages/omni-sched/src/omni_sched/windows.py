"""Windows: the denoising steps of an iteration that are stochastic and trained; the others are deterministic.

Letters: S denoising steps, numbered 0 (from sigma = 1) to S-1 (to sigma = 0); K = len(window) stochastic steps.

A window is a pure function of the iteration: every rank finds the same one without talking, and a resumed run needs no
saved state. The global random state is neither read nor changed.
"""

import math
import random
from bisect import bisect_right
from itertools import accumulate
from typing import Literal, get_args

Strategy = Literal["all", "fixed", "random", "sliding", "decay", "exp_decay", "subset"]

SLIDING = ("sliding", "decay", "exp_decay")
EXP_DECAY_START = 0.52  # of the schedule: step 13 of 25, as published
EXP_DECAY_RATE = 2.5  # over the whole schedule: 0.1 for each of 25 steps, as published


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
    """Ascending indices of the stochastic steps, at least one, all in [low, high).

    strategy is one of
        all: the whole range [low, high);
        fixed: the first `size` steps of the range;
        random: `size` steps in a row, start uniform over the range;
        sliding: `size` steps in a row, start moved by `stride` every iters_per_window iterations; the last window ends
            exactly at high, and the next is the first again, so every step has its turn;
        decay: sliding, but a window stays for fewer iterations the later it starts, on a straight line
            from iters_per_window at low to 1 at high;
        exp_decay: sliding, with iters_per_window * exp(-2.5 * (start / S - 0.52)) iterations, rounded up, for windows
            that start past 0.52 of the schedule;
        subset: `size` steps of the range at random, not in a row.

    The choice of random and subset changes every iters_per_window iterations too.

    Args:
        num_steps: S, at least 2.
        size: K; None takes the whole range.
        low, high: the range, high exclusive. high is at most S-1, and None means that: the last step, to sigma = 0, has
            no density worth training on.
        iteration: of the training loop, from 0.
        seed: chooses the random sequence of windows; any integer.
        iters_per_window: iterations that share a window; with the decays, those of the first window.
        stride: steps a sliding window moves, at most size (a larger one would leave steps out).

    Raises:
        ValueError: an argument outside the ranges above.

    sliding, decay and exp_decay are MixGRPO's `progressive`, `decay` and `exp_decay`, arXiv 2507.21802; fixed is the
    window of MixGRPO-Flash*. The released code lets the window shrink at the end of the schedule and, unless told to
    roll back, become empty past it; its high is S - 2; and its exp_decay counts 0.1 for each step past 13 whatever S
    is, which is the one here at the published 25 steps. random is the window of Flow-GRPO-Fast, arXiv 2505.05470.
    subset is the share of timesteps that DanceGRPO, arXiv 2505.07818, trains on, there drawn for each sample.
    """
    high = num_steps - 1 if high is None else high
    size = high - low if size is None else size
    _check_range(num_steps, size, low, high)
    _check_turns(strategy, iteration, iters_per_window, stride)
    turn = iteration // iters_per_window
    if strategy == "subset":
        return tuple(sorted(_rng(seed, turn).sample(range(low, high), size)))
    if strategy == "all" and size != high - low:
        raise ValueError(f"size must be None with strategy 'all', got {size}")
    if strategy in SLIDING and stride > size:
        raise ValueError(f"stride must be <= size with strategy {strategy!r}, got stride={stride}, size={size}")
    start = low
    if strategy == "random":
        start = _rng(seed, turn).randint(low, high - size)
    elif strategy in SLIDING:
        starts = [*range(low, high - size, stride), high - size]  # a last, shorter move ends flush with high
        ends = list(accumulate(_stay(strategy, place, low, high, num_steps, iters_per_window) for place in starts))
        start = starts[bisect_right(ends, iteration % ends[-1])]
    return tuple(range(start, start + size))


def _stay(strategy: str, start: int, low: int, high: int, num_steps: int, iters_per_window: int) -> int:
    """Number of iterations, at least 1, that a sliding window stays at start."""
    if strategy == "decay":
        return (iters_per_window * (high - start) + start - low) // (high - low)
    if strategy == "exp_decay":
        past = max(0.0, start / num_steps - EXP_DECAY_START)
        return math.ceil(iters_per_window * math.exp(-EXP_DECAY_RATE * past))
    return iters_per_window


def _rng(seed: int, turn: int) -> random.Random:
    # A string seed enters through SHA-512 with all its bits, so neighbouring pairs give unrelated streams; it does not
    # depend on Python's per-process string hash.
    return random.Random(f"sde_window {seed} {turn}")


def _check_range(num_steps: int, size: int, low: int, high: int) -> None:
    if num_steps < 2:
        raise ValueError(f"num_steps must be >= 2, because the last step is never stochastic, got {num_steps}")
    if high > num_steps - 1:
        raise ValueError(f"high must be <= num_steps - 1 = {num_steps - 1}, the last step is excluded, got {high}")
    if not 0 <= low < high:
        raise ValueError(f"low must be in [0, high = {high}), got {low}")
    if not 1 <= size <= high - low:
        raise ValueError(f"size must be in [1, high - low = {high - low}], got {size}")


def _check_turns(strategy: str, iteration: int, iters_per_window: int, stride: int) -> None:
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if iteration < 0:
        raise ValueError(f"iteration must be >= 0, got {iteration}")
    if iters_per_window < 1:
        raise ValueError(f"iters_per_window must be >= 1, got {iters_per_window}")
    if stride < 1:
        raise ValueError(f"stride must be >= 1, got {stride}")
