"""Forward-process policy optimization for flow-matching models: DiffusionNFT and AWM.

    prompts -> rollout of the old policy -> score -> advantages -> update (noise -> velocity -> loss -> step) -> refresh

A group of samples is drawn for each prompt, by any solver, and graded over HTTP. Only the finished samples count: they
are noised afresh, and the velocity there is pulled towards the good ones and pushed away from the bad ones. There is no
stochastic step, no density, no trajectory (DiffusionNFT, arXiv 2509.16117; AWM, arXiv 2509.25050).

    python apps/train_nft.py --preset tiny-signs --scorer-url http://127.0.0.1:8100
    torchrun --nproc-per-node 8 apps/train_nft.py --preset qwen-image-ocr-lora --scorer-url http://scorer:8100

Three policies: the trained one; the old one, which follows it as `--old-schedule` says, a second adapter with LoRA and
a copy of the weights without; and with `--kl-coef` the reference, which is the model without its adapter.

What differs from the released code of the papers:
1. The levels of the rollout's schedule are trained at as they are, not as timesteps rounded to integers.
2. A sample without a score never counts as 0: its loss has weight 0, and it enters no mean of rewards.
3. Noise and its levels depend on (seed, step, prompt, sample) alone: any number of ranks trains on the same numbers.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omni_rl.cli import parse_cli

import presets
import settings

# 1. Arguments. Parsed before torch is imported, so that --help and a wrong flag are answered at once.


ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    scorer_url: str = ""  # URL of the reward server, or several of equal ones with commas between
    scorer_token_file: str = ""  # File that holds the reward server's token
    scorer_timeout_s: float = 120.0  # Longest wait for the scores of one batch, a restart of the server included
    on_failure: Literal["raise", "mask", "mask_group"] = "raise"  # End the run, or leave out samples or groups
    watch_scorer_url: str = ""  # URL of a second server that evaluations ask, with the same token
    name: str = "run"  # The run writes to runs/NAME
    seed: int = 0  # Decides prompts, noise and noise levels
    steps: int = 300  # Training steps; one step is one rollout
    save_every: int = 10  # Training steps between two checkpoints; the same command continues from the newest
    keep_checkpoints: int = 2  # Newest checkpoints to keep
    hang_timeout_s: float = 1800.0  # Longest wait of a rank for another, after which the run ends
    dry_run: bool = False  # Only check the settings, and print them and what a step will do
    eval_every: int = 50  # Training steps between two evaluations
    eval_num_steps: int = 10  # Denoising steps in an evaluation
    model: str = f"{ROOT}/checkpoints/tiny-signs-qwen-image"  # Folder or hub id of a diffusers Qwen-Image pipeline
    dtype: Literal["float32", "bfloat16"] = "float32"  # Of the weights that are not trained; what is trained is float32
    prompts: str = f"{ROOT}/data/tiny-signs/train.txt"  # Training prompts, .txt or .jsonl
    eval_prompts: str = f"{ROOT}/data/tiny-signs/eval.txt"  # Prompts of the evaluations
    engine: Literal["diffusers", "vllm-omni"] = "diffusers"  # What samples: embedded, or vLLM-Omni in process
    engine_sleep: bool = True  # Whether the engine's own weights leave the accelerator during updates
    algo: Literal["nft", "awm"] = "nft"  # Row of the table ALGOS
    prompts_per_step: int = 32  # Groups in a training step, over all ranks
    group_size: int = 16  # Samples of a group
    batch_size: int = 16  # Samples per forward of a rank, in rollout and update alike: same shape, same bits
    height: int = 512  # Pixels
    width: int = 512  # Pixels
    num_steps: int = 10  # Denoising steps of a rollout
    guidance_scale: float = 1.0  # Classifier-free guidance, in rollout and update alike; 1 is off, as published
    sample_with: Literal["old", "policy"] = "old"  # The policy that draws the samples
    old_schedule: Literal["copy", "linear", "delayed_linear"] = "copy"  # How much the old policy keeps at a refresh
    old_decay_max: float = 1.0  # It never keeps more than this share
    old_every: int = 1  # Training steps between two refreshes
    train_levels: int | None = None  # Noise levels that each sample is trained at; by default all that may be
    train_low: int = 0  # First step of the rollout's schedule whose level may be trained at
    train_high: int | None = None  # One past the last such step; by default one past the last of all
    nft_beta: float = 1.0  # DiffusionNFT: how far the two contrasted policies stand from the old one
    adv_mode: Literal[
        "continuous", "positive_only", "negative_only", "one_only", "binary"
    ] = "continuous"  # DiffusionNFT: how an advantage becomes the probability to be good  # fmt: skip
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"  # AWM: of a sample's error
    clip_range: float = 1.0  # AWM: half-width of the ratio's free range around 1
    adv_clip_max: float = 5.0  # Bound on advantages
    adv_std: Literal["batch", "group", "none"] = "batch"  # What advantages are divided by
    adv_correction: Literal[0, 1] = 1  # That divides squares by their number minus this
    kl_coef: float = 0.0  # Weight of the velocity's distance to that of the model without its adapter
    old_kl_coef: float = 0.0  # Weight of the velocity's distance to that of the old policy
    updates_per_step: int = 1  # Optimizer steps per rollout
    lr: float = 3e-4  # Learning rate of AdamW
    lr_decay: bool = False  # Whether it falls in a straight line to 0 at the last step
    warmup_steps: int = 0  # Training steps over which the learning rate rises
    weight_decay: float = 1e-4  # Of AdamW
    max_grad_norm: float = 1.0  # Gradients with a larger norm are scaled down
    ema_decay: float = 0.0  # Evaluate and save a moving average of the weights that keeps this share a step; 0 is off
    lora_rank: int = 0  # 0 trains all weights of the transformer
    lora_alpha: int = 128  # LoRA's scale is alpha / rank
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass to save memory
    shard: Literal["auto", "none", "ddp", "fsdp2"] = "auto"  # On several ranks auto is ddp for LoRA, else fsdp2


PRESETS = {name: Args(**values) for name, values in presets.NFT.items()}


LEAST = {  # setting -> least value
    "old_decay_max": 0.0, "old_every": 1, "train_low": 0, "nft_beta": 1e-12, "clip_range": 1e-12, "adv_clip_max": 1e-6,
    "kl_coef": 0.0, "old_kl_coef": 0.0,
}  # fmt: skip


def check_args(args: Args) -> None:
    """Raises ValueError when settings do not fit together."""
    settings.check(args, LEAST)
    settings.num_batches(args)
    low, high, count = trained_levels(args)
    settings.require(
        (args.scorer_url or args.dry_run, "--scorer-url must be the URL of a reward server"),
        (low < high <= args.num_steps, f"--train-low and --train-high must bound steps of the rollout: {low}, {high}"),
        (1 <= count <= high - low, f"--train-levels must be from 1 to the number of trained steps ({high - low})"),
        (args.lora_rank or not args.kl_coef, "--kl-coef needs --lora-rank > 0: the reference is the model without it"),
        (args.old_decay_max <= 1, "--old-decay-max must be <= 1"),
    )  # fmt: skip


def trained_levels(args: Args) -> tuple[int, int, int]:
    """First step of the rollout's schedule that is trained at, one past the last, and how many levels of a sample."""
    high = args.num_steps if args.train_high is None else args.train_high
    return args.train_low, high, high - args.train_low if args.train_levels is None else args.train_levels


if __name__ == "__main__":
    ARGS = parse_cli(Args, PRESETS, check_args, sys.argv[1:], description=__doc__)

# 2. Algorithms. One more is one more line.

import torch
from omni_losses import (
    LossOutput,
    awm_log_prob,
    awm_loss,
    diffusion_nft_loss,
    group_advantages,
    old_policy_decay,
    reward_probability,
    velocity_kl,
)
from omni_reward import Score
from omni_rl.report import write_samples
from omni_rollout import SamplingParams, Trajectory
from omni_rollout.models import qwen_image
from omni_sched import step_noise
from omni_train.lora import adapter, ema_update, ema_update_params, reference
from omni_train.optim import optimizer_step, warmup_lr
from omni_train.shard import reduce_gradients
from torch import Tensor

import grading
import rollouts
import runs
from runs import Run


@dataclass(frozen=True)
class Noised:
    """B samples, each noised afresh to one level. `weights` [B] is 0 for a sample without a score, else 1."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    x_t: Tensor
    cond: dict[str, Tensor]
    advantages: Tensor
    weights: Tensor


def nft_loss(args: Args, velocity: Tensor, old_velocity: Tensor, at: Noised) -> LossOutput:
    """DiffusionNFT: contrasts a step from the old policy towards the trained one with a step away from it."""
    prob = reward_probability(at.advantages, adv_clip_max=args.adv_clip_max, mode=args.adv_mode)
    return diffusion_nft_loss(
        velocity, old_velocity, at.x0, at.x_t, at.sigma, prob,
        nft_beta=args.nft_beta, adv_clip_max=args.adv_clip_max, weights=at.weights,
    )  # fmt: skip


def matching_loss(args: Args, velocity: Tensor, old_velocity: Tensor, at: Noised) -> LossOutput:
    """AWM: a clipped policy gradient that takes minus the flow-matching error for the log-probability."""
    new, old = (awm_log_prob(v, at.x0, at.noise, at.sigma, weighting=args.weighting) for v in (velocity, old_velocity))
    return awm_loss(
        new, old, at.advantages, clip_range=args.clip_range, adv_clip_max=args.adv_clip_max, weights=at.weights
    )


ALGOS: dict[str, Callable[[Args, Tensor, Tensor, Noised], LossOutput]] = {"nft": nft_loss, "awm": matching_loss}

# 3. The old policy


def old_policy(run: Run) -> AbstractContextManager[None]:
    """Within the `with` block the net is the old policy."""
    return adapter(run.net, "old") if run.args.lora_rank else run.copy.applied()


def sampling_policy(run: Run) -> AbstractContextManager[None]:
    """Within the `with` block the net is the policy that draws the samples."""
    return old_policy(run) if run.args.sample_with == "old" else nullcontext()


def refresh_old(run: Run, step: int) -> float:
    """Moves the old policy towards the trained one; returns the share of itself that it kept."""
    args = run.args
    if (step + 1) % args.old_every:
        return 1.0
    num_updates = (step + 1) * args.updates_per_step  # the published schedules count optimizer steps
    decay = min(old_policy_decay(num_updates, schedule=args.old_schedule), args.old_decay_max)
    if args.lora_rank:
        ema_update(run.net, "default", "old", decay)
    else:
        trained, old = zip(*run.copy.pairs(), strict=True)
        ema_update_params(trained, old, decay)
    return decay


# 4. One training step: rollout, score, advantages, update


def rollout(run: Run, step: int) -> tuple[list[Trajectory], list[rollouts.Pending]]:
    """This rank's batches of the step and their scores to come: one batch is scored while the next is drawn."""
    args = run.args
    prompts = rollouts.samples(run.sampler.at(step), args.group_size, seed=args.seed, step=step)
    params = SamplingParams(args.num_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    batches, pending = zip(*rollouts.draw(run.on, prompts, params), strict=True)
    return list(batches), list(pending)


def grade(run: Run, scores: list[Score]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and weights of this rank's samples, [batches, B], and what the rewards of all ranks look like."""
    args, dist = run.args, run.on.dist
    rewards, groups, metrics = rollouts.look_at(
        run.on, scores, group_size=args.group_size, need_one=args.on_failure == "raise"
    )
    advantages = group_advantages(rewards, groups, std=args.adv_std, correction=args.adv_correction)
    metrics |= {"advantage/min": advantages.min().item(), "advantage/max": advantages.max().item()}
    own, weights = (grading.own(run.on, v).to(dist.device) for v in (advantages, (~rewards.isnan()).float()))
    return own, weights, metrics


def noise_afresh(args: Args, batch: Trajectory, advantages: Tensor, weights: Tensor) -> list[Noised]:
    """The batch at each of its noise levels: one of every stratum of the trained part of the rollout's schedule."""
    low, high, count = trained_levels(args)
    seeds, first = [prompt.seed for prompt in batch.prompts], args.num_steps  # what comes before is the rollout's noise
    uniform = torch.special.ndtr(step_noise(seeds, first + count, (count,)).double())
    index = low + ((torch.arange(count) + uniform) * (high - low) / count).long().clamp(max=high - low - 1)
    points = []
    for k in range(count):
        noise, sigma = step_noise(seeds, first + k, batch.x0.shape[1:]).to(batch.x0), batch.sigmas[index[:, k]]
        level = sigma.view(-1, *[1] * (noise.ndim - 1))
        x_t = (1 - level) * batch.x0 + level * noise
        points.append(Noised(batch.x0, noise, sigma, x_t, batch.cond, advantages, weights))
    return points


def predict(run: Run, at: Noised) -> Tensor:
    """The velocity at the noised samples."""
    return qwen_image.predict_velocity(run.net, at.x_t, at.sigma, at.cond, guidance_scale=run.args.guidance_scale)


def frozen_velocities(run: Run, points: list[Noised], num_first: int) -> dict[str, list[Any]]:
    """What the policies that stay predict at each point; None where the one that sampled is where the update starts."""
    args = run.args
    skip = num_first if args.sample_with == "policy" else 0
    policies = [("sampler", sampling_policy(run), skip)]
    policies += [("old", old_policy(run), 0)] if args.old_kl_coef else []
    policies += [("reference", reference(run.net), 0)] if args.kl_coef else []
    velocities: dict[str, list[Any]] = {}
    for name, policy, start in policies:
        with torch.no_grad(), policy:
            velocities[name] = [None] * start + [predict(run, at) for at in points[start:]]
    return velocities


def update(run: Run, step: int, batches: list[Trajectory], advantages: Tensor, weights: Tensor) -> dict[str, float]:
    """Optimizer steps on this step's samples; the metrics are means over batches, noise levels and ranks."""
    args, dist = run.args, run.on.dist
    points = [at for i, b in enumerate(batches) for at in noise_afresh(args, b, advantages[i], weights[i])]
    per_update = len(points) // args.updates_per_step
    frozen = frozen_velocities(run, points, per_update)
    lr = warmup_lr(step, lr=args.lr, warmup_steps=args.warmup_steps, decay_steps=args.steps * args.lr_decay)
    seen: list[dict[str, Tensor]] = []
    results = []
    for first in range(0, len(points), per_update):
        for i in range(first, first + per_update):
            velocity = predict(run, points[i])
            old = velocity.detach() if frozen["sampler"][i] is None else frozen["sampler"][i]
            out = ALGOS[args.algo](args, velocity, old, points[i])
            loss, metrics = out.loss, dict(out.metrics)
            for policy, coef in (("reference", args.kl_coef), ("old", args.old_kl_coef)):
                if coef:
                    distance = velocity_kl(velocity, frozen[policy][i]).mean()
                    loss, metrics[f"{policy}_velocity_kl"] = loss + coef * distance, distance.detach()
            # Gradients are summed over batches, noise levels and ranks; this makes the sum a mean.
            (loss / (per_update * dist.world_size)).backward()
            seen.append(metrics | {"loss": loss.detach()})
        reduce_gradients(run.params, dist.mesh, mode=run.mode)
        results.append(optimizer_step(run.optimizer, run.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist))
    means = {name: torch.stack([m[name] for m in seen]).mean() for name in seen[0]}
    return runs.update_metrics(dist, means, results, lr)


# 5. The whole


def train_step(run: Run, step: int) -> dict[str, float]:
    """One training step: rollout of the old policy, score, advantages, update, refresh of the old policy."""
    with sampling_policy(run):
        with run.log.phase("sync"):
            moved = rollouts.sync(run.on.engine, run.net, version=step)
        with run.log.phase("rollout"):
            batches, pending = rollout(run, step)
    with run.log.phase("reward_wait"):
        scores = rollouts.collect(run.on, pending)
    advantages, weights, metrics = grade(run, scores)
    if run.on.dist.is_main:
        write_samples(run.folder, step + 1, *rollouts.pictures(batches, scores))
    with runs.update_phase(run, metrics):
        metrics |= update(run, step, batches, advantages, weights)
        run.ema.update(step)
        metrics["policy/old_decay"] = refresh_old(run, step)
    return metrics | {"perf/sync_mb": moved / 2**20}


def num_forwards(args: Args) -> dict[str, int]:
    """Forwards of `batch_size` samples that a rank computes in a training step."""
    batches = settings.num_batches(args)
    trained = batches * trained_levels(args)[2]
    again = trained - trained // args.updates_per_step if args.sample_with == "policy" else trained
    return {"rollout": batches * args.num_steps, "update": trained, "the policy that sampled": again} | {
        name: trained for name, coef in (("reference", args.kl_coef), ("old policy", args.old_kl_coef)) if coef
    }


def main(args: Args) -> None:
    """Trains, or continues, the run of that name; evaluated weights are in runs/NAME/weights."""
    runs.carry_out(args, num_forwards(args), train_step, frozen_adapters=("old",), keep_copy=True)


if __name__ == "__main__":
    runs.launch(main, ARGS)
