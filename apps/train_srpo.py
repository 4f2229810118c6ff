"""Reward gradients for flow-matching models: SRPO, which differentiates the reward itself.

    prompts -> rollout -> noise, one step, recovered image -> reward for praise and for blame -> loss -> step

One sample is drawn for each prompt and noised afresh. From there the model takes one short step, down to a random noise
level or up to it, and the sample is recovered with the noise that is known to be in it. A reward model in this process
says how well the image fits its prompt with a word of praise, and with a word of blame; what it likes about every image
cancels in the difference, whose gradient trains the model (SRPO, arXiv 2509.06942).

    python apps/train_srpo.py --preset tiny-signs
    torchrun --nproc-per-node 8 apps/train_srpo.py --preset qwen-image-pickscore

This is the one trainer whose reward is no server: a gradient does not travel over HTTP. `direct_rewards.py` has the
rewards. A model that climbs its reward's gradient finds what the reward overlooks, so give `--watch-scorer-url`:
another scorer, which only evaluations ask.

What differs from the released code of the paper:
1. Each sample has a noise level of its own; theirs is one for all ranks. Neither is rounded to an integer timestep.
2. Noise and levels depend on (seed, step, prompt) alone: any number of ranks trains on the same numbers.
"""

import sys
import time
from concurrent.futures import Future
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

    watch_scorer_url: str = ""  # URL of a reward server that evaluations ask
    scorer_token_file: str = ""  # File that holds its token
    scorer_timeout_s: float = 120.0  # Longest wait for the scores of one batch, a restart of the server included
    on_failure: Literal["raise", "mask"] = "raise"  # End the run when that server fails, or leave out its scores
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
    engine: Literal["diffusers"] = "diffusers"  # What samples: the embedded engine
    reward: Literal["sign-reader", "clip"] = "sign-reader"  # Row of the table REWARDS in direct_rewards.py
    reward_model: str = f"{ROOT}/checkpoints/tiny-signs-reader"  # Folder or hub id of its weights
    positive_words: str = "Clear"  # Words of praise, separated by commas; a step puts one before all its prompts
    negative_words: str = "Smudged"  # Words of blame, likewise
    prompts_per_step: int = 32  # Prompts in a training step, over all ranks
    group_size: int = 1  # Samples of each prompt
    batch_size: int = 16  # Samples per forward of a rank, in rollout and update alike
    height: int = 512  # Pixels
    width: int = 512  # Pixels
    num_steps: int = 25  # Denoising steps of a rollout
    guidance_scale: float = 1.0  # Classifier-free guidance of rollouts and evaluations; 1 is off
    level_low: float = 0.2  # Noise levels to train at, the lowest: 0 is data
    level_high: float = 0.95  # The highest, < 1: 1 is noise
    level_step: float = 0.1  # Length of the one step that the model takes, as a share of the range of levels
    discount_low: float = 0.1  # What remains of the plain reward when denoising, at the lowest level
    discount_high: float = 0.25  # The same at the highest
    inversion_discount_low: float = 0.3  # What remains when inverting, at the lowest level
    inversion_discount_high: float = 0.01  # The same at the highest
    threshold: float = 0.7  # Relative rewards of this and more have no gradient
    updates_per_step: int = 1  # Optimizer steps per rollout
    lr: float = 5e-6  # Learning rate of AdamW
    lr_decay: bool = False  # Whether it falls in a straight line to 0 at the last step
    warmup_steps: int = 0  # Training steps over which the learning rate rises
    weight_decay: float = 1e-4  # Of AdamW
    max_grad_norm: float = 0.1  # Gradients with a larger norm are scaled down
    ema_decay: float = 0.0  # Evaluate and save a moving average of the weights that keeps this share a step; 0 is off
    lora_rank: int = 0  # 0 trains all weights of the transformer
    lora_alpha: int = 128  # LoRA's scale is alpha / rank
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass to save memory
    shard: Literal["auto", "none", "ddp", "fsdp2"] = "auto"  # On several ranks auto is ddp for LoRA, else fsdp2


PRESETS = {name: Args(**values) for name, values in presets.SRPO.items()}


LEAST = {  # setting -> least value
    "group_size": 1, "level_low": 0.0, "level_step": 1e-3, "discount_low": 0.0, "discount_high": 0.0,
    "inversion_discount_low": 0.0, "inversion_discount_high": 0.0,
}  # fmt: skip


def check_args(args: Args) -> None:
    """Raises ValueError when settings do not fit together."""
    settings.check(args, LEAST)
    settings.num_batches(args)
    settings.require(
        (args.level_low < args.level_high < 1, "--level-low must be < --level-high, and that < 1"),
        (args.level_step < 1, "--level-step must be < 1"),
        (words(args.positive_words) and words(args.negative_words),
         "--positive-words and --negative-words must hold a word"),
    )  # fmt: skip


def words(text: str) -> list[str]:
    """The words that commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    ARGS = parse_cli(Args, PRESETS, check_args, sys.argv[1:], description=__doc__)

import torch
from omni_losses import LossOutput, direct_align, reward_metrics, srpo_loss
from omni_reward import Score
from omni_rl.direct_rewards import REWARDS, Reward
from omni_rl.report import write_samples
from omni_rollout import SamplingParams, Trajectory
from omni_rollout.models import qwen_image
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.dist import Dist
from omni_train.optim import optimizer_step, warmup_lr
from omni_train.shard import reduce_gradients
from torch import Tensor

import rollouts
import runs
from runs import Run

# 2. The reward, in this process


@dataclass
class OwnScorer:
    """The reward as a scorer of finished images, in the place of a RewardClient; its scores are there at once."""

    reward: Reward
    device: torch.device
    busy_s: float = 0.0

    @torch.no_grad()
    def submit(self, media: dict[str, Any], prompts: list[str], meta: object = None) -> Future[list[Score]]:
        """The scores of images, uint8 [N, H, W, 3], for their prompts as they are."""
        start = time.perf_counter()
        images = torch.from_numpy(media["image"]).to(self.device).permute(0, 3, 1, 2).float() / 255
        future: Future[list[Score]] = Future()
        future.set_result([Score(value) for value in self.reward(images, prompts).tolist()])
        self.busy_s += time.perf_counter() - start
        return future

    def close(self) -> None:
        """Nothing to close."""


def connect(args: Any, dist: Dist) -> OwnScorer:
    """The reward, on this rank's device."""
    return OwnScorer(REWARDS[args.reward](args.reward_model, dist.device), dist.device)


# 3. One training step: rollout, then a step down and one up to each sample's own noise level


def rollout(run: Run, step: int) -> tuple[list[Trajectory], list[Score]]:
    """This rank's batches of the step, and what the reward says of the finished images."""
    args = run.args
    prompts = rollouts.samples(run.sampler.at(step), args.group_size, seed=args.seed, step=step)
    params = SamplingParams(args.num_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    batches, pending = zip(*rollouts.draw(run.on, prompts, params), strict=True)
    return list(batches), rollouts.collect(run.on, pending)


def levels(args: Args, batch: Trajectory, *, inversion: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Noise levels [B] before and after the model's one step, and the discounts [B] there.

    u in (0, 1) is a sample's place in the range of levels, where the step ends. It begins `level_step` above, or below
    when inverting, and nowhere beyond the range.
    """
    seeds = [prompt.seed for prompt in batch.prompts]
    u = torch.special.ndtr(step_noise(seeds, args.num_steps, (1,))[:, 0])  # the steps before are the rollout's
    length = torch.minimum(torch.minimum(u, 1 - u), torch.full_like(u, args.level_step))
    start = u - length if inversion else u + length
    at, low, high = u, args.discount_low, args.discount_high
    if inversion:
        at, low, high = start, args.inversion_discount_low, args.inversion_discount_high
    span, device = args.level_high - args.level_low, batch.x0.device
    values = (args.level_low + span * start, args.level_low + span * u, low + (high - low) * at)
    sigma, sigma_next, discount = (value.to(device) for value in values)
    return sigma, sigma_next, discount


def align(run: Run, reward: Reward, batch: Trajectory, step: int, *, inversion: bool) -> LossOutput:
    """The loss of one step of the model from the noised samples, through the decoder and the reward."""
    args, prompts = run.args, batch.prompts
    sigma, sigma_next, discount = levels(args, batch, inversion=inversion)
    noise = step_noise([p.seed for p in prompts], INITIAL_NOISE, batch.x0.shape[1:]).to(batch.x0)  # it began with this
    level = sigma.view(-1, *[1] * (noise.ndim - 1))
    x = (1 - level) * batch.x0 + level * noise
    velocity = qwen_image.predict_velocity(run.net, x, sigma, batch.cond)
    images = qwen_image.decode(run.on.engine.sampler.model, direct_align(velocity, x, noise, sigma, sigma_next))
    positive, negative = (
        reward(images, [f"{control[step % len(control)]}. {p.text}" for p in prompts])
        for control in (words(args.positive_words), words(args.negative_words))
    )
    return srpo_loss(positive, negative, discount=discount, inversion=inversion, threshold=args.threshold)


def update(run: Run, step: int, batches: list[Trajectory]) -> dict[str, float]:
    """Optimizer steps on this step's samples; the metrics are means over batches and ranks."""
    args, dist = run.args, run.on.dist
    scorer: Any = run.on.client
    seen: list[dict[str, Tensor]] = []
    results = []
    per_update = len(batches) // args.updates_per_step
    lr = warmup_lr(step, lr=args.lr, warmup_steps=args.warmup_steps, decay_steps=args.steps * args.lr_decay)
    for first in range(0, len(batches), per_update):
        for batch in batches[first : first + per_update]:
            metrics = {"loss": torch.zeros((), device=dist.device)}
            for kind in ("inversion", "denoising"):
                out = align(run, scorer.reward, batch, step, inversion=kind == "inversion")
                # Gradients are summed over batches, kinds of step and ranks; this makes the sum a mean.
                (out.loss / (2 * per_update * dist.world_size)).backward()
                metrics |= {f"{kind}_{name}": value for name, value in out.metrics.items()}
                metrics["loss"] += out.loss.detach() / 2
            seen.append(metrics)
        reduce_gradients(run.params, dist.mesh, mode=run.mode)
        results.append(optimizer_step(run.optimizer, run.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist))
    means = {name: torch.stack([m[name] for m in seen]).mean() for name in seen[0]}
    return runs.update_metrics(dist, means, results, lr)


# 4. The whole


def train_step(run: Run, step: int) -> dict[str, float]:
    """One training step: rollout, update, sync."""
    with run.log.phase("rollout"):
        batches, scores = rollout(run, step)
    rewards = rollouts.gather_rewards(run.on, scores)
    all_alike = torch.zeros(len(rewards), dtype=torch.long)  # nothing is compared within a group: the step is one
    metrics = {f"reward/{name}": value.item() for name, value in reward_metrics(rewards, all_alike).items()}
    if run.on.dist.is_main:
        write_samples(run.folder, step + 1, *rollouts.pictures(batches, scores))
    with runs.update_phase(run, metrics):
        metrics |= update(run, step, batches)
        run.ema.update(step)
    rollouts.sync(run.on.engine, run.net, version=step + 1)
    return metrics


def num_forwards(args: Args) -> dict[str, int]:
    """Forwards of `batch_size` samples that a rank computes in a training step."""
    batches = settings.num_batches(args)
    return {"rollout": batches * args.num_steps, "update": 2 * batches}


def main(args: Args) -> None:
    """Trains, or continues, the run of that name; evaluated weights are in runs/NAME/weights."""
    runs.carry_out(args, num_forwards(args), train_step, connect=connect)


if __name__ == "__main__":
    runs.launch(main, ARGS)
