"""TDM-R1 on one page: `tdm.py` with a reward that needs no gradient.

    python -m omni_reward.server --scorer ocr --option reading=line --port 8100 &
    torchrun --standalone --nproc-per-node 2 apps/variants/tdm_r1.py --model checkpoints/tiny-signs-qwen-image \
        --prompts data/tiny-signs/train.txt --eval-prompts data/tiny-signs/eval.txt --scorer-url http://127.0.0.1:8100

The student takes Euler steps, so that each of its latents leads to one image, whose score is the latent's reward (arXiv
2603.07700). A surrogate learns to make the latents of each prompt's better samples more likely than those of its worse
samples. The student follows the difference of the surrogate and the net before training, in addition to the loss of
TDM, which keeps it near the teacher.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    name: str = "tdm-r1"  # Name of the run in runs/NAME

    shard: Literal["ddp", "fsdp2"] = "ddp"  # On several ranks: replicated (ddp) or sharded (fsdp2) weights
    dtype: Literal["float32", "bfloat16"] = "float32"  # Data type of frozen weights; trained weights are float32
    lora_rank: int = 16  # Rank of the adapters of student, fake net and surrogate; 0 trains full copies
    lora_alpha: int = 32  # The adapters' product is scaled by alpha / rank

    prompts_per_step: int = 8  # Prompts in a training step, over all ranks
    group_size: int = 8  # Samples of each prompt
    batch_size: int = 16  # Samples per forward of a rank
    height: int = 32  # Pixels
    width: int = 96  # Pixels
    num_inference_steps: int = 4  # Steps of the student
    guidance_scale: float = 1.0  # Guidance of all nets except the teacher, if they take it as an input
    teacher_guidance_scale: float = 1.0  # Guidance of the teacher, by the pipeline's guidance_scale
    teacher_true_cfg_scale: float = 1.0  # Guidance of the teacher, by the pipeline's true_cfg_scale

    fake_updates: int = 5  # Optimizer steps of the fake net before each of the student
    lr: float = 1e-4  # Learning rate of AdamW for the student
    fake_lr: float = 3e-4  # Learning rate for the fake net
    surrogate_lr: float = 3e-4  # Learning rate for the surrogate
    surrogate_beta: float = 100.0  # Sharpness of the surrogate's weight; higher values reduce it sooner
    reward_weight: float = 0.7  # Weight of the learned reward relative to the loss of TDM

    train_steps: int = 100  # Training steps
    eval_every: int = 10  # Training steps between evaluations
    save_every: int = 10  # Training steps between checkpoints
    seed: int = 0  # Seed of all random numbers


MAY_CHANGE = ("name", "scorer_url", "shard", "train_steps", "eval_every", "save_every")  # when a run resumes
args = tyro.cli(Args, description=__doc__)  # before torch is imported, so that --help is fast
for name, value in vars(args).items():
    if type(value) is int and value < (low := int(name not in ("lora_rank", "seed"))):
        raise SystemExit(f"--{name.replace('_', '-')} must be >= {low}, got {value}")
folder = Path("runs", args.name)
if ".." in folder.parts or folder.parent.parts[:1] != ("runs",):
    raise SystemExit(f"--name must name a folder below runs/, got {args.name!r}")

import torch
from omni_losses import added_noise_error, dgpo_loss, distribution_matching_loss, group_advantages
from omni_reward import RewardClient
from omni_rollout import Params, Prompt, Trajectory
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.sampler import check_images
from omni_sched import INITIAL_NOISE, euler_step, ode_step, renoise, step_noise
from omni_train.checkpoint.store import Checkpoint, check_config
from omni_train.dist import deal, deterministic, gather_by_index, init_distributed, mean_metrics, same_error, shutdown
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder
from omni_train.lora import adapter, adapter_params, reference
from omni_train.optim import SummedBackward, build_adamw, optimizer_step
from omni_train.prepare import Lora, Preparation, prepare
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.prompts.sampler import PromptSampler, sample_seed
from omni_train.shard import shard
from omni_train.signals import catch_stop
from omni_train.weights.full import save_weights
from torch import Tensor, nn

# 2. The ranks and their inputs

dist = init_distributed()  # one process per device; without torchrun one rank
if dist.device.type == "cpu":
    torch.set_num_threads(1)  # reproducible on any number of cores
dtype = getattr(torch, args.dtype)
mode = args.shard if dist.mesh else "none"


def check_prompt(record: PromptRecord) -> None:
    """Raise ValueError for a prompt with features that this page does not support."""
    if record.images or record.size:
        raise ValueError("a prompt must have no images and no size: train_distill.py takes them")


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
    num_prompts, per_round = args.prompts_per_step, dist.world_size * args.batch_size  # full batches on all ranks
    train_prompts = PromptSampler(args.prompts, prompts_per_step=num_prompts, seed=args.seed, check=check_prompt)
    eval_prompts = expand(load_prompts(args.eval_prompts, check=check_prompt), 1, -1)
    counts = {"samples of a step": num_prompts * args.group_size, "lines of --eval-prompts": len(eval_prompts)}
    for name, count in counts.items():
        if count % per_round:
            raise ValueError(f"{name} must be a multiple of {per_round}, got {count}")
    if args.batch_size % args.group_size:
        raise ValueError(f"--batch-size must be a multiple of --group-size {args.group_size}, got {args.batch_size}")
    model = open_model(args.model)
    if "image" not in model.MEDIA:
        raise ValueError(f"--model must make images, {args.model} makes {' and '.join(model.MEDIA)}")
    check_images(model, [])  # it must sample from text only
    params = Params(
        args.num_inference_steps, args.height, args.width, guidance_scale=args.guidance_scale,
        rule=ode_step, noise_level=1.0, sde_steps=tuple(range(args.num_inference_steps - 1)),
    )  # fmt: skip
    cfg = {"true_cfg_scale": args.teacher_true_cfg_scale} if args.teacher_true_cfg_scale != 1 else {}
    guided = replace(params, guidance_scale=args.teacher_guidance_scale, guidance=cfg)
    for sampling in (params, guided):
        model.check(sampling)
    model.check_files()
    scorer = RewardClient(args.scorer_url, timeout_s=120)
    scorer.check()

# 3. Student, fake net, surrogate and teacher, and the run's files

preparation = Preparation(dist.device, model.BLOCK_NAMES, dtype, mesh=dist.mesh if mode == "fsdp2" else None)
files = {name: model.weight_files(part) for name, part in model.nets.items()}


def read_net(prep: Preparation) -> nn.Module:
    """Return the model's net with its weights."""
    return prepare(model.empty_net(buffers=True), prep, files)


ROLES = ("student", "fake", "surrogate")  # roles of trained nets; "reference" and "teacher" are the net before training
if args.lora_rank:  # all nets in one: adapters, and the net without them
    lora = Lora(model.LORA_TARGETS, args.lora_rank, args.lora_alpha, "default", args.seed, others=ROLES[1:])
    trained = student = read_net(replace(preparation, lora=lora))
    weights = {role: adapter_params(student, "default" if role == "student" else role) for role in ROLES}
    nn.ParameterList(p for role_weights in weights.values() for p in role_weights).requires_grad_(True)
else:
    nets, base = {role: read_net(preparation) for role in ROLES}, read_net(preparation.frozen())
    trained, student = nn.ModuleDict(nets), nets["student"]
    weights = {role: list(net.parameters()) for role, net in nets.items()}
if mode == "ddp":
    shard(trained, dist.mesh, mode=mode)


@contextmanager
def net_of(role: str) -> Iterator[nn.Module]:
    """Yield the net of a role, with its adapter active in the block."""
    if not args.lora_rank:
        yield nets[role] if role in ROLES else base
    else:
        with adapter(student, "default" if role == "student" else role) if role in ROLES else reference(student):
            yield student


engine = DiffusersEngine(model, model.load(device=dist.device, dtype=dtype, net=student))
all_weights = [p for role_weights in weights.values() for p in role_weights]
optimizer = build_adamw(all_weights, lr=args.lr, weight_decay=0.0)  # updates only weights with a gradient
backward = deterministic()(SummedBackward(trained, dist.mesh, mode=mode))  # sums the gradients of all ranks

RunLock(folder, dist)  # one writer of the folder at a time
checkpoints = Checkpoint(folder / "checkpoints", dist)
if saved := checkpoints.latest():
    check_config(saved, vars(args), ignore=MAY_CHANGE)
    checkpoints.load(saved, trained, optimizer)
claim_folder(dist, folder, has_checkpoint=bool(saved))  # raises if it holds another run
first_step = saved.step if saved else 0
log = RunLog(folder, is_main=dist.is_main, total_steps=args.train_steps, resume_step=first_step if saved else -1)

# 4. Sampling, and predictions


def sample(prompts: Sequence[Prompt]) -> tuple[list[Trajectory], Tensor]:
    """Return this rank's batches of the student, and rewards [N] of all ranks' samples, NaN without a score.

    Each batch is scored while the next one is sampled. A failed request ends the run.
    """
    batches, pending = [], []
    for chunk in deal(prompts, dist, args.batch_size):
        batches.append(engine.generate(chunk, params))
        images = {"image": batches[-1].media["image"].cpu().numpy()}
        pending.append(scorer.submit(images, [p.text for p in chunk], [p.meta for p in chunk]))
    with same_error(dist):
        scores = [math.nan if score.value is None else score.value for one in pending for score in one.result()]
    indices = torch.tensor([prompt.index for batch in batches for prompt in batch.prompts])
    return batches, gather_by_index(dist, indices, torch.tensor(scores, dtype=torch.float64), len(prompts))


@dataclass(frozen=True)
class Segment:
    """The k-th step of the student: latents [B, ...] of a batch before and after it, and their noise levels [B]."""

    batch: Trajectory
    k: int
    x: Tensor
    x_next: Tensor
    sigma: Tensor
    sigma_next: Tensor


def sample_segments(batch: Trajectory) -> list[Segment]:
    """Return the student's steps."""
    noise = step_noise([prompt.seed for prompt in batch.prompts], INITIAL_NOISE, batch.x0.shape[1:])
    x = [noise.to(dist.device), *batch.x_next.unbind(1), batch.x0]
    sigma = batch.sigmas[:, None].expand(-1, len(batch))
    return [Segment(batch, k, x[k], x[k + 1], sigma[k], sigma[k + 1]) for k in range(args.num_inference_steps)]


def predict(role: str, batch: Trajectory, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the velocity and the clean samples, each [B, ...], that a net predicts from x [B, ...] at sigma [B]."""
    role_params = guided if role == "teacher" else params
    cond = engine.condition(batch.prompts, role_params)  # cached: encoded once
    with net_of(role) as net:
        velocity = model.predict_velocity(net, x, sigma, cond, role_params)
    return velocity, x - sigma.view(-1, *[1] * (x.ndim - 1)) * velocity


def noise_segment(segment: Segment, seeds: Sequence[int], update: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the end of a step noised to levels inside it, x [B, ...], with noise [B, ...], levels [B] and std [B]."""
    number = (update + 1) * args.num_inference_steps + segment.k
    shares = torch.tensor([0.01 + 0.98 * sample_seed(seed, number, 0, 0) / 2**63 for seed in seeds]).to(dist.device)
    levels = torch.lerp(segment.sigma_next, segment.sigma, shares)
    noise = step_noise(seeds, number, segment.x.shape[1:]).to(dist.device)
    x, std = renoise(segment.x_next, noise, segment.sigma_next, levels)
    return x, noise, levels, std


# 5. Training

with log, catch_stop() as stop:
    engine.load_weights((), version=first_step)
    if not saved:
        log.log(0, {"eval/reward": sample(eval_prompts)[1].nanmean().item()})
    for step in range(first_step, args.train_steps):
        # Rollout: the student's steps, and the advantage of each sample within its group.
        prompts = expand(train_prompts.at(step), args.group_size, step)
        with log.phase("rollout"):
            batches, rewards = sample(prompts)
        groups = torch.tensor([prompt.group for prompt in prompts])
        advantages = group_advantages(rewards, groups, std="batch")
        segments = [segment for batch in batches for segment in sample_segments(batch)]
        share, of = 1 / (len(segments) * dist.world_size), len(segments)  # gradients are summed over segments and ranks
        means: dict[str, list[Tensor]] = {"fake/error": [], "surrogate/loss": [], "policy/matching_error": []}
        means["policy/reward_gap"] = []

        # The fake net learns the student's latents, with several updates per update of the student: two time scales.
        with log.phase("fake"):
            for i in range(args.fake_updates):
                for segment in segments:
                    x, noise, levels, std = noise_segment(segment, [p.seed for p in segment.batch.prompts], i)
                    velocity, _ = predict("fake", segment.batch, x, levels)
                    error = added_noise_error(velocity, x, noise, levels, std).mean()
                    backward(error * share, of=of)
                    means["fake/error"].append(error.detach())
                optimizer_step(optimizer, weights["fake"], lr=args.fake_lr, max_grad_norm=1.0, dist=dist)

        # The surrogate learns the reward of latents; a group shares its noise. Later latents have more weight.
        with log.phase("surrogate"):
            for segment in segments:
                seeds = [sample_seed(args.seed, step, prompt.group, -1) for prompt in segment.batch.prompts]
                x, noise, levels, std = noise_segment(segment, seeds, 0)
                errors = {}
                for role in ("surrogate", "reference"):
                    with torch.set_grad_enabled(role == "surrogate"):
                        velocity, _ = predict(role, segment.batch, x, levels)
                    errors[role] = added_noise_error(velocity, x, noise, levels, std)
                new, old, places = errors["surrogate"], errors["reference"], segment.batch.indices
                of_group = advantages[places].to(dist.device), groups[places].to(dist.device)
                out = dgpo_loss(new, old, new.detach(), *of_group, dgpo_beta=args.surrogate_beta)
                backward(out.loss * share * (segment.k + 1) / args.num_inference_steps, of=of)
                means["surrogate/loss"].append(out.loss.detach())
            learned = optimizer_step(
                optimizer, weights["surrogate"], lr=args.surrogate_lr, max_grad_norm=1.0, dist=dist
            )

        # The student moves its samples towards the teacher's denoised latents, and towards higher reward.
        with log.phase("update"):
            for segment in segments:
                velocity, x0 = predict("student", segment.batch, segment.x, segment.sigma)
                if not torch.equal(euler_step(velocity, segment.x, segment.sigma, segment.sigma_next), segment.x_next):
                    raise RuntimeError(f"a step must end where it ended when it was sampled, step {segment.k} does not")
                x, _, levels, _ = noise_segment(segment, [p.seed for p in segment.batch.prompts], args.fake_updates)
                with torch.no_grad():
                    to = {
                        r: predict(r, segment.batch, x, levels)[1]
                        for r in ("fake", "teacher", "surrogate", "reference")
                    }
                matching = distribution_matching_loss(x0, to["fake"], to["teacher"])
                reward = distribution_matching_loss(x0, to["reference"], to["surrogate"])
                backward((matching.loss + args.reward_weight * reward.loss) * share, of=of)
                means["policy/matching_error"].append(matching.metrics["matching_error"])
                means["policy/reward_gap"].append(reward.metrics["matching_error"])
            result = optimizer_step(optimizer, weights["student"], lr=args.lr, max_grad_norm=1.0, dist=dist)
        engine.load_weights((), version=step + 1)

        # Evaluate, log, save, stop.
        must_stop, is_last = stop.requested(dist), step + 1 == args.train_steps
        metrics = {"reward/mean": rewards.nanmean().item(), "policy/grad_norm": result.grad_norm}
        metrics["surrogate/grad_norm"] = learned.grad_norm
        metrics |= mean_metrics(dist, {name: torch.stack(values).mean() for name, values in means.items()})
        if is_last or (step + 1) % args.eval_every == 0:
            with log.phase("eval"):
                metrics["eval/reward"] = sample(eval_prompts)[1].nanmean().item()
        log.log(step + 1, metrics)
        checkpoints.poll()
        if is_last or must_stop or (step + 1) % args.save_every == 0:
            checkpoints.async_save(step + 1, trained, optimizer, config=vars(args))
        if must_stop:
            break
    checkpoints.wait()

for name, part in model.nets.items():  # in the layout that diffusers' pipeline loads
    save_weights(student.get_submodule(name), folder / "weights" / name, dist, into=part)
shutdown()
