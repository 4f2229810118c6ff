"""DMD2 on one page: train a few-step student to match the distribution of a teacher's samples.

    python -m omni_reward.server --scorer ocr --option reading=line --port 8100 &
    torchrun --standalone --nproc-per-node 2 apps/variants/dmd2.py --model checkpoints/tiny-signs-qwen-image \
        --prompts data/tiny-signs/train.txt --eval-prompts data/tiny-signs/eval.txt \
        --scorer-url http://127.0.0.1:8100 --teacher-true-cfg-scale 4

The student predicts clean samples and noises them again for its next step (arXiv 2405.14867). The fake net learns to
denoise them. The difference between it and the teacher, the net before training, is the direction from the student's
samples to the teacher's. Only evaluations are scored. The paper's GAN, which needs data, is left out.
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
    name: str = "dmd2"  # Name of the run in runs/NAME

    shard: Literal["ddp", "fsdp2"] = "ddp"  # On several ranks: replicated (ddp) or sharded (fsdp2) weights
    dtype: Literal["float32", "bfloat16"] = "float32"  # Data type of frozen weights; trained weights are float32
    lora_rank: int = 16  # Rank of the adapters of student and fake net; 0 trains two full copies
    lora_alpha: int = 32  # The adapters' product is scaled by alpha / rank

    prompts_per_step: int = 64  # Prompts in a training step, over all ranks, each with one sample
    batch_size: int = 16  # Samples per forward of a rank
    height: int = 32  # Pixels
    width: int = 96  # Pixels
    num_inference_steps: int = 4  # Steps of the student
    guidance_scale: float = 1.0  # Guidance of student and fake net, for nets that take it as an input
    teacher_guidance_scale: float = 1.0  # Guidance of the teacher, by the pipeline's guidance_scale
    teacher_true_cfg_scale: float = 1.0  # Guidance of the teacher, by the pipeline's true_cfg_scale

    fake_updates: int = 5  # Optimizer steps of the fake net before each of the student
    min_noise: float = 0.02  # Lowest noise level at which to compare samples
    max_noise: float = 0.98  # Highest noise level
    lr: float = 1e-4  # Learning rate of AdamW for the student
    fake_lr: float = 3e-4  # Learning rate for the fake net

    train_steps: int = 100  # Training steps
    eval_every: int = 10  # Training steps between evaluations
    save_every: int = 10  # Training steps between checkpoints
    seed: int = 0  # Seed of all random numbers


MAY_CHANGE = ("name", "scorer_url", "shard", "train_steps", "eval_every", "save_every")  # when a run resumes
args = tyro.cli(Args, description=__doc__)  # before torch is imported, so that --help is fast
for name, value in vars(args).items():
    if type(value) is int and value < (low := int(name not in ("lora_rank", "seed"))):
        raise SystemExit(f"--{name.replace('_', '-')} must be >= {low}, got {value}")
if not 0 < args.min_noise < args.max_noise < 1:
    raise SystemExit(f"0 < --min-noise < --max-noise < 1 must hold, got {args.min_noise} and {args.max_noise}")
folder = Path("runs", args.name)
if ".." in folder.parts or folder.parent.parts[:1] != ("runs",):
    raise SystemExit(f"--name must name a folder below runs/, got {args.name!r}")

import torch
from omni_losses import distribution_matching_loss, velocity_error
from omni_reward import RewardClient
from omni_rollout import Params, Prompt, Trajectory
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.sampler import check_images
from omni_sched import INITIAL_NOISE, add_noise, cps_step, step_noise
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


def expand(records: Sequence[PromptRecord], step: int) -> list[Prompt]:
    """Return a sample for each prompt. Each has its own seed, so that samples do not depend on ranks and batches."""
    return [
        Prompt(
            record.text, group=i, index=i, seed=sample_seed(args.seed, step, record.index, 0),
            negative=record.negative, meta=dict(record.meta),
        )
        for i, record in enumerate(records)
    ]  # fmt: skip


with same_error(dist):  # an error on one rank ends all ranks
    num_prompts, per_round = args.prompts_per_step, dist.world_size * args.batch_size  # full batches on all ranks
    train_prompts = PromptSampler(args.prompts, prompts_per_step=num_prompts, seed=args.seed, check=check_prompt)
    eval_prompts = expand(load_prompts(args.eval_prompts, check=check_prompt), -1)
    for name, count in {"--prompts-per-step": num_prompts, "lines of --eval-prompts": len(eval_prompts)}.items():
        if count % per_round:
            raise ValueError(f"{name} must be a multiple of {per_round}, got {count}")
    model = open_model(args.model)
    if "image" not in model.MEDIA:
        raise ValueError(f"--model must make images, {args.model} makes {' and '.join(model.MEDIA)}")
    check_images(model, [])  # it must sample from text only
    # A step of the student: to its clean sample, then by fresh noise to the next level; `cps_step` at noise level 1.
    params = Params(
        args.num_inference_steps, args.height, args.width, guidance_scale=args.guidance_scale,
        rule=cps_step, noise_level=1.0, sde_steps=tuple(range(args.num_inference_steps - 1)),
    )  # fmt: skip
    cfg = {"true_cfg_scale": args.teacher_true_cfg_scale} if args.teacher_true_cfg_scale != 1 else {}
    guided = replace(params, guidance_scale=args.teacher_guidance_scale, guidance=cfg)
    for sampling in (params, guided):
        model.check(sampling)
    model.check_files()
    scorer = RewardClient(args.scorer_url, timeout_s=120)
    scorer.check()

# 3. Student, fake net and teacher, and the run's files

preparation = Preparation(dist.device, model.BLOCK_NAMES, dtype, mesh=dist.mesh if mode == "fsdp2" else None)
files = {name: model.weight_files(part) for name, part in model.nets.items()}


def read_net(prep: Preparation) -> nn.Module:
    """Return the model's net with its weights."""
    return prepare(model.empty_net(buffers=True), prep, files)


if args.lora_rank:  # three nets in one: two adapters, and the net without them
    lora = Lora(model.LORA_TARGETS, args.lora_rank, args.lora_alpha, "default", args.seed, others=("fake",))
    trained = student = read_net(replace(preparation, lora=lora))
    student_weights, fake_weights = (adapter_params(student, name) for name in ("default", "fake"))
    nn.ParameterList(fake_weights).requires_grad_(True)
else:
    student, fake, teacher = read_net(preparation), read_net(preparation), read_net(preparation.frozen())
    trained = nn.ModuleDict({"student": student, "fake": fake})
    student_weights, fake_weights = list(student.parameters()), list(fake.parameters())
if mode == "ddp":
    shard(trained, dist.mesh, mode=mode)


@contextmanager
def net_of(role: str) -> Iterator[nn.Module]:
    """Yield the net of student, fake or teacher, with its adapter active in the block."""
    if not args.lora_rank:
        yield {"student": student, "fake": fake, "teacher": teacher}[role]
    else:
        with reference(student) if role == "teacher" else adapter(student, "default" if role == "student" else role):
            yield student


engine = DiffusersEngine(model, model.load(device=dist.device, dtype=dtype, net=student))
optimizer = build_adamw([*student_weights, *fake_weights], lr=args.lr, weight_decay=0.0)  # only those with a gradient
backward = deterministic()(SummedBackward(trained, dist.mesh, mode=mode))  # sums the gradients of all ranks

RunLock(folder, dist)  # one writer of the folder at a time
checkpoints = Checkpoint(folder / "checkpoints", dist)
if saved := checkpoints.latest():
    check_config(saved, vars(args), ignore=MAY_CHANGE)
    checkpoints.load(saved, trained, optimizer)
claim_folder(dist, folder, has_checkpoint=bool(saved))  # raises if it holds another run
first_step = saved.step if saved else 0
log = RunLog(folder, is_main=dist.is_main, total_steps=args.train_steps, resume_step=first_step if saved else -1)

# 4. Sampling, and clean samples


def evaluate() -> float:
    """Return the mean score of the student's samples for the held-out prompts."""
    indices, pending = [], []
    for chunk in deal(eval_prompts, dist, args.batch_size):
        images = {"image": engine.generate(chunk, params).media["image"].cpu().numpy()}
        pending.append(scorer.submit(images, [p.text for p in chunk], [p.meta for p in chunk]))
        indices += [prompt.index for prompt in chunk]
    with same_error(dist):
        scores = [math.nan if score.value is None else score.value for one in pending for score in one.result()]
    values = torch.tensor(scores, dtype=torch.float64)
    return gather_by_index(dist, torch.tensor(indices), values, len(eval_prompts)).nanmean().item()


@dataclass(frozen=True)
class Point:
    """Latents x [B, ...] of a batch at level sigma [B], at the start of the student's k-th step."""

    batch: Trajectory
    k: int
    x: Tensor
    sigma: Tensor


def sample_points(prompts: Sequence[Prompt]) -> list[Point]:
    """Sample, and return the starting points of the student's steps."""
    batch = engine.generate(prompts, replace(params, decode=False))
    noise = step_noise([prompt.seed for prompt in prompts], INITIAL_NOISE, batch.x0.shape[1:])
    starts = [noise.to(dist.device), *batch.x_next.unbind(1)]
    return [Point(batch, k, x, batch.sigmas[k].expand(len(x))) for k, x in enumerate(starts)]


def predict(role: str, batch: Trajectory, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the velocity and the clean samples, each [B, ...], that a net predicts from x [B, ...] at sigma [B]."""
    role_params = guided if role == "teacher" else params
    cond = engine.condition(batch.prompts, role_params)  # cached: encoded once
    with net_of(role) as net:
        velocity = model.predict_velocity(net, x, sigma, cond, role_params)
    return velocity, x - sigma.view(-1, *[1] * (x.ndim - 1)) * velocity


def draw_noise(point: Point, update: int) -> tuple[Tensor, Tensor]:
    """Return new noise [B, ...] and noise levels [B] for a point in an update of a training step."""
    seeds, number = [p.seed for p in point.batch.prompts], (update + 1) * args.num_inference_steps + point.k
    shares = torch.tensor([sample_seed(seed, number, 0, 0) / 2**63 for seed in seeds])
    levels = args.min_noise + (args.max_noise - args.min_noise) * shares
    return step_noise(seeds, number, point.x.shape[1:]).to(dist.device), levels.to(dist.device)


# 5. Training

with log, catch_stop() as stop:
    engine.load_weights((), version=first_step)
    if not saved:
        log.log(0, {"eval/reward": evaluate()})
    for step in range(first_step, args.train_steps):
        # Rollout: the student's latents before each of its steps, and the clean samples that it predicts there.
        prompts = expand(train_prompts.at(step), step)
        with log.phase("rollout"), torch.no_grad():
            points = [point for chunk in deal(prompts, dist, args.batch_size) for point in sample_points(chunk)]
            samples = [predict("student", point.batch, point.x, point.sigma)[1] for point in points]
        share = 1 / (len(points) * dist.world_size)  # gradients are summed over points and ranks
        fake_errors, matching_errors = [], []

        # The fake net learns the student's samples, with several updates per update of the student: two time scales.
        with log.phase("fake"):
            for i in range(args.fake_updates):
                for point, x0 in zip(points, samples, strict=True):
                    noise, levels = draw_noise(point, i)
                    velocity, _ = predict("fake", point.batch, add_noise(x0, noise, levels), levels)
                    error = velocity_error(velocity, x0, noise).mean()
                    backward(error * share, of=len(points))
                    fake_errors.append(error.detach())
                learned = optimizer_step(optimizer, fake_weights, lr=args.fake_lr, max_grad_norm=1.0, dist=dist)

        # The student moves its samples from the fake net's denoised samples towards the teacher's.
        with log.phase("update"):
            for point in points:
                _, x0 = predict("student", point.batch, point.x, point.sigma)
                noise, levels = draw_noise(point, args.fake_updates)
                with torch.no_grad():
                    noised = add_noise(x0, noise, levels)
                    others = [predict(role, point.batch, noised, levels)[1] for role in ("fake", "teacher")]
                out = distribution_matching_loss(x0, *others)
                backward(out.loss * share, of=len(points))
                matching_errors.append(out.metrics["matching_error"])
            result = optimizer_step(optimizer, student_weights, lr=args.lr, max_grad_norm=1.0, dist=dist)
        engine.load_weights((), version=step + 1)

        # Evaluate, log, save, stop.
        must_stop, is_last = stop.requested(dist), step + 1 == args.train_steps
        metrics = {"policy/grad_norm": result.grad_norm, "fake/grad_norm": learned.grad_norm}
        means = {"policy/matching_error": matching_errors, "fake/error": fake_errors}
        metrics |= mean_metrics(dist, {name: torch.stack(values).mean() for name, values in means.items()})
        if is_last or (step + 1) % args.eval_every == 0:
            with log.phase("eval"):
                metrics["eval/reward"] = evaluate()
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
