"""How good each sample was, compared with the others drawn for the same prompt.

Letters: N samples of all ranks, in any order; a group is the samples of one prompt.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Std = Literal["batch", "group", "none"]


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    std: Std = "batch",
    eps: float = 1e-4,
    correction: int = 1,
) -> Tensor:
    """Advantages [N], float32: each reward minus its group's mean, over a standard deviation.

        A_i = (r_i - mean_g(r)) / (std(r) + eps)

    A group whose rewards are all equal gets exactly 0, and so does a group of one sample. A reward of NaN marks a
    sample without a score: it gets advantage 0 and enters no mean and no standard deviation.

    Args:
        rewards: [N], any scale.
        groups: [N], integer ids; equal ids form a group, the ids' order and size mean nothing.
        std: "batch" divides by the standard deviation of all scored rewards, "group" by the group's own, "none" by
            nothing (Dr. GRPO, arXiv 2503.20783).
        eps: added to the standard deviation, in units of the reward, > 0.
        correction: the standard deviation divides squares by n - correction, 0 or 1.

    Raises:
        ValueError: shapes or dtypes do not fit, a reward is infinite, or an option is out of range.

    Source: the group-relative advantage of Flow-GRPO (arXiv 2505.05470), after DeepSeekMath (arXiv 2402.03300).
    Released code differs: flow_grpo divides squares by n (`correction=0`), verl-omni and DanceGRPO by n - 1, which
    makes advantages smaller by sqrt((n - 1) / n), 2 % at n = 24 and 29 % at n = 2; DanceGRPO has eps 1e-8.
    """
    _check(rewards, groups, std, eps, correction)
    rewards = rewards.detach().float()
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0.0)
    ids, index = torch.unique(groups, return_inverse=True)

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(ids)).index_add_(0, index, x)

    count = group_sum(scored.float())
    mean = group_sum(values) / count.clamp(min=1)
    varied = scored & _varied(rewards, scored, index, len(ids))
    centered = torch.where(varied, values - mean[index], 0.0)
    if std == "none":
        return centered
    if std == "group":
        variance = group_sum(centered.square()) / (count - correction).clamp(min=1)
        return centered / (variance.sqrt()[index] + eps)
    batch_mean = values.sum() / scored.sum().clamp(min=1)
    squares = torch.where(scored, values - batch_mean, 0.0).square().sum()
    return centered / ((squares / (scored.sum() - correction).clamp(min=1)).sqrt() + eps)


def reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """What the rewards of a step look like, as 0-d tensors; samples without a score (NaN) count in the last one only.

    `mean`, `min`, `max`; `group_std`, the mean over groups of the standard deviation (squares divided by n);
    `zero_variance_ratio`, the share of groups whose rewards are all equal and teach nothing; `abstained_ratio`.

    Args:
        rewards: [N], any scale, NaN where there is no score; at least one has a score.
        groups: [N], integer ids.
    """
    scored = ~rewards.isnan()
    values = rewards[scored].float()
    stds = [rewards[scored & (groups == g)].float() for g in groups[scored].unique()]
    varied = torch.stack([(r.max() > r.min()).float() for r in stds])
    return {
        "mean": values.mean(),
        "min": values.min(),
        "max": values.max(),
        "group_std": torch.stack([r.std(correction=0) for r in stds]).mean(),
        "zero_variance_ratio": 1 - varied.mean(),
        "abstained_ratio": 1 - scored.float().mean(),
    }


def _varied(rewards: Tensor, scored: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Whether a sample's group holds two different rewards, [N].

    Asked of the rewards, not of their variance: the rounded mean of equal floats may differ from them, and dividing the
    difference by a tiny standard deviation would turn rounding into an advantage.
    """
    low, high = (rewards.new_full((num_groups,), bound) for bound in (torch.inf, -torch.inf))
    low = low.scatter_reduce(0, index, rewards.where(scored, torch.inf), "amin")
    high = high.scatter_reduce(0, index, rewards.where(scored, -torch.inf), "amax")
    return (high > low)[index]


def _check(rewards: Tensor, groups: Tensor, std: str, eps: float, correction: int) -> None:
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards and groups must be [N] alike, got shapes {tuple(rewards.shape)} and {tuple(groups.shape)}"
        )
    if groups.is_floating_point():
        raise ValueError(f"groups must hold integers, got {groups.dtype}")
    if rewards.isinf().any():
        raise ValueError(f"rewards must be finite, or NaN where there is none, got {rewards.isinf().sum()} infinite")
    if std not in get_args(Std):
        raise ValueError(f"std must be one of {get_args(Std)}, got {std!r}")
    if not eps > 0:
        raise ValueError(f"eps must be > 0, got {eps}")
    if correction not in (0, 1):
        raise ValueError(f"correction must be 0 or 1, got {correction}")
