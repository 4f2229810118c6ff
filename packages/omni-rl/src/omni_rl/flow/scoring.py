"""Scores of a step's samples to batches to train on: asking without waiting, rewards of all ranks, advantages.

Where a rank samples whole groups, and each is divided by its own deviation or by none, the advantages of a batch need
only the scores of its own groups. The first minibatch then waits for no more than these, batch by batch. Batches keep
their order, whichever scores come first, so that no bit depends on the scorer's speed. Before the first optimizer step
all scores of all ranks are graded, as in an update that waits for them: where a scorer has failed, the weights are
untouched.

Letters: N samples of a step over all ranks, n of them this rank's; B samples of a batch. A sample's place among the N
is its prompt's `index`, so nothing here depends on how the samples were dealt to the ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from omni_losses import best_worst_n, filter_groups, group_advantages, multi_reward_advantages, reward_metrics
from omni_reward import RewardError, Score
from omni_rollout import Prompt, Samples, Trajectory
from omni_rollout.types import to_device
from omni_train.dist import Dist, gather_by_index, gather_json
from torch import Tensor

from omni_rl.flow.scorers import Pending, Scorer
from omni_rl.run.run import AnyRun, MediaRun, Step
from omni_rl.settings.args import STREAMS, JudgedArgs, parse_judges, parse_numbers
from omni_rl.settings.cli import printable

Grade = Callable[[list[Score]], list["TrainBatch"]]


def submit(scorer: Scorer, samples: Samples, rows: slice = slice(None)) -> Pending:
    """The scores to come of a batch, or of these samples of it."""
    media = {kind: samples.media[kind][rows].cpu().numpy() for kind in scorer.kinds}
    prompts = samples.prompts[rows]
    references = [[image.numpy() for image in p.images] for p in prompts] if scorer.takes_references else None
    return scorer.submit(media, [p.text for p in prompts], [{**p.meta, **samples.rates} for p in prompts], references)


def collect(dist: Dist, pending: Sequence[Pending]) -> list[Score]:
    """The scores [n] of this rank's samples, in the order of its batches; waits for them.

    Raises:
        RewardError: the scorer failed for some rank, or what it is asked cannot be sent; raised on every rank, so that
            all can save what there is.
    """
    error = next(filter(None, (future.exception() for future in pending)), None)
    for rank, message in enumerate(gather_json(dist, None if error is None else str(error))):
        if message is not None:
            raise RewardError(f"scores of rank {rank}: {message}") from error
    return scores_of(pending)


def scores_of(pending: Iterable[Pending]) -> list[Score]:
    """The scores of these requests, one after the other; waits for them."""
    return [score for future in pending for score in future.result()]


def groups_of(prompts: Sequence[Prompt]) -> Tensor:
    """The group [N] of each of a step's samples, int64."""
    return torch.tensor([prompt.group for prompt in prompts])


def gather_rewards(dist: Dist, batches: Sequence[Samples], scores: Sequence[Score], groups: Tensor) -> Tensor:
    """The rewards [N] of all ranks' samples, as `rewards_of` has them."""
    return rewards_of(_in_order(dist, batches, values_of(scores), len(groups)), groups)


def values_of(scores: Sequence[Score]) -> list[float]:
    """The value of each score; NaN where there is none, infinite where its group is to be left out."""
    return [math.inf if s.mask_group else math.nan if s.value is None else s.value for s in scores]


def rewards_of(values: Tensor, groups: Tensor) -> Tensor:
    """The rewards [N] of samples with these values [N] of their scores, in whole groups [N]; NaN where there is none.

    A group has none at all where the client asked to leave it out, or where it has several samples and fewer than two
    scores, which compare nothing.
    """
    places = groups.unique(return_inverse=True)[1]
    masks = torch.ones_like(values), values.isfinite(), values.isinf()
    sizes, scored, masked = (torch.zeros(len(groups)).index_add(0, places, m.float())[places] for m in masks)
    return values.masked_fill((masked > 0) | (scored < sizes.clamp(max=2)), math.nan)


def gather_parts(
    dist: Dist, batches: Sequence[Samples], scores: Sequence[Score], names: Sequence[str], rewards: Tensor
) -> Tensor:
    """The named parts [N, names] of all ranks' scores; NaN where there is none, or no reward.

    Raises:
        RuntimeError: no score has a part of that name.
    """
    columns = [
        _in_order(dist, batches, [score.parts.get(name, math.nan) for score in scores], len(rewards)) for name in names
    ]
    parts = torch.stack(columns, dim=1).masked_fill(rewards.isnan()[:, None], math.nan)
    for name, column in zip(names, columns, strict=True):
        if column.isnan().all() and not rewards.isnan().all():
            raise RuntimeError(
                f"the scorer must name a part {name!r} in its scores, it names {sorted(scores[0].parts)}"
            )
    return parts


def rewards_at(run: AnyRun, step: Step, batches: Sequence[Samples], scores: Sequence[Score], groups: Tensor) -> Tensor:
    """Return the rewards [N] of all ranks' samples in their groups [N], which the step logs.

    scores: of this rank's samples, in the order of its batches.

    Raises:
        RuntimeError: no sample has a score, and --scorer.on-failure asks for one.
    """
    rewards = gather_rewards(run.dist, batches, scores, groups)
    log_rewards(run, step, rewards, groups, scores)
    return rewards


def log_rewards(run: AnyRun, step: Step, rewards: Tensor, groups: Tensor, scores: Sequence[Score]) -> None:
    """Log metrics of the rewards [N] in their groups [N]. scores: this rank's, for the reason of an abstention."""
    if not rewards.isnan().all():
        step.metrics |= {f"reward/{name}": value.item() for name, value in reward_metrics(rewards, groups).items()}
        return
    if run.args.scorer.on_failure == "raise":
        raise RuntimeError(
            f"the scorer gave no score for any of {len(rewards)} samples: {printable(str(scores[0].abstained))}"
        )
    step.metrics["reward/abstained_ratio"] = 1.0


def log_advantages(step: Step, advantages: Tensor) -> None:
    """Log the extremes of a step's advantages, and whether there is a signal among them."""
    step.has_signal = bool(advantages.any())
    step.metrics |= {"advantage/min": advantages.min().item(), "advantage/max": advantages.max().item()}


def advantages_of(
    run: MediaRun[JudgedArgs],
    step: Step,
    prompts: Sequence[Prompt],
    batches: Sequence[Samples],
    scores: Sequence[Score],
) -> tuple[Tensor, Tensor]:
    """Return advantages [N], or [N, M] of M streams, and rewards [N] of all ranks' samples; the step logs both.

    Raises:
        RuntimeError: as `rewards_at`.
    """
    args, groups = run.args, groups_of(prompts)
    rewards = rewards_at(run, step, batches, scores, groups)
    if args.reward_parts:
        advantages = part_advantages(run, batches, scores, rewards, groups)
    else:
        advantages = group_advantages(rewards, groups, std=args.adv_std, correction=args.adv_correction)
    log_advantages(step, advantages)
    return advantages, rewards


def part_advantages(
    run: MediaRun[JudgedArgs], batches: Sequence[Samples], scores: Sequence[Score], rewards: Tensor, groups: Tensor
) -> Tensor:
    """Advantages [N] of --reward-parts, each normalized by itself; [N, M] with --streams.reward-media.

    rewards, groups: [N].
    """
    args = run.args
    weights, judges = parse_numbers(args.reward_parts, ""), parse_judges(args.streams.reward_media, args.reward_parts)
    columns = gather_parts(run.dist, batches, scores, list(weights), rewards)

    def added(medium: str | None) -> Tensor:
        own = [weight * (judges.get(name, medium) == medium) for name, weight in weights.items()]
        return multi_reward_advantages(columns, groups, own, std=args.adv_std, correction=args.adv_correction)

    return torch.stack([added(medium) for medium in STREAMS], dim=1) if judges else added(None)


class Grades(NamedTuple):
    """What scores say of B samples: advantages [B], or [B, M] of M streams, and weights [B], which None sets to 1."""

    advantages: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one forward of an update, whose grades are waited for when they are read.

    grades: returns them. is_as_sampled: the rollout had the same batch, so that an exact engine's log-probs are the
    update's to the last bit.
    """

    trajectory: Trajectory
    grades: Callable[[], Grades]
    is_as_sampled: bool = True

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Tensor, weights: Tensor | None = None) -> "TrainBatch":
        """Return a batch whose grades are there."""
        return cls(trajectory, lambda: Grades(advantages, weights))

    @property
    def advantages(self) -> Tensor:
        """[B], or [B, M] of M streams."""
        return self.grades().advantages

    @property
    def weights(self) -> Tensor | None:
        """[B], or None where each sample counts once."""
        return self.grades().weights


def graded(
    run: AnyRun, step: Step, pending: Sequence[Pending], grade: Grade, early: list[TrainBatch] | None = None
) -> list[TrainBatch]:
    """Return the batches to train on: those of `grade`, which takes this rank's scores, or the same ones early.

    early: as `by_group` has them; `grade` then comes before the first optimizer step.

    Raises:
        RewardError: the scorer failed for some rank; on every rank, at the latest before the first optimizer step.
    """

    @cache
    def settle() -> list[TrainBatch]:
        with run.phase("reward_wait"):
            return grade(collect(run.dist, pending))

    if early is None:
        return settle()
    step.settle = settle
    return early


def by_group(
    run: MediaRun[JudgedArgs],
    batches: Sequence[Trajectory],
    pending: Sequence[Pending],
    unit: int = 1,
    *,
    weighted: bool,
) -> list[TrainBatch] | None:
    """Return this rank's batches, each of which waits for its groups' scores when it is read.

    None where they do not suffice: a rank samples parts of groups, or others' scores enter an advantage.

    Args:
        run: the run.
        batches: of this rank, as they were sampled.
        pending: their scores, in the same order.
        unit: as `omni_rl.flow.sampling.deal` has it.
        weighted: whether a sample without a score has weight 0.
    """
    args = run.args
    is_whole = run.dist.world_size == 1 or max(args.batch_size, unit) % args.group_size == 0
    if not is_whole or args.adv_std == "batch" or args.reward_parts:
        return None
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    return [TrainBatch(b, cache(partial(_own_grades, run, b, prompts, pending, weighted))) for b in batches]


def _own_grades(
    run: MediaRun[JudgedArgs], batch: Trajectory, prompts: Sequence[Prompt], pending: Sequence[Pending], weighted: bool
) -> Grades:
    """Return a batch's grades as soon as the scores up to the end of its last group are there.

    Those of a scorer that failed are 0, as ranks go through a sharded net together; the first optimizer step then
    raises on every rank.

    prompts: of this rank, group by group.
    """
    requests, scores = iter(pending), list[Score]()
    num_needed = sum(prompt.group <= batch.prompts[-1].group for prompt in prompts)
    onto = partial(to_device, device=run.dist.device)
    with run.phase("reward_wait"):
        while len(scores) < num_needed:
            if (request := next(requests)).exception():
                zeros = onto(torch.zeros(len(batch)))
                return Grades(zeros, zeros if weighted else None)
            scores += request.result()
    groups = groups_of(prompts[: len(scores)])
    rewards = rewards_of(torch.tensor(values_of(scores)), groups)
    advantages = group_advantages(rewards, groups, std=run.args.adv_std, correction=run.args.adv_correction)
    is_own = torch.isin(torch.tensor([p.index for p in prompts[: len(scores)]]), batch.indices)
    return Grades(onto(advantages[is_own]), onto((~rewards[is_own].isnan()).float()) if weighted else None)


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
    """This rank's batches to train on, minibatch by minibatch, each with its advantages on the device.

    They are as they were drawn if all samples are kept, else repacked. A minibatch is a consecutive share of them, or
    where they are too few for that, of their kept steps too.

    advantages: [N]. keep: [N], or None to keep all.
    """
    shares = math.gcd(len(batches), num_minibatches)
    if keep is None:
        chosen = [TrainBatch.of(b, to_device(advantages[b.indices], dist.device)) for b in batches]
    else:
        chosen = repack(dist, batches, advantages, keep, num_minibatches=shares)
    return chosen if shares == num_minibatches else split_steps(chosen, shares, num_minibatches // shares)


def split_steps(batches: Sequence[TrainBatch], shares: int, parts: int) -> list[TrainBatch]:
    """Return each share of the batches `parts` times, first with the first of their kept steps, and so on."""
    size, length = len(batches) // shares, batches[0].trajectory.num_kept // parts
    return [
        replace(batch, trajectory=batch.trajectory.take_steps(start, start + length))
        for first in range(0, len(batches), size)
        for start in range(0, parts * length, length)
        for batch in batches[first : first + size]
    ]


def repack(
    dist: Dist, batches: Sequence[Trajectory], advantages: Tensor, keep: Tensor, *, num_minibatches: int
) -> list[TrainBatch]:
    """The kept samples in the fewest full batches, equally many on every rank and in every minibatch.

    A minibatch keeps to its own consecutive share of the rank's batches, a batch to one size. Places that are left over
    are filled with samples of weight 0, spread evenly over the batches of a size. The weights make a minibatch's mean
    over all places that over its kept samples of all ranks.
    """
    size, share = len(batches[0]), len(batches) // num_minibatches
    parts = [by_size(batches[i : i + share]) for i in range(0, len(batches), share)]  # per minibatch and size
    counts = [[int(keep[torch.cat([b.indices for b in same])].sum()) for same in part] for part in parts]
    least = [[math.ceil(count / size) for count in own] for own in counts]
    by_rank = gather_json(dist, [[sum(own) for own in counts], [sum(own) for own in least]])
    kept, rounds = torch.tensor(by_rank).unbind(dim=1)  # [ranks, minibatches]
    most = max(1, int(rounds.max()))
    scale = most * size * dist.world_size / kept.sum(dim=0).clamp(min=1)
    chosen = []
    for part, own, factor in zip(parts, least, scale, strict=True):
        for same, num in zip(part, _filled(own, [len(same) for same in part], most), strict=True):
            indices = torch.cat([batch.indices for batch in same])
            order = keep[indices].int().argsort(descending=True, stable=True)[: num * size]
            for row in order.view(size, num).T.sort(dim=1).values:  # dealt to batches in turn
                picked, weights = indices[row], keep[indices[row]] * factor
                onto = partial(to_device, device=dist.device)
                batch = TrainBatch.of(_pick(same, row), onto(advantages[picked]), onto(weights))
                chosen.append(replace(batch, is_as_sampled=False))
    return chosen


def by_size(batches: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The batches of each height and width, and of each number and shapes of references."""
    together: dict[object, list[Trajectory]] = {}
    for batch in batches:
        _, references = batch.prompts[0].shapes
        together.setdefault((batch.params.height, batch.params.width, references), []).append(batch)
    return list(together.values())


def _filled(counts: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """The counts, raised in turn as far as each may be until their sum is `total`."""
    filled, left = [], total - sum(counts)
    for count, bound in zip(counts, most, strict=True):
        more = min(left, bound - count)
        filled.append(count + more)
        left -= more
    return filled


def _in_order(dist: Dist, batches: Sequence[Samples], values: Sequence[float], total: int) -> Tensor:
    """A number for each of this rank's samples -> those of all ranks, [total]."""
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    return gather_by_index(dist, indices, torch.tensor(values), total)


def _pick(batches: Sequence[Trajectory], places: Tensor) -> Trajectory:
    """The samples at ascending places [B], counted through equal batches, without padding that none of them needs."""
    size = len(batches[0])
    found = places // size
    return Trajectory.cat([batches[i].select(places[found == i] % size) for i in found.unique().tolist()]).trim()
