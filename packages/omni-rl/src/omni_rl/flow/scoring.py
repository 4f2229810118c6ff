"""From the samples of a step to their advantages: requests of scores, and the rewards of all ranks.

Notation: N samples of a step over all ranks, n of them this rank's; B samples of a batch. A sample's place among the N
is its prompt's `index`, so nothing here depends on how the samples were dealt to the ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from omni_losses import group_advantages, multi_reward_advantages, reward_metrics
from omni_reward import RewardError, Score
from omni_rollout import Prompt, Samples, Trajectory
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


def wait_and_grade(run: RunT, step: Step, rollout: RolloutT, grade: Callable[[RunT, Step, RolloutT], T]) -> T:
    """Wait for the scores of all ranks, and return the result of `grade`.

    Raises:
        RewardError: the scorer failed for some rank; on every rank.
    """
    with run.phase("reward_wait"):
        collect(run.dist, rollout.pending, rollout.num_scored)
        return grade(run, step, rollout)


def _in_order(dist: Dist, batches: Sequence[Samples], values: Sequence[float], total: int) -> Tensor:
    """Return the numbers [total], float64, of all ranks' samples from this rank's."""
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    return gather_by_index(dist, indices, torch.tensor(values, dtype=torch.float64), total)
