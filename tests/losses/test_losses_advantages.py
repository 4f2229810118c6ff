"""Advantages: worked examples, and what must not change them."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import filter_groups, group_advantages, multi_reward_advantages, overrated, reward_metrics

torch.set_num_threads(1)

REWARDS = torch.tensor([1.0, 3.0, 10.0, 14.0, 18.0])
GROUPS = torch.tensor([7, 7, -2, -2, -2])
CENTERED = [-1.0, 1.0, -4.0, 0.0, 4.0]


def advantages(rewards, groups, **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **options)


def test_none_subtracts_the_mean_of_the_group():
    assert group_advantages(REWARDS, GROUPS, std="none").tolist() == CENTERED


@pytest.mark.parametrize(("correction", "stds"), [(1, (2**0.5, 4.0)), (0, (1.0, (32 / 3) ** 0.5))])
def test_group_divides_by_the_groups_own_deviation(correction, stds):
    got = group_advantages(REWARDS, GROUPS, std="group", eps=1e-4, correction=correction)
    expected = [c / (stds[0 if i < 2 else 1] + 1e-4) for i, c in enumerate(CENTERED)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("correction", "deviation"), [(1, statistics.stdev), (0, statistics.pstdev)])
def test_batch_divides_by_the_deviation_of_all_rewards(correction, deviation):
    got = group_advantages(REWARDS, GROUPS, std="batch", eps=1e-4, correction=correction)
    scale = deviation(REWARDS.tolist()) + 1e-4
    assert got.tolist() == pytest.approx([c / scale for c in CENTERED], rel=1e-6)


@pytest.mark.parametrize("std", ["batch", "group"])
def test_of_two_samples_the_deviation_is_their_distance_over_root_two(std):
    got = advantages([1.0, 4.0], [0, 0], std=std, eps=1e-9)
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    by_n = advantages([1.0, 4.0], [0, 0], std=std, eps=1e-9, correction=0)
    assert by_n.tolist() == pytest.approx([-1.0, 1.0])


def test_defaults_are_the_batch_deviation_over_n_minus_1_and_a_tenth_of_a_thousandth():
    rewards = torch.tensor([1e-4, 3e-4, 2e-4, 2.5e-4], requires_grad=True)  # so small that eps counts
    got = group_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    scale = statistics.stdev(rewards.tolist()) + 1e-4
    assert got.tolist() == pytest.approx([-1e-4 / scale, 1e-4 / scale, -0.25e-4 / scale, 0.25e-4 / scale], rel=1e-4)
    assert not got.requires_grad


def test_two_conventions_differ_by_the_known_factor():
    rewards, groups = torch.rand(24, generator=torch.Generator().manual_seed(0)), torch.zeros(24, dtype=torch.long)
    by_n, by_n_minus_1 = (group_advantages(rewards, groups, eps=1e-12, correction=c) for c in (0, 1))
    torch.testing.assert_close(by_n / by_n_minus_1, torch.full((24,), math.sqrt(24 / 23)))


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_a_group_of_equal_rewards_gets_exactly_zero(std):
    """0.1 seven times: its float32 sum divided by 7 is not 0.1."""
    got = advantages([0.1] * 7 + [1.0, 2.0], [0] * 7 + [1, 1], std=std)
    assert got[:7].tolist() == [0.0] * 7
    assert got[7] < 0 < got[8]
    assert advantages([0.1] * 7, [0] * 7, std=std, eps=1e-30).tolist() == [0.0] * 7


@pytest.mark.parametrize("std", ["batch", "group", "none"])
@pytest.mark.parametrize("correction", [0, 1])
def test_a_sample_alone_gets_zero(std, correction):
    assert advantages([5.0, 2.0], [0, 1], std=std, correction=correction).tolist() == [0.0, 0.0]
    assert advantages([5.0], [0], std=std, correction=correction).tolist() == [0.0]


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_unscored_samples_get_zero_and_change_no_other(std):
    nan = math.nan
    got = advantages([nan, 1.0, 3.0, nan, 10.0, 14.0, nan], [7, 7, 7, -2, -2, -2, 9], std=std)
    expected = advantages([1.0, 3.0, 10.0, 14.0], [7, 7, -2, -2], std=std)
    assert got[[1, 2, 4, 5]].tolist() == expected.tolist()
    assert got[[0, 3, 6]].tolist() == [0.0] * 3


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_nothing_scored_gives_zeros(std):
    assert advantages([math.nan] * 3, [0, 0, 1], std=std).tolist() == [0.0] * 3
    assert group_advantages(torch.tensor([]), torch.tensor([], dtype=torch.long), std=std).shape == (0,)


samples = st.lists(st.tuples(st.integers(-64, 64), st.sampled_from([-5, 0, 3, 10**12])), min_size=1, max_size=12)


@settings(deadline=None)
@given(samples, st.randoms(use_true_random=False), st.sampled_from(["batch", "group", "none"]))
def test_order_does_not_matter(samples, random, std):
    order = random.sample(range(len(samples)), len(samples))
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    rewards = rewards / 8
    straight = group_advantages(rewards, groups, std=std)
    shuffled = group_advantages(rewards[order], groups[order], std=std)
    torch.testing.assert_close(shuffled, straight[order])


@settings(deadline=None)
@given(samples, st.integers(-1000, 1000), st.sampled_from([0.25, 2.0, 64.0]))
def test_shift_and_scale_of_rewards_do_not_matter(samples, shift, scale):
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    for std in ("batch", "group"):
        plain = group_advantages(rewards, groups, std=std, eps=1e-9)
        moved = group_advantages(rewards * scale + shift, groups, std=std, eps=1e-9)
        torch.testing.assert_close(moved, plain, rtol=1e-3, atol=1e-3)


@settings(deadline=None)
@given(samples)
def test_each_group_sums_to_zero(samples):
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    for std in ("batch", "group", "none"):
        got = group_advantages(rewards, groups, std=std)
        for group in groups.unique():
            assert abs(got[groups == group].sum()) < 1e-3


def root(square):
    """The square root of a fraction, to 60 decimals."""
    return Fraction(math.isqrt(square.numerator * 10**120 // square.denominator), 10**60)


def deviation_of(rewards, correction):
    mean = sum(rewards) / len(rewards)
    return root(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - correction))


def exact(rewards, groups, std, eps=1e-4, correction=1):
    """Advantages in rational arithmetic, of the numbers that the floats are."""
    rewards = [Fraction(r) for r in rewards]
    own = {g: [r for r, other in zip(rewards, groups, strict=True) if other == g] for g in set(groups)}
    whole = deviation_of(rewards, correction)
    none = Fraction(1) - Fraction(eps)
    by = {g: {"none": none, "batch": whole, "group": deviation_of(own[g], correction)} for g in own}
    means = {g: sum(values) / len(values) for g, values in own.items()}
    return [float((r - means[g]) / (by[g][std] + Fraction(eps))) for r, g in zip(rewards, groups, strict=True)]


SCALES = {
    "a hundred give or take a hundredth": (100.0, 0.01, 16),
    "groups of hundreds": (100.0, 0.01, 256),
    "a million give or take one": (1e6, 1.0, 16),
    "near the largest": (0.0, 1e20, 16),
    "far from zero": (1e20, 1e12, 16),
    "tiny": (0.0, 1e-20, 16),
    "of size one": (0.5, 0.2, 16),
}


@pytest.mark.parametrize("std", ["batch", "group", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_they_are_those_of_exact_arithmetic_wherever_the_rewards_lie(scale, dtype, std):
    """Rounded once, to float32. Means in float32 were off by up to 37 %, and squares overflowed from 1e19 on."""
    middle, spread, size = SCALES[scale]
    drawn = torch.randn(2 * size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards, groups = (middle + spread * drawn).to(dtype), torch.arange(2 * size) % 2
    wanted = torch.tensor(exact(rewards.tolist(), groups.tolist(), std), dtype=torch.float64)
    found = group_advantages(rewards, groups, std=std)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7 * wanted.abs().max().item())
    twice = multi_reward_advantages(torch.stack([rewards, -rewards / 2], dim=1), groups, [0.5, -1.0], std="none")
    plain = torch.tensor(exact(rewards.tolist(), groups.tolist(), "none"), dtype=torch.float64)
    torch.testing.assert_close(twice.double(), plain, rtol=1e-6, atol=1e-7 * plain.abs().max().item())
    metrics = reward_metrics(rewards, groups)
    own = [statistics.pstdev(map(Fraction, rewards[groups == g].tolist())) for g in (0, 1)]
    assert metrics["mean"].item() == pytest.approx(float(statistics.mean(map(Fraction, rewards.tolist()))), rel=1e-12)
    assert metrics["group_std"].item() == pytest.approx(float(sum(own) / 2), rel=1e-6)


def test_several_rewards_are_rescaled_in_float64_too():
    rewards = 1e6 + torch.randn(64, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = torch.arange(64) % 4
    columns = [exact(column.tolist(), groups.tolist(), "group") for column in rewards.T]
    total = [2 * a - b for a, b in zip(*columns, strict=True)]
    scale = math.sqrt(math.fsum(t * t for t in total) / 63) + 1e-4
    found = multi_reward_advantages(rewards, groups, [2.0, -1.0], rescale=True)
    assert found.tolist() == pytest.approx([t / scale for t in total], rel=1e-6, abs=1e-6)


def test_rewards_that_differ_by_the_rounding_of_a_float64_sum_alone_are_equal():
    """0.1 + 0.2 is not 0.3. Rewards that a scorer rounds to float32 differ by more, or not at all."""
    rewards, groups = torch.tensor([0.1 + 0.2, 0.3, 1e9, 1e9 + 1e-2], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, groups, std="group", eps=1e-30)[:2].tolist() == [0.0, 0.0]
    assert filter_groups(rewards, groups).tolist() == [False, False, True, True]
    assert reward_metrics(rewards, groups)["zero_variance_ratio"] == 0.5
    close = torch.tensor([1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()])
    assert filter_groups(close, torch.tensor([0, 0])).all()


def test_integer_and_float64_rewards_give_float32():
    for rewards in (torch.tensor([1, 2]), torch.tensor([1.0, 2.0], dtype=torch.float64)):
        assert group_advantages(rewards, torch.tensor([0, 0])).dtype == torch.float32


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"must both be \[N\], got shapes \(2,\) and \(3,\)"):
        advantages([1.0, 2.0], [0, 0, 0])
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"groups must hold integers, got torch.float32"):
        advantages([1.0, 2.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="finite, or NaN where there is none, got 1 infinite"):
        advantages([1.0, math.inf], [0, 0])
    with pytest.raises(ValueError, match="got 1 infinite in float32"):
        group_advantages(torch.tensor([1.0, 1e39], dtype=torch.float64), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"std must be one of .* got 'global'"):
        advantages([1.0], [0], std="global")
    with pytest.raises(ValueError, match="eps must be > 0, got 0"):
        advantages([1.0], [0], eps=0.0)
    with pytest.raises(ValueError, match="correction must be 0 or 1, got 2"):
        advantages([1.0], [0], correction=2)


def test_reward_metrics_of_a_worked_batch():
    rewards = torch.tensor([1.0, 3.0, 0.1, 0.1, 0.1, math.nan, 7.0, math.nan])
    metrics = reward_metrics(rewards, torch.tensor([4, 4, 0, 0, 0, 0, 2, 3]))
    with pytest.raises(ValueError, match=r"at least one score, got none in 2"):
        reward_metrics(torch.full((2,), math.nan), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        reward_metrics(rewards, torch.tensor([0]))
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "mean": 11.3 / 6,
            "min": 0.1,
            "max": 7.0,
            "group_std": 1 / 3,  # of 1, 0 and 0: the group without a score has none
            "zero_variance_ratio": 2 / 3,
            "abstained_ratio": 1 / 4,
        },
        abs=1e-6,
    )


def test_overrated_samples_are_those_ranked_furthest_above_what_other_rewards_make_of_them():
    """Ranks written out: the reward has 4, 3, 2, 1 of 4, the others' mean is 1, 2.5, 2.5, 4: doubt 3, 0.5, -0.5, -3."""
    rewards = torch.tensor([0.9, 0.5, 0.4, 0.1])
    others = torch.tensor([[1.0, 20.0], [2.0, 40.0], [3.0, 30.0], [4.0, 50.0]])
    assert overrated(rewards, others, 1.0).tolist() == [True, True, False, False]
    assert overrated(rewards, others, 0.25).tolist() == [True, False, False, False]
    assert overrated(rewards, others, 0.3).tolist() == [True, True, False, False]  # rounded up
    assert overrated(rewards, rewards[:, None].pow(3).expand(4, 3), 1.0).sum() == 0  # who agrees doubts nothing
    assert overrated(10 * rewards - 3, others.exp2(), 1.0).tolist() == [True, True, False, False]  # only ranks count
    nan = torch.tensor([torch.nan])
    mask = overrated(torch.cat([nan, rewards]), torch.cat([nan.expand(1, 2), others]), 1.0)
    assert mask.tolist() == [False, True, True, False, False]
    lacking = torch.where(torch.arange(4)[:, None] == 0, torch.nan, others)
    assert overrated(rewards, lacking, 1.0).tolist() == [False, True, True, False]  # 1.5, 0.5, -2 of the other three
    for shape, share in (((4,), 0.5), ((4, 1), 0.0), ((3, 1), 0.5)):
        with pytest.raises(ValueError, match=r"^rewards and others must be"):
            overrated(rewards, torch.zeros(shape), share)
