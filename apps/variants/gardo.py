"""GARDO's gate on one page: `flowgrpo_by_hand.py` with a KL on only the samples that the reward overrates.

    python -m omni_reward.server --scorer "ocr + 0*clip" --option ocr.reading=line --port 8100 &
    torchrun --standalone --nproc-per-node 2 apps/variants/gardo.py --model checkpoints/tiny-signs-qwen-image \
        --prompts data/tiny-signs/train.txt --eval-prompts data/tiny-signs/eval.txt \
        --scorer-url http://127.0.0.1:8100 --gate-parts clip --lora-rank 4

A sample is overrated if it ranks higher by the whole score than by other parts of the score, such as one of weight 0.
Only these samples have a KL to the policy before training (arXiv 2512.24138, the gate). The released code also
adapts the share between 0.02 and 0.2, resets the reference, and weights diverse samples more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

# 1. Settings


@dataclass(frozen=True)
class Args:
    """Settings of a run."""

    model: str  # Folder or hub id of a diffusers text-to-image pipeline
    prompts: str  # Training prompts, one per line, or a .jsonl file
    eval_prompts: str  # Held-out prompts
    scorer_url: str  # URL of a reward server
    gate_parts: str  # Parts of the score, separated by commas, that detect overrated samples
    name: str = "gardo"  # Name of the run in runs/NAME

    vllm_omni: bool = False  # Sample with vLLM-Omni, in this process, instead of the trained net
    shard: Literal["ddp", "fsdp2"] = "ddp"  # On several ranks: replicated (ddp) or sharded (fsdp2) weights
    dtype: Literal["float32", "bfloat16"] = "float32"  # Data type of frozen weights; trained weights are float32
    lora_rank: int = 4  # Rank of the adapters; the net without them is the reference of the KL
    lora_alpha: int = 64  # The adapters' product is scaled by alpha / rank

    prompts_per_step: int = 8  # Prompts in a training step, over all ranks
    group_size: int = 8  # Samples of each prompt
    batch_size: int = 16  # Samples per forward of a rank
    height: int = 32  # Pixels
    width: int = 96  # Pixels
    num_inference_steps: int = 10  # Denoising steps
    guidance_scale: float = 1.0  # Classifier-free guidance
    noise_level: float = 0.4  # Strength of the injected noise
    window_size: int = 2  # Number of consecutive stochastic steps; only they are trained
    window_low: int = 1  # First step that may be stochastic
    window_high: int = 4  # One past the last step that may be stochastic

    num_minibatches: int = 1  # Optimizer steps in a training step
    clip_range: float = 1e-3  # Half-width of PPO's clip
    kl_coef: float = 0.04  # Weight of the KL
    gate_share: float = 0.1  # Largest share of a step's samples in the KL
    lr: float = 8e-5  # Learning rate of AdamW

    train_steps: int = 300  # Training steps
    eval_every: int = 50  # Training steps between evaluations
    save_every: int = 10  # Training steps between checkpoints
    seed: int = 0  # Seed of all random numbers


MAY_CHANGE = ("name", "scorer_url", "shard", "train_steps", "eval_every", "save_every")  # when a run resumes
args = tyro.cli(Args, description=__doc__)  # before torch is imported, so that --help is fast
for name, value in vars(args).items():
    low = 0 if name in ("window_low", "seed") else 1
    if type(value) is int and value < low:
        raise SystemExit(f"--{name.replace('_', '-')} must be >= {low}, got {value}")
folder = Path("runs", args.name)
if ".." in folder.parts or folder.parent.parts[:1] != ("runs",):
    raise SystemExit(f"--name must name a folder below runs/, got {args.name!r}")

import torch
from omni_losses import gaussian_kl, group_advantages, grpo_loss, overrated
from omni_reward import RewardClient
from omni_rollout import Engine, Params, Prompt, Trajectory, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.sampler import check_images
from omni_sched import sde_step, sde_window
from omni_train.checkpoint.store import Checkpoint, check_config
from omni_train.dist import deal, deterministic, gather_by_index, init_distributed, mean_metrics, same_error, shutdown
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder
from omni_train.lora import reference
from omni_train.optim import SummedBackward, build_adamw, optimizer_step
from omni_train.prepare import Lora, Preparation, prepare
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.prompts.sampler import PromptSampler, sample_seed
from omni_train.shard import shard
from omni_train.signals import catch_stop
from omni_train.weights.full import named_weights, save_weights
from torch import Tensor

# 2. The ranks and their inputs

dist = init_distributed()  # one process per device; without torchrun one rank
if dist.device.type == "cpu":
    torch.set_num_threads(1)  # reproducible on any number of cores
dtype = getattr(torch, args.dtype)
mode = args.shard if dist.mesh else "none"


def check_prompt(record: PromptRecord) -> None:
    """Raise ValueError for a prompt with features that this page does not support."""
    if record.images or record.size:
        raise ValueError("a prompt must have no images and no size: train_flowgrpo.py takes them")


def expand(records: Sequence[PromptRecord], num_samples: int, step: int) -> list[Prompt]:
    """Return the samples of each prompt. Each has its own seed, so that samples do not depend on ranks and batches."""
    return [
        Prompt(
            record.text, group=group, index=group * num_samples + i, seed=sample_seed(args.seed, step, record.index, i),
            negative=record.negative, meta=dict(record.meta),
        )
        for group, record in enumerate(records)
        for i in range(num_samples)
    ]  # fmt: skip


with same_error(dist):  # an error on one rank ends all ranks
    num_prompts, per_round = args.prompts_per_step, dist.world_size * args.batch_size  # one batch on each rank
    train_prompts = PromptSampler(args.prompts, prompts_per_step=num_prompts, seed=args.seed, check=check_prompt)
    eval_prompts = expand(load_prompts(args.eval_prompts, check=check_prompt), 1, -1)
    num_samples, multiple = num_prompts * args.group_size, per_round * args.num_minibatches
    if num_samples % multiple:
        raise ValueError(f"a step must have a multiple of {multiple} samples, got {num_samples}")
    if len(eval_prompts) % per_round:
        raise ValueError(f"--eval-prompts must have a multiple of {per_round} lines, got {len(eval_prompts)}")
    model = open_model(args.model)
    if "image" not in model.MEDIA:
        raise ValueError(f"--model must make images, {args.model} makes {' and '.join(model.MEDIA)}")
    check_images(model, [])  # it must sample from text only
    params = Params(args.num_inference_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    model.check(params)
    model.check_files()
    scorer = RewardClient(args.scorer_url, timeout_s=120)
    scorer.check()

# 3. The policy, the engine that samples from it, and the run's files

lora = Lora(model.LORA_TARGETS, args.lora_rank, args.lora_alpha, "default", args.seed)
preparation = Preparation(dist.device, model.BLOCK_NAMES, dtype, lora, mesh=dist.mesh if mode == "fsdp2" else None)
files = {name: model.weight_files(part) for name, part in model.nets.items()}
net = prepare(model.empty_net(buffers=True), preparation, files)  # adapters, weights, shards
if mode == "ddp":
    shard(net, dist.mesh, mode=mode)  # copies rank 0's trained weights; for fsdp2, `prepare` has sharded them

if args.vllm_omni:
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    engine: Engine = VllmOmniEngine(model, device=dist.device, dtype=dtype, together=partial(same_error, dist))
else:
    engine = DiffusersEngine(model, model.load(device=dist.device, dtype=dtype, net=net))

weights = [p for p in net.parameters() if p.requires_grad]
optimizer = build_adamw(weights, lr=args.lr, weight_decay=0.0)
backward = deterministic()(SummedBackward(net, dist.mesh, mode=mode))  # sums the gradients of all ranks

RunLock(folder, dist)  # one writer of the folder at a time
checkpoints = Checkpoint(folder / "checkpoints", dist)
if saved := checkpoints.latest():
    check_config(saved, vars(args), ignore=MAY_CHANGE)
    checkpoints.load(saved, net, optimizer)
claim_folder(dist, folder, has_checkpoint=bool(saved))  # raises if it holds another run
first_step = saved.step if saved else 0
log = RunLog(folder, is_main=dist.is_main, total_steps=args.train_steps, resume_step=first_step if saved else -1)

# 4. Sampling


def sample(prompts: Sequence[Prompt], params: Params) -> tuple[list[Trajectory], Tensor, Tensor]:
    """Return this rank's batches, and rewards [N] and parts [N, M] of all ranks' samples, NaN if missing.

    Each batch is scored while the next one is sampled. A failed request ends the run.
    """
    batches, pending = [], []
    for own_prompts in deal(prompts, dist, args.batch_size):
        batches.append(engine.generate(own_prompts, params))
        images = {"image": batches[-1].media["image"].cpu().numpy()}
        pending.append(scorer.submit(images, [p.text for p in own_prompts], [p.meta for p in own_prompts]))
    with same_error(dist):
        scores = [score for request in pending for score in request.result()]
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    rows = [[math.nan if score.value is None else score.value for score in scores]]
    rows += [[score.parts.get(name, math.nan) for score in scores] for name in args.gate_parts.split(",")]
    rewards, *parts = [
        gather_by_index(dist, indices, row, len(prompts)) for row in torch.tensor(rows, dtype=torch.float64)
    ]
    if not rewards.isnan().all() and any(part.isnan().all() for part in parts):
        named = ", ".join(scores[0].parts)
        raise ValueError(f"--gate-parts must name parts of the scores, got {args.gate_parts}; this scorer has {named}")
    return batches, rewards, torch.stack(parts, dim=1)


# 5. Training

with log, catch_stop() as stop:
    engine.load_weights(() if engine.shares_weights else named_weights(net), version=first_step)
    if not saved:
        log.log(0, {"eval/reward": sample(eval_prompts, params)[1].nanmean().item()})
    for step in range(first_step, args.train_steps):
        # Rollout: a few consecutive denoising steps, the window, are stochastic.
        window = sde_window(
            args.num_inference_steps, args.window_size, low=args.window_low, high=args.window_high,
            strategy="random", iteration=step, seed=args.seed,
        )  # fmt: skip
        noisy = replace(params, rule=sde_step, noise_level=args.noise_level, sde_steps=window)
        prompts = expand(train_prompts.at(step), args.group_size, step)
        with log.phase("rollout"):
            batches, rewards, parts = sample(prompts, noisy)

        # Advantages: compare each sample with the others of its prompt.
        groups = torch.tensor([prompt.group for prompt in prompts])
        advantages = group_advantages(rewards, groups, std="batch").to(dist.device)

        # Gate: the KL is the mean over the samples that the reward overrates.
        gate = overrated(rewards, parts, args.gate_share).float()
        gate = (gate / gate.mean().clamp(min=1 / len(gate))).to(dist.device)

        # Update: evaluate the stochastic steps again; the ratio is their probability over that before the update.
        losses, kls = [], []
        with log.phase("update"):
            old = [[batch.rollout_log_prob[:, k] for k in range(batch.num_kept)] for batch in batches]
            if not engine.is_exact:  # its arithmetic is close to the trainer's but not equal
                with torch.no_grad():
                    old = [[replay(model, net, b, k).log_prob for k in range(b.num_kept)] for b in batches]
            num_batches = len(batches) // args.num_minibatches
            for first in range(0, len(batches), num_batches):
                for batch, old_log_prob in [*zip(batches, old, strict=True)][first : first + num_batches]:
                    own_advantages = advantages[batch.indices]
                    for k in range(batch.num_kept):
                        new = replay(model, net, batch, k)
                        out = grpo_loss(new.log_prob, old_log_prob[k], own_advantages, clip_range=args.clip_range)
                        if first == 0 and out.metrics["ratio_max_dev"] != 0:
                            raise RuntimeError(f"the ratio must be 1 before an update, got {out.metrics}")
                        with torch.no_grad(), reference(net):
                            before_training = replay(model, net, batch, k)
                        kl = (gate[batch.indices] * gaussian_kl(new.mean, before_training.mean, new.std)).mean()
                        num_parts = num_batches * batch.num_kept
                        backward((out.loss + args.kl_coef * kl) / (num_parts * dist.world_size), of=num_parts)
                        losses.append(out.loss.detach())
                        kls.append(kl.detach())
                result = optimizer_step(optimizer, weights, lr=args.lr, max_grad_norm=1.0, dist=dist)
        with log.phase("sync"):
            engine.load_weights(() if engine.shares_weights else named_weights(net), version=step + 1)

        # Evaluate, log, save, stop.
        must_stop, is_last = stop.requested(dist), step + 1 == args.train_steps
        metrics = {"reward/mean": rewards.nanmean().item(), "policy/grad_norm": result.grad_norm}
        metrics["reward/overrated_ratio"] = (gate > 0).float().mean().item()
        metrics |= mean_metrics(dist, {"policy/loss": torch.stack(losses).mean(), "policy/kl": torch.stack(kls).mean()})
        if is_last or (step + 1) % args.eval_every == 0:
            with log.phase("eval"):
                metrics["eval/reward"] = sample(eval_prompts, params)[1].nanmean().item()
        log.log(step + 1, metrics)
        checkpoints.poll()
        if is_last or must_stop or (step + 1) % args.save_every == 0:
            checkpoints.async_save(step + 1, net, optimizer, config=vars(args))
        if must_stop:
            break
    checkpoints.wait()

for name, part in model.nets.items():  # in the layout that diffusers' pipeline loads
    save_weights(net.get_submodule(name), folder / "weights" / name, dist, into=part)
engine.close()
shutdown()
