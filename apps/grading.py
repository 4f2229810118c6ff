"""From scores to what a policy gradient trains on: advantages, and the samples that are worth it.

Letters: N samples of a step over all ranks, in the order of the prompts; B samples of a batch.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from omni_losses import best_worst_n, filter_groups, group_advantages, multi_reward_advantages, tempflow_weights
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
    keep = filter_groups(advantages, groups) if drop_zero_signal else torch.ones_like(groups, dtype=torch.bool)
    if best:
        keep &= torch.isin(torch.arange(len(groups)), best_worst_n(advantages, groups, best))
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
    on: Rollouts, batches: list[Trajectory], advantages: torch.Tensor, keep: torch.Tensor | None, *, updates: int
) -> tuple[list[Trajectory], torch.Tensor, torch.Tensor | None]:
    """This rank's batches to train on, the advantages [batches, B] of their samples, and their weights or None.

    advantages: [N]. keep: [N], which samples to train on; None takes all as they were drawn. updates: see `regroup`.
    """
    if keep is None or bool(keep.all()):
        return batches, own(on, advantages), None
    batches, places, weights = regroup(on, batches, keep, updates=updates)
    return batches, own(on, advantages).flatten()[places], weights


def regroup(
    on: Rollouts, batches: Sequence[Trajectory], keep: torch.Tensor, *, updates: int = 1
) -> tuple[list[Trajectory], torch.Tensor, torch.Tensor]:
    """The samples to train on in as few full batches as they fit in, equally many on every rank and in every update.

    What is left of the last places is filled up with samples of weight 0, evenly over the batches of an update.

    Args:
        batches: this rank's. keep: [N], boolean, whether to train on a sample; of all ranks.
        updates: optimizer steps; each gets its own consecutive share of the batches, and trains on samples of these.

    Returns:
        The new batches; which samples they hold, [new batches, B], as indices of this rank's samples in order; and
        their weights, [new batches, B], by which an update's mean over all places is that over its kept samples of all
        ranks.
    """
    size, world_size = on.batch_size, on.dist.world_size
    blocks = keep.view(updates, -1, world_size, size)
    rounds = max(1, -(-int(blocks.sum(dim=(1, 3)).max()) // size))
    kept = blocks[:, :, on.dist.rank].flatten(1)  # [updates, samples of this rank]
    order = kept.int().argsort(dim=1, descending=True, stable=True)[:, : rounds * size]
    order = order.view(updates, size, rounds).transpose(1, 2).sort(dim=2).values  # dealt to the batches in turn
    scale = rounds * size * world_size / blocks.sum(dim=(1, 2, 3)).clamp(min=1)
    weights = kept.gather(1, order.flatten(1)).view_as(order) * scale[:, None, None]
    places = (order + torch.arange(updates)[:, None, None] * kept.shape[1]).flatten(0, 1)
    return [pick(batches, row) for row in places], places, weights.flatten(0, 1)


def pick(batches: Sequence[Trajectory], places: torch.Tensor) -> Trajectory:
    """The samples at ascending places [B], counted through equal batches, without padding that none of them needs."""
    size = len(batches[0])
    found = places // size
    return Trajectory.cat([batches[i].select(places[found == i] % size) for i in found.unique().tolist()]).trim()
