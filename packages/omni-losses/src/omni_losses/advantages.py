"""Advantages of samples relative to the other samples of a prompt, and the selection of samples to train on.

Notation: N samples from all ranks, in any order; a group is the samples of one prompt; R rewards per sample. A NaN
reward marks a sample without a score. Everything is computed in float64, because means and deviations are differences
of rewards, which may be small relative to their magnitude.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Std = Literal["batch", "group", "none"]

ROUNDING = 2.0**-40  # relative difference that rewards can have through rounding in a scorer's float64 sums


def group_advantages(
    rewards: Tensor, groups: Tensor, *, std: Std = "batch", eps: float = 1e-4, correction: int = 1
) -> Tensor:
    """Compute advantages [N], float32: each reward minus its group's mean, over a standard deviation.

        A_i = (r_i - mean_g(r)) / (std(r) + eps)

    A group whose rewards are all equal gets exactly 0, and so does a group of one sample. A NaN reward marks a sample
    without a score: its advantage is 0, and it is excluded from means and standard deviations.

    Args:
        rewards: [N], any scale.
        groups: [N], integer ids; equal ids form a group, their order and magnitude have no meaning.
        std: "batch" divides by the standard deviation of all scored rewards, "group" by that of the group, "none" does
            not divide (Dr. GRPO, arXiv 2503.20783).
        eps: added to the standard deviation, in units of the reward, > 0.
        correction: 0 or 1; the standard deviation divides the sum of squares by n - correction.

    Raises:
        ValueError: shapes or dtypes do not match, a reward is infinite, or an option is out of range.

    Source: the group-relative advantage of Flow-GRPO (arXiv 2505.05470), after DeepSeekMath (arXiv 2402.03300).
    Released code differs: flow_grpo divides the sum of squares by n (`correction=0`), verl-omni and DanceGRPO by n - 1,
    which makes advantages smaller by sqrt((n - 1) / n), 2 % at n = 24 and 29 % at n = 2; DanceGRPO has eps 1e-8.
    """
    check_rewards(rewards, groups)
    if std not in get_args(Std):
        raise ValueError(f"std must be one of {get_args(Std)}, got {std!r}")
    if not eps > 0:
        raise ValueError(f"eps must be > 0, got {eps}")
    if correction not in (0, 1):
        raise ValueError(f"correction must be 0 or 1, got {correction}")
    rewards = rewards.detach().double()
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0.0)
    ids, index = torch.unique(groups, return_inverse=True)

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(ids)).index_add_(0, index, x)

    count = group_sum(scored.double())
    mean = group_sum(values) / count.clamp(min=1)
    varied = scored & _has_variation(rewards, scored, index, len(ids))
    centered = torch.where(varied, values - mean[index], 0.0)
    if std == "none":
        return centered.float()
    if std == "group":
        variance = group_sum(centered.square()) / (count - correction).clamp(min=1)
        return (centered / (variance.sqrt()[index] + eps)).float()
    batch_mean = values.sum() / scored.sum().clamp(min=1)
    squares = torch.where(scored, values - batch_mean, 0.0).square().sum()
    return (centered / ((squares / (scored.sum() - correction).clamp(min=1)).sqrt() + eps)).float()


def multi_reward_advantages(
    rewards: Tensor,
    groups: Tensor,
    reward_weights: Sequence[float],
    *,
    std: Std = "group",
    eps: float = 1e-4,
    correction: int = 1,
    rescale: bool = False,
) -> Tensor:
    """Compute advantages [N], float32, from several rewards: the weighted sum of each reward's group advantages.

        A_i = sum_r weight_r group_advantages(rewards[:, r])_i

    Every reward is normalized before it is weighted, so its scale and offset do not matter: a weight is the share of a
    reward, whether it is in [0, 1] or [0, 100]. A NaN reward adds 0 to its sample, as if it were the group's average,
    and a sample whose rewards are all NaN gets exactly 0.

    Args:
        rewards: [N, R], any scales.
        groups: [N], integer ids.
        reward_weights: R finite numbers; negative for rewards to minimize.
        std, eps, correction: as in `group_advantages`, for each reward.
        rescale: divide A by its standard deviation over the scored samples, plus eps, so that the magnitude of the
            advantages does not depend on the number of rewards and their weights.

    Raises:
        ValueError: shapes or dtypes do not match, a reward or weight is infinite, or an option is out of range.

    Source: `advantage_aggr` of MixGRPO's released code (arXiv 2507.21802), where std is "group" and eps 1e-8; with
    rescale, GDPO (arXiv 2601.05242), which also subtracts the batch mean: 0 here, since every group sums to 0.
    """
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards must be [N, R] with R >= 1, got shape {tuple(rewards.shape)}")
    if len(reward_weights) != rewards.shape[1] or not all(map(math.isfinite, reward_weights)):
        raise ValueError(f"reward_weights must be R = {rewards.shape[1]} finite numbers, got {list(reward_weights)}")
    parts = [
        weight * group_advantages(column, groups, std=std, eps=eps, correction=correction).double()
        for weight, column in zip(reward_weights, rewards.unbind(dim=1), strict=True)
    ]
    total = torch.stack(parts).sum(dim=0)
    if not rescale:
        return total.float()
    num_scored = (~rewards.isnan()).any(dim=1).sum()
    variance = total.square().sum() / (num_scored - correction).clamp(min=1)
    return (total / (variance.sqrt() + eps)).float()


def filter_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return a boolean mask [N] of the samples with signal: scored, in a group with at least two different rewards.

    All others have advantage 0. Dropping them saves their part of the update. It also changes the mean in a loss: it is
    over fewer samples, so the remaining samples weigh more.

    Args:
        rewards: [N], any scale.
        groups: [N], integer ids.

    Raises:
        ValueError: shapes or dtypes do not match, or a reward is infinite.

    Source: the dynamic sampling of DAPO (arXiv 2503.14476), which samples other prompts instead; flow_grpo drops
    them too, but keeps enough samples to make the batch divisible.
    """
    check_rewards(rewards, groups)
    ids, index = torch.unique(groups, return_inverse=True)
    scored = ~rewards.isnan()
    return scored & _has_variation(rewards.double(), scored, index, len(ids))


def best_worst_n(rewards: Tensor, groups: Tensor, n: int) -> Tensor:
    """Return the ascending indices of the n/2 best and the n/2 worst samples of every group.

    Compute the advantages of whole groups first, then train on these samples only. A group with at most n scored
    samples keeps them all; samples without a score are never kept. Of equal rewards, the earlier counts as the worse.

    Args:
        rewards: [N], any scale; pass the advantages if there are several rewards.
        groups: [N], integer ids.
        n: number of samples to keep in each group, even, at least 2.

    Raises:
        ValueError: shapes or dtypes do not match, a reward is infinite, or n is odd or below 2.

    Source: the best-of-N training of DanceGRPO (arXiv 2505.07818). Released code (HunyuanVideo, 8 of 24) selects among
    all samples of a rank by their advantages, not within each group.
    """
    check_rewards(rewards, groups)
    if n < 2 or n % 2:
        raise ValueError(f"n must be even and >= 2, got {n}")
    kept = []
    for group in groups.unique():
        (members,) = torch.where((groups == group) & ~rewards.isnan())
        ranked = members[rewards[members].argsort(stable=True)]
        kept.append(ranked if len(ranked) <= n else torch.cat([ranked[: n // 2], ranked[-n // 2 :]]))
    return torch.cat(kept).sort().values if kept else groups.new_empty(0, dtype=torch.long)


def reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """Return statistics of a step's rewards, 0-d float64; NaN (no score) counts only in `abstained_ratio`.

    `mean`, `min`, `max`; `group_std`, the mean over groups of the standard deviation (squares divided by n);
    `zero_variance_ratio`, the share of groups whose rewards are all equal and give no signal; `abstained_ratio`.

    Args:
        rewards: [N], any scale, NaN where there is no score; at least one must have a score.
        groups: [N], integer ids.

    Raises:
        ValueError: shapes or dtypes do not match, a reward is infinite, or none has a score.
    """
    check_rewards(rewards, groups)
    scored = ~rewards.isnan()
    if not scored.any():
        raise ValueError(f"rewards must hold at least one score, got none in {len(rewards)}")
    values = rewards[scored].double()
    stds = [rewards[scored & (groups == g)].double() for g in groups[scored].unique()]
    varied = torch.stack([(r.max() - r.min() > ROUNDING * r.abs().max()).double() for r in stds])
    return {
        "mean": values.mean(),
        "min": values.min(),
        "max": values.max(),
        "group_std": torch.stack([r.std(correction=0) for r in stds]).mean(),
        "zero_variance_ratio": 1 - varied.mean(),
        "abstained_ratio": 1 - scored.double().mean(),
    }


def ranks(scores: Tensor) -> Tensor:
    """Return the number of other scores that are lower than each score, [N]; equal scores count half.

    These are ranks from 0; equal scores share their mean rank, so the correlation of two rankings is Spearman's.

    scores: [N], no NaN.
    """
    lower = (scores[:, None] > scores).float() + (scores[:, None] == scores).float() / 2
    return lower.sum(dim=1) - 0.5


def overrated(rewards: Tensor, others: Tensor, share: float) -> Tensor:
    """Return a mask [N] of the samples whose rank by the reward most exceeds their mean rank by other rewards.

        u_i = w_i(r) - mean over R of w_i(r_R),        w: `ranks`

    At most `share * N` samples, rounded up, are in it: those with the largest u > 0. A KL to the reference on only
    these samples restrains a policy that exploits the reward, and no other policy.

    Args:
        rewards: [N], NaN where there is no score.
        others: [N, R], other rewards, NaN likewise; samples that miss any score are never in the mask.
        share: share of the samples, in (0, 1].

    Raises:
        ValueError: shapes do not match, or the share is out of range.

    Source: the gate of GARDO (arXiv 2512.24138). Its released code adapts the share, from 0.02 to 0.2, to the mean
    of u, takes that share of the samples with u > 0, and counts ranks from the best.
    """
    if rewards.ndim != 1 or others.ndim != 2 or len(others) != len(rewards) or not 0 < share <= 1:
        shapes = f"{tuple(rewards.shape)} and {tuple(others.shape)}, {share}"
        raise ValueError(f"rewards and others must be [N] and [N, R], and share in (0, 1], got {shapes}")
    excess = torch.full_like(rewards, -torch.inf, dtype=torch.float32)
    (scored,) = torch.where(~(rewards.isnan() | others.isnan().any(dim=1)))
    excess[scored] = others.shape[1] * ranks(rewards[scored])  # R times u, which is exact
    for column in others.unbind(dim=1):
        excess[scored] -= ranks(column[scored])
    top = excess.argsort(descending=True, stable=True)[: math.ceil(share * len(excess))]
    return torch.isin(torch.arange(len(excess), device=excess.device), top) & (excess > 0)


def _has_variation(rewards: Tensor, scored: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Return a mask [N] of the samples whose group has at least two different rewards. rewards: [N], float64.

    It compares rewards, not their variance: the rounded mean of equal floats may differ from them, and dividing the
    difference by a tiny standard deviation would turn rounding into an advantage.
    """
    low, high = (rewards.new_full((num_groups,), bound) for bound in (torch.inf, -torch.inf))
    low = low.scatter_reduce(0, index, rewards.where(scored, torch.inf), "amin")
    high = high.scatter_reduce(0, index, rewards.where(scored, -torch.inf), "amax")
    return (high - low > ROUNDING * high.abs().clamp(min=low.abs()))[index]


def check_rewards(rewards: Tensor, groups: Tensor) -> None:
    """Raise ValueError for rewards that are not [N], finite or NaN, and for groups that are not [N] integers."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards and groups must both be [N], got shapes {tuple(rewards.shape)} and {tuple(groups.shape)}"
        )
    if groups.is_floating_point():
        raise ValueError(f"groups must hold integers, got {groups.dtype}")
    if infinite := int(rewards.float().isinf().sum()):
        raise ValueError(f"rewards must be finite, or NaN where there is none, got {infinite} infinite in float32")
