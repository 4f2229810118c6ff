"""Sampling of a step, distributed over the ranks, with its rows in the report; evaluations on fixed prompts.

Notation: N samples of a step over all ranks, B samples of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import torch
from omni_reward import Score
from omni_rollout import Params, Prompt, Samples, Trajectory
from omni_rollout.thoughts import ThoughtTrajectory
from omni_sched import StreamStep, Transition, sde_step, sde_window
from omni_sched.schedules import Strategy
from omni_train.dist import deal, gather_json
from omni_train.progress import add_phase, track
from omni_train.prompts.files import PromptRecord
from omni_train.prompts.sampler import sample_seed
from omni_train.shard import gathered

from omni_rl.flow.evals import HeldOut, Shown, by_tag, describe
from omni_rl.flow.gold import judge
from omni_rl.flow.scorers import Pending, Scorer
from omni_rl.flow.scoring import Rollout, collect, gather_parts, gather_rewards, submit, submit_groups
from omni_rl.media.images import read_image
from omni_rl.report import Sample
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.eval_sets import GOLD
from omni_rl.settings.groups import Window


def expand_groups(
    records: Sequence[PromptRecord], group_size: int, *, seed: int, step: int, same_start_noise: bool = False
) -> list[Prompt]:
    """Return `group_size` samples of each prompt, group by group, each with its own seed.

    same_start_noise: True if the samples of a group start from the same noise.
    """
    return [
        Prompt(
            text=record.text,
            group=group,
            index=group * group_size + i,
            seed=sample_seed(seed, step, record.index, i),
            negative=record.negative,
            images=tuple(map(read_image, record.images)),
            meta=dict(record.meta),
            initial_seed=sample_seed(seed, step, record.index, 0) if same_start_noise else None,
            size=record.size,
        )
        for group, record in enumerate(records)
        for i in range(group_size)
    ]


def by_shapes(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Group prompts whose samples can share a batch."""
    together: dict[object, list[Prompt]] = {}
    for prompt in prompts:
        together.setdefault(prompt.shapes, []).append(prompt)
    return list(together.values())


def counted(batches: Sequence[Sequence[Prompt]]) -> Iterator[Sequence[Prompt]]:
    """Yield the batches, with progress of the samples and of the texts to encode."""
    add_phase("encoding", len({prompt.text for batch in batches for prompt in batch}), "prompts")
    return track(batches, "samples")


def prompts_of(run: MediaRun[MediaArgs], step: Step, *, same_start_noise: bool = False) -> list[Prompt]:
    """Return the N prompts of a training step's samples, the same on every rank."""
    records, size, seed = run.prompts.at(step.number), run.args.data.group_size, run.args.run.seed
    return expand_groups(records, size, seed=seed, step=step.number, same_start_noise=same_start_noise)


def window_params(
    run: MediaRun[MediaArgs],
    step: Step,
    window: Window,
    *,
    rule: Callable[..., Transition] = sde_step,
    strategy: Strategy = "random",
    iters_per_window: int = 1,
    stride: int = 1,
) -> Params:
    """Return the sampling parameters of a training step. All ranks have the same window of stochastic steps.

    rule: a step of omni_sched; with streams, frames and sound have separate log-probs. Others: see `sde_window`.
    """
    sde_steps = sde_window(
        run.args.sampling.num_inference_steps,
        window.window_size,
        low=window.window_low,
        high=window.window_high,
        strategy=strategy,
        iteration=step.number,
        seed=run.args.run.seed,
        iters_per_window=iters_per_window,
        stride=stride,
    )
    if run.streams:
        rule = StreamStep(rule, tuple(run.streams.values()))
    return replace(run.base_params, rule=rule, noise_level=window.noise_level, sde_steps=sde_steps)


def sample(
    run: MediaRun[MediaArgs],
    prompts: Sequence[Prompt],
    params: Params,
    *,
    consecutive: int = 1,
    scorer: Scorer | None = None,
) -> Rollout[Trajectory]:
    """Return this rank's batches of `prompts`, from `sample_here` or from the ranks that only sample."""
    if run.samplers is None:
        return sample_here(run, prompts, params, consecutive=consecutive, scorer=scorer)
    consecutive = max(run.args.data.batch_size, consecutive, group_of(prompts, scorer or run.scorer))
    own = deal(prompts, run.dist, run.args.data.batch_size, consecutive=consecutive)
    run.counts["sampled"] += sum(map(len, own))
    return Rollout(prompts, *run.samplers.take(own, params, consecutive, run.counts), consecutive)


def group_of(prompts: Sequence[Prompt], scorer: Scorer) -> int:
    """Return the group size if the scorer takes whole groups, else 1."""
    return sum(prompt.group == prompts[0].group for prompt in prompts) if scorer.takes_groups else 1


def sample_here(
    run: MediaRun[MediaArgs],
    prompts: Sequence[Prompt],
    params: Params,
    *,
    consecutive: int = 1,
    scorer: Scorer | None = None,
) -> Rollout[Trajectory]:
    """Return this rank's batches of `prompts`. Each batch is scored while the next one is sampled.

    If the scorer compares groups, each group is dealt to one rank and scored after its last batch. Ranks of a
    context-parallel group return the same batches, without media; they alternate in decoding and scoring batches, or
    decode tiles together.

    consecutive: see `deal`. scorer: replaces the run's.

    Raises:
        RuntimeError: the engine's weights are not those of the last sync.
    """
    batches, scored, pending, scorer = [], list[Trajectory](), list[Pending](), scorer or run.scorer
    dist, batch_size = run.dist, run.args.data.batch_size
    group = group_of(prompts, scorer)
    consecutive = max(batch_size, consecutive, group)
    dealt = deal(prompts, dist, batch_size, consecutive=consecutive)
    for number, own in enumerate(counted(dealt)):
        following = dealt[number + 1] if number + 1 < len(dealt) else ()
        is_scored = number // (consecutive // batch_size) % dist.context == dist.rank % dist.context
        sized = params.of_size(own[0].size)
        in_tiles = 0 < run.args.memory.decode_tile < max(sized.height, sized.width)
        batch = run.engine.generate(own, replace(sized, decode=is_scored or in_tiles))
        if batch.weight_version != run.version:
            raise RuntimeError(f"the engine samples with weights {batch.weight_version}, the trainer has {run.version}")
        if following:  # while the device is busy with this one
            run.engine.prepare(following, params.of_size(following[0].size))
        # Scorers and the report read the media on the host; this copy is the only wait for the batch.
        batch = replace(batch, media={kind: tensor.cpu() for kind, tensor in batch.media.items() if is_scored})
        if dist.context > 1:  # the same on all ranks of the group
            batches.append(replace(batch, media={}, rates={}, params=replace(batch.params, decode=True)))
        else:
            batches.append(batch)
        run.counts["sampled"] += len(batch)
        if not is_scored:
            continue
        scored.append(batch)
        if scorer.takes_groups:
            pending += submit_groups(scorer, scored, group, run.args.scorer.batch_size)
            continue
        size = run.args.scorer.batch_size or len(batch)
        pending += [submit(scorer, scored[-1], slice(i, i + size)) for i in range(0, len(batch), size)]
    return Rollout(prompts, batches, pending, consecutive, scored)


def show(run: MediaRun[MediaArgs], step: Step, rollout: Rollout[Trajectory]) -> None:
    """Show the best and worst of some of rank 0's samples in the report."""
    if report := run.session.report:
        scores = rollout.scores
        run.breakers.pictures(lambda: report.show_samples(step.number + 1, *_shown(rollout.scored, scores)))


def evaluate_set(run: MediaRun[MediaArgs], held: HeldOut[Params, Scorer]) -> tuple[dict[str, float], Shown]:
    """Return metrics of a set's samples, and this rank's samples for the report."""
    is_gold = held.name == GOLD
    second = run.scorer if is_gold else held.watch
    prompts = expand_groups(held.records, held.samples, seed=held.seed, step=-1)  # the same for every run
    # Every rank runs the same number of full batches, as sharded weights and scorers of groups require; the samples
    # that fill them up are not counted.
    asked = [held.scorer or run.scorer, *([second] if second else [])]
    group = held.samples if any(scorer.takes_groups for scorer in asked) else 1
    filled = fill_batches(prompts, run.args.data.batch_size, run.dist.dp_size, group=group)
    with gathered(run.policy.net) if "rollout" in run.policy.unshard else nullcontext():
        rollout = sample_here(run, filled, held.params, consecutive=group, scorer=held.scorer)
    batches = rollout.scored
    parts = [batches[: end + 1] for end in range(len(batches))] if second else []
    watched = [future for own in parts for future in submit_groups(asked[-1], own, group, run.args.scorer.batch_size)]
    scores = collect(run.dist, rollout.pending, rollout.num_scored)
    groups = torch.arange(len(filled))
    whole = gather_rewards(run.dist, batches, scores, groups)
    others = dict[str, torch.Tensor]()
    own_names = sorted({name for score in scores for name in score.parts})
    if names := sorted({name for of_rank in gather_json(run.dist, own_names) for name in of_rank}):
        others |= dict(zip(names, gather_parts(run.dist, batches, scores, names, whole).T, strict=True))
    if second:
        found = collect(run.dist, watched, rollout.num_scored)
        others["proxy" if is_gold else "watch"] = gather_rewards(run.dist, batches, found, groups)
    rewards = {held.metric(name): values[: len(prompts)] for name, values in others.items()}
    means = {name: values.nanmean().item() for name, values in rewards.items() if not values.isnan().all()}
    for name, values in (others if names else {"reward": whole} | others).items():
        means |= by_tag(held, name, values[: len(prompts)])
    means |= describe(held, whole[: len(prompts)])
    if is_gold:
        means |= judge(run, held, prompts, rollout.batches, others["proxy"][: len(prompts)], whole[: len(prompts)])
    return means, run.breakers.pictures(_shown, batches, scores) or ([], [])


def fill_batches(prompts: Sequence[Prompt], batch_size: int, num_ranks: int, *, group: int = 1) -> list[Prompt]:
    """Add copies of prompts, with new indices, until every rank has the same number of full batches, each of one size.

    group: number of consecutive prompts that stay on one rank. A copy belongs to another group.
    """
    unit, copies, seen = max(batch_size, group), count(len(prompts)), set[int]()
    full = [prompt for same in by_shapes(prompts) for prompt in _repeated(same, unit)]
    filled = []
    for prompt in _repeated(full, unit * num_ranks):
        index = next(copies) if prompt.index in seen else prompt.index
        filled.append(prompt if index == prompt.index else replace(prompt, index=index, group=index // group))
        seen.add(prompt.index)
    return filled


def _repeated(prompts: Sequence[Prompt], unit: int) -> list[Prompt]:
    """Repeat the first prompts up to a multiple of `unit`."""
    return [prompts[i % len(prompts)] for i in range(-(-len(prompts) // unit) * unit)]


def _thoughts(batch: Samples) -> Sequence[str | None]:
    """Return the thought before each sample, or None for a model without thoughts."""
    return batch.thoughts.answers if isinstance(batch, ThoughtTrajectory) else [None] * len(batch)


def _shown(batches: Sequence[Samples], scores: Sequence[Score]) -> Shown:
    """Return the media of each of this rank's samples by kind, and their rows in the report."""
    samples = [
        (prompt, batch.rates, thought)
        for batch in batches
        for prompt, thought in zip(batch.prompts, _thoughts(batch), strict=True)
    ]
    rows = [
        Sample(p.text, s.value, p.group, p.seed, s.details, s.abstained, p.images, rates, answer=thought)
        for (p, rates, thought), s in zip(samples, scores, strict=True)
    ]
    return [dict(zip(b.media, own, strict=True)) for b in batches for own in zip(*b.media.values(), strict=True)], rows
