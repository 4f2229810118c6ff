"""From rewards to the batches of an update: advantages, the samples worth training on, and their repacking.

Letters: N samples of a step over all ranks; B samples of a batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omni_losses import best_worst_n, filter_groups
from omni_rollout import Trajectory
from omni_train.dist import Dist, gather_floats
from torch import Tensor


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one forward of an update. advantages: [B]. weights: [B], or None where each sample counts once."""

    trajectory: Trajectory
    advantages: Tensor
    weights: Tensor | None = None


def keep_samples(
    advantages: Tensor, rewards: Tensor, groups: Tensor, *, best_worst: int, drop_silent_groups: bool
) -> Tensor:
    """Mask [N] of the samples to train on: the best and worst of each group, `best_worst` in all (0: all of it).

    drop_silent_groups: leave out groups whose samples all score alike. A sample whose reward is NaN is left out by
    either choice.
    """
    advantages = advantages.masked_fill(rewards.isnan(), math.nan)
    keep = filter_groups(advantages, groups) if drop_silent_groups else torch.ones_like(groups, dtype=torch.bool)
    if best_worst:
        keep &= torch.isin(torch.arange(len(groups)), best_worst_n(advantages, groups, best_worst))
    return keep


def select(
    dist: Dist, batches: Sequence[Trajectory], advantages: Tensor, keep: Tensor | None, *, num_minibatches: int = 1
) -> list[TrainBatch]:
    """This rank's batches to train on, each with its advantages on the device.

    advantages: [N]. keep: [N], or None to take all batches as they were drawn; else the kept samples are repacked.
    """
    if keep is None or bool(keep.all()):
        return [TrainBatch(b, advantages[b.indices].to(dist.device)) for b in batches]
    return repack(dist, batches, advantages, keep, num_minibatches=num_minibatches)


def repack(
    dist: Dist, batches: Sequence[Trajectory], advantages: Tensor, keep: Tensor, *, num_minibatches: int = 1
) -> list[TrainBatch]:
    """The kept samples in the fewest full batches, equally many on every rank and in every minibatch.

    A minibatch keeps to its own consecutive share of the rank's batches. Places that are left over are filled with
    samples of weight 0, spread evenly. The weights make a minibatch's mean over all places that over its kept samples
    of all ranks.
    """
    size = len(batches[0])
    indices = torch.cat([batch.indices for batch in batches])
    kept = keep[indices].view(num_minibatches, -1)  # [minibatches, samples of this rank]
    counts = gather_floats(dist, kept.sum(dim=1).float()).view(dist.world_size, num_minibatches)
    rounds = max(1, math.ceil(counts.max().item() / size))
    order = kept.int().argsort(dim=1, descending=True, stable=True)[:, : rounds * size]
    order = order.view(num_minibatches, size, rounds).transpose(1, 2).sort(dim=2).values  # dealt to batches in turn
    scale = rounds * size * dist.world_size / counts.sum(dim=0).clamp(min=1)
    weights = (kept.gather(1, order.flatten(1)).view_as(order) * scale[:, None, None]).flatten(0, 1).to(dist.device)
    places = (order + torch.arange(num_minibatches)[:, None, None] * kept.shape[1]).flatten(0, 1)
    values = advantages[indices].to(dist.device)
    return [TrainBatch(_pick(batches, row), values[row], w) for row, w in zip(places, weights, strict=True)]


def _pick(batches: Sequence[Trajectory], places: Tensor) -> Trajectory:
    """The samples at ascending places [B], counted through equal batches, without padding that none of them needs."""
    size = len(batches[0])
    found = places // size
    return Trajectory.cat([batches[i].select(places[found == i] % size) for i in found.unique().tolist()]).trim()
