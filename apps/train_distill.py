"""On-policy distillation of flow-matching models: few-step students, distilled guidance, several teachers.

    prompts -> rollout of the student -> the teachers' velocity at the student's latents -> loss -> step

The student samples, and a teacher computes its velocity at each latent of the student, so that the student is corrected
on its own trajectories (DiffusionOPD, arXiv 2605.15055). A teacher with several steps per student step trains a
few-step student (progressive distillation, arXiv 2202.00512, on the student's trajectories). A teacher with guidance
trains a student that needs no guidance.

    omni-rl train distill --preset tiny-signs
    omni-rl train distill --nproc-per-node 8 --model black-forest-labs/FLUX.1-dev --lora.rank 32 \\
        --teachers ocr=runs/ocr/weights,style=runs/style/weights --prompts prompts.jsonl --eval.prompts eval.txt
    torchrun --standalone --nproc-per-node 8 apps/train_distill.py ...  # the same, without the command

The teacher is the model before training, or `--teachers` names others. They must be trained like the student: with LoRA
of the same rank, or with all weights. A prompt selects a teacher with the key `"teacher"` of its line; otherwise all
teachers apply. Training needs no reward: a scorer grades only evaluations.

Differences from the released code of the paper:
1. `std` is the true standard deviation of a step, so the loss is the true KL (theirs misses a factor |dt|).
2. Teachers may take more steps than the student.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs, load_records
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import Flat, at_least, between, prefix_errors, require
from omni_rl.settings.rules import check_scored

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class StudentSampling(groups.Sampling):
    """Sampling of the student."""

    num_inference_steps: Annotated[int, between(2, 10_000)] = 4  # Denoising steps of the student


@dataclass(frozen=True)
class Args(MediaArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    RATES = (1e-5, 1e-4)

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.MediaSharding = groups.MediaSharding()
    memory: groups.MediaMemory = groups.MediaMemory()
    data: Flat[groups.Data] = groups.Data(group_size=1)
    eval: MediaEval = MediaEval(num_inference_steps=4)
    sampling: Flat[StudentSampling] = StudentSampling()
    scorer: groups.ScoredScorer = groups.ScoredScorer()
    optim: groups.MediaOptim = groups.MediaOptim()
    streams: groups.Streams = groups.Streams()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-4 with LoRA, 1e-5 without

    # Algorithm
    algo: Literal["opd", "opd-cps", "opd-ode"] = "opd-ode"  # Algorithm, a row of the table ALGOS
    teachers: str = ""  # Teachers as NAME=FOLDER of weights, separated by commas; empty: the model before training
    teacher_substeps: Annotated[int, at_least(1)] = 1  # Steps of a teacher within each step of the student
    teacher_guidance_scale: Annotated[float | None, at_least(0)] = None  # Teachers' guidance scale; none: the student's
    teacher_true_cfg_scale: Annotated[float | None, at_least(1)] = None  # Teachers' true CFG scale; none: the student's
    noise_level: Annotated[float, at_least(1e-6)] = 0.7  # Strength of the noise of opd and opd-cps
    train_low: Annotated[int, at_least(0)] = 0  # First trained step of the student
    train_high: int | None = None  # One past the last trained step; none: all that can be trained


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    low, high = trained_steps(args)
    check_scored(args, num_trained=max(1, high - low), needs_scorer=False)
    end = args.sampling.num_inference_steps - (args.algo != "opd-ode")
    bounds = f"steps of the student (0 to {end} with {args.algo})"
    require(
        (low < high <= end, f"--train-low and --train-high must bound {bounds}, got {low} and {high}"),
        (args.noise_level <= 1 or args.algo != "opd-cps", "--noise-level must be <= 1 for opd-cps"),
    )
    names = parse_teachers(args.teachers)
    with prefix_errors("--prompts: "):
        for record in load_records(args.data, args.data.prompts):
            teacher = record.meta.get("teacher")
            require((teacher in (None, *names), f'"teacher" must be one of --teachers, got {teacher!r}'))


def trained_steps(args: Args) -> tuple[int, int]:
    """Return the first trained step of the student, and one past the last."""
    end = args.sampling.num_inference_steps - (args.algo != "opd-ode")
    return args.train_low, end if args.train_high is None else args.train_high


def parse_teachers(text: str) -> dict[str, str]:
    """Return the folders of the teachers by name.

    Raises:
        ValueError: a piece is not NAME=FOLDER, a name is repeated or not an identifier, or the folder does not exist.
    """
    folders: dict[str, str] = {}
    for piece in filter(None, text.split(",")):
        name, _, folder = piece.partition("=")
        is_new = name.isidentifier() and name not in folders and folder
        require(
            (is_new, f"--teachers must be NAME=FOLDER with commas between, each name once, got {text!r}"),
            (Path(folder).is_dir(), f"--teachers: {name} must be a folder of weights, got {folder}"),
        )
        folders[name] = folder
    return folders


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_distill", description=__doc__)

# 2. Algorithms. To add one, add a row.

import torch
from omni_losses import LossOutput, distill_kl_loss, distill_velocity_loss
from omni_rl.flow.sampling import evaluate_set, sample, show, step_prompts
from omni_rl.flow.scorers import abstaining_scorer
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import (
    check_trained_steps,
    export,
    open_engine,
    open_scorers,
    read_media,
    read_teachers,
)
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout import Params, Trajectory
from omni_rollout.types import Cond, to_device
from omni_sched import Transition, cps_step, euler_step, ode_step, sde_step
from torch import Tensor


def velocity_loss(velocity: Tensor, target: Tensor, latents: "Latents", weights: Tensor) -> LossOutput:
    """Return the squared distance of the velocities, for deterministic steps."""
    return distill_velocity_loss(velocity, target, weights=weights)


def kl_loss(velocity: Tensor, target: Tensor, latents: "Latents", weights: Tensor) -> LossOutput:
    """Return the KL of the stochastic step to the teacher's."""
    levels = {"sigma": latents.sigma, "sigma_next": latents.sigma_next, "noise_level": latents.params.noise_level}
    student, teacher = (latents.params.rule(v, latents.x, **levels, x_next=latents.x_next) for v in (velocity, target))
    return distill_kl_loss(student.mean, teacher.mean, student.std, weights=weights)


Loss = Callable[[Tensor, Tensor, "Latents", Tensor], LossOutput]
ALGOS: dict[str, tuple[Callable[..., Transition], Loss]] = {
    "opd": (sde_step, kl_loss),
    "opd-cps": (cps_step, kl_loss),
    "opd-ode": (ode_step, velocity_loss),
}

INITIAL = ""  # name of the teacher that is the initial model
UNSCORED = abstaining_scorer("samples of training are not scored")

# 3. A training step: rollout of the student, and its correction


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    teachers = parse_teachers(args.teachers)
    inputs = read_media(args, world, policies=[] if teachers else ["reference"], scored=False)
    rule = None if args.algo == "opd-ode" else ALGOS[args.algo][0]
    check_trained_steps(args, world, inputs, trained_steps(args), rule)
    inputs = read_teachers(args, world, inputs, teachers, partial(teacher_params, args))
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session, scored=False)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm=args.algo)
    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            with run.phase("rollout"):
                rollout = sample(run, step_prompts(run, step), student_params(args, run.base_params), scorer=UNSCORED)
                conds = [teacher_cond(run, batch) for batch in rollout.batches]  # while the engine is awake
            with run.updating(step):
                step.metrics |= update(run, step, rollout.batches, conds, list(teachers) or [INITIAL])
            run.sync(step)
            show(run, step, rollout)


def student_params(args: Args, params: Params) -> Params:
    """Return the student's sampling parameters. The last step is not kept: it starts where the previous one ends."""
    rule, _ = ALGOS[args.algo]
    low, high = trained_steps(args)
    last = args.sampling.num_inference_steps - 1
    kept_steps = tuple(range(min(low, last - 1), min(high, last)))
    return replace(params, rule=rule, noise_level=args.noise_level, sde_steps=kept_steps)


def teacher_params(args: Args, params: Params) -> Params:
    """Return the sampling parameters of the teachers, which may be guided even if the student is not."""
    scale, cfg = args.teacher_guidance_scale, args.teacher_true_cfg_scale
    guidance = params.guidance if cfg is None else {**params.guidance, "true_cfg_scale": cfg}
    return replace(params, guidance=guidance, guidance_scale=params.guidance_scale if scale is None else scale)


@dataclass(frozen=True)
class Latents:
    """The student's latents [B, ...] before and after one of its steps, and their noise levels [B]."""

    x: Tensor
    x_next: Tensor
    sigma: Tensor
    sigma_next: Tensor
    params: Params


def latents_at(trajectory: Trajectory, i: int) -> Latents:
    """Return the latents of the i-th step of the schedule, which must be kept or the last one."""
    k = i - trajectory.params.sde_steps[0]
    if k < trajectory.num_kept:
        return Latents(
            trajectory.x[:, k],
            trajectory.x_next[:, k],
            trajectory.sigma(k),
            trajectory.sigma_next(k),
            trajectory.params,
        )
    sigma, sigma_next = (level.expand(len(trajectory)) for level in trajectory.sigmas[i : i + 2])
    return Latents(trajectory.x_next[:, -1], trajectory.x0, sigma, sigma_next, trajectory.params)


def update(
    run: MediaRun[Args], step: Step, batches: Sequence[Trajectory], conds: Sequence[Cond], teachers: Sequence[str]
) -> dict[str, float]:
    """Take an optimizer step on each minibatch of this rank's batches; metrics are means over steps and ranks.

    conds: the teachers' conditioning of each batch.
    """
    args, dist, (_, loss_of) = run.args, run.dist, ALGOS[run.args.algo]
    points = [(batch, cond, i) for batch, cond in zip(batches, conds, strict=True) for i in range(*trained_steps(args))]
    size = len(points) // args.data.num_minibatches
    forwards, results = [], []
    for first in range(0, len(points), size):
        for batch, cond, i in points[first : first + size]:
            latents = latents_at(batch, i)
            velocity = run.model.predict_velocity(run.policy.net, latents.x, latents.sigma, batch.cond, latents.params)
            outputs = []
            for name in teachers:
                weights = to_device(teacher_shares(batch, name, len(teachers)), latents.x.device)
                outputs.append(loss_of(velocity, teacher_velocity(run, name, cond, latents), latents, weights))
            loss = torch.stack([out.loss for out in outputs]).sum()
            # Gradients are summed over batches, steps and ranks; this makes the sum a mean.
            run.policy.backward(loss / (size * dist.dp_size), of=size)
            means = {name: torch.stack([out.metrics[name] for out in outputs]).mean() for name in outputs[0].metrics}
            forwards.append(means | {"loss": loss.detach()})
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


def teacher_shares(batch: Trajectory, teacher: str, count: int) -> Tensor:
    """Return a teacher's share [B] of each sample's loss: 1 or 0 if the prompt names a teacher, else 1 / count."""
    teacher_names = [prompt.meta.get("teacher") for prompt in batch.prompts]
    return torch.tensor([1 / count if name is None else float(name == teacher) for name in teacher_names])


def teacher_cond(run: MediaRun[Args], batch: Trajectory) -> Cond:
    """Return the teachers' conditioning of a batch: the student's, with negative prompts if only they are guided."""
    params = teacher_params(run.args, batch.params)
    needs_negatives = run.model.is_guided(params) and not run.model.is_guided(batch.params)
    return run.engine.condition(batch.prompts, params) if needs_negatives else batch.cond


@torch.no_grad()
def teacher_velocity(run: MediaRun[Args], name: str, cond: Cond, latents: Latents) -> Tensor:
    """Return a teacher's mean velocity [B, ...] over its steps within the student's step."""
    args, model, params = run.args, run.model, teacher_params(run.args, latents.params)
    levels = [
        torch.lerp(latents.sigma, latents.sigma_next, j / args.teacher_substeps)
        for j in range(args.teacher_substeps + 1)
    ]
    x, velocities = latents.x, []
    with run.policy.reference() if name == INITIAL else run.policy.teacher(name) as net:
        for sigma, sigma_next in pairwise(levels):
            velocities.append(model.predict_velocity(net, x, sigma, cond, params))
            x = euler_step(velocities[-1], x, sigma, sigma_next)
    return torch.stack(velocities).mean(dim=0)


if __name__ == "__main__":
    launch(main, ARGS)
