"""Preferences between samples for flow-matching models: Diffusion-DPO, online and offline.

    online:   prompts -> rollout -> score -> best and worst of each group -> update (noise -> errors -> loss -> step)
    offline:  preference file -> update

A pair is two samples of one prompt, of which one is preferred. Both are noised afresh, with the same noise to the same
level, and the model is trained to denoise the preferred one better than a reference does, and the other one worse
(Diffusion-DPO, arXiv 2311.12908). The reference is the model without its adapter, or a copy of the first weights.

    python apps/train_dpo.py --preset tiny-signs --scorer-url http://127.0.0.1:8100
    python apps/train_dpo.py --preset tiny-signs-offline --preferences data/pairs/pairs.jsonl
    torchrun --nproc-per-node 4 apps/train_dpo.py --preset qwen-image-ocr-lora --scorer-url http://scorer:8100

docs/preferences.md describes the file, `scripts/build_preferences.py` makes one. Without a scorer, evaluations draw
images but grade none.

What differs from the released code of the papers:
1. A group whose samples all score the same gives no pair, and a sample without a score is in none.
2. The loss takes the conditional velocity, also where samples are drawn with guidance: that is what denoises data.
3. Noise and its levels depend on (seed, step, prompt) alone: any number of ranks trains on the same numbers.
"""

import os
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
    steps: int = 300  # Training steps; one step is one rollout, or one draw of pairs
    save_every: int = 10  # Training steps between two checkpoints; the same command continues from the newest
    keep_checkpoints: int = 2  # Newest checkpoints to keep
    hang_timeout_s: float = 1800.0  # Longest wait of a rank for another, after which the run ends
    dry_run: bool = False  # Only check the settings, and print them and what a step will do
    eval_every: int = 50  # Training steps between two evaluations
    eval_num_steps: int = 10  # Denoising steps in an evaluation
    model: str = f"{ROOT}/checkpoints/tiny-signs-qwen-image"  # Folder or hub id of a diffusers Qwen-Image pipeline
    dtype: Literal["float32", "bfloat16"] = "float32"  # Of the weights that are not trained; what is trained is float32
    preferences: str = ""  # Train offline, on the pairs of this .jsonl file instead of --prompts
    prompts: str = f"{ROOT}/data/tiny-signs/train.txt"  # Training prompts, .txt or .jsonl
    eval_prompts: str = f"{ROOT}/data/tiny-signs/eval.txt"  # Prompts of the evaluations
    engine: Literal["diffusers", "vllm-omni"] = "diffusers"  # What samples: embedded, or vLLM-Omni in process
    engine_sleep: bool = True  # Whether the engine's own weights leave the accelerator during updates
    prompts_per_step: int = 32  # Groups in a training step, over all ranks; offline, pairs
    group_size: int = 16  # Samples of a group, of which the best and the worst are a pair; offline it is 2
    batch_size: int = 16  # Samples per forward of a rank; in updates half as many pairs
    height: int = 512  # Pixels
    width: int = 512  # Pixels
    num_steps: int = 10  # Denoising steps of a rollout
    guidance_scale: float = 1.0  # Classifier-free guidance of rollouts and evaluations; 1 is off
    dpo_beta: float = 2000.0  # How strongly the reference holds: larger is closer to it
    levels_per_pair: int = 1  # Noise levels that each pair is trained at
    level_shift: float = 1.0  # Moves the levels, logit-normal by themselves, towards noise where > 1
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


PRESETS = {name: Args(**values) for name, values in presets.DPO.items()}


LEAST = {"batch_size": 2, "dpo_beta": 1e-12, "levels_per_pair": 1, "level_shift": 1e-6}  # setting -> least value


def check_args(args: Args) -> None:
    """Raises ValueError when settings do not fit together."""
    settings.check(args, LEAST)
    samples, unit = args.prompts_per_step * args.group_size, max(args.batch_size, args.group_size)
    per_round = unit * int(os.environ.get("WORLD_SIZE", "1"))
    settings.require(
        (args.scorer_url or args.preferences or args.dry_run,
         "--scorer-url must be the URL of a reward server, or --preferences a file of pairs"),
        (not args.preferences or Path(args.preferences).is_file(),
         f"--preferences must be a .jsonl file of pairs, got {args.preferences}"),
        (args.batch_size % 2 == 0, f"--batch-size must be even, as a pair is two samples, got {args.batch_size}"),
        (args.preferences or unit % min(args.batch_size, args.group_size) == 0,
         f"--batch-size and --group-size: one must divide the other, got {args.batch_size} and {args.group_size}"),
        (args.preferences or samples % per_round == 0,
         f"all ranks must draw whole groups and batches: {per_round} must divide a step's samples ({samples})"),
        (args.prompts_per_step % args.updates_per_step == 0, "--updates-per-step must divide --prompts-per-step"),
        (not args.preferences or args.group_size == 2, "--preferences needs --group-size 2: a group is a pair"),
        (not args.preferences or args.engine == "diffusers", "--preferences needs --engine diffusers"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, PRESETS, check_args, sys.argv[1:], description=__doc__)

# 2. Pairs: from a rollout, or from a file

import torch
from omni_losses import best_worst_pairs, diffusion_dpo_loss, velocity_error
from omni_reward import Score
from omni_rl.preferences import NoScorer, check_preferences, read_latent
from omni_rl.report import write_samples
from omni_rollout import Prompt, SamplingParams, Trajectory
from omni_rollout.models import qwen_image
from omni_rollout.types import pad_alike
from omni_sched import shift_sigmas, step_noise
from omni_train.data import load_prompts, sample_seed
from omni_train.dist import Dist, gather_floats
from omni_train.lora import reference
from omni_train.optim import optimizer_step, warmup_lr
from omni_train.shard import reduce_gradients
from torch import Tensor

import rollouts
import runs
from runs import Run


@dataclass(frozen=True)
class Pairs:
    """This rank's pairs: latents [n, ...], and of each pair its place among the prompts of the step.

    Without a single pair there is one row, which only fills up, and no place.
    """

    win: Tensor
    lose: Tensor
    cond: dict[str, Tensor]
    seeds: list[int]
    places: list[int]


def rollout(run: Run, step: int) -> tuple[list[Trajectory], list[rollouts.Pending]]:
    """This rank's batches of the step and their scores to come; all samples of a group are drawn by one rank."""
    args = run.args
    prompts = rollouts.samples(run.sampler.at(step), args.group_size, seed=args.seed, step=step)
    params = SamplingParams(args.num_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    dealt = whole_groups(prompts, args, run.on.dist.world_size)
    batches, pending = zip(*rollouts.draw(run.on, dealt, params), strict=True)
    return list(batches), list(pending)


def whole_groups(prompts: list[Prompt], args: Args, world_size: int) -> list[Prompt]:
    """The prompts in the order in which batches, dealt to the ranks in turn, bring each rank whole groups."""
    unit = max(args.batch_size, args.group_size)
    order = torch.arange(len(prompts)).view(-1, world_size, unit // args.batch_size, args.batch_size)
    return [prompts[i] for i in order.transpose(1, 2).flatten().tolist()]


def choose(run: Run, batches: list[Trajectory], scores: list[Score]) -> tuple[Pairs, dict[str, float]]:
    """The best and the worst of each of this rank's groups, and what the rewards of all ranks look like."""
    dist, size = run.on.dist, run.args.group_size
    unit = max(run.args.batch_size, size)  # what a rank is dealt at a time, seen as one batch
    on, need_one = replace(run.on, batch_size=unit), run.args.on_failure == "raise"
    rewards, _, metrics = rollouts.look_at(on, scores, group_size=size, need_one=need_one)
    own = rewards.view(-1, dist.world_size, unit)[:, dist.rank].flatten()
    pairs = best_worst_pairs(own, torch.arange(len(own)) // size)
    drawn = Trajectory.cat(batches)
    win, lose = (drawn.select([pair[side] for pair in pairs or [(0, 0)]]) for side in range(2))
    places = [prompt.group for prompt in win.prompts[: len(pairs)]]
    return Pairs(win.x0, lose.x0, win.cond, [prompt.seed for prompt in win.prompts], places), metrics


@torch.no_grad()
def read_pairs(run: Run, step: int) -> Pairs:
    """This rank's pairs of the step from the preference file."""
    args, dist, model = run.args, run.on.dist, run.on.engine.sampler.model
    records = run.sampler.at(step)
    rows = records[dist.rank :: dist.world_size] or records[:1]
    folder = Path(args.preferences).parent
    shape = qwen_image.latent_shape(model, height=args.height, width=args.width)
    win, lose = (
        torch.stack([read_latent(model, folder / str(r.meta[side]), shape).to(dist.device) for r in rows])
        for side in ("win", "lose")
    )
    texts = [qwen_image.encode(model, record.text) for record in rows]
    cond = {name: torch.stack(pad_alike([text[name] for text in texts], dim=0)) for name in texts[0]}
    seeds = [sample_seed(args.seed, step, record.index, 0) for record in rows]
    places = list(range(dist.rank, len(records), dist.world_size))
    return Pairs(win, lose, cond, seeds, places)


# 3. The update


@dataclass(frozen=True)
class Noised:
    """B/2 pairs at one noise level each, the preferred samples first, so B samples; the first `count` pairs count."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor
    cond: dict[str, Tensor]
    count: int


def noise_afresh(args: Args, pairs: Pairs, own: list[int]) -> list[Noised]:
    """The pairs in the rows `own`, filled up to a batch of the usual shape, at each of their noise levels."""
    first, count = args.num_steps, args.levels_per_pair  # the noise of the steps before is the rollout's
    rows = own + [0] * (args.batch_size // 2 - len(own))
    seeds, x0 = [pairs.seeds[i] for i in rows], torch.cat([pairs.win[rows], pairs.lose[rows]])
    cond = {name: torch.cat([tensor[rows], tensor[rows]]) for name, tensor in pairs.cond.items()}
    sigmas = shift_sigmas(step_noise(seeds, first + count, (count,)).sigmoid(), args.level_shift).to(x0)
    points = []
    for k in range(count):
        noise = step_noise(seeds, first + k, x0.shape[1:]).to(x0)
        points.append(Noised(x0, torch.cat([noise, noise]), sigmas[:, k].repeat(2), cond, len(own)))
    return points


def errors(run: Run, at: Noised) -> Tensor:
    """The flow-matching error of each noised sample, [B]."""
    level = at.sigma.view(-1, *[1] * (at.x0.ndim - 1))
    x_t = (1 - level) * at.x0 + level * at.noise
    return velocity_error(qwen_image.predict_velocity(run.net, x_t, at.sigma, at.cond), at.x0, at.noise)


def reference_policy(run: Run) -> AbstractContextManager[None]:
    """Within the `with` block the net is the reference."""
    return reference(run.net) if run.args.lora_rank else run.copy.applied()


def update(run: Run, step: int, pairs: Pairs) -> dict[str, float]:
    """Optimizer steps on this step's pairs; the metrics are means over all pairs and noise levels."""
    args, dist, size, num_updates = run.args, run.on.dist, run.args.batch_size // 2, run.args.updates_per_step
    lr = warmup_lr(step, lr=args.lr, warmup_steps=args.warmup_steps, decay_steps=args.steps * args.lr_decay)
    updates = [place * num_updates // args.prompts_per_step for place in pairs.places]
    rows = [[i for i, u in enumerate(updates) if u == number] for number in range(num_updates)]
    counts = gather_floats(dist, torch.tensor([float(len(own)) for own in rows])).view(dist.world_size, -1).long()
    num_pairs, most = counts.sum(dim=0).tolist(), counts.amax(dim=0).tolist()
    # Every rank computes as many batches as the one with the most pairs, as sharded weights demand.
    points = [
        [at for i in range(0, n, size) for at in noise_afresh(args, pairs, own[i : i + size])]
        for own, n in zip(rows, most, strict=True)
    ]
    with torch.no_grad(), reference_policy(run):
        references = [[errors(run, at) for at in batches] for batches in points]
    seen: list[dict[str, Tensor]] = []
    results = []
    for number in [u for u in range(num_updates) if num_pairs[u]]:
        for at, old in zip(points[number], references[number], strict=True):
            real = at.count or 1  # without any, the first row keeps this rank in step, with weight 0
            terms = [e[:real] for e in (*errors(run, at).chunk(2), *old.chunk(2))]
            out = diffusion_dpo_loss(*terms, dpo_beta=args.dpo_beta)
            # Gradients are summed over pairs, noise levels and ranks; this makes the sum a mean.
            (out.loss * at.count / (num_pairs[number] * args.levels_per_pair)).backward()
            seen.append({name: v * at.count for name, v in (out.metrics | {"loss": out.loss.detach()}).items()})
        reduce_gradients(run.params, dist.mesh, mode=run.mode)
        results.append(optimizer_step(run.optimizer, run.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist))
    if not results:
        return {"policy/pairs": 0.0, "policy/lr": lr}
    share = dist.world_size / (sum(num_pairs) * args.levels_per_pair)
    sums = {name: torch.stack([m[name] for m in seen]).sum() * share for name in seen[0]}
    return runs.update_metrics(dist, sums, results, lr) | {"policy/pairs": float(sum(num_pairs))}


# 4. The whole


def train_step(run: Run, step: int) -> dict[str, float]:
    """One training step: rollout, score, pairs and update, or offline the last two."""
    metrics: dict[str, float] = {}
    if run.args.preferences:
        with run.log.phase("read"):
            pairs = read_pairs(run, step)
    else:
        with run.log.phase("rollout"):
            batches, pending = rollout(run, step)
        with run.log.phase("reward_wait"):
            scores = rollouts.collect(run.on, pending)
        pairs, metrics = choose(run, batches, scores)
        if run.on.dist.is_main:
            write_samples(run.folder, step + 1, *rollouts.pictures(batches, scores))
    with runs.update_phase(run, metrics):
        metrics |= update(run, step, pairs)
        run.ema.update(step)
    with run.log.phase("sync"):
        metrics["perf/sync_mb"] = rollouts.sync(run.on.engine, run.net, version=step + 1) / 2**20
    return metrics


def num_forwards(args: Args) -> dict[str, int]:
    """Forwards of `batch_size` samples that a rank computes in a training step, if every group gives a pair."""
    world, size = int(os.environ.get("WORLD_SIZE", "1")), args.batch_size // 2
    batches = 0 if args.preferences else args.prompts_per_step * args.group_size // (args.batch_size * world)
    pairs = -(-args.prompts_per_step // (args.updates_per_step * world))  # of a rank in an update
    trained = -(-pairs // size) * args.updates_per_step * args.levels_per_pair
    return {"rollout": batches * args.num_steps, "update": trained, "reference": trained}


def connect(args: Any, dist: Dist) -> Any:
    """The client of the reward server, or what stands in its place when there is none."""
    return runs.connect(args, dist) if args.scorer_url else NoScorer()


def main(args: Args) -> None:
    """Trains, or continues, the run of that name; evaluated weights are in runs/NAME/weights."""
    if args.preferences:
        check_preferences(load_prompts(args.preferences), Path(args.preferences).parent)
        args = replace(args, prompts=args.preferences)
    runs.carry_out(args, num_forwards(args), train_step, connect=connect, keep_copy=True)


if __name__ == "__main__":
    runs.launch(main, ARGS)
