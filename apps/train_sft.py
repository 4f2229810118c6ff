"""Supervised fine-tuning of flow-matching models on images, videos or sound: a cold start for reinforcement learning.

    file of prompts and samples -> noise -> flow-matching error -> step

Each sample is noised to random levels, at which the model learns the velocity noise - data. This is the pretraining
loss, conditional flow matching (arXiv 2210.02747, rectified flow in arXiv 2403.03206). Training does not sample.

    omni-rl train sft --preset tiny-signs
    omni-rl train sft --nproc-per-node 4 --model stabilityai/stable-diffusion-3.5-medium --lora.rank 32 \\
        --prompts data/mine/samples.jsonl --eval.prompts eval.txt
    torchrun --standalone --nproc-per-node 4 apps/train_sft.py ...  # the same, without the command

Each line of --prompts names a file as "sample", or, in a file of pairs, as "win", the preferred sample;
docs/preferences.md describes both. Any other trainer can start from runs/NAME/weights with --init-weights. Training
needs no reward; a scorer is only used in evaluations.

Differences from diffusers' training scripts:
1. Noise levels follow the sampling schedule of the model, even if it depends on the size. `--level-shift`
   uses one shift for all sizes, like their SD3 script.
2. `--logit-mean` > 0 moves the levels towards noise, as in arXiv 2403.03206; in their scripts it moves them to data.
3. Levels and noise depend on (seed, step, prompt), not on the number of ranks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from omni_rl.media.preferences import check_preferences
from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import Flat, between
from omni_rl.settings.rules import check_scored

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class LevelData(groups.Data):
    """Samples to imitate, each at several noise levels."""

    group_size: Annotated[int, between(1, 65_536)] = 1  # Noise levels per sample in a step


@dataclass(frozen=True)
class LevelSampling(groups.Sampling):
    """Sizes, guidance, and the schedule of the noise levels."""

    num_inference_steps: Annotated[int, between(2, 10_000)] = 40  # Steps of the schedule that levels interpolate


@dataclass(frozen=True)
class Args(MediaArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    RATES = (1e-5, 1e-4)

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.MediaSharding = groups.MediaSharding()
    memory: groups.MediaMemory = groups.MediaMemory()
    data: Flat[LevelData] = LevelData()
    eval: MediaEval = MediaEval()
    sampling: Flat[LevelSampling] = LevelSampling()
    scorer: groups.ScoredScorer = groups.ScoredScorer()
    optim: groups.MediaOptim = groups.MediaOptim()
    streams: groups.Streams = groups.Streams()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-4 with LoRA, 1e-5 without

    # Algorithm
    levels: Literal["logit-normal", "uniform"] = "logit-normal"  # Distribution of noise levels before the schedule
    logit_mean: Annotated[float, between(-10, 10)] = 0.0  # Mean of their logits; > 0: towards noise
    logit_std: Annotated[float, between(1e-3, 10)] = 1.0  # Standard deviation of their logits
    level_shift: Annotated[float | None, between(1e-3, 1e3)] = None  # Shift towards noise; none: the model's schedule


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    check_scored(args, needs_scorer=False)
    check_preferences(args.data.prompts, args.data, args.sampling, ("sample",), name="--prompts")


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_sft", description=__doc__)

# 2. A step's samples, and their noise

import torch
from omni_losses import velocity_error
from omni_rl.flow.experts import clamp_to_side, restrict_to_expert
from omni_rl.flow.sampling import evaluate_set, step_prompts, track_progress
from omni_rl.media.preferences import named_file, read_latent
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import export, open_engine, open_scorers, read_media
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout import Params, Prompt
from omni_rollout.types import Cond, to_device
from omni_sched import add_noise, linear_sigmas, shift_sigmas, step_noise
from omni_train.dist import deal
from torch import Tensor

TRAIN_LEVELS = 1000  # levels of the schedule with --level-shift, as in diffusers' training scripts
QUANTILES = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000  # to measure each expert's share of the levels


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    inputs = read_media(args, world, scored=False)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session, scored=False)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="sft")
    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            with run.phase("read"):
                batches = read_batches(run, step)
            with run.updating(step):
                step.metrics |= update(run, step, batches)
            run.sync(step)


@dataclass(frozen=True)
class Noised:
    """B samples of one size, each at one noise level: x0 and noise [B, ...], sigma [B]. params: without guidance."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    cond: Cond
    params: Params


def read_batches(run: MediaRun[Args], step: Step) -> list[Noised]:
    """Return this rank's batches of the step."""
    batches = []
    for prompts in track_progress(deal(step_prompts(run, step), run.dist, run.args.data.batch_size)):
        params = run.model.unguided(run.base_params.of_size(prompts[0].size))
        x0, seeds = read_samples(run, prompts, params), [prompt.seed for prompt in prompts]
        noise_and_levels = step_noise(seeds, 1, x0.shape[1:]), noise_levels(run, step, seeds, params)
        noise, sigma = (to_device(tensor, run.dist.device) for tensor in noise_and_levels)
        batches.append(Noised(x0, noise, sigma, run.engine.condition(prompts, params), params))
    return batches


@torch.no_grad()
def read_samples(run: MediaRun[Args], prompts: Sequence[Prompt], params: Params) -> Tensor:
    """Return the clean latents [B, ...] of the samples that the prompts name. Each file is read and encoded once."""
    folder = run.prompts.folder
    names = [str(named_file(prompt.meta, "sample")) for prompt in prompts]
    latents = {name: read_latent(run.model, run.engine.parts, folder / name, params) for name in dict.fromkeys(names)}
    return torch.stack([latents[name] for name in names]).to(run.dist.device)


def noise_levels(run: MediaRun[Args], step: Step, seeds: Sequence[int], params: Params) -> Tensor:
    """Return a noise level [B] for each seed, float32 on the host.

    If the model has two experts, one of them is chosen for all levels of the step.
    """
    args, boundary, shift = run.args, run.model.boundary, run.args.level_shift
    schedule = run.model.sigmas(params) if shift is None else shift_sigmas(linear_sigmas(TRAIN_LEVELS), shift)
    quantiles = torch.special.ndtr(step_noise(seeds, 0, (1,))[:, 0].double())
    if not boundary:
        return level_at(args, schedule, quantiles)
    share = (level_at(args, schedule, QUANTILES) >= boundary).double().mean().item()
    levels = level_at(args, schedule, restrict_to_expert(run, step, quantiles, share, 0))
    return clamp_to_side(run, levels, levels.mean())


def level_at(args: Args, schedule: Tensor, quantiles: Tensor) -> Tensor:
    """Return the noise level [B], float32, at quantiles [B] in (0, 1) of the levels' distribution, from noise to data.

    schedule: levels [S + 1] from 1 to 0, interpolated linearly. Logit-normal places follow eq. 19 of arXiv 2403.03206.
    """
    fractions = quantiles
    if args.levels == "logit-normal":
        fractions = (args.logit_std * torch.special.ndtri(quantiles) - args.logit_mean).sigmoid()
    steps = fractions * (len(schedule) - 1)
    first = steps.long().clamp(max=len(schedule) - 2)
    return torch.lerp(schedule[first].double(), schedule[first + 1].double(), steps - first).float()


# 3. The update


def update(run: MediaRun[Args], step: Step, batches: Sequence[Noised]) -> dict[str, float]:
    """Take an optimizer step on each minibatch of this rank's batches; metrics are means over samples and ranks."""
    size, forwards, results = len(batches) // run.args.data.num_minibatches, [], []
    for first in range(0, len(batches), size):
        for noised in batches[first : first + size]:
            x_t = add_noise(noised.x0, noised.noise, noised.sigma)
            velocity = run.model.predict_velocity(run.policy.net, x_t, noised.sigma, noised.cond, noised.params)
            loss = velocity_error(velocity, noised.x0, noised.noise).mean()
            # Gradients are summed over batches and ranks; this makes the sum a mean.
            run.policy.backward(loss / (size * run.dist.dp_size), of=size)
            forwards.append({"loss": loss.detach()})
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


if __name__ == "__main__":
    launch(main, ARGS)
