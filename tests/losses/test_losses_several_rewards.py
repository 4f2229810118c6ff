"""Several rewards at once, and which samples are worth training."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_losses import best_worst_n, filter_groups, group_advantages, multi_reward_advantages

torch.set_num_threads(1)

NAN = math.nan
REWARDS = torch.tensor([[1.0, 30.0], [3.0, 10.0], [10.0, 5.0], [14.0, 5.0], [18.0, 5.0]])
GROUPS = torch.tensor([7, 7, -2, -2, -2])


def test_the_weighted_sum_of_each_rewards_own_advantages_by_hand():
    """The second reward is the same for group -2 and adds nothing there."""
    got = multi_reward_advantages(REWARDS, GROUPS, [1.0, 0.5], std="none")
    assert got.tolist() == [-1 + 0.5 * 10, 1 - 0.5 * 10, -4.0, 0.0, 4.0]


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_one_reward_is_group_advantages(std):
    one = multi_reward_advantages(REWARDS[:, :1], GROUPS, [1.0], std=std, eps=1e-3, correction=0)
    assert torch.equal(one, group_advantages(REWARDS[:, 0], GROUPS, std=std, eps=1e-3, correction=0))


def test_defaults_are_each_groups_own_deviation_over_n_minus_1():
    got = multi_reward_advantages(REWARDS * 1e-4, GROUPS, [1.0, 0.5])  # so small that eps counts
    options = {"std": "group", "eps": 1e-4, "correction": 1}
    first, second = (group_advantages(column * 1e-4, GROUPS, **options) for column in REWARDS.unbind(dim=1))
    torch.testing.assert_close(got, first + 0.5 * second)


@pytest.mark.parametrize("std", ["batch", "group"])
def test_the_scale_of_a_reward_means_nothing_and_its_weight_all(std):
    plain = multi_reward_advantages(REWARDS, GROUPS, [1.0, 0.5], std=std, eps=1e-9)
    scaled = multi_reward_advantages(REWARDS * torch.tensor([1000.0, 0.125]) + 3, GROUPS, [1.0, 0.5], std=std, eps=1e-9)
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=1e-3)
    twice = multi_reward_advantages(REWARDS, GROUPS, [2.0, 1.0], std=std, eps=1e-9)
    torch.testing.assert_close(twice, 2 * plain)
    summed = group_advantages(REWARDS.sum(dim=1), GROUPS, std=std)
    assert not torch.allclose(summed, plain, atol=0.1)  # the sum of raw rewards is another thing


def test_rescaling_makes_the_size_free_of_the_weights():
    options = {"std": "group", "eps": 1e-9, "rescale": True}
    one = multi_reward_advantages(REWARDS, GROUPS, [1.0, 0.5], **options)
    other = multi_reward_advantages(REWARDS, GROUPS, [8.0, 4.0], **options)
    torch.testing.assert_close(one, other)
    assert one.std(correction=1).item() == pytest.approx(1, rel=1e-5)
    assert one.mean().item() == pytest.approx(0, abs=1e-6)


def test_rescaling_of_two_samples_and_of_one():
    options = {"reward_weights": [1.0], "std": "none", "eps": 1e-9, "rescale": True}
    two = multi_reward_advantages(torch.tensor([[1.0], [4.0]]), torch.tensor([0, 0]), **options)
    assert two.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    one = multi_reward_advantages(torch.tensor([[1.0], [NAN]]), torch.tensor([0, 0]), **options)
    assert one.tolist() == [0.0, 0.0]


def test_rescaling_counts_every_sample_with_any_reward():
    rewards = torch.cat([REWARDS, torch.tensor([[NAN, 4.0], [NAN, NAN]])])
    groups = torch.cat([GROUPS, torch.tensor([7, 7])])
    plain = multi_reward_advantages(rewards, groups, [1.0, 0.5])
    scale = (plain.square().sum() / (6 - 1)).sqrt() + 1e-4
    torch.testing.assert_close(multi_reward_advantages(rewards, groups, [1.0, 0.5], rescale=True), plain / scale)


def test_a_missing_reward_adds_nothing_and_enters_no_statistic():
    rewards = REWARDS.clone()
    rewards[0, 1] = NAN
    got = multi_reward_advantages(rewards, GROUPS, [1.0, 0.5], std="none")
    assert got.tolist() == [-1.0, 1.0, -4.0, 0.0, 4.0]  # sample 1 is alone with its second reward
    for rescale in (False, True):
        extra = torch.cat([REWARDS, torch.full((2, 2), NAN)])
        groups = torch.cat([GROUPS, torch.tensor([7, 3])])
        padded = multi_reward_advantages(extra, groups, [1.0, 0.5], rescale=rescale)
        assert padded[5:].tolist() == [0.0, 0.0]
        torch.testing.assert_close(padded[:5], multi_reward_advantages(REWARDS, GROUPS, [1.0, 0.5], rescale=rescale))


def test_nothing_scored_gives_zeros():
    for rescale in (False, True):
        got = multi_reward_advantages(torch.full((2, 2), NAN), torch.tensor([0, 0]), [1.0, 1.0], rescale=rescale)
        assert got.tolist() == [0.0, 0.0]


def test_signal_of_a_worked_batch():
    rewards = torch.tensor([1.0, 3.0, 0.1, 0.1, 0.1, NAN, 7.0, NAN, 2.0, NAN])
    groups = torch.tensor([4, 4, 0, 0, 0, 0, 2, 3, 5, 4])
    assert filter_groups(rewards, groups).tolist() == [True, True] + [False] * 8
    assert filter_groups(torch.tensor([]), torch.tensor([], dtype=torch.long)).tolist() == []


def test_best_and_worst_of_every_group():
    rewards = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, NAN, 8.0, 7.0, 6.0])
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    assert best_worst_n(rewards, groups, 2).tolist() == [0, 1, 5, 9]
    assert best_worst_n(rewards, groups, 4).tolist() == [0, 1, 2, 3, 5, 7, 8, 9]
    assert best_worst_n(rewards, groups, 6).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    eight = torch.tensor([3.0, 0.0, 7.0, 1.0, 6.0, 2.0, 5.0, 4.0])
    assert best_worst_n(eight, torch.zeros(8, dtype=torch.long), 6).tolist() == [1, 2, 3, 4, 5, 6]  # all but 3 and 4
    nothing = best_worst_n(torch.full((2,), NAN), torch.tensor([0, 0]), 2)
    assert nothing.tolist() == []
    assert nothing.dtype == torch.long  # an index still
    assert best_worst_n(torch.tensor([]), torch.tensor([], dtype=torch.long), 2).tolist() == []


def test_of_equal_rewards_the_first_counts_as_the_worse():
    assert best_worst_n(torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0]), torch.zeros(5, dtype=torch.long), 2).tolist() == [0, 4]


rows = st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 2)), min_size=1, max_size=14)


@settings(deadline=None)
@given(rows, st.sampled_from([2, 4, 6]))
def test_the_kept_are_no_better_than_the_best_left_out_nor_worse_than_the_worst(samples, n):
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    kept = best_worst_n(rewards / 4, groups, n)
    assert kept.tolist() == sorted(set(kept.tolist()))
    left_out = [i for i in range(len(rewards)) if i not in kept.tolist()]
    for group in groups.unique():
        chosen = rewards[kept[groups[kept] == group]].sort().values
        assert len(chosen) == min(n, int((groups == group).sum()))
        for i in (i for i in left_out if groups[i] == group):
            assert chosen[n // 2 - 1] <= rewards[i] <= chosen[n // 2]


@settings(deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_signal_is_where_an_advantage_can_be_and_ignores_order(samples, random):
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    rewards = rewards.float()
    signal = filter_groups(rewards, groups)
    assert not (group_advantages(rewards, groups)[~signal] != 0).any()
    for group in groups[signal].unique():
        assert rewards[groups == group].unique().numel() > 1
    order = random.sample(range(len(samples)), len(samples))
    assert torch.equal(filter_groups(rewards[order], groups[order]), signal[order])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"rewards must be \[N, R\] with R >= 1, got shape \(5,\)"):
        multi_reward_advantages(REWARDS[:, 0], GROUPS, [1.0])
    with pytest.raises(ValueError, match=r"reward_weights must be R = 2 finite numbers, got \[1.0\]"):
        multi_reward_advantages(REWARDS, GROUPS, [1.0])
    with pytest.raises(ValueError, match=r"reward_weights must be R = 2 finite numbers, got \[1.0, inf\]"):
        multi_reward_advantages(REWARDS, GROUPS, [1.0, math.inf])
    with pytest.raises(ValueError, match="std must be one of"):
        multi_reward_advantages(REWARDS, GROUPS, [1.0, 1.0], std="global")
    for n in (0, 1, 3):
        with pytest.raises(ValueError, match=f"n must be even and >= 2, got {n}"):
            best_worst_n(REWARDS[:, 0], GROUPS, n)
    for function in (filter_groups, lambda rewards, groups: best_worst_n(rewards, groups, 2)):
        with pytest.raises(ValueError, match=r"must both be \[N\]"):
            function(REWARDS, GROUPS)
        with pytest.raises(ValueError, match="got 1 infinite"):
            function(torch.tensor([math.inf]), torch.tensor([0]))
