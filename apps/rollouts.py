"""What every trainer does with prompts: open an engine, deal the prompts to the ranks, sample, score, evaluate.

Letters: N samples of a step over all ranks, B samples of a batch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omni_losses import reward_metrics
from omni_reward import RewardClient, RewardError, Score
from omni_reward.client import OnFailure
from omni_rl.cli import flag
from omni_rl.report import Sample, write_eval
from omni_rollout import Prompt, SamplingParams, Trajectory
from omni_rollout.diffusers_engine import DiffusersEngine
from omni_rollout.models import qwen_image
from omni_train.data import PromptRecord, sample_seed
from omni_train.dist import Dist, gather_floats, gather_json, same_error
from omni_train.lora import add_lora
from omni_train.weights import named_weights

Pending = Future[list[Score]]


@dataclass(frozen=True)
class Rollouts:
    """Who samples, who scores, how many samples a forward has, and a second scorer that evaluations ask, if any.

    forwards: how many samples have passed the transformers, as `samples`.
    """

    dist: Dist
    engine: Any  # Engine
    client: RewardClient
    batch_size: int
    watch: RewardClient | None = None
    forwards: Counter[str] = field(default_factory=Counter)


def open_engine(kind: str, path: str, dist: Dist, dtype: torch.dtype) -> tuple[Any, Any]:
    """The engine and the transformer to train: for `diffusers` the engine's own, for `vllm-omni` one on the host."""
    if kind == "diffusers":
        model = qwen_image.load(path, device=dist.device, dtype=dtype)
        return DiffusersEngine(qwen_image, model), model.transformer
    from omni_rollout.vllm_omni_engine import VllmOmniEngine
    from omni_rollout.vllm_omni_models.qwen_image import QwenImageRollout

    together = partial(same_error, dist)
    engine = VllmOmniEngine(QwenImageRollout, path, device=dist.device, dtype=dtype, together=together)
    return engine, qwen_image.load_transformer(path, dtype=dtype)


def count_forwards(engine: Any, net: torch.nn.Module) -> Counter[str]:
    """Counts from now on the samples that pass the transformers of the engine and of the trainer."""
    seen: Counter[str] = Counter()

    def count(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen["samples"] += len(kwargs["hidden_states"])

    for module in {engine.net, net}:  # the embedded engine's is the trainer's
        module.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def total(on: Rollouts, count: int) -> float:
    """The sum of all ranks' counts."""
    return gather_floats(on.dist, torch.tensor([float(count)])).sum().item()


def make_trainable(
    net: Any, *, lora_rank: int, lora_alpha: float, seed: int, frozen_adapters: Sequence[str] = ()
) -> None:
    """A fresh adapter on a frozen base, and frozen ones that equal it; with rank 0 all weights in float32."""
    if lora_rank:
        for name in ("default", *frozen_adapters):
            add_lora(net, qwen_image.LORA_TARGETS, rank=lora_rank, alpha=lora_alpha, adapter=name, seed=seed)
    else:
        net.float().requires_grad_(True)


def connect(urls: str, token_file: str, dist: Dist, *, timeout_s: float, on_failure: OnFailure) -> RewardClient:
    """A client of the scorer at one URL, or of equal ones at several with commas between; all have answered.

    Raises:
        ValueError: one has not, or it refuses the token, or scores something else than images.
    """
    with flag("--scorer-token-file: "):
        token = Path(token_file).read_text().strip() if token_file else None
    in_flight = max(1, 64 // dist.world_size)  # as many as the server lets wait, shared by the ranks
    with flag("--scorer-url: "):
        client = RewardClient(
            urls.split(","), token=token, timeout_s=timeout_s, max_in_flight=in_flight, on_failure=on_failure
        )
    try:
        client.check()
        media = client.info()["media"]
    except RewardError as exc:
        raise ValueError(f"--scorer-url must be a reward server that answers: {exc}") from exc
    if media != ["image"]:
        raise ValueError(f"--scorer-url must be a reward server that takes images, {urls} takes {', '.join(media)}")
    return client


def sync(engine: Any, net: torch.nn.Module, *, version: int) -> int:
    """Brings the net's weights to the engine; returns the bytes that were copied. Every rank calls it."""
    if isinstance(engine, DiffusersEngine):  # it samples with the net itself
        engine.load_weights((), version=version)
        return 0
    engine.load_weights(named_weights(net), version=version)
    return engine.moved_bytes


def samples(
    records: list[PromptRecord], group_size: int, *, seed: int, step: int, share_noise: bool = False
) -> list[Prompt]:
    """`group_size` samples of each prompt, each with a seed of its own; on request a group starts from one noise."""
    return [
        Prompt(
            r.text, group, sample_seed(seed, step, r.index, i), r.negative, meta=dict(r.meta),
            initial_seed=sample_seed(seed, step, r.index, 0) if share_noise else None,
        )
        for group, r in enumerate(records)
        for i in range(group_size)
    ]  # fmt: skip


def draw(on: Rollouts, prompts: list[Prompt], params: SamplingParams) -> Iterator[tuple[Trajectory, Pending]]:
    """This rank's batches of `prompts`, dealt to the ranks in turn; each is with the scorer while the next is drawn."""
    size, dist = on.batch_size, on.dist
    for i in range(dist.rank * size, len(prompts), dist.world_size * size):
        batch = on.engine.generate(prompts[i : i + size], params)
        yield batch, submit(on.client, batch)


def submit(client: RewardClient, batch: Trajectory) -> Pending:
    """The scores to come of a batch."""
    images = batch.media.permute(0, 2, 3, 1).cpu().numpy()
    return client.submit({"image": images}, [p.text for p in batch.prompts], [p.meta for p in batch.prompts])


def collect(on: Rollouts, pending: Sequence[Pending]) -> list[Score]:
    """The scores of this rank's samples, in order; waits for them.

    Raises:
        RewardError: the scorer failed for some rank; raised on every rank, so that all can save what there is.
    """
    scores: list[Score] = []
    error: RewardError | None = None
    try:
        scores = [score for future in pending for score in future.result()]
    except RewardError as exc:
        error = exc
    for rank, message in enumerate(gather_json(on.dist, None if error is None else str(error))):
        if message is not None:
            raise RewardError(f"scores of rank {rank}: {message}") from error
    return scores


def gather_rewards(on: Rollouts, scores: list[Score], *, group_size: int = 1) -> torch.Tensor:
    """The rewards of all ranks, [N], in the order of the prompts; NaN where there is none.

    A group has none at all where the client asked to leave it out, or where fewer than two of its samples have one.
    """
    missing = [math.inf if score.mask_group else math.nan for score in scores]
    values = [none if score.value is None else score.value for score, none in zip(scores, missing, strict=True)]
    rewards = in_order(on, values).view(-1, group_size)
    scored = rewards.isfinite().sum(dim=1)
    out = rewards.isinf().any(dim=1) | (scored < min(2, group_size))
    return rewards.masked_fill(out[:, None], math.nan).flatten()


def gather_parts(on: Rollouts, scores: list[Score], names: Sequence[str], rewards: torch.Tensor) -> torch.Tensor:
    """The named parts of all ranks' scores, [N, names]; NaN where there is none, or no reward.

    Raises:
        RuntimeError: no score has a part of that name.
    """
    columns = [in_order(on, [score.parts.get(name, math.nan) for score in scores]) for name in names]
    parts = torch.stack(columns, dim=1).masked_fill(rewards.isnan()[:, None], math.nan)
    for name, column in zip(names, columns, strict=True):
        if column.isnan().all() and not rewards.isnan().all():
            raise RuntimeError(
                f"the scorer must name a part {name!r} in its scores, it names {sorted(scores[0].parts)}"
            )
    return parts


def in_order(on: Rollouts, values: list[float]) -> torch.Tensor:
    """A number for each of this rank's samples -> those of all ranks, [N], in the order of the prompts."""
    by_rank = gather_floats(on.dist, torch.tensor(values)).view(on.dist.world_size, -1, on.batch_size)
    return by_rank.transpose(0, 1).flatten()


def look_at(
    on: Rollouts, scores: list[Score], *, group_size: int, need_one: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """The rewards of all ranks, [N], NaN where there is none, the groups [N] they are of, and what to log of them.

    Raises:
        RuntimeError: no sample has a score, and one is needed.
    """
    rewards = gather_rewards(on, scores, group_size=group_size)
    groups = torch.arange(len(rewards)) // group_size
    if not rewards.isnan().all():
        seen = {name: value.item() for name, value in reward_metrics(rewards, groups).items()}
    elif need_one:
        raise RuntimeError(f"the scorer gave no score for any of {len(rewards)} samples: {scores[0].abstained}")
    else:
        seen = {"abstained_ratio": 1.0}
    return rewards, groups, {f"reward/{name}": value for name, value in seen.items()}


def evaluate(on: Rollouts, prompts: list[Prompt], params: SamplingParams, folder: Path, step: int) -> dict[str, float]:
    """The mean reward of `prompts`, also by the second scorer; rank 0 writes its images to the folder of the run."""
    wanted, per_round = len(prompts), on.batch_size * on.dist.world_size
    # Every rank runs the same number of full batches, as sharded weights demand; what fills them up is not counted.
    padded = [prompts[i % wanted] for i in range(-(-wanted // per_round) * per_round)]
    batches, pending = zip(*draw(on, padded, params), strict=True)
    scores = collect(on, pending)
    metrics = {"eval/reward": gather_rewards(on, scores)[:wanted]}
    if on.watch:
        metrics["eval/watch"] = gather_rewards(on, collect(on, [submit(on.watch, batch) for batch in batches]))[:wanted]
    if on.dist.is_main:
        write_eval(folder, step, *pictures(batches, scores))
    means = {name: rewards.nanmean().item() for name, rewards in metrics.items()}
    return means | {"eval/abstained_ratio": metrics["eval/reward"].isnan().float().mean().item()}


def pictures(batches: Sequence[Trajectory], scores: Sequence[Score]) -> tuple[torch.Tensor, list[Sample]]:
    """This rank's images, [N, 3, H, W], and what the report shows of each."""
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    rows = [
        Sample(p.text, s.value, p.group, p.seed, s.details, s.abstained) for p, s in zip(prompts, scores, strict=True)
    ]
    return torch.cat([batch.media for batch in batches]), rows
