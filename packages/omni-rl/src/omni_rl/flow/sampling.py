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

from omni_rl.flow.evals import HeldOut, Shown, score_metrics, tag_metrics
from omni_rl.flow.gold import gold_metrics
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


def group_by_shapes(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Group prompts whose samples can share a batch."""
    by_shapes: dict[object, list[Prompt]] = {}
    for prompt in prompts:
        by_shapes.setdefault(prompt.shapes, []).append(prompt)
    return list(by_shapes.values())


def track_progress(batches: Sequence[Sequence[Prompt]]) -> Iterator[Sequence[Prompt]]:
    """Yield the batches, with progress of the samples and of the texts to encode."""
    add_phase("encoding", len({prompt.text for batch in batches for prompt in batch}), "prompts")
    return track(batches, "samples")


def step_prompts(run: MediaRun[MediaArgs], step: Step, *, same_start_noise: bool = False) -> list[Prompt]:
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
    consecutive = max(run.args.data.batch_size, consecutive, scorer_group_size(prompts, scorer or run.scorer))
    prompt_batches = deal(prompts, run.dist, run.args.data.batch_size, consecutive=consecutive)
    run.counts["sampled"] += sum(map(len, prompt_batches))
    return Rollout(prompts, *run.samplers.receive(prompt_batches, params, consecutive, run.counts), consecutive)


def scorer_group_size(prompts: Sequence[Prompt], scorer: Scorer) -> int:
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
    group = scorer_group_size(prompts, scorer)
    consecutive = max(batch_size, consecutive, group)
    prompt_batches = deal(prompts, dist, batch_size, consecutive=consecutive)
    for number, batch_prompts in enumerate(track_progress(prompt_batches)):
        next_prompts = prompt_batches[number + 1] if number + 1 < len(prompt_batches) else ()
        is_scored = number // (consecutive // batch_size) % dist.context == dist.rank % dist.context
        sized_params = params.of_size(batch_prompts[0].size)
        is_tiled = 0 < run.args.memory.decode_tile < max(sized_params.height, sized_params.width)
        batch = run.engine.generate(batch_prompts, replace(sized_params, decode=is_scored or is_tiled))
        if batch.weight_version != run.version:
            raise RuntimeError(f"the engine samples with weights {batch.weight_version}, the trainer has {run.version}")
        if next_prompts:  # while the device is busy with this one
            run.engine.prepare(next_prompts, params.of_size(next_prompts[0].size))
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
        run.breakers.pictures(lambda: report.show_samples(step.number + 1, *_report_samples(rollout.scored, scores)))


def evaluate_set(run: MediaRun[MediaArgs], eval_set: HeldOut[Params, Scorer]) -> tuple[dict[str, float], Shown]:
    """Return metrics of a set's samples, and this rank's samples for the report."""
    is_gold = eval_set.name == GOLD
    second_scorer = run.scorer if is_gold else eval_set.watch
    prompts = expand_groups(eval_set.records, eval_set.samples, seed=eval_set.seed, step=-1)  # the same for every run
    # Every rank runs the same number of full batches, as sharded weights and scorers of groups require; the samples
    # that fill them up are not counted.
    scorers = [eval_set.scorer or run.scorer, *([second_scorer] if second_scorer else [])]
    group = eval_set.samples if any(scorer.takes_groups for scorer in scorers) else 1
    filled = fill_batches(prompts, run.args.data.batch_size, run.dist.dp_size, group=group)
    with gathered(run.policy.net) if "rollout" in run.policy.unshard else nullcontext():
        rollout = sample_here(run, filled, eval_set.params, consecutive=group, scorer=eval_set.scorer)
    batches = rollout.scored
    prefixes = [batches[: end + 1] for end in range(len(batches))] if second_scorer else []
    second_pending = [
        future
        for batches_so_far in prefixes
        for future in submit_groups(scorers[-1], batches_so_far, group, run.args.scorer.batch_size)
    ]
    scores = collect(run.dist, rollout.pending, rollout.num_scored)
    groups = torch.arange(len(filled))
    main_rewards = gather_rewards(run.dist, batches, scores, groups)
    other_rewards = dict[str, torch.Tensor]()
    rank_names = sorted({name for score in scores for name in score.parts})
    if names := sorted({name for part_names in gather_json(run.dist, rank_names) for name in part_names}):
        other_rewards |= dict(zip(names, gather_parts(run.dist, batches, scores, names, main_rewards).T, strict=True))
    if second_scorer:
        second_scores = collect(run.dist, second_pending, rollout.num_scored)
        other_rewards["proxy" if is_gold else "watch"] = gather_rewards(run.dist, batches, second_scores, groups)
    rewards = {eval_set.metric(name): values[: len(prompts)] for name, values in other_rewards.items()}
    means = {name: values.nanmean().item() for name, values in rewards.items() if not values.isnan().all()}
    for name, values in (other_rewards if names else {"reward": main_rewards} | other_rewards).items():
        means |= tag_metrics(eval_set, name, values[: len(prompts)])
    means |= score_metrics(eval_set, main_rewards[: len(prompts)])
    if is_gold:
        means |= gold_metrics(
            run,
            eval_set,
            prompts,
            rollout.batches,
            other_rewards["proxy"][: len(prompts)],
            main_rewards[: len(prompts)],
        )
    return means, run.breakers.pictures(_report_samples, batches, scores) or ([], [])


def fill_batches(prompts: Sequence[Prompt], batch_size: int, num_ranks: int, *, group: int = 1) -> list[Prompt]:
    """Add copies of prompts, with new indices, until every rank has the same number of full batches, each of one size.

    group: number of consecutive prompts that stay on one rank. A copy belongs to another group.
    """
    multiple, new_indices, used = max(batch_size, group), count(len(prompts)), set[int]()
    full = [prompt for same_shape in group_by_shapes(prompts) for prompt in _repeat_to_multiple(same_shape, multiple)]
    filled = []
    for prompt in _repeat_to_multiple(full, multiple * num_ranks):
        index = next(new_indices) if prompt.index in used else prompt.index
        filled.append(prompt if index == prompt.index else replace(prompt, index=index, group=index // group))
        used.add(prompt.index)
    return filled


def _repeat_to_multiple(prompts: Sequence[Prompt], multiple: int) -> list[Prompt]:
    """Repeat the first prompts up to a multiple of `multiple`."""
    return [prompts[i % len(prompts)] for i in range(-(-len(prompts) // multiple) * multiple)]


def _thoughts(batch: Samples) -> Sequence[str | None]:
    """Return the thought before each sample, or None for a model without thoughts."""
    return batch.thoughts.answers if isinstance(batch, ThoughtTrajectory) else [None] * len(batch)


def _report_samples(batches: Sequence[Samples], scores: Sequence[Score]) -> Shown:
    """Return the media of each of this rank's samples by kind, and their rows in the report."""
    samples = [
        (prompt, batch.rates, thought)
        for batch in batches
        for prompt, thought in zip(batch.prompts, _thoughts(batch), strict=True)
    ]
    rows = [
        Sample(p.text, score.value, p.group, p.seed, score.details, score.abstained, p.images, rates, answer=thought)
        for (p, rates, thought), score in zip(samples, scores, strict=True)
    ]
    return [
        dict(zip(b.media, tensors, strict=True)) for b in batches for tensors in zip(*b.media.values(), strict=True)
    ], rows
