"""The batches of an update: the samples of a step, or a selection of them, with their advantages.

If a rank samples whole groups, and advantages are divided by the standard deviation of their group or not at all, the
advantages of a batch need only the scores of its own groups. The first minibatch then waits for these scores only,
batch by batch. Batches keep their order regardless of which scores arrive first, so results do not depend on the
scorer's speed. Before the first optimizer step all scores of all ranks are awaited: if a scorer failed, the weights
are unchanged.

Notation: N samples of a step over all ranks, B samples of a batch. The `index` of a prompt is the place of its sample
among the N.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from omni_losses import best_worst_n, filter_groups, group_advantages
from omni_reward import Score
from omni_rollout import Trajectory
from omni_rollout.types import to_device
from omni_sched import step_noise
from omni_train.dist import Dist, gather_json
from torch import Tensor

from omni_rl.flow.scoring import (
    Rollout,
    completed_requests,
    group_indices,
    mask_rewards,
    score_values,
    step_advantages,
    wait_and_grade,
)
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.groups import Advantages


class Grades(NamedTuple):
    """Advantages [B] of B samples, or [B, M] with M streams, and weights [B]; None means 1."""

    advantages: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class TrainBatch:
    """A batch of an update. Reading `advantages` or `weights` waits for the scores of its groups.

    grades: returns both. is_as_sampled: True if the rollout had the same batch, so that the log-probs of an exact
    engine equal those of the update bit by bit.
    """

    trajectory: Trajectory
    grades: Callable[[], Grades]
    is_as_sampled: bool = True

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Tensor, weights: Tensor | None = None) -> "TrainBatch":
        """Return a batch whose grades are known."""
        return cls(trajectory, lambda: Grades(advantages, weights))

    @property
    def advantages(self) -> Tensor:
        """Advantages [B], or [B, M] with M streams."""
        return self.grades().advantages

    @property
    def weights(self) -> Tensor | None:
        """Weights [B], or None if each sample counts once."""
        return self.grades().weights


def train_batches(
    run: MediaRun[MediaArgs],
    step: Step,
    rollout: Rollout[Trajectory],
    settings: Advantages,
    *,
    weighted: bool = False,
    best_worst: int = 0,
    drop_silent_groups: bool = False,
    num_minibatches: int = 1,
) -> list[TrainBatch]:
    """Return this rank's batches to train on, with their grades.

    A batch waits only for the scores of its own groups, when its grades are read. All batches wait for all scores if
    samples may be left out, a rank samples parts of groups, or an advantage depends on scores of other groups.

    Args:
        run: the run.
        step: the step, to log rewards and advantages.
        rollout: the step's samples.
        settings: settings of the advantages.
        weighted: True to give samples without a score weight 0.
        best_worst, drop_silent_groups: see `keep_samples`.
        num_minibatches: see `select`.

    Raises:
        RewardError: the scorer failed on some rank. Raised on every rank, at the latest before the first optimizer
            step.
    """
    may_drop = bool(best_worst) or drop_silent_groups

    def grade(run: MediaRun[MediaArgs], step: Step, rollout: Rollout[Trajectory]) -> list[TrainBatch]:
        advantages, rewards = step_advantages(run, step, rollout, settings)
        weights, keep = (~rewards.isnan()).float() if weighted else None, None
        if may_drop:
            keep = keep_samples(
                advantages, rewards, rollout.groups, best_worst=best_worst, drop_silent_groups=drop_silent_groups
            )
            step.metrics["reward/trained_ratio"] = keep.float().mean().item()
        return select(run.dist, rollout.batches, advantages, keep, weights, num_minibatches=num_minibatches)

    is_as_sampled = not may_drop and len(rollout.batches) % num_minibatches == 0
    if not is_as_sampled or not groups_are_local(run.args, settings, run.dist, rollout.consecutive):
        return wait_and_grade(run, step, rollout, grade)
    step.grade_all = partial(wait_and_grade, run, step, rollout, grade)
    return [
        TrainBatch(batch, cache(partial(_batch_grades, run, batch, rollout, settings, weighted)))
        for batch in rollout.batches
    ]


def subsample_rollout(rollout: Rollout[Trajectory], fraction: float) -> Rollout[Trajectory]:
    """Return the rollout with `subsample_steps` of each batch, or unchanged if `fraction` is 1."""
    return (
        replace(rollout, batches=[subsample_steps(batch, fraction) for batch in rollout.batches])
        if fraction < 1
        else rollout
    )


def subsample_steps(batch: Trajectory, fraction: float) -> Trajectory:
    """Return the samples with a random fraction of their kept steps, as in DanceGRPO's released code.

    The choice depends only on a sample's seed, so it does not depend on the number of ranks.
    """
    first = batch.params.num_inference_steps  # lower indices are the rollout's noise
    order = step_noise([prompt.seed for prompt in batch.prompts], first, (batch.num_kept,)).argsort(dim=1)
    chosen = order[:, : max(1, int(batch.num_kept * fraction))].sort(dim=1).values
    return batch.take_steps(to_device(chosen, batch.x.device))


def groups_are_local(args: MediaArgs, settings: Advantages, dist: Dist, consecutive: int) -> bool:
    """Return True if the advantages of a rank's samples depend only on its own scores, which arrive batch by batch."""
    is_whole = dist.world_size == 1 or consecutive % args.data.group_size == 0
    needs_all_scores = dist.context > 1 or args.sampling.draw_ahead or args.scorer.sleep or settings.reward_parts
    return is_whole and settings.adv_std != "batch" and not needs_all_scores


def _batch_grades(
    run: MediaRun[MediaArgs], batch: Trajectory, rollout: Rollout[Trajectory], settings: Advantages, weighted: bool
) -> Grades:
    """Return a batch's grades once the scores up to the end of its last group have arrived.

    If the scorer failed, they are 0, because the ranks of a sharded net must run together; the first optimizer step
    then raises on every rank.
    """
    prompts = [prompt for batch in rollout.batches for prompt in batch.prompts]
    requests, scores = completed_requests(rollout.pending, len(prompts)), list[Score]()
    num_needed = sum(prompt.group <= batch.prompts[-1].group for prompt in prompts)
    with run.phase("reward_wait"):
        while len(scores) < num_needed:
            if (request := next(requests)).exception():
                zeros = to_device(torch.zeros(len(batch)), run.dist.device)
                return Grades(zeros, zeros if weighted else None)
            scores += request.result()
    groups = group_indices(prompts[: len(scores)])
    rewards = mask_rewards(torch.tensor(score_values(scores), dtype=torch.float64), groups)
    advantages = group_advantages(rewards, groups, std=settings.adv_std, correction=settings.adv_correction)
    is_in_batch = torch.isin(torch.tensor([p.index for p in prompts[: len(scores)]]), batch.indices)
    weights = (~rewards[is_in_batch].isnan()).float() if weighted else None
    return _train_batch(run.dist, batch, advantages[is_in_batch], weights).grades()


def keep_samples(
    advantages: Tensor, rewards: Tensor, groups: Tensor, *, best_worst: int, drop_silent_groups: bool
) -> Tensor:
    """Return a mask [N] of the samples to train on: the best and worst of each group, `best_worst` in total (0: all).

    drop_silent_groups: drop groups whose samples all have the same score. Either option drops samples whose reward is
    NaN.
    """
    advantages = advantages.masked_fill(rewards.isnan(), math.nan)
    keep = filter_groups(advantages, groups) if drop_silent_groups else torch.ones_like(groups, dtype=torch.bool)
    if best_worst:
        keep &= torch.isin(torch.arange(len(groups)), best_worst_n(advantages, groups, best_worst))
    return keep


def select(
    dist: Dist,
    batches: Sequence[Trajectory],
    advantages: Tensor,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    num_minibatches: int = 1,
) -> list[TrainBatch]:
    """Return this rank's batches to train on, minibatch by minibatch, with their grades on the device.

    If all samples are kept, the batches are those of the rollout, else they are repacked. A minibatch is a consecutive
    chunk of the batches or, if there are too few, a part of the kept steps of a chunk.

    advantages: [N]. keep: [N], or None to keep all. weights: [N], used only if all samples are kept.
    """
    num_chunks = math.gcd(len(batches), num_minibatches)
    if keep is None or keep.all():
        own_weights = [None if weights is None else weights[batch.indices] for batch in batches]
        chosen = [
            _train_batch(dist, batch, advantages[batch.indices], batch_weights)
            for batch, batch_weights in zip(batches, own_weights, strict=True)
        ]
    else:
        chosen = repack(dist, batches, advantages, keep, num_minibatches=num_chunks)
    if num_chunks == num_minibatches:
        return chosen
    return split_steps(chosen, num_chunks, num_minibatches // num_chunks)


def _train_batch(dist: Dist, batch: Trajectory, advantages: Tensor, weights: Tensor | None) -> TrainBatch:
    return TrainBatch.of(
        batch, to_device(advantages, dist.device), None if weights is None else to_device(weights, dist.device)
    )


def split_steps(batches: Sequence[TrainBatch], num_chunks: int, parts: int) -> list[TrainBatch]:
    """Repeat each chunk of batches for each of `parts` consecutive parts of their kept steps."""
    size, length = len(batches) // num_chunks, batches[0].trajectory.num_kept // parts
    return [
        replace(batch, trajectory=batch.trajectory.take_steps(slice(start, start + length)))
        for first in range(0, len(batches), size)
        for start in range(0, parts * length, length)
        for batch in batches[first : first + size]
    ]


def repack(
    dist: Dist, batches: Sequence[Trajectory], advantages: Tensor, keep: Tensor, *, num_minibatches: int
) -> list[TrainBatch]:
    """Pack the kept samples into the fewest full batches, the same number on every rank and in every minibatch.

    A minibatch uses its own consecutive share of the rank's batches, and a batch has samples of one size. Free places
    are filled with samples of weight 0, spread evenly over the batches of a size. The weights turn the mean over
    all places of a minibatch into the mean over its kept samples of all ranks.
    """
    size, share = len(batches[0]), len(batches) // num_minibatches
    parts = [group_by_size(batches[i : i + share]) for i in range(0, len(batches), share)]  # per minibatch and size
    counts = [
        [int(keep[torch.cat([batch.indices for batch in same_size])].sum()) for same_size in minibatch_parts]
        for minibatch_parts in parts
    ]
    min_batches = [[math.ceil(count / size) for count in row_counts] for row_counts in counts]
    by_rank = gather_json(dist, [[sum(row) for row in counts], [sum(row) for row in min_batches]])
    num_kept, rounds = torch.tensor(by_rank[:: dist.context]).unbind(dim=1)  # [dp_size, minibatches]
    num_batches = max(1, int(rounds.max()))
    scale = num_batches * size * dist.dp_size / num_kept.sum(dim=0).clamp(min=1)
    chosen = []
    for minibatch_parts, row_counts, factor in zip(parts, min_batches, scale, strict=True):
        for same_size, count in zip(
            minibatch_parts,
            _fill_counts(row_counts, [len(same_size) for same_size in minibatch_parts], num_batches),
            strict=True,
        ):
            indices = torch.cat([batch.indices for batch in same_size])
            order = keep[indices].int().argsort(descending=True, stable=True)[: count * size]
            for row in order.view(size, count).T.sort(dim=1).values:  # dealt round-robin to batches
                picked, weights = indices[row], keep[indices[row]] * factor
                batch = _train_batch(dist, _select_samples(same_size, row), advantages[picked], weights)
                chosen.append(replace(batch, is_as_sampled=False))
    return chosen


def group_by_size(batches: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Group batches by height and width, and by number and shapes of references."""
    by_size: dict[object, list[Trajectory]] = {}
    for batch in batches:
        _, references = batch.prompts[0].shapes
        by_size.setdefault((batch.params.height, batch.params.width, references), []).append(batch)
    return list(by_size.values())


def _fill_counts(counts: Sequence[int], bounds: Sequence[int], total: int) -> list[int]:
    """Raise the counts one after another, each up to its bound, until their sum is `total`."""
    filled, remaining = [], total - sum(counts)
    for count, bound in zip(counts, bounds, strict=True):
        extra = min(remaining, bound - count)
        filled.append(count + extra)
        remaining -= extra
    return filled


def _select_samples(batches: Sequence[Trajectory], places: Tensor) -> Trajectory:
    """Return the samples at ascending places [B], counted across batches of equal size, with padding trimmed."""
    size = len(batches[0])
    batch_of = places // size
    return Trajectory.cat([batches[i].select(places[batch_of == i] % size) for i in batch_of.unique().tolist()]).trim()
