"""Scores of a step's samples: asking for them without waiting, those of all ranks in order, what is trained on.

Letters: N samples of a step over all ranks, n of them this rank's; B samples of a batch. A sample's place among the N
is its prompt's `index`, so nothing here depends on how the samples were dealt to the ranks.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from omni_losses import best_worst_n, filter_groups, reward_metrics
from omni_reward import RewardClient, RewardError, Score
from omni_rollout import Prompt, Samples, Trajectory
from omni_rollout.types import to_device
from omni_train.data import PromptRecord
from omni_train.dist import Dist, gather_by_index, gather_json
from torch import Tensor

from omni_rl.args import RunArgs
from omni_rl.cli import flag, printable, require
from omni_rl.pictures import read_picture

Pending = Future[list[Score]]
Arrays = Mapping[str, np.ndarray]  # media by their kinds
Metas = Sequence[Mapping[str, object]]
References = Sequence[Sequence[np.ndarray]] | None  # of each sample, for a scorer that takes them
Grade = Callable[[Arrays, Sequence[str]], list[Score]]


class AnyScorer(Protocol):
    """A scorer of finished samples. `busy_s` counts the seconds that it has worked."""

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""

    def close(self) -> None:
        """Free what the scorer holds."""


class Scorer(AnyScorer, Protocol):
    """A scorer of media."""

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of media that it takes, no more and no less."""

    @property
    def takes_references(self) -> bool:
        """Whether it wants the pictures that the samples were made from."""

    def submit(self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None) -> Pending:
        """The future scores of N samples, as `omni_reward.RewardClient.submit` gives them."""


class LocalScorer:
    """A scorer in this process: `grade(media, texts) -> scores`, called at once with media of these kinds."""

    takes_references = False

    def __init__(self, grade: Grade, kinds: Sequence[str] = ("image",)) -> None:
        self.grade, self.kinds = grade, kinds
        self.busy_s = 0.0

    def submit(self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None) -> Pending:
        """Scores that are there at once."""
        start = time.perf_counter()
        future: Pending = Future()
        future.set_result(self.grade(media, prompts))
        self.busy_s += time.perf_counter() - start
        return future

    def close(self) -> None:
        """Nothing to free."""


def abstain(media: Arrays, texts: Sequence[str]) -> list[Score]:
    """No score for any sample: the `grade` of a run without a scorer."""
    return [Score(None, abstained="there is no scorer")] * len(texts)


def connect(
    urls: str,
    args: RunArgs,
    dist: Dist,
    canary: PromptRecord,
    kinds: Sequence[str],
    *,
    samples: Arrays = MappingProxyType({}),
    name: str = "--scorer-url",
    parts: Sequence[str] = (),
) -> tuple[RewardClient, str]:
    """A client of the scorer at one URL, or of equal ones at several with commas between, and its name and version.

    Each server has scored a canary: a sample with the text, meta and references of a prompt.

    kinds: of media that the model draws, of which the scorer may take some. samples: of these kinds, a canary's; others
    are the client's own. name: of the flag that holds the URLs.
    parts: that its scores must name.

    Raises:
        ValueError: a server does not answer, refuses the token or the canary, takes other media, or takes references
            where the prompt has none.
    """
    with flag("--scorer-token-file: "):
        token = Path(args.scorer_token_file).read_text().strip() if args.scorer_token_file else None
    open_client = partial(
        RewardClient,
        urls.split(","),
        token=token,
        timeout_s=args.scorer_timeout_s,
        on_failure=args.on_failure,
        proxy=args.scorer_proxy,
    )
    with flag(f"{name}: "):
        client = open_client()
    try:
        info = client.info()
        media = (
            {kind: samples[kind] for kind in info["media"]} if info["media"] in [[kind] for kind in samples] else None
        )
        references = [[read_picture(path).numpy() for path in canary.images]] if client.takes_references else None
        require((references != [[]], f"{name} must be a scorer without references, as the prompts name no images"))
        replies = client.check(media, [canary.text], [canary.meta], references)
    except RewardError as exc:
        raise ValueError(f"{name} must be a reward server that answers: {exc}") from exc
    require(
        (set(info["media"]) <= set(kinds),
         f"{name} must be a server of rewards for {' and '.join(kinds)}, takes {', '.join(info['media'])} "
         f"in protocol {info['protocol']}"),
        *((part in score.parts, f"--reward-parts must name parts of the scores, {sorted(score.parts)}, got {part!r}")
          for part in parts for scores in replies for score in scores if score.abstained is None),
    )  # fmt: skip
    waiting = info["limits"]["max_waiting"] * len(client.urls)  # requests that the servers let wait, for all ranks
    client.close()
    client = open_client(max_in_flight=max(1, waiting // dist.world_size))
    client.takes_references, client.kinds = references is not None, tuple(info["media"])  # asked once
    return client, f"{info['scorer']} {info['scorer_version']}".strip()


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


def describe_rewards(rewards: Tensor, groups: Tensor, scores: Sequence[Score], *, need_one: bool) -> dict[str, float]:
    """Metrics `reward/...` of the rewards [N] in their groups [N].

    scores: this rank's, for the reason of an abstention.

    Raises:
        RuntimeError: no sample has a score, and one is needed.
    """
    if not rewards.isnan().all():
        return {f"reward/{name}": value.item() for name, value in reward_metrics(rewards, groups).items()}
    if need_one:
        raise RuntimeError(
            f"the scorer gave no score for any of {len(rewards)} samples: {printable(str(scores[0].abstained))}"
        )
    return {"reward/abstained_ratio": 1.0}


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
    return in_minibatches(chosen, shares, num_minibatches)


def in_minibatches(batches: Sequence[TrainBatch], shares: int, num_minibatches: int) -> list[TrainBatch]:
    """Return the batches minibatch by minibatch, of which several may be the kept steps of one share, a part each."""
    if shares == num_minibatches:
        return list(batches)
    parts = num_minibatches // shares
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
