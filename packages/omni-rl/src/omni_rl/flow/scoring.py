"""From the scores of a step's samples to training batches: requests, rewards of all ranks, advantages.

Where a rank samples whole groups, and each is divided by its own deviation or by none, the advantages of a batch need
only the scores of its own groups. The first minibatch then waits for no more than these, batch by batch. Batches keep
their order, whichever scores come first, so that no bit depends on the scorer's speed. Before the first optimizer step
all scores of all ranks are graded, as in an update that waits for them: where a scorer has failed, the weights are
untouched.

Letters: N samples of a step over all ranks, n of them this rank's; B samples of a batch. A sample's place among the N
is its prompt's `index`, so nothing here depends on how the samples were dealt to the ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from omni_losses import (
    best_worst_n,
    filter_groups,
    group_advantages,
    multi_reward_advantages,
    reward_metrics,
)
from omni_reward import RewardError, Score
from omni_rollout import Prompt, Samples, Trajectory
from omni_rollout.types import to_device
from omni_sched import step_noise
from omni_train.dist import Dist, gather_by_index, gather_json
from omni_train.progress import advance, doing
from omni_train.terminal import one_line
from torch import Tensor

from omni_rl.flow.scorers import Pending, Scorer
from omni_rl.run.run import AnyRun, MediaRun, Step
from omni_rl.settings.args import STREAMS, MediaArgs, parse_judges, parse_numbers
from omni_rl.settings.groups import Advantages

BatchT = TypeVar("BatchT", bound=Samples, covariant=True)
RolloutT = TypeVar("RolloutT", bound="Rollout[Any]")
RunT = TypeVar("RunT", bound=AnyRun)
T = TypeVar("T")


def submit(scorer: Scorer, samples: Samples, rows: slice = slice(None)) -> Pending:
    """Request the scores of a batch, or of some rows of it; return a future."""
    media = {kind: samples.media[kind][rows].cpu().numpy() for kind in scorer.kinds}
    prompts = samples.prompts[rows]
    references = [[image.numpy() for image in p.images] for p in prompts] if scorer.takes_references else None
    groups = [p.group for p in prompts] if scorer.takes_groups else None
    texts, meta = [p.text for p in prompts], [{**p.meta, **samples.rates} for p in prompts]
    return scorer.submit(media, texts, meta, references, groups)


def submit_groups(scorer: Scorer, batches: Sequence[Samples], group: int, size: int) -> list[Pending]:
    """Request the scores of the groups that the last of a rank's batches completes; return futures.

    group: samples of a group, which a batch divides or is divided by. size: most samples in a request, which holds at
    least a group; 0 is any.
    """
    turn = max(1, group // len(batches[-1]))  # batches that hold whole groups
    if len(batches) % turn:
        return []
    own, first = batches[-turn:], batches[-turn]
    media = {kind: torch.cat([batch.media[kind] for batch in own]) for kind in scorer.kinds}
    whole = Samples(tuple(p for batch in own for p in batch.prompts), media, first.rates, first.weight_version)
    each = max(group, (size or len(whole)) // group * group)
    return [submit(scorer, whole, slice(start, start + each)) for start in range(0, len(whole), each)]


def arrived(pending: Sequence[Pending], total: int) -> Iterator[Pending]:
    """Yield the requests of `total` samples in their order, each once it is done."""
    with doing("scores", total, "samples"):
        for request in pending:
            if request.exception() is None:
                advance(len(request.result()))
            yield request


def collect(dist: Dist, pending: Sequence[Pending], total: int = 0) -> list[Score]:
    """Wait for the scores [n] of this rank's samples, and return them in the order of its batches.

    total: n, for the progress.

    Raises:
        RewardError: the scorer failed for some rank, or what it is asked cannot be sent; raised on every rank, so that
            all can save what there is.
    """
    error = next(filter(None, (request.exception() for request in arrived(pending, total))), None)
    for rank, message in enumerate(gather_json(dist, None if error is None else str(error))):
        if message is not None:
            raise RewardError(f"scores of rank {rank}: {message}") from error
    return [score for future in pending for score in future.result()]


def groups_of(prompts: Sequence[Prompt]) -> Tensor:
    """Return the group [N] of each of a step's samples, int64."""
    return torch.tensor([prompt.group for prompt in prompts])


@dataclass(frozen=True)
class Rollout(Generic[BatchT]):
    """The samples of a step: the N prompts of all ranks, this rank's batches, and its pending scores in their order.

    in_a_row: number of consecutive samples that one rank takes. decoded: the batches with media, which are scored; None
    for all of them.
    """

    prompts: Sequence[Prompt]
    batches: Sequence[BatchT]
    pending: Sequence[Pending]
    in_a_row: int = 1
    decoded: Sequence[BatchT] | None = None

    @property
    def scored(self) -> Sequence[BatchT]:
        """The batches that this rank has scored; ranks with the same samples have scored the rest."""
        return self.batches if self.decoded is None else self.decoded

    @property
    def num_scored(self) -> int:
        """The number of samples that this rank has scored."""
        return sum(map(len, self.scored))

    @property
    def groups(self) -> Tensor:
        """The group [N] of each sample, int64."""
        return groups_of(self.prompts)

    @property
    def scores(self) -> list[Score]:
        """The scores [n] of the samples of `scored`; waits for them."""
        return [score for future in self.pending for score in future.result()]


MediaRollout = Rollout[Trajectory]


def gather_rewards(dist: Dist, batches: Sequence[Samples], scores: Sequence[Score], groups: Tensor) -> Tensor:
    """Return the rewards [N], float64, of all ranks' samples, as `rewards_of` does. batches: those with the scores."""
    return rewards_of(_in_order(dist, batches, values_of(scores), len(groups)), groups)


def values_of(scores: Sequence[Score]) -> list[float]:
    """Return the value of each score; NaN if there is none, infinite if its group is to be left out."""
    return [math.inf if s.mask_group else math.nan if s.value is None else s.value for s in scores]


def rewards_of(values: Tensor, groups: Tensor) -> Tensor:
    """Return the rewards [N] of samples in whole groups [N] from the values [N] of their scores; NaN for no reward.

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
    """Return the named parts [N, names] of all ranks' scores; NaN where there is none, or no reward.

    batches: those with the scores.

    Raises:
        RuntimeError: no score has a part of that name.
    """
    columns = [
        _in_order(dist, batches, [score.parts.get(name, math.nan) for score in scores], len(rewards)) for name in names
    ]
    parts = torch.stack(columns, dim=1).masked_fill(rewards.isnan()[:, None], math.nan)
    for name, column in zip(names, columns, strict=True):
        if column.isnan().all() and not rewards.isnan().all():
            named = sorted(scores[0].parts) if scores else "none on this rank"
            raise RuntimeError(f"the scorer must name a part {name!r} in its scores, it names {named}")
    return parts


def rewards_at(run: AnyRun, step: Step, rollout: Rollout[Any], groups: Tensor | None = None) -> Tensor:
    """Return the rewards [N] of all ranks' samples, and log them.

    groups: [N], instead of the rollout's.

    Raises:
        RuntimeError: no sample has a score, and --scorer.on-failure asks for one.
    """
    groups, scores = rollout.groups if groups is None else groups, rollout.scores
    rewards = gather_rewards(run.dist, rollout.scored, scores, groups)
    if rewards.isnan().all():
        if run.args.scorer.on_failure == "raise":
            reason = one_line(next((str(score.abstained) for score in scores), "on other ranks"))
            raise RuntimeError(f"the scorer gave no score for any of {len(rewards)} samples: {reason}")
        step.metrics["reward/abstained_ratio"] = 1.0
        return rewards
    step.metrics |= {f"reward/{name}": value.item() for name, value in reward_metrics(rewards, groups).items()}
    if run.score_parts:
        parts = gather_parts(run.dist, rollout.scored, scores, run.score_parts, rewards).nanmean(dim=0).tolist()
        step.metrics |= {f"reward/{name}": part for name, part in zip(run.score_parts, parts, strict=True)}
    return rewards


def log_advantages(step: Step, advantages: Tensor, whole: Tensor) -> None:
    """Log the extremes of a step's advantages, the effect of eps on them, and whether any is not 0.

    whole: the advantages with an eps of almost 0.
    """
    step.has_signal = bool(advantages.any())
    step.metrics |= {"advantage/min": advantages.min().item(), "advantage/max": advantages.max().item()}
    sizes = [each.abs().double().sum().item() for each in (advantages, whole)]
    step.metrics["advantage/eps_share"] = max(0.0, 1 - sizes[0] / sizes[1]) if sizes[1] else 0.0


def advantages_of(
    run: MediaRun[MediaArgs], step: Step, rollout: Rollout[Trajectory], settings: Advantages
) -> tuple[Tensor, Tensor]:
    """Return advantages [N], or [N, M] of M streams, and rewards [N] of all ranks' samples; log both.

    Raises:
        RuntimeError: as `rewards_at`.
    """
    rewards = rewards_at(run, step, rollout)
    compare = partial(
        group_advantages, rewards, rollout.groups, std=settings.adv_std, correction=settings.adv_correction
    )
    if settings.reward_parts:
        compare = partial(part_advantages, settings, run.args.streams.reward_media, run.dist, rollout, rewards)
    advantages = compare()
    log_advantages(step, advantages, compare(eps=1e-30))
    return advantages, rewards


def part_advantages(
    settings: Advantages,
    reward_media: str,
    dist: Dist,
    rollout: Rollout[Trajectory],
    rewards: Tensor,
    *,
    eps: float = 1e-4,
) -> Tensor:
    """Return advantages [N] of --reward-parts, each normalized by itself; [N, M] with --streams.reward-media.

    rewards: [N]. eps: as in `multi_reward_advantages`.
    """
    weights, judges = parse_numbers(settings.reward_parts, ""), parse_judges(reward_media, settings.reward_parts)
    columns, groups = gather_parts(dist, rollout.scored, rollout.scores, list(weights), rewards), rollout.groups
    compare = partial(
        multi_reward_advantages, columns, groups, std=settings.adv_std, eps=eps, correction=settings.adv_correction
    )

    def added(medium: str | None) -> Tensor:
        return compare([weight * (judges.get(name, medium) == medium) for name, weight in weights.items()])

    return torch.stack([added(medium) for medium in STREAMS], dim=1) if judges else added(None)


class Grades(NamedTuple):
    """Advantages [B] of B samples, or [B, M] of M streams, and weights [B], where None is 1."""

    advantages: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class TrainBatch:
    """A batch of an update. Reading `advantages` or `weights` waits for the scores of its groups.

    grades: returns both. is_as_sampled: the rollout had the same batch, so that an exact engine's log-probs are the
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


def wait_and_grade(run: RunT, step: Step, rollout: RolloutT, grade: Callable[[RunT, Step, RolloutT], T]) -> T:
    """Wait for the scores of all ranks, and return the result of `grade`.

    Raises:
        RewardError: the scorer failed for some rank; on every rank.
    """
    with run.phase("reward_wait"):
        collect(run.dist, rollout.pending, rollout.num_scored)
        return grade(run, step, rollout)


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

    A batch as it was sampled waits only for the scores of its own groups, when its grades are read. All wait for all
    scores where samples may be left out, a rank samples parts of groups, or others' scores enter an advantage.

    Args:
        run: the run.
        step: its step, which logs rewards and advantages.
        rollout: of the step.
        settings: of the advantages.
        weighted: True if a sample without a score has weight 0.
        best_worst, drop_silent_groups: as `keep_samples`.
        num_minibatches: as `select`.

    Raises:
        RewardError: the scorer failed for some rank; on every rank, at the latest before the first optimizer step.
    """
    leaves_out = bool(best_worst) or drop_silent_groups

    def grade(run: MediaRun[MediaArgs], step: Step, rollout: Rollout[Trajectory]) -> list[TrainBatch]:
        advantages, rewards = advantages_of(run, step, rollout, settings)
        weights, keep = (~rewards.isnan()).float() if weighted else None, None
        if leaves_out:
            keep = keep_samples(
                advantages, rewards, rollout.groups, best_worst=best_worst, drop_silent_groups=drop_silent_groups
            )
            step.metrics["reward/trained_ratio"] = keep.float().mean().item()
        return select(run.dist, rollout.batches, advantages, keep, weights, num_minibatches=num_minibatches)

    is_as_sampled = not leaves_out and len(rollout.batches) % num_minibatches == 0
    if not is_as_sampled or not groups_are_local(run.args, settings, run.dist, rollout.in_a_row):
        return wait_and_grade(run, step, rollout, grade)
    step.grade_all = partial(wait_and_grade, run, step, rollout, grade)
    return [TrainBatch(b, cache(partial(_own_grades, run, b, rollout, settings, weighted))) for b in rollout.batches]


def with_some_steps(rollout: Rollout[Trajectory], fraction: float) -> Rollout[Trajectory]:
    """Return the rollout with `some_steps` of each batch; with all of them where the share is 1."""
    return replace(rollout, batches=[some_steps(b, fraction) for b in rollout.batches]) if fraction < 1 else rollout


def some_steps(batch: Trajectory, fraction: float) -> Trajectory:
    """Return the samples with this share of their kept steps, at random for each, as DanceGRPO's released code does.

    The choice depends only on a sample's seed: any number of ranks takes the same steps.
    """
    first = batch.params.num_inference_steps  # the noise of the steps before is the rollout's
    places = step_noise([prompt.seed for prompt in batch.prompts], first, (batch.num_kept,)).argsort(dim=1)
    chosen = places[:, : max(1, int(batch.num_kept * fraction))].sort(dim=1).values
    return batch.take_steps(to_device(chosen, batch.x.device))


def groups_are_local(args: MediaArgs, settings: Advantages, dist: Dist, in_a_row: int) -> bool:
    """Return True if the advantages of a rank's samples need only its own scores, which arrive batch by batch."""
    is_whole = dist.world_size == 1 or in_a_row % args.data.group_size == 0
    waits = dist.context > 1 or args.sampling.draw_ahead or args.scorer.sleep or settings.reward_parts
    return is_whole and settings.adv_std != "batch" and not waits


def _own_grades(
    run: MediaRun[MediaArgs], batch: Trajectory, rollout: Rollout[Trajectory], settings: Advantages, weighted: bool
) -> Grades:
    """Return a batch's grades as soon as the scores up to the end of its last group have arrived.

    Those of a scorer that failed are 0, as ranks go through a sharded net together; the first optimizer step then
    raises on every rank.
    """
    prompts = [prompt for batch in rollout.batches for prompt in batch.prompts]
    requests, scores = arrived(rollout.pending, len(prompts)), list[Score]()
    num_needed = sum(prompt.group <= batch.prompts[-1].group for prompt in prompts)
    with run.phase("reward_wait"):
        while len(scores) < num_needed:
            if (request := next(requests)).exception():
                zeros = to_device(torch.zeros(len(batch)), run.dist.device)
                return Grades(zeros, zeros if weighted else None)
            scores += request.result()
    groups = groups_of(prompts[: len(scores)])
    rewards = rewards_of(torch.tensor(values_of(scores), dtype=torch.float64), groups)
    advantages = group_advantages(rewards, groups, std=settings.adv_std, correction=settings.adv_correction)
    is_own = torch.isin(torch.tensor([p.index for p in prompts[: len(scores)]]), batch.indices)
    weights = (~rewards[is_own].isnan()).float() if weighted else None
    return _train_batch(run.dist, batch, advantages[is_own], weights).grades()


def keep_samples(
    advantages: Tensor, rewards: Tensor, groups: Tensor, *, best_worst: int, drop_silent_groups: bool
) -> Tensor:
    """Return a mask [N] of the samples to train on: the best and worst of each group, `best_worst` in all (0: all).

    drop_silent_groups: leave out groups whose samples have equal scores. A sample whose reward is NaN is left out by
    either choice.
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

    They are as they were sampled if all samples are kept, else repacked. A minibatch is a consecutive chunk of them, or
    if they are too few for that, a part of the kept steps of a chunk.

    advantages: [N]. keep: [N], or None to keep all. weights: [N], of samples that are all kept.
    """
    num_chunks = math.gcd(len(batches), num_minibatches)
    if keep is None or keep.all():
        own_weights = [None if weights is None else weights[batch.indices] for batch in batches]
        chosen = [
            _train_batch(dist, b, advantages[b.indices], own) for b, own in zip(batches, own_weights, strict=True)
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
    """Return each chunk of the batches `parts` times, first with the first of their kept steps, and so on."""
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
    """Put the kept samples into the fewest full batches, equally many on every rank and in every minibatch.

    A minibatch keeps to its own consecutive share of the rank's batches, a batch to one size. Places that are left over
    are filled with samples of weight 0, spread evenly over the batches of a size. The weights turn the mean over
    all places of a minibatch into the mean over its kept samples of all ranks.
    """
    size, share = len(batches[0]), len(batches) // num_minibatches
    parts = [by_size(batches[i : i + share]) for i in range(0, len(batches), share)]  # per minibatch and size
    counts = [[int(keep[torch.cat([b.indices for b in same])].sum()) for same in part] for part in parts]
    least = [[math.ceil(count / size) for count in own] for own in counts]
    by_rank = gather_json(dist, [[sum(own) for own in counts], [sum(own) for own in least]])
    kept, rounds = torch.tensor(by_rank[:: dist.context]).unbind(dim=1)  # [dp_size, minibatches]
    most = max(1, int(rounds.max()))
    scale = most * size * dist.dp_size / kept.sum(dim=0).clamp(min=1)
    chosen = []
    for part, own, factor in zip(parts, least, scale, strict=True):
        for same, num in zip(part, _filled(own, [len(same) for same in part], most), strict=True):
            indices = torch.cat([batch.indices for batch in same])
            order = keep[indices].int().argsort(descending=True, stable=True)[: num * size]
            for row in order.view(size, num).T.sort(dim=1).values:  # dealt to batches in turn
                picked, weights = indices[row], keep[indices[row]] * factor
                batch = _train_batch(dist, _pick(same, row), advantages[picked], weights)
                chosen.append(replace(batch, is_as_sampled=False))
    return chosen


def by_size(batches: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Group batches by height and width, and by number and shapes of references."""
    together: dict[object, list[Trajectory]] = {}
    for batch in batches:
        _, references = batch.prompts[0].shapes
        together.setdefault((batch.params.height, batch.params.width, references), []).append(batch)
    return list(together.values())


def _filled(counts: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Raise the counts in turn, each up to its bound, until their sum is `total`."""
    filled, left = [], total - sum(counts)
    for count, bound in zip(counts, most, strict=True):
        more = min(left, bound - count)
        filled.append(count + more)
        left -= more
    return filled


def _in_order(dist: Dist, batches: Sequence[Samples], values: Sequence[float], total: int) -> Tensor:
    """Return the numbers [total], float64, of all ranks' samples from this rank's."""
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    return gather_by_index(dist, indices, torch.tensor(values, dtype=torch.float64), total)


def _pick(batches: Sequence[Trajectory], places: Tensor) -> Trajectory:
    """Return the samples at ascending places [B], counted through equal batches, without needless padding."""
    size = len(batches[0])
    found = places // size
    return Trajectory.cat([batches[i].select(places[found == i] % size) for i in found.unique().tolist()]).trim()
