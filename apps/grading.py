"""From scores to what a policy gradient trains on: advantages, and the samples that are worth it.

Letters: N samples of a step over all ranks, in the order of the prompts; B samples of a batch.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from omni_losses import best_of_n, group_advantages, has_signal, multi_reward_advantages, tempflow_weights
from omni_reward import Score
from omni_rollout import Trajectory

import settings
from rollouts import Rollouts, gather_parts


def advantages_of(
    on: Rollouts,
    scores: list[Score],
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    parts: str = "",
    std: Literal["batch", "group", "none"],
    correction: Literal[0, 1],
) -> tuple[torch.Tensor, dict[str, float]]:
    """The advantages [N] of the samples of all ranks, and what to log of them.

    scores: of this rank's samples. rewards, groups: [N], as `rollouts.look_at` returns them. parts: what to normalize
    one by one instead of the whole score, as ocr=0.7,jpeg=0.3.
    """
    if parts:
        weights = settings.parse_weights(parts)
        columns = gather_parts(on, scores, list(weights), rewards)
        values = multi_reward_advantages(columns, groups, list(weights.values()), std=std, correction=correction)
    else:
        values = group_advantages(rewards, groups, std=std, correction=correction)
    return values, {"advantage/min": values.min().item(), "advantage/max": values.max().item()}


def worth_training(
    advantages: torch.Tensor, rewards: torch.Tensor, groups: torch.Tensor, *, best: int, drop_zero_signal: bool
) -> torch.Tensor:
    """Which samples to train on, [N]: the best and worst of each group, `best` in all (0: all), or those with a signal.

    A sample whose reward is NaN has none.
    """
    advantages = advantages.masked_fill(rewards.isnan(), math.nan)
    keep = has_signal(advantages, groups) if drop_zero_signal else torch.ones_like(groups, dtype=torch.bool)
    if best:
        keep &= torch.isin(torch.arange(len(groups)), best_of_n(advantages, groups, best))
    return keep


def weigh(kind: Literal["equal", "tempflow"], std: torch.Tensor, *factors: torch.Tensor | None) -> torch.Tensor | None:
    """Weights [B] of the samples in the loss of a step whose standard deviation is `std`; None where all weigh 1."""
    present = [factor for factor in factors if factor is not None]
    if kind == "tempflow":
        present.append(tempflow_weights(std))
    return torch.stack(present).prod(dim=0) if present else None


def own(on: Rollouts, values: torch.Tensor) -> torch.Tensor:
    """Of values [N] of all samples, in the order of the prompts, those of this rank's batches, [batches, B]."""
    return values.view(-1, on.dist.world_size, on.batch_size)[:, on.dist.rank]


def to_train(
    on: Rollouts, batches: list[Trajectory], advantages: torch.Tensor, keep: torch.Tensor | None, *, multiple: int
) -> tuple[list[Trajectory], torch.Tensor, torch.Tensor | None]:
    """This rank's batches to train on, the advantages [batches, B] of their samples, and their weights or None.

    advantages: [N]. keep: [N], which samples to train on; None takes all as they were drawn. multiple: see `regroup`.
    """
    if keep is None:
        return batches, own(on, advantages), None
    batches, places, weights = regroup(on, batches, keep, multiple=multiple)
    return batches, own(on, advantages).flatten()[places], weights


def regroup(
    on: Rollouts, batches: Sequence[Trajectory], keep: torch.Tensor, *, multiple: int = 1
) -> tuple[list[Trajectory], torch.Tensor, torch.Tensor]:
    """The samples to train on in as few full batches as they fit in, equally many on every rank.

    What is left of the last places is filled up with samples of weight 0, evenly over the batches.

    Args:
        batches: this rank's. keep: [N], boolean, whether to train on a sample; of all ranks.
        multiple: the number of batches is one of this number.

    Returns:
        The new batches; which samples they hold, [new batches, B], as indices of this rank's samples in order; and
        their weights, [new batches, B], by which a mean over all places is the mean over the kept samples of all ranks.
    """
    by_rank = keep.view(-1, on.dist.world_size, on.batch_size).transpose(0, 1).flatten(1)
    rounds = -(-int(by_rank.sum(dim=1).max()) // on.batch_size)
    rounds = max(1, -(-rounds // multiple)) * multiple
    kept = by_rank[on.dist.rank]
    order = kept.int().argsort(descending=True, stable=True)[: rounds * on.batch_size].view(-1, rounds).T
    whole = Trajectory.cat(batches)
    scale = rounds * on.batch_size * on.dist.world_size / max(1, int(keep.sum()))
    return [whole.select(index) for index in order], order, kept[order] * scale
