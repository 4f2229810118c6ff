"""Preferences between samples for flow-matching models: Diffusion-DPO, online and offline.

    online:   prompts -> rollout -> score -> best and worst of each group -> update (noise -> errors -> loss -> step)
    offline:  preference file -> update

A pair is a preferred and a rejected sample of one prompt. Both are noised with the same new noise to the same
level, and the model is trained to denoise the preferred one better than a reference, and the other one worse
(Diffusion-DPO, arXiv 2311.12908). The reference is the policy before training.

    omni-rl train dpo --preset tiny-signs
    omni-rl train dpo --preset tiny-signs-offline --preferences data/pairs/pairs.jsonl
    omni-rl train dpo --nproc-per-node 4 --preset qwen-image-ocr-lora --scorer.url http://scorer:8100
    torchrun --standalone --nproc-per-node 4 apps/train_dpo.py ...  # the same, without the command

docs/preferences.md describes the file, and `scripts/build_preferences.py` creates one. Without a scorer, evaluations
generate samples but do not grade them.

Differences from the released code of the papers:
1. Groups with equal scores and samples without a score yield no pairs.
2. The loss uses the conditional velocity, even if samples are guided, because it is the one that denoises data.
3. Noise and levels depend on (seed, step, prompt) and, online, on which sample of the group is preferred. They do not
   depend on the number of ranks.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs, dp_size
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import Flat, at_least, between, require
from omni_rl.settings.rules import check_scored

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class Args(MediaArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first. Offline, a group is a pair."""

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.RolloutSharding = groups.RolloutSharding()
    memory: groups.MediaMemory = groups.MediaMemory()
    data: Flat[groups.GroupData] = groups.GroupData()
    eval: MediaEval = MediaEval()
    sampling: Flat[groups.RolloutSampling] = groups.RolloutSampling()
    scorer: groups.ScoredScorer = groups.ScoredScorer()
    optim: groups.MediaOptim = groups.MediaOptim()
    streams: groups.Streams = groups.Streams()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-4 with LoRA, 1e-5 without

    # Algorithm
    preferences: str = ""  # File of pairs (.jsonl) for offline training, instead of --prompts and a scorer
    dpo_beta: Annotated[float, at_least(1e-12)] = 2000.0  # Strength of the regularization towards the reference
    levels_per_pair: Annotated[int, at_least(1)] = 1  # Noise levels per pair
    level_shift: Annotated[float, at_least(1e-3)] = 1.0  # Shift of the logit-normal levels; > 1: towards noise

    def __post_init__(self) -> None:
        """Set `prompts` to the file of pairs, so that printed and saved settings include it."""
        super().__post_init__()
        vars(self).update(data=replace(self.data, prompts=self.preferences or self.data.prompts))


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    offline = bool(args.preferences)  # then a batch has pairs of one size, for any batch size
    data = args.data
    samples, unit = data.prompts_per_step * data.group_size, max(data.batch_size, data.group_size)
    per_round = unit * dp_size(args)
    if offline:
        from omni_rl.media.preferences import check_preferences

        check_preferences(args.preferences, data, args.sampling)
    checked = replace(args, data=replace(data, batch_size=2)) if offline else args
    check_scored(checked, num_trained=None, needs_scorer=False)
    require(
        (args.scorer.is_set or offline or args.run.dry_run,
         "--scorer must name a reward, --scorer.url a reward server, or --preferences a file of pairs"),
        (not (offline and args.sampling.draw_ahead),
         f"--draw-ahead must be 0 with --preferences, of which nothing is sampled, got {args.sampling.draw_ahead}"),
        (data.batch_size % 2 == 0, f"--batch-size must be even, as a pair is two samples, got {data.batch_size}"),
        (offline or unit % min(data.batch_size, data.group_size) == 0,
         f"--batch-size and --group-size: one must divide the other, got {data.batch_size} and {data.group_size}"),
        (offline or samples % per_round == 0,
         f"all ranks must sample whole groups and batches: {per_round} must divide a step's samples ({samples})"),
        (data.prompts_per_step % data.num_minibatches == 0,
         f"--num-minibatches must divide --prompts-per-step ({data.prompts_per_step}), got {data.num_minibatches}"),
        (not offline or data.group_size == 2, f"--preferences needs --group-size 2, got {data.group_size}"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_dpo", description=__doc__)

# 2. Pairs: from a rollout, or from a file

import torch
from omni_losses import best_worst_pairs, diffusion_dpo_loss, velocity_error
from omni_rl.flow.batches import group_by_size
from omni_rl.flow.experts import clamp_to_side, restrict_to_expert
from omni_rl.flow.sampling import evaluate_set, expand_groups, group_by_shapes, sample, show, step_prompts
from omni_rl.flow.scoring import Rollout, step_rewards, wait_and_grade
from omni_rl.media.preferences import read_latent
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import export, open_engine, open_scorers, read_media
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.serve import serve
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout import Trajectory
from omni_rollout.types import take_rows, to_device
from omni_sched import add_noise, shift_sigmas, step_noise
from omni_train.dist import gather_json
from torch import Tensor, nn


@dataclass(frozen=True)
class Pairs:
    """This rank's n pairs of one size: clean latents [n, ...], and each pair's noise seed and place in the step.

    size: (height, width), or None for the size in the settings.

    Without any pairs there is one filler row, and `places` is empty.
    """

    win: Tensor
    lose: Tensor
    cond: Mapping[str, Tensor]
    size: tuple[int, int] | None
    seeds: Sequence[int]
    places: Sequence[int]


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    scored = not args.preferences
    inputs = read_media(args, world, policies=["reference"], scored=scored)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session, scored=scored)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="dpo")
    if world.is_sampler:
        serve(run, roll_out)  # type: ignore[arg-type]  # not None: rollout ranks exclude --preferences
        return
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            pairs = select_pairs(run, step, rollout) if rollout else read_pairs(run, step)
            with run.updating(step):
                step.metrics |= update(run, step, pairs)
            run.sync(step)


def roll_out(run: MediaRun[Args], step: Step) -> Rollout[Trajectory] | None:
    """Return this rank's samples of a step, with pending scores, or None offline."""
    if run.args.preferences:
        return None
    with run.phase("rollout"):
        return sample(run, step_prompts(run, step), run.base_params, consecutive=run.args.data.group_size)


def select_pairs(run: MediaRun[Args], step: Step, rollout: Rollout[Trajectory]) -> list[Pairs]:
    """Return the best and the worst sample of each of this rank's groups of the step, by size, and show samples."""
    # wait for all, because batches hold pairs of several groups
    pairs = wait_and_grade(run, step, rollout, choose_pairs)
    show(run, step, rollout)
    return pairs


def choose_pairs(run: MediaRun[Args], step: Step, rollout: Rollout[Trajectory]) -> list[Pairs]:
    """Return the best and the worst sample of each of this rank's groups, by size."""
    rewards, chosen = step_rewards(run, step, rollout), []
    for same_size in group_by_size(rollout.batches):
        trajectory = Trajectory.cat(same_size)
        place_of = {index: place for place, index in enumerate(trajectory.indices.tolist())}
        pairs = [pair for pair in best_worst_pairs(rewards, rollout.groups) if pair[0] in place_of]
        win, lose = (trajectory.select([place_of[pair[side]] for pair in pairs] or [0]) for side in range(2))
        seeds, places = [prompt.seed for prompt in win.prompts], [prompt.group for prompt in win.prompts[: len(pairs)]]
        chosen.append(Pairs(win.x0, lose.x0, win.cond, win.prompts[0].size, seeds, places))
    return chosen


@torch.no_grad()
def read_pairs(run: MediaRun[Args], step: Step) -> list[Pairs]:
    """Return this rank's pairs of the step from the preference file, by size."""
    dist, model, parts, records = run.dist, run.model, run.engine.parts, run.prompts.at(step.number)
    places = range(dist.dp_rank, len(records), dist.dp_size)
    prompts = expand_groups([records[i] for i in places] or records[:1], 1, seed=run.args.run.seed, step=step.number)
    folder, pairs = run.prompts.folder, []
    with run.phase("read"):
        for same_shape in group_by_shapes(prompts):
            params = run.base_params.of_size(same_shape[0].size)
            win, lose = (
                torch.stack([read_latent(model, parts, folder / str(p.meta[side]), params) for p in same_shape])
                for side in ("win", "lose")
            )
            cond, seeds = run.engine.condition(same_shape, model.unguided(params)), [p.seed for p in same_shape]
            pair_places = [places[p.index] for p in same_shape] if places else []
            pairs.append(Pairs(win.to(dist.device), lose.to(dist.device), cond, same_shape[0].size, seeds, pair_places))
    return pairs


# 3. The update


@dataclass(frozen=True)
class Noised:
    """B samples: B/2 pairs at one noise level each, preferred samples first. Only the first `count` pairs count."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    cond: dict[str, Tensor]
    size: tuple[int, int] | None
    count: int


def noise_pairs(run: MediaRun[Args], step: Step, pairs: Pairs, pair_rows: Sequence[int]) -> list[Noised]:
    """Return the pairs in the rows `pair_rows`, filled up to the usual batch shape, at each of their noise levels.

    If the model has two experts, one of them is chosen for each level of the step.
    """
    args = run.args
    first = args.sampling.num_inference_steps  # lower indices are the rollout's noise
    count = args.levels_per_pair
    rows = [*pair_rows, *[0] * (args.data.batch_size // 2 - len(pair_rows))]
    seeds, to_pairs_device = [pairs.seeds[i] for i in rows], partial(to_device, device=pairs.win.device)
    x0 = torch.cat([take_rows(pairs.win, rows), take_rows(pairs.lose, rows)])
    cond = {name: torch.cat([take_rows(tensor, rows)] * 2) for name, tensor in pairs.cond.items()}
    sigmas = shift_sigmas(step_noise(seeds, first + count, (count,)).sigmoid(), args.level_shift)
    if run.model.boundary:
        sigmas = torch.stack([move_to_expert(run, step, sigma, k) for k, sigma in enumerate(sigmas.T)], dim=1)
    sigmas = to_pairs_device(sigmas)
    noised = []
    for k in range(count):
        noise = to_pairs_device(step_noise(seeds, first + k, x0.shape[1:]))
        noised.append(Noised(x0, torch.cat([noise, noise]), sigmas[:, k].repeat(2), cond, pairs.size, len(pair_rows)))
    return noised


def move_to_expert(run: MediaRun[Args], step: Step, sigma: Tensor, k: int) -> Tensor:
    """Move noise levels [B], the k-th of a step, to one of two experts' sides by rescaling their quantiles."""
    shift, boundary = run.args.level_shift, torch.tensor(run.model.boundary).double()
    quantiles, cut = (torch.special.ndtr(-shift_sigmas(s.double(), 1 / shift).logit()) for s in (sigma, boundary))
    normal = -torch.special.ndtri(restrict_to_expert(run, step, quantiles, cut.item(), k))
    moved = shift_sigmas(normal.sigmoid(), shift).float()
    return clamp_to_side(run, moved, moved.mean())


def flow_errors(run: MediaRun[Args], net: nn.Module, noised: Noised) -> Tensor:
    """Return the flow-matching error [B] of each noised sample."""
    params = run.model.unguided(run.base_params.of_size(noised.size))
    x_t = add_noise(noised.x0, noised.noise, noised.sigma)
    velocity = run.model.predict_velocity(net, x_t, noised.sigma, noised.cond, params)
    return velocity_error(velocity, noised.x0, noised.noise)


def minibatch_rows(data: groups.Data, pairs: Sequence[Pairs], number: int) -> list[tuple[Pairs, list[int]]]:
    """Return this rank's batches of one optimizer step, as pairs of one size and their rows."""
    batches = []
    for same_size in pairs:
        numbers = [place * data.num_minibatches // data.prompts_per_step for place in same_size.places]
        rows = [i for i, update_number in enumerate(numbers) if update_number == number]
        batches += [(same_size, rows[i : i + data.batch_size // 2]) for i in range(0, len(rows), data.batch_size // 2)]
    return batches


def update(run: MediaRun[Args], step: Step, pairs: Sequence[Pairs]) -> dict[str, float]:
    """Take an optimizer step on each minibatch of pairs; metrics are means over all pairs and noise levels."""
    args, dist, num_updates = run.args, run.dist, run.args.data.num_minibatches
    rank_batches = [minibatch_rows(args.data, pairs, number) for number in range(num_updates)]
    counts = gather_json(dist, [[sum(len(rows) for _, rows in batches), len(batches)] for batches in rank_batches])
    counts = counts[:: dist.context]  # once per context-parallel group
    totals, maxima = torch.tensor(counts).sum(dim=0), torch.tensor(counts).amax(dim=0)
    num_pairs, num_batches = totals[:, 0].tolist(), maxima[:, 1].tolist()
    # All ranks compute the same number of batches, as sharded weights require.
    padded = [b + [(pairs[0], [])] * (n - len(b)) for b, n in zip(rank_batches, num_batches, strict=True)]
    points = [[noised for part, rows in b for noised in noise_pairs(run, step, part, rows)] for b in padded]
    with torch.no_grad(), run.policy.reference() as net:
        references = [[flow_errors(run, net, noised) for noised in batches] for batches in points]
    forwards, results = [], []
    for number in range(num_updates):
        for noised, old in zip(points[number], references[number], strict=True) if num_pairs[number] else ():
            num_counted = noised.count or 1  # a filler runs with weight 0, to keep ranks in step
            new = flow_errors(run, run.policy.net, noised)
            out = diffusion_dpo_loss(*(e[:num_counted] for e in (*new.chunk(2), *old.chunk(2))), dpo_beta=args.dpo_beta)
            # Gradients are summed over pairs, noise levels and ranks; this makes the sum a mean.
            loss = out.loss * noised.count / (num_pairs[number] * args.levels_per_pair)
            run.policy.backward(loss, of=len(points[number]))
            forwards.append({name: v * noised.count for name, v in (out.metrics | {"loss": out.loss.detach()}).items()})
        results.append(run.optimizer_step(step, has_signal=num_pairs[number] > 0))
    step.metrics["policy/pairs"] = float(sum(num_pairs))
    if not forwards:
        step.has_signal = False
        return {"policy/skipped_updates": float(num_updates)}
    share = dist.dp_size / (sum(num_pairs) * args.levels_per_pair)
    sums = {name: torch.stack([m[name] for m in forwards]).sum() * share for name in forwards[0]}
    return run.policy_metrics([sums], results)


if __name__ == "__main__":
    launch(main, ARGS)
