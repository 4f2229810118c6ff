"""Reverse-process policy gradients for flow-matching models: FlowGRPO, DanceGRPO, MixGRPO, GRPO-Guard, Flow-DPPO.

    prompts -> rollout -> Trajectory -> score -> advantages -> update (rescore -> loss -> step) -> sync

A group of samples is drawn for each prompt with a few stochastic steps. A scorer grades the images over HTTP. A sample
better than its group makes its stochastic steps more likely, a worse one less (Flow-GRPO, arXiv 2505.05470).

    python apps/train_flowgrpo.py --preset tiny-signs --scorer-url http://127.0.0.1:8100
    torchrun --nproc-per-node 8 apps/train_flowgrpo.py --preset qwen-image-ocr-lora --scorer-url http://scorer:8100

What differs from the released code of the papers:
1. Before the first update of every step the ratio is checked to be 1, and the run stops if it is not.
2. `std` is the true standard deviation of a step, so the KL term is the true KL (theirs misses a factor |dt|).
3. A sample without a score never counts as 0: its advantage is 0, and it enters no mean.
4. Noise depends on (seed, step, prompt, sample) alone: any number of ranks draws the same samples.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    seed: int = 0  # Decides prompts, noise and windows
    steps: int = 300  # Training steps; one step is one rollout
    save_every: int = 10  # Training steps between two checkpoints; the same command continues from the newest
    keep_checkpoints: int = 2  # Newest checkpoints to keep
    hang_timeout_s: float = 1800.0  # Longest wait of a rank for another, after which the run ends
    dry_run: bool = False  # Only check the settings, and print them and what a step will do
    eval_every: int = 50  # Training steps between two evaluations
    eval_num_steps: int = 10  # Denoising steps in an evaluation, which uses no noise
    model: str = f"{ROOT}/checkpoints/tiny-signs-qwen-image"  # Folder or hub id of a diffusers Qwen-Image pipeline
    dtype: Literal["float32", "bfloat16"] = "float32"  # Of the weights that are not trained; what is trained is float32
    prompts: str = f"{ROOT}/data/tiny-signs/train.txt"  # Training prompts, .txt or .jsonl
    eval_prompts: str = f"{ROOT}/data/tiny-signs/eval.txt"  # Prompts of the evaluations
    engine: Literal["diffusers", "vllm-omni"] = "diffusers"  # What samples: the embedded engine or vLLM-Omni
    engine_sleep: bool = True  # Whether the engine's own weights leave the accelerator during updates
    old_log_prob: Literal["auto", "rollout", "recompute", "correct"] = "auto"  # Engine's (auto: if exact), trainer's
    # before its first update (auto: else), or that and weights that correct the engine's samples
    ratio_tolerance: float | None = None  # Largest |ratio - 1| of trainer and engine; else 0 or RATIO_TOLERANCE
    correction_level: Literal["step", "trajectory"] = "trajectory"  # What shares a weight
    correction_mode: Literal["truncate", "mask"] = "truncate"  # What happens to weights beyond the bounds
    correction_low: float = 0.99  # Least density of the trainer over the engine's, per latent element
    correction_high: float = 1.01  # Largest such ratio
    algo: Literal[
        "flowgrpo", "flowgrpo-cps", "dancegrpo", "mixgrpo", "mixgrpo-decay", "mixgrpo-exp-decay", "grpo-guard",
        "flow-dppo"
    ] = "flowgrpo"  # Row of the table ALGOS  # fmt: skip
    prompts_per_step: int = 32  # Groups in a training step, over all ranks
    group_size: int = 16  # Samples of a group
    batch_size: int = 16  # Samples per forward of a rank, in rollout and update alike: same shape, same bits
    height: int = 512  # Pixels
    width: int = 512  # Pixels
    num_steps: int = 10  # Denoising steps of a rollout
    guidance_scale: float = 1.0  # Classifier-free guidance; 1 is off
    noise_level: float = 0.7  # Strength of the injected noise, as the algorithm's step defines it
    window_size: int | None = None  # Stochastic steps of a rollout; all but the last by default
    window_low: int = 0  # First step that may be stochastic
    window_high: int | None = None  # One past the last step that may be stochastic
    window_iters: int = 1  # Training steps that share a window
    window_stride: int = 1  # Steps that a sliding window moves at a time
    share_noise: bool = False  # Whether a group starts from one noise; the steps before its window then run once
    flash_ratio: float | None = None  # Share of the steps after the window that is left, now by DPM-Solver++
    clip_range: float = 1e-4  # Half-width of the ratio's free range around 1
    kl_threshold: float = 1e-5  # Size of flow-dppo's trust region, nats per latent element
    adv_clip_max: float = 5.0  # Bound on advantages
    reward_parts: str = ""  # Parts of the score to normalize one by one, then add, as ocr=0.7,jpeg=0.3; or the score
    adv_std: Literal["batch", "group", "none"] = "batch"  # What advantages are divided by
    adv_correction: Literal[0, 1] = 1  # That divides squares by their number minus this
    best_of_n: int = 0  # Samples of a group to train on: the best and the worst, half each; 0 is all
    drop_zero_signal: bool = False  # Whether to leave out groups whose samples all score alike
    step_weights: Literal["equal", "tempflow"] = "equal"  # Of the trained steps; tempflow weighs them by their noise
    kl_coef: float = 0.0  # Weight of the KL to the model without its adapter
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


PRESETS = {name: Args(**values) for name, values in presets.FLOWGRPO.items()}


LEAST = {  # setting -> least value
    "noise_level": 1e-6, "window_low": 0, "window_iters": 1, "window_stride": 1, "correction_low": 0, "best_of_n": 0,
    "clip_range": 1e-12, "kl_threshold": 1e-30, "adv_clip_max": 1e-6, "kl_coef": 0.0,
}  # fmt: skip


def check_args(args: Args) -> None:
    """Raises ValueError when settings do not fit together."""
    settings.check(args, LEAST)
    settings.parse_weights(args.reward_parts)
    settings.num_batches(args)
    low = args.window_low
    high = args.num_steps - 1 if args.window_high is None else args.window_high
    size = high - low if args.window_size is None else args.window_size
    settings.require(
        (args.scorer_url or args.dry_run, "--scorer-url must be the URL of a reward server"),
        (args.lora_rank or not args.kl_coef, "--kl-coef needs --lora-rank > 0: the reference is the model without it"),
        (args.window_size or not args.algo.startswith(("dance", "mix")), f"--window-size must be set for {args.algo}"),
        (low < high < args.num_steps,
         f"--window-low must be < --window-high, and that < --num-steps ({args.num_steps}), got {low} and {high}"),
        (1 <= size <= high - low, f"--window-size must be from 1 to the window's {high - low} steps, got {size}"),
        (args.window_stride <= size, f"--window-stride must be <= --window-size ({size}), got {args.window_stride}"),
        (args.correction_low < 1 < args.correction_high, "--correction-low must be < 1 and --correction-high > 1"),
        (args.noise_level <= 1 or args.algo != "flowgrpo-cps", "--noise-level must be <= 1 for flowgrpo-cps"),
        (args.flash_ratio is None or 0 < args.flash_ratio <= 1,
         f"--flash-ratio must be in (0, 1], got {args.flash_ratio}"),
        (args.best_of_n % 2 == 0 and args.best_of_n <= args.group_size,
         f"--best-of-n must be even and <= --group-size ({args.group_size}), got {args.best_of_n}"),
        (args.old_log_prob != "correct" or not regroups(args),
         "--old-log-prob correct does not go with --best-of-n or --drop-zero-signal"),
    )  # fmt: skip


def regroups(args: Args) -> bool:
    """Whether some samples are left out, so that those left are put together in other batches than they were drawn."""
    return bool(args.best_of_n) or args.drop_zero_signal


if __name__ == "__main__":
    ARGS = parse_cli(Args, PRESETS, check_args, sys.argv[1:], description=__doc__)

# 2. Algorithms. One more is one more line.

import torch
from omni_losses import (
    LossOutput,
    flow_dppo_loss,
    gaussian_kl,
    grpo_guard_loss,
    grpo_loss,
    rollout_weights,
)  # fmt: skip
from omni_reward import Score
from omni_rl.gate import check_ratio
from omni_rl.report import write_samples
from omni_rollout import SamplingParams, Trajectory
from omni_rollout.models import qwen_image
from omni_sched import Transition, cps_step, dance_step, sde_step, sde_window
from omni_train.lora import reference
from omni_train.optim import optimizer_step, warmup_lr
from omni_train.shard import reduce_gradients

import grading
import rollouts
import runs
from runs import Run


class Old(NamedTuple):
    """A step under the weights before the update: log-prob [B], and mean [B, ...] where the loss asks for it."""

    log_prob: torch.Tensor
    mean: Any


def clipped(now: Any, old: Old, advantages: torch.Tensor, args: Args, **others: Any) -> LossOutput:
    """PPO's clipped loss."""
    return grpo_loss(
        now.log_prob, old.log_prob, advantages, clip_range=args.clip_range, adv_clip_max=args.adv_clip_max,
        weights=others["weights"],
    )  # fmt: skip


def guarded(now: Any, old: Old, advantages: torch.Tensor, args: Args, **others: Any) -> LossOutput:
    """The same with a ratio that is centered at 1 and spreads alike at every step (GRPO-Guard)."""
    return grpo_guard_loss(
        now.log_prob, old.log_prob, advantages, mean=now.mean, old_mean=old.mean, std=now.std,
        clip_range=args.clip_range, adv_clip_max=args.adv_clip_max, **others,
    )  # fmt: skip


def in_region(now: Any, old: Old, advantages: torch.Tensor, args: Args, **others: Any) -> LossOutput:
    """No clip, but a trust region in the KL of the step (Flow-DPPO)."""
    return flow_dppo_loss(
        now.log_prob, old.log_prob, advantages, mean=now.mean, old_mean=old.mean, std=now.std,
        kl_threshold=args.kl_threshold, weights=others["weights"],
    )  # fmt: skip


@dataclass(frozen=True)
class Algo:
    """A stochastic step, the strategy of its window, a loss, and whether that asks for the step's mean."""

    step: Callable[..., Transition]
    window: Literal["random", "sliding", "decay", "exp_decay", "subset"]
    loss: Callable[..., LossOutput] = clipped
    needs_mean: bool = False


ALGOS = {
    "flowgrpo": Algo(sde_step, "random"),
    "flowgrpo-cps": Algo(cps_step, "random"),
    "dancegrpo": Algo(dance_step, "subset"),
    "mixgrpo": Algo(sde_step, "sliding"),
    "mixgrpo-decay": Algo(sde_step, "decay"),
    "mixgrpo-exp-decay": Algo(sde_step, "exp_decay"),
    "grpo-guard": Algo(sde_step, "random", guarded, needs_mean=True),
    "flow-dppo": Algo(sde_step, "random", in_region, needs_mean=True),
}
# Largest |ratio - 1| of trainer and engine before the first update, where engine or batches are not the trainer's own:
RATIO_TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3}

# 3. One training step: rollout, score, advantages, update


def rollout(run: Run, step: int) -> tuple[list[Trajectory], list[rollouts.Pending]]:
    """This rank's batches of the step and their scores to come: one batch is scored while the next is drawn."""
    args, records = run.args, run.sampler.at(step)
    prompts = rollouts.samples(records, args.group_size, seed=args.seed, step=step, share_noise=args.share_noise)
    batches, pending = zip(*rollouts.draw(run.on, prompts, params_at(args, step)), strict=True)
    return list(batches), list(pending)


def params_at(args: Args, step: int) -> SamplingParams:
    """How a training step samples; its window is the same on every rank."""
    algo = ALGOS[args.algo]
    window = sde_window(
        args.num_steps, args.window_size, low=args.window_low, high=args.window_high, strategy=algo.window,
        iteration=step, seed=args.seed, iters_per_window=args.window_iters, stride=args.window_stride,
    )  # fmt: skip
    return SamplingParams(
        args.num_steps, args.height, args.width, guidance_scale=args.guidance_scale, step=algo.step,
        noise_level=args.noise_level, sde_steps=window, keep_mean=algo.needs_mean, flash_ratio=args.flash_ratio,
    )  # fmt: skip


def grade(run: Run, scores: list[Score]) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]:
    """Advantages [N] of the samples of all ranks, which of them to train on, [N] or None for all, and what to log."""
    args = run.args
    rewards, groups, metrics = rollouts.look_at(
        run.on, scores, group_size=args.group_size, need_one=args.on_failure == "raise"
    )
    advantages, seen = grading.advantages_of(
        run.on, scores, rewards, groups, parts=args.reward_parts, std=args.adv_std, correction=args.adv_correction
    )
    if not regroups(args):
        return advantages, None, metrics | seen
    keep = grading.worth_training(
        advantages, rewards, groups, best=args.best_of_n, drop_zero_signal=args.drop_zero_signal
    )
    return advantages, keep, metrics | seen | {"reward/trained_ratio": keep.float().mean().item()}


def old_policy(run: Run, batches: list[Trajectory]) -> list[list[Old] | None]:
    """Per batch and kept step, the policy before the update; None where the first update's own forwards have it."""
    source, kept = run.args.old_log_prob, range(batches[0].x.shape[1])
    if source == "rollout":
        return [
            [Old(b.rollout_log_prob[:, k], None if b.rollout_mean is None else b.rollout_mean[:, k]) for k in kept]
            for b in batches
        ]
    skip = len(batches) // run.args.updates_per_step if source == "recompute" else 0
    with torch.no_grad():
        return [None] * skip + [[as_old(run, rescore(run, b, k)[0]) for k in kept] for b in batches[skip:]]


def as_old(run: Run, move: Any) -> Old:
    """What is kept of a step that the weights before the update take."""
    return Old(move.log_prob.detach(), move.mean.detach() if ALGOS[run.args.algo].needs_mean else None)


def correct(args: Args, old: list[Old] | None, batch: Trajectory) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
    """For each step weights [B] that turn the engine's samples into the trainer's, or None where they are; metrics."""
    if args.old_log_prob != "correct" or old is None:
        return [None] * batch.x.shape[1], {}
    weights, metrics = rollout_weights(
        torch.stack([step.log_prob for step in old], dim=1), batch.rollout_log_prob, level=args.correction_level,
        mode=args.correction_mode, low=args.correction_low, high=args.correction_high,
    )  # fmt: skip
    return weights.unbind(dim=1), {f"correction_{name}": value for name, value in metrics.items()}


def update(
    run: Run, step: int, batches: list[Trajectory], advantages: torch.Tensor, shares: torch.Tensor | None
) -> dict[str, float]:
    """Optimizer steps on this step's samples, with advantages and weights [batches, B]; returns metrics, as means."""
    args, dist = run.args, run.on.dist
    seen: list[dict[str, torch.Tensor]] = []
    results = []
    per_update, num_kept = len(batches) // args.updates_per_step, batches[0].x.shape[1]
    lr = warmup_lr(step, lr=args.lr, warmup_steps=args.warmup_steps, decay_steps=args.steps * args.lr_decay)
    old = old_policy(run, batches)
    for first in range(0, len(batches), per_update):
        for i in range(first, first + per_update):
            batch, before, batch_advantages = batches[i], old[i], advantages[i].to(dist.device)
            share = None if shares is None else shares[i].to(dist.device)
            corrections, metrics = correct(args, before, batch)
            for k in range(num_kept):
                move, kl = rescore(run, batch, k)
                out = ALGOS[args.algo].loss(
                    move, before[k] if before else as_old(run, move), batch_advantages, args,
                    sqrt_dt=(batch.sigma(k) - batch.sigma_next(k)).sqrt(),
                    weights=grading.weigh(args.step_weights, move.std, share, corrections[k]),
                )  # fmt: skip
                kl = (kl if share is None else kl * share).mean()
                loss = out.loss + args.kl_coef * kl
                # Gradients are summed over batches, kept steps and ranks; this makes the sum a mean.
                (loss / (per_update * num_kept * dist.world_size)).backward()
                gap = (move.log_prob.detach() - batch.rollout_log_prob[:, k]).abs().max().expm1()
                seen.append(metrics | out.metrics | {"loss": loss.detach(), "kl": kl.detach(), "rollout_gap": gap})
        if first == 0:
            deviation = check_ratio(dist, [m["rollout_gap"] for m in seen], args.ratio_tolerance, step)
        reduce_gradients(run.params, dist.mesh, mode=run.mode)
        results.append(optimizer_step(run.optimizer, run.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist))
    means = {name: torch.stack([m[name] for m in seen]).mean() for name in seen[0]}
    return runs.update_metrics(dist, means, results, lr) | {"policy/first_ratio_max_dev": deviation}


def rescore(run: Run, batch: Trajectory, k: int) -> tuple[Any, torch.Tensor]:
    """The k-th kept step of every sample under the weights of now, and the KL [B] to the reference."""
    scale, level = run.args.guidance_scale, run.args.noise_level
    x, x_next, sigma, sigma_next = batch.x[:, k], batch.x_next[:, k], batch.sigma(k), batch.sigma_next(k)

    def score() -> Transition:
        velocity = qwen_image.predict_velocity(run.net, x, sigma, batch.cond, guidance_scale=scale)
        return ALGOS[run.args.algo].step(velocity, x, sigma, sigma_next, noise_level=level, x_next=x_next)

    if not run.args.kl_coef:
        return score(), torch.zeros(len(x), device=x.device)
    with torch.no_grad(), reference(run.net):
        ref_mean = score().mean
    move = score()
    return move, gaussian_kl(move.mean, ref_mean, move.std)


# 4. The whole


def train_step(run: Run, step: int) -> dict[str, float]:
    """One training step: rollout, score, advantages, update, sync."""
    with run.log.phase("rollout"):
        batches, pending = rollout(run, step)
    with run.log.phase("reward_wait"):
        scores = rollouts.collect(run.on, pending)
    advantages, keep, metrics = grade(run, scores)
    if run.on.dist.is_main:
        write_samples(run.folder, step + 1, *rollouts.pictures(batches, scores))
    batches, own, shares = grading.to_train(run.on, batches, advantages, keep, updates=run.args.updates_per_step)
    with runs.update_phase(run, metrics):
        metrics |= update(run, step, batches, own, shares)
        run.ema.update(step)
    with run.log.phase("sync"):
        metrics["perf/sync_mb"] = rollouts.sync(run.on.engine, run.net, version=step + 1) / 2**20
    return metrics


def num_forwards(args: Args) -> dict[str, int]:
    """Forwards of `batch_size` samples that a rank computes in a training step."""
    batches, params = settings.num_batches(args), params_at(args, 0)
    latest = replace(params, sde_steps=((args.window_high or args.num_steps - 1) - 1,))  # leaves Flash the fewest steps
    scored = batches * len(params.sde_steps)
    again = {"correct": scored, "recompute": scored - scored // args.updates_per_step}.get(args.old_log_prob, 0)
    names = {"rollout": batches * latest.num_flash_steps, "update": scored, "old log-probs": again}
    names |= {"reference": scored + again} if args.kl_coef else {}
    fewer = {"rollout": args.share_noise or args.flash_ratio is not None}
    return {f"{name}, at most" if fewer.get(name, regroups(args)) else name: n for name, n in names.items()}


def main(args: Args) -> None:
    """Trains, or continues, the run of that name; evaluated weights are in runs/NAME/weights."""
    is_own = args.engine == "diffusers" and not regroups(args)  # rollout and update are the same arithmetic
    if args.old_log_prob == "auto":
        args = replace(args, old_log_prob="rollout" if is_own else "recompute")
    if args.ratio_tolerance is None:
        args = replace(args, ratio_tolerance=0.0 if is_own else RATIO_TOLERANCE[args.dtype])
    runs.carry_out(args, num_forwards(args), train_step)


if __name__ == "__main__":
    runs.launch(main, ARGS)
