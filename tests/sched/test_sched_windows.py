"""Windows: properties over long runs, MixGRPO's published schedule, and what is refused."""

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import count, groupby, islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_sched import sde_window

STEADY = ["all", "fixed", "random", "sliding", "subset"]  # windows that all last iters_per_window iterations
DECAYS = ["decay", "exp_decay"]
STRATEGIES = STEADY + DECAYS


@st.composite
def window_arguments(draw: st.DrawFn, max_steps: int = 50) -> dict[str, Any]:
    num_steps = draw(st.integers(2, max_steps))
    low = draw(st.integers(0, num_steps - 2))
    high = draw(st.integers(low + 1, num_steps - 1))
    strategy = draw(st.sampled_from(STRATEGIES))
    size = None if strategy == "all" else draw(st.none() | st.integers(1, high - low))
    return {
        "num_steps": num_steps,
        "size": size,
        "low": low,
        "high": high,
        "strategy": strategy,
        "seed": draw(st.integers(-(2**70), 2**70)),
        "iters_per_window": draw(st.integers(1, 30)),
        "stride": draw(st.integers(1, size or high - low)),
    }


@settings(max_examples=5, deadline=None)
@given(arguments=window_arguments())
def test_ten_thousand_iterations_are_never_empty_and_in_range(arguments: dict[str, Any]) -> None:
    low, high = arguments["low"], arguments["high"]
    size = arguments["size"] or high - low
    for iteration in range(10_000):
        window = sde_window(**arguments, iteration=iteration)
        assert len(window) == size
        assert low <= window[0] <= window[-1] < high
        assert all(a < b for a, b in pairwise(window))


@settings(max_examples=100, deadline=None)
@given(arguments=window_arguments(), iteration=st.integers(0, 10**12))
def test_a_window_is_a_pure_function(arguments: dict[str, Any], iteration: int) -> None:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    first = sde_window(**arguments, iteration=iteration)
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    random.random()
    sde_window(**arguments, iteration=iteration + 1)
    assert sde_window(**arguments, iteration=iteration) == first


@settings(max_examples=100, deadline=None)
@given(
    arguments=window_arguments(),
    strategy=st.sampled_from(STEADY),
    turn=st.integers(0, 10**6),
    offset=st.integers(0, 29),
)
def test_iterations_of_a_turn_share_their_window(
    arguments: dict[str, Any], strategy: str, turn: int, offset: int
) -> None:
    arguments |= {"strategy": strategy} | ({"size": None} if strategy == "all" else {})
    start = turn * arguments["iters_per_window"]
    inside = start + offset % arguments["iters_per_window"]
    assert sde_window(**arguments, iteration=inside) == sde_window(**arguments, iteration=start)


@settings(max_examples=50, deadline=None)
@given(arguments=window_arguments(max_steps=20), strategy=st.sampled_from(["sliding", *DECAYS]))
def test_a_sliding_window_covers_every_step_and_returns_to_the_start(arguments: dict[str, Any], strategy: str) -> None:
    arguments |= {"strategy": strategy}
    turns = [next(pair) for _, pair in groupby(sde_window(**arguments, iteration=i) for i in range(20 * 30 * 2))]
    again = turns[1:].index(turns[0]) + 1 if len(turns) > 1 else 1
    assert {step for window in turns[:again] for step in window} == set(range(arguments["low"], arguments["high"]))
    assert turns[again : 2 * again] == turns[: len(turns[again : 2 * again])]
    assert all(one[0] < other[0] for one, other in pairwise(turns[:again]))


def stays(strategy: Any, num_places: int, **arguments: Any) -> list[int]:
    """How many iterations the window stays at each of its first places."""
    windows = (sde_window(25, 4, strategy=strategy, iteration=i, **arguments) for i in count())
    return [len(list(group)) for _, group in islice(groupby(windows), num_places)]


@pytest.mark.parametrize("iters", [1, 2, 10, 25])
def test_decay_is_the_published_straight_line(iters: int) -> None:
    """MixGRPO's: iterations interpolated between the largest and 1 by the window's start over 23, rounded down."""
    expected = [math.floor(iters * (1 - Fraction(start, 23)) + Fraction(start, 23)) for start in range(20)]
    assert stays("decay", 20, high=23, iters_per_window=iters) == expected
    assert expected[0] == iters
    assert min(expected) >= 1


def test_decay_falls_over_its_own_range() -> None:
    """From 10 iterations at step 5 to 1 at step 15, were a window to start there."""
    expected = [math.floor(10 * (1 - Fraction(i, 10)) + Fraction(i, 10)) for i in range(7)]
    assert stays("decay", 7, low=5, high=15, iters_per_window=10) == expected


def test_decay_of_mixgrpo_by_hand() -> None:
    """10 at first; 10 - 9/23, rounded down, at the next place; 10 - 19 * 9/23 = 2.6 at the last."""
    assert stays("decay", 20, high=23, iters_per_window=10) == [
        10,
        9,
        9,
        8,
        8,
        8,
        7,
        7,
        6,
        6,
        6,
        5,
        5,
        4,
        4,
        4,
        3,
        3,
        2,
        2,
    ]


@pytest.mark.parametrize("iters", [1, 5, 20])
def test_exp_decay_is_the_published_curve_at_25_steps(iters: int) -> None:
    expected = [math.ceil(iters * math.exp(-0.1 * max(0, start - 13))) for start in range(21)]
    assert stays("exp_decay", 21, iters_per_window=iters) == expected


def test_exp_decay_depends_on_the_place_in_the_schedule_not_on_its_length() -> None:
    coarse = stays("exp_decay", 21, iters_per_window=100)
    windows = [
        sde_window(50, 8, strategy="exp_decay", stride=2, iters_per_window=100, iteration=i) for i in range(2200)
    ]
    fine = [len(list(group)) for _, group in groupby(windows)]
    assert fine[:20] == coarse[:20]


@pytest.mark.parametrize("strategy", DECAYS)
def test_decays_with_one_iteration_slide(strategy: Any) -> None:
    for i in range(100):
        assert sde_window(25, 4, strategy=strategy, iteration=i) == sde_window(25, 4, strategy="sliding", iteration=i)


def test_random_windows_have_uniform_starts() -> None:
    counts = Counter(sde_window(10, 3, iteration=i)[0] for i in range(7000))
    assert sorted(counts) == list(range(7))  # starts 0 .. 6, the last window ends at step 8
    assert all(abs(count - 1000) < 5 * 29.3 for count in counts.values())  # binomial std 29.3


def test_subsets_use_every_step_alike_and_are_not_only_runs() -> None:
    windows = [sde_window(10, 3, strategy="subset", iteration=i) for i in range(3000)]
    counts = Counter(step for window in windows for step in window)
    assert sorted(counts) == list(range(9))
    assert all(abs(count - 1000) < 5 * 25.8 for count in counts.values())  # binomial std 25.8
    assert len(set(windows)) == 84  # all of 9 choose 3


@pytest.mark.parametrize("strategy", ["random", "subset"])
def test_seeds_give_different_sequences(strategy: Any) -> None:
    def sequence(seed: int) -> list[tuple[int, ...]]:
        return [sde_window(25, 4, strategy=strategy, seed=seed, iteration=i) for i in range(200)]

    sequences = [sequence(seed) for seed in (0, 1, -1, 2**32, 2**64)]
    for i, one in enumerate(sequences):
        for other in sequences[i + 1 :]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 40  # 10 expected for runs


def test_mixgrpo_schedule() -> None:
    """25 steps, window 4, stride 1, 25 iterations per window; step 24 is the last and stays deterministic."""

    def window(iteration: int) -> tuple[int, ...]:
        return sde_window(25, 4, strategy="sliding", iters_per_window=25, iteration=iteration)

    assert window(0) == window(24) == (0, 1, 2, 3)
    assert window(25) == (1, 2, 3, 4)
    assert window(25 * 20) == window(524) == (20, 21, 22, 23)
    assert window(525) == (0, 1, 2, 3)
    assert window(575) == (2, 3, 4, 5)  # where the released progressive schedule has run out of steps


def test_a_fixed_window_never_moves() -> None:
    for iteration in (0, 1, 7, 10**6):
        assert sde_window(25, 4, low=3, strategy="fixed", iteration=iteration) == (3, 4, 5, 6)


def test_a_sliding_window_ends_flush_with_the_range() -> None:
    starts = [sde_window(11, 4, strategy="sliding", stride=4, iteration=i)[0] for i in range(4)]
    assert starts == [0, 4, 6, 0]


def test_defaults_and_ranges() -> None:
    assert sde_window(10, strategy="all") == tuple(range(9))
    assert sde_window(10) == tuple(range(9))
    assert sde_window(10, strategy="all", low=2, high=5) == (2, 3, 4)
    assert sde_window(10, 2, strategy="fixed", low=1) == (1, 2)
    assert sde_window(2) == (0,)
    first = sde_window(50, 2, iteration=0, seed=0, iters_per_window=1, strategy="random")
    assert sde_window(50, 2) == first
    assert sde_window(25, 4, strategy="sliding", iteration=3) == (3, 4, 5, 6)  # a step further every iteration


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 1}, "num_steps must be >= 2, .* got 1"),
        ({"high": 10}, "high must be <= num_steps - 1 = 9, .* got 10"),
        ({"low": -1}, r"low must be in \[0, high = 9\), got -1"),
        ({"low": 4, "high": 4}, r"low must be in \[0, high = 4\), got 4"),
        ({"size": 0}, r"size must be in \[1, high - low = 9\], got 0"),
        ({"size": 4, "high": 3}, r"size must be in \[1, high - low = 3\], got 4"),
        ({"size": 3, "strategy": "all"}, "size must be None with strategy 'all', got 3"),
        ({"size": 2, "strategy": "sliding", "stride": 3}, "stride must be <= size .* got stride=3, size=2"),
        ({"size": 2, "strategy": "decay", "stride": 3}, "stride must be <= size with strategy 'decay'"),
        ({"strategy": "progressive"}, "strategy must be one of all, fixed, .* got 'progressive'"),
        ({"iteration": -1}, "iteration must be >= 0, got -1"),
        ({"iters_per_window": 0}, "iters_per_window must be >= 1, got 0"),
        ({"stride": 0}, "stride must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sde_window(**({"num_steps": 10} | arguments))
