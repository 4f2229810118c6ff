"""From the samples of a step to their advantages: score requests, and the rewards of all ranks.

Notation: N samples of a step over all ranks, n of them on this rank; B samples of a batch. A sample's place among the N
is its prompt's `index`, so results do not depend on how the samples were dealt to the ranks.
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
from omni_train.progress import advance, phase
from omni_train.terminal import one_line
from torch import Tensor

from omni_rl.flow.scorers import Pending, Scorer
from omni_rl.run.run import AnyRun, MediaRun, Step
from omni_rl.settings.args import STREAMS, MediaArgs, parse_numbers, parse_reward_media
from omni_rl.settings.groups import Advantages

BatchT = TypeVar("BatchT", bound=Samples, covariant=True)
RolloutT = TypeVar("RolloutT", bound="Rollout[Any]")
RunT = TypeVar("RunT", bound=AnyRun)
T = TypeVar("T")


def submit(scorer: Scorer, samples: Samples, rows: slice = slice(None)) -> Pending:
    """Request the scores of a batch, or of some of its rows, and return a future."""
    media = {kind: samples.media[kind][rows].cpu().numpy() for kind in scorer.kinds}
    prompts = samples.prompts[rows]
    references = [[image.numpy() for image in p.images] for p in prompts] if scorer.takes_references else None
    groups = [p.group for p in prompts] if scorer.takes_groups else None
    texts, meta = [p.text for p in prompts], [{**p.meta, **samples.rates} for p in prompts]
    return scorer.submit(media, texts, meta, references, groups)


def submit_groups(scorer: Scorer, batches: Sequence[Samples], group: int, size: int) -> list[Pending]:
    """Request the scores of the groups completed by the last of a rank's batches, and return futures.

    group: size of a group, a multiple or divisor of the batch size. size: maximum number of samples in a request, which
    holds at least one group; 0: no limit.
    """
    num_batches = max(1, group // len(batches[-1]))  # number of batches that hold whole groups
    if len(batches) % num_batches:
        return []
    group_batches, first = batches[-num_batches:], batches[-num_batches]
    media = {kind: torch.cat([batch.media[kind] for batch in group_batches]) for kind in scorer.kinds}
    samples = Samples(
        tuple(p for batch in group_batches for p in batch.prompts), media, first.rates, first.weight_version
    )
    request_size = max(group, (size or len(samples)) // group * group)
    return [
        submit(scorer, samples, slice(start, start + request_size)) for start in range(0, len(samples), request_size)
    ]


def completed_requests(pending: Sequence[Pending], total: int) -> Iterator[Pending]:
    """Yield the requests of `total` samples in order, each when it is done."""
    with phase("scores", total, "samples"):
        for request in pending:
            if request.exception() is None:
                advance(len(request.result()))
            yield request


def collect(dist: Dist, pending: Sequence[Pending], total: int = 0) -> list[Score]:
    """Wait for the scores [n] of this rank's samples, and return them in the order of its batches.

    total: n, for the progress bar.

    Raises:
        RewardError: the scorer failed on some rank, or a request could not be sent. Raised on every rank, so that all
            can save their state.
    """
    error = next(filter(None, (request.exception() for request in completed_requests(pending, total))), None)
    for rank, message in enumerate(gather_json(dist, None if error is None else str(error))):
        if message is not None:
            raise RewardError(f"scores of rank {rank}: {message}") from error
    return [score for future in pending for score in future.result()]


def group_indices(prompts: Sequence[Prompt]) -> Tensor:
    """Return the groups [N] of a step's samples, int64."""
    return torch.tensor([prompt.group for prompt in prompts])


@dataclass(frozen=True)
class Rollout(Generic[BatchT]):
    """The samples of a step: the N prompts of all ranks, this rank's batches, and its pending scores in their order.

    consecutive: number of consecutive samples that are dealt to one rank. decoded: the batches with media, which are
    scored; None: all.
    """

    prompts: Sequence[Prompt]
    batches: Sequence[BatchT]
    pending: Sequence[Pending]
    consecutive: int = 1
    decoded: Sequence[BatchT] | None = None

    @property
    def scored(self) -> Sequence[BatchT]:
        """The batches scored by this rank. Other ranks of its context-parallel group score the rest."""
        return self.batches if self.decoded is None else self.decoded

    @property
    def num_scored(self) -> int:
        """The number of samples scored by this rank."""
        return sum(map(len, self.scored))

    @property
    def groups(self) -> Tensor:
        """The groups [N] of the samples, int64."""
        return group_indices(self.prompts)

    @property
    def scores(self) -> list[Score]:
        """The scores [n] of the samples in `scored`. Waits for them."""
        return [score for future in self.pending for score in future.result()]


MediaRollout = Rollout[Trajectory]


def gather_rewards(dist: Dist, batches: Sequence[Samples], scores: Sequence[Score], groups: Tensor) -> Tensor:
    """Return the rewards [N], float64, of all ranks' samples; see `mask_rewards`. batches: those of `scores`."""
    return mask_rewards(_gather_in_order(dist, batches, score_values(scores), len(groups)), groups)


def score_values(scores: Sequence[Score]) -> list[float]:
    """Return the value of each score: NaN if there is none, infinity if its group is to be dropped."""
    return [math.inf if s.mask_group else math.nan if s.value is None else s.value for s in scores]


def mask_rewards(values: Tensor, groups: Tensor) -> Tensor:
    """Return the rewards [N] of samples in whole groups [N] from the values [N] of their scores; NaN for no reward.

    All rewards of a group are NaN if the client marked it to be dropped, or if it has several samples but fewer than
    two scores, so that there is nothing to compare.
    """
    places = groups.unique(return_inverse=True)[1]
    masks = torch.ones_like(values), values.isfinite(), values.isinf()
    sizes, scored, masked = (torch.zeros(len(groups)).index_add(0, places, m.float())[places] for m in masks)
    return values.masked_fill((masked > 0) | (scored < sizes.clamp(max=2)), math.nan)


def gather_parts(
    dist: Dist, batches: Sequence[Samples], scores: Sequence[Score], names: Sequence[str], rewards: Tensor
) -> Tensor:
    """Return the named parts [N, names] of all ranks' scores; NaN for a missing part or reward.

    batches: those of `scores`.

    Raises:
        RuntimeError: no score has a part with one of the names.
    """
    columns = [
        _gather_in_order(dist, batches, [score.parts.get(name, math.nan) for score in scores], len(rewards))
        for name in names
    ]
    parts = torch.stack(columns, dim=1).masked_fill(rewards.isnan()[:, None], math.nan)
    for name, column in zip(names, columns, strict=True):
        if column.isnan().all() and not rewards.isnan().all():
            part_names = sorted(scores[0].parts) if scores else "none on this rank"
            raise RuntimeError(f"the scorer must name a part {name!r} in its scores, it names {part_names}")
    return parts


def step_rewards(run: AnyRun, step: Step, rollout: Rollout[Any], groups: Tensor | None = None) -> Tensor:
    """Return the rewards [N] of all ranks' samples, and log them.

    groups: [N], replaces the rollout's.

    Raises:
        RuntimeError: no sample has a score, and --scorer.on-failure is raise.
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


def log_advantages(step: Step, advantages: Tensor, without_eps: Tensor) -> None:
    """Log the extremes of a step's advantages and the effect of eps on them, and record whether any is nonzero.

    without_eps: the advantages computed with an eps of almost 0.
    """
    step.has_signal = bool(advantages.any())
    step.metrics |= {"advantage/min": advantages.min().item(), "advantage/max": advantages.max().item()}
    sizes = [values.abs().double().sum().item() for values in (advantages, without_eps)]
    step.metrics["advantage/eps_share"] = max(0.0, 1 - sizes[0] / sizes[1]) if sizes[1] else 0.0


def step_advantages(
    run: MediaRun[MediaArgs], step: Step, rollout: Rollout[Trajectory], settings: Advantages
) -> tuple[Tensor, Tensor]:
    """Return advantages [N], or [N, M] with M streams, and rewards [N] of all ranks' samples, and log both.

    Raises:
        RuntimeError: as in `step_rewards`.
    """
    rewards = step_rewards(run, step, rollout)
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
    """Return advantages [N] of --reward-parts, each normalized separately; [N, M] with --streams.reward-media.

    rewards: [N]. eps: see `multi_reward_advantages`.
    """
    weights, media = parse_numbers(settings.reward_parts, ""), parse_reward_media(reward_media, settings.reward_parts)
    columns, groups = gather_parts(dist, rollout.scored, rollout.scores, list(weights), rewards), rollout.groups
    compare = partial(
        multi_reward_advantages, columns, groups, std=settings.adv_std, eps=eps, correction=settings.adv_correction
    )

    def sum_parts(medium: str | None) -> Tensor:
        return compare([weight * (media.get(name, medium) == medium) for name, weight in weights.items()])

    return torch.stack([sum_parts(medium) for medium in STREAMS], dim=1) if media else sum_parts(None)


def wait_and_grade(run: RunT, step: Step, rollout: RolloutT, grade: Callable[[RunT, Step, RolloutT], T]) -> T:
    """Wait for the scores of all ranks, and return the result of `grade`.

    Raises:
        RewardError: the scorer failed on some rank. Raised on every rank.
    """
    with run.phase("reward_wait"):
        collect(run.dist, rollout.pending, rollout.num_scored)
        return grade(run, step, rollout)


def _gather_in_order(dist: Dist, batches: Sequence[Samples], values: Sequence[float], total: int) -> Tensor:
    """Gather the values of all ranks' samples: [total], float64, in the order of their indices."""
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    return gather_by_index(dist, indices, torch.tensor(values, dtype=torch.float64), total)
