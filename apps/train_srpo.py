"""Reward gradients for flow-matching models: SRPO, which differentiates the reward itself.

    prompts -> rollout -> noise, one step, recovered image -> reward with praise and with blame -> loss -> step

The model generates one sample for each prompt, which is noised again. From there the model takes one short step, down
or up to a random noise level, and the sample is recovered with the known noise. A reward model in this process
scores the image with a positive word and with a negative word in the prompt. The difference cancels a general bias of
the reward model, and its gradient trains the model (SRPO, arXiv 2509.06942).

    omni-rl train srpo --preset tiny-signs
    omni-rl train srpo --nproc-per-node 8 --preset hunyuan-image-pickscore
    torchrun --standalone --nproc-per-node 8 apps/train_srpo.py ...  # the same, without the command

Only this trainer has no reward server, because it needs the gradient of the reward. The rewards are in
`omni_rl.flow.direct_rewards`. Reward gradients exploit weaknesses of the reward, so set
`--scorer.watch-url`: another scorer, only for evaluations.

Differences from the released code of the paper:
1. Each sample has its own noise level; in their code all ranks share one. Levels are not rounded to integer timesteps.
2. Noise and levels depend only on (seed, step, prompt), not on the number of ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import REQUIRED, Flat, at_least, between, require
from omni_rl.settings.rules import check_media

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class GradientMemory(groups.MediaMemory):
    """Ways to save memory in an update that also decodes images."""

    OFFLOAD = "encoder optimizer activations blocks"


@dataclass(frozen=True)
class GradientSampling(groups.Sampling):
    """Sampling of images."""

    engine: Literal["diffusers"] = "diffusers"  # Sampling engine in the trainer's process


@dataclass(frozen=True)
class Args(MediaArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    RATES = (5e-6, 1e-5)

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.MediaSharding = groups.MediaSharding()
    memory: GradientMemory = GradientMemory()
    data: Flat[groups.Data] = groups.Data(group_size=1)
    eval: MediaEval = MediaEval()
    sampling: Flat[GradientSampling] = GradientSampling(num_inference_steps=25)
    scorer: groups.MediaScorer = groups.MediaScorer()
    optim: groups.MediaOptim = groups.MediaOptim(max_grad_norm=0.1)
    streams: groups.Streams = groups.Streams()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-5 with LoRA, 5e-6 without

    # Algorithm
    reward: Literal["sign-reader", "clip"] = "sign-reader"  # Reward, a row of REWARDS in omni_rl.flow.direct_rewards
    reward_model: Annotated[str, REQUIRED] = ""  # Folder or hub id of the reward's weights
    positive_words: str = "Clear"  # Words of praise, separated by commas; a step prefixes one to all its prompts
    negative_words: str = "Smudged"  # Words of blame, separated by commas; a step prefixes one to all its prompts
    level_low: Annotated[float, at_least(0)] = 0.2  # Lowest trained noise level; 0 is data
    level_high: float = 0.95  # Highest trained noise level, < 1; 1 is noise
    level_step: Annotated[float, at_least(1e-3)] = 0.1  # Length of the single step, as a fraction of the levels' range
    discount_low: Annotated[float, at_least(0)] = 0.1  # Weight of the plain reward when denoising, lowest level
    discount_high: Annotated[float, at_least(0)] = 0.25  # Weight of the plain reward when denoising, highest level
    inversion_discount_low: Annotated[float, at_least(0)] = 0.3  # Its weight when inverting, lowest level
    inversion_discount_high: Annotated[float, at_least(0)] = 0.01  # Its weight when inverting, highest level
    threshold: float = 0.7  # Relative reward above which there is no gradient


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    check_media(args)
    height, width = args.sampling.height, args.sampling.width
    require(
        (args.level_low + 1e-3 <= args.level_high + 1e-9 and args.level_high <= 0.999,
         "--level-high must be at least 0.001 above --level-low, and <= 0.999, "
         f"got {args.level_low} and {args.level_high}"),
        (args.level_step < 1, f"--level-step must be < 1, got {args.level_step}"),
        (split_words(args.positive_words), f"--positive-words must hold a word, got {args.positive_words!r}"),
        (split_words(args.negative_words), f"--negative-words must hold a word, got {args.negative_words!r}"),
        (args.reward != "sign-reader" or (height, width) == (32, 96),
         f"--reward sign-reader reads images of 32 x 96, got --height {height} and --width {width}"),
    )  # fmt: skip


def split_words(text: str) -> list[str]:
    """Return the comma-separated words."""
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_srpo", description=__doc__)

# 2. The reward, in this process

import numpy as np
import torch
from omni_losses import LossOutput, direct_align, srpo_loss
from omni_reward import Score
from omni_rl.flow.direct_rewards import REWARDS, Reward
from omni_rl.flow.experts import clamp_to_side, restrict_to_expert
from omni_rl.flow.sampling import evaluate_set, sample, show, step_prompts
from omni_rl.flow.scorers import LocalScorer
from omni_rl.flow.scoring import Rollout, step_rewards, wait_and_grade
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import export, open_engine, open_scorers, read_media
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout import Trajectory
from omni_rollout.types import to_device
from omni_sched import INITIAL_NOISE, add_noise, step_noise
from omni_train.dist import Dist, deterministic
from torch import Tensor


@torch.no_grad()
def grade(reward: Reward, dist: Dist, media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
    """Score finished images or videos, uint8 [N, ..., H, W, 3], with their unchanged texts."""
    pixels = to_device(torch.from_numpy(next(iter(media.values()))), dist.device).float() / 255
    return [Score(value) for value in media_rewards(reward, pixels, texts).tolist()]


def media_rewards(reward: Reward, pixels: Tensor, texts: Sequence[str]) -> Tensor:
    """Return the rewards [N] of images [N, H, W, 3] in [0, 1], or means over frames of videos [N, F, H, W, 3]."""
    frames = pixels.movedim(-1, -3).reshape(len(texts), -1, 3, *pixels.shape[-3:-1])
    rewards = reward(frames.flatten(0, 1), [text for text in texts for _ in range(frames.shape[1])])
    return rewards.view(len(texts), -1).mean(dim=1)


# 3. A training step: rollout, then a step down and one up to each sample's own noise level


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    load_reward = cache(partial(REWARDS[args.reward], args.reward_model))
    inputs = read_media(args, world)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session, build_scorer=partial(reward_scorer, load_reward))
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="srpo")
    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            with run.phase("rollout"):
                rollout = sample(run, step_prompts(run, step), run.base_params)
            batches = wait_and_grade(run, step, rollout, grade_as_one)
            with run.updating(step):
                step.metrics |= update(run, step, load_reward(run.dist.device), batches)
            run.sync(step)
            show(run, step, rollout)


def grade_as_one(run: MediaRun[Args], step: Step, rollout: Rollout[Trajectory]) -> Sequence[Trajectory]:
    """Log the rewards as one group, because samples are not compared within groups."""
    step_rewards(run, step, rollout, torch.zeros(len(rollout.prompts), dtype=torch.long))
    return rollout.batches


def reward_scorer(load_reward: Callable[[torch.device], Reward], dist: Dist, kinds: Sequence[str]) -> LocalScorer:
    """Return the reward as a scorer of finished samples of these kinds."""
    require((kinds[0] != "audio", "--model must generate images or videos, which the rewards of SRPO see, got sound"))
    return LocalScorer(partial(grade, load_reward(dist.device), dist), kinds)


def noise_levels(
    run: MediaRun[Args], step: Step, batch: Trajectory, *, inversion: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise levels [B] before and after the model's single step, and the discounts [B].

    u in (0, 1) is a sample's place in the range of levels at the end of the step. The step begins `level_step` above
    it, or below it when inverting, but within the range. With two experts, it begins on the side of the chosen one.
    """
    args = run.args
    seeds = [prompt.seed for prompt in batch.prompts]
    first = args.sampling.num_inference_steps  # lower indices are the rollout's noise
    u = torch.special.ndtr(step_noise(seeds, first, (1,))[:, 0])
    span, boundary = args.level_high - args.level_low, run.model.boundary
    if boundary:
        u = 1 - restrict_to_expert(run, step, 1 - u, 1 - (boundary - args.level_low) / span, int(inversion))
    length = torch.minimum(torch.minimum(u, 1 - u), torch.full_like(u, args.level_step))
    start = u - length if inversion else u + length
    fraction, low, high = u, args.discount_low, args.discount_high
    if inversion:
        fraction, low, high = start, args.inversion_discount_low, args.inversion_discount_high
    sigma_next, device = args.level_low + span * u, batch.x0.device
    sigma = args.level_low + span * start
    if boundary:
        sigma = clamp_to_side(run, sigma, sigma_next[0])
    values = (sigma, sigma_next, low + (high - low) * fraction)
    sigma, sigma_next, discount = (to_device(value, device) for value in values)
    return sigma, sigma_next, discount


def alignment_loss(
    run: MediaRun[Args], step: Step, reward: Reward, batch: Trajectory, *, inversion: bool
) -> LossOutput:
    """Return the loss of one step of the model from the noised samples, through the decoder and the reward."""
    args, prompts = run.args, batch.prompts
    sigma, sigma_next, discount = noise_levels(run, step, batch, inversion=inversion)
    seeds, shape = [p.seed for p in prompts], batch.x0.shape[1:]
    noise = to_device(step_noise(seeds, INITIAL_NOISE, shape), batch.x0.device)  # its initial noise
    x, params = add_noise(batch.x0, noise, sigma), run.model.unguided(batch.params)
    velocity = run.model.predict_velocity(run.policy.net, x, sigma, batch.cond, params)
    x0 = direct_align(velocity, x, noise, sigma, sigma_next)
    mode = "warn" if args.policy.deterministic else "default"  # selects padding with deterministic gradients
    with deterministic(mode):
        media, _ = run.model.decode(run.engine.parts, x0, batch.cond, params)
    positive, negative = (
        media_rewards(
            reward, media[run.model.MEDIA[0]], [f"{word_list[step.number % len(word_list)]}. {p.text}" for p in prompts]
        )
        for word_list in (split_words(args.positive_words), split_words(args.negative_words))
    )
    return srpo_loss(positive, negative, discount=discount, inversion=inversion, threshold=args.threshold)


def update(run: MediaRun[Args], step: Step, reward: Reward, batches: Sequence[Trajectory]) -> dict[str, float]:
    """Take an optimizer step on each minibatch; metrics are means over batches and ranks."""
    dist, size = run.dist, len(batches) // run.args.data.num_minibatches
    forwards, results = [], []
    for first in range(0, len(batches), size):
        for batch in batches[first : first + size]:
            metrics = {"loss": torch.zeros((), device=dist.device)}
            for kind in ("inversion", "denoising"):
                out = alignment_loss(run, step, reward, batch, inversion=kind == "inversion")
                # Gradients are summed over batches, kinds of step and ranks; this makes the sum a mean.
                run.policy.backward(out.loss / (2 * size * dist.dp_size), of=2 * size)
                metrics |= {f"{kind}_{name}": value for name, value in out.metrics.items()}
                metrics["loss"] += out.loss.detach() / 2
            forwards.append(metrics)
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


if __name__ == "__main__":
    launch(main, ARGS)
