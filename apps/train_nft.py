"""Forward-process policy optimization for flow-matching models: DiffusionNFT, AWM and DGPO.

    prompts -> rollout of the old policy -> score -> advantages -> update (noise -> velocity -> loss -> step) -> refresh

A solver generates a group of samples for each prompt, and a scorer grades them over HTTP. Training uses only the
finished samples: they are noised again, and the velocity is trained towards good samples and away from bad ones. No
stochastic steps, densities or trajectories are needed (DiffusionNFT, arXiv 2509.16117; AWM, arXiv 2509.25050;
DGPO, arXiv 2510.08425).

    omni-rl train nft --preset tiny-signs
    omni-rl train nft --nproc-per-node 8 --preset qwen-image-ocr-lora --scorer.url http://scorer:8100
    torchrun --standalone --nproc-per-node 8 apps/train_nft.py ...  # the same, without the command

There are three policies: the trained policy; the old policy, which follows it by `--old-schedule` (a second adapter
with LoRA, otherwise a copy of the weights); and with `--kl-coef`, or for DGPO, the policy before training.

Differences from the released code of the papers:
1. The noise levels of the rollout's schedule are not rounded to integer timesteps.
2. A sample without a score never counts as 0: its loss has weight 0, and it is excluded from means of rewards.
3. Noise and levels depend only on (seed, step, prompt, sample), not on the number of ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import Flat, at_least, between, require
from omni_rl.settings.rules import check_scored

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class Args(MediaArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.RolloutSharding = groups.RolloutSharding()
    memory: groups.MediaMemory = groups.MediaMemory()
    data: Flat[groups.GroupData] = groups.GroupData()
    eval: MediaEval = MediaEval()
    sampling: Flat[groups.RolloutSampling] = groups.RolloutSampling()
    scorer: groups.ScoredScorer = groups.ScoredScorer()
    optim: groups.MediaOptim = groups.MediaOptim()
    streams: groups.JudgedStreams = groups.JudgedStreams()
    advantages: Flat[groups.JudgedAdvantages] = groups.JudgedAdvantages()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-4 with LoRA, 1e-5 without

    # Algorithm
    algo: Literal["nft", "awm", "dgpo"] = "nft"  # Algorithm, a row of the table ALGOS
    sample_with: Literal["old", "policy"] = "old"  # Policy that generates the samples
    solver: Literal["euler", "dpmpp"] = "euler"  # Solver of rollouts; dpmpp: DPM-Solver++(2M); evaluations use euler
    old_schedule: Literal["copy", "linear", "delayed_linear"] = "copy"  # Schedule of the old policy's decay
    old_decay_max: Annotated[float, between(0, 1)] = 1.0  # Largest decay of the old policy
    old_every: Annotated[int, at_least(1)] = 1  # Training steps between updates of the old policy
    num_inner_epochs: Annotated[int, at_least(1)] = 1  # Passes of the update over the noised samples of a step
    train_levels: int | None = None  # Noise levels per sample; none: all of the trained range
    train_low: Annotated[int, at_least(0)] = 0  # First step of the rollout's schedule with a trained level
    train_high: int | None = None  # One past the last such step; none: all steps
    nft_beta: Annotated[float, at_least(1e-12)] = 1.0  # DiffusionNFT: distance of implicit policies from the old one
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"  # AWM: weighting of a sample's error
    dgpo_beta: Annotated[float, at_least(1e-12)] = 100.0  # DGPO: sharpness of a group's weight
    dgpo_reference: Literal["reference", "sampler"] = "reference"  # DGPO: the initial policy or the sampling policy
    clip_range: Annotated[float, at_least(1e-6)] = 1.0  # AWM, DGPO: clip half-width of the ratio
    adv_clip_max: Annotated[float, at_least(1e-6)] = 5.0  # Bound on advantages
    kl_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the distance to the initial velocity
    old_kl_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the distance to the old policy's velocity

    @property
    def has_reference(self) -> bool:
        """True if the initial policy is needed."""
        return bool(self.kl_coef) or (self.algo == "dgpo" and self.dgpo_reference == "reference")


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    low, high, count = trained_levels(args)
    batch_unit = args.data.group_size if args.algo == "dgpo" else 1  # whole groups
    check_scored(args, num_trained=max(1, count), unit=batch_unit)
    require(
        (low < high <= args.sampling.num_inference_steps,
         f"--train-low and --train-high must bound steps of the rollout ({args.sampling.num_inference_steps}), "
         f"got {low} and {high}"),
        (1 <= count <= high - low, f"--train-levels must be from 1 to the {high - low} trained steps, got {count}"),
    )  # fmt: skip


def trained_levels(args: Args) -> tuple[int, int, int]:
    """Return the first trained step of the rollout's schedule, one past the last, and the levels per sample."""
    high = args.sampling.num_inference_steps if args.train_high is None else args.train_high
    return args.train_low, high, high - args.train_low if args.train_levels is None else args.train_levels


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_nft", description=__doc__)

# 2. Algorithms. To add one, add a row.

import torch
from omni_losses import (
    LossOutput,
    awm_log_prob,
    awm_loss,
    dgpo_loss,
    diffusion_nft_loss,
    old_policy_decay,
    reward_probability,
    velocity_error,
    velocity_kl,
)
from omni_rl.flow.batches import TrainBatch, train_batches
from omni_rl.flow.experts import restrict_to_expert
from omni_rl.flow.sampling import evaluate_set, sample, show, step_prompts
from omni_rl.flow.scoring import MediaRollout
from omni_rl.flow.streams import select_stream, stream_weights, sum_losses
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import check_trained_steps, export, open_engine, open_scorers, read_media
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.serve import serve
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout.types import to_device
from omni_sched import add_noise, step_noise
from torch import Tensor


@dataclass(frozen=True)
class Noised:
    """The samples of a batch, noised again to one level each: noise [B, ...], sigma [B], x_t [B, ...]."""

    batch: TrainBatch
    noise: Tensor
    sigma: Tensor
    x_t: Tensor


Velocities = Mapping[str, Tensor]  # by policy: "sampler", and the keys of `anchor_velocities`
Loss = Callable[[Args, Tensor, Velocities, Noised], LossOutput]


def nft_loss(args: Args, velocity: Tensor, others: Velocities, noised: Noised) -> LossOutput:
    """Return DiffusionNFT's loss, which contrasts a step from the old policy to the trained one with its opposite."""
    return diffusion_nft_loss(
        velocity,
        others["sampler"],
        noised.batch.trajectory.x0,
        noised.x_t,
        noised.sigma,
        reward_probability(noised.batch.advantages, adv_clip_max=args.adv_clip_max),
        nft_beta=args.nft_beta,
        adv_clip_max=args.adv_clip_max,
        weights=noised.batch.weights,
    )


def matching_loss(args: Args, velocity: Tensor, others: Velocities, noised: Noised) -> LossOutput:
    """Return AWM's loss: a clipped policy gradient with minus the flow-matching error as the log-probability."""
    x0, batch, velocities = noised.batch.trajectory.x0, noised.batch, (velocity, others["sampler"])
    new, old = (awm_log_prob(v, x0, noised.noise, noised.sigma, weighting=args.weighting) for v in velocities)
    clip, adv_clip = args.clip_range, args.adv_clip_max
    return awm_loss(new, old, batch.advantages, clip_range=clip, adv_clip_max=adv_clip, weights=batch.weights)


def group_loss(args: Args, velocity: Tensor, others: Velocities, noised: Noised) -> LossOutput:
    """Return DGPO's loss: flow matching weighted by the advantage, and by how badly the group is still ordered."""
    batch, x0 = noised.batch, noised.batch.trajectory.x0
    velocities = velocity, others[args.dgpo_reference], others["sampler"]
    new, reference, old = (velocity_error(v, x0, noised.noise) for v in velocities)
    groups = to_device(torch.tensor([prompt.group for prompt in batch.trajectory.prompts]), x0.device)
    beta, clip, adv_clip = args.dgpo_beta, args.clip_range, args.adv_clip_max
    advantages = batch.advantages
    return dgpo_loss(new, reference, old, advantages, groups, dgpo_beta=beta, clip_range=clip, adv_clip_max=adv_clip)


def loss_by_stream(sizes: list[int], shares: Sequence[float], loss_of: Loss) -> Loss:
    """Return the weighted sum of separate losses of frames and sound. sizes: latent elements. shares: weights."""

    def loss(args: Args, velocity: Tensor, others: Velocities, noised: Noised) -> LossOutput:
        latents = velocity, noised.batch.trajectory.x0, noised.noise, noised.x_t, *others.values()
        streams = zip(*(latent.split(sizes, dim=1) for latent in latents), strict=True)
        losses = []
        for m, (stream_velocity, x0, noise, x_t, *stream_others) in enumerate(streams):
            trajectory, advantages = replace(noised.batch.trajectory, x0=x0), select_stream(noised.batch.advantages, m)
            batch = TrainBatch.of(trajectory, advantages, noised.batch.weights)
            velocities = dict(zip(others, stream_others, strict=True))
            losses.append(loss_of(args, stream_velocity, velocities, Noised(batch, noise, noised.sigma, x_t)))
        return sum_losses(losses, shares)

    return loss


@dataclass(frozen=True)
class Algo:
    """A loss. shares_noise: True if the samples of a group share noise and noise level."""

    loss: Loss
    shares_noise: bool = False


ALGOS = {"nft": Algo(nft_loss), "awm": Algo(matching_loss), "dgpo": Algo(group_loss, shares_noise=True)}

# 3. A training step: rollout of the old policy, score, advantages, update, refresh of the old policy


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    policies = ["old", "reference"] if args.has_reference else ["old"]
    inputs = read_media(args, world, policies=policies)
    check_trained_steps(args, world, inputs, trained_levels(args)[:2])
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm=args.algo)
    if world.is_sampler:
        serve(run, roll_out)
        return
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            batches = train_batches(run, step, rollout, args.advantages, weighted=True)  # weight 0 without a score
            with run.updating(step):
                step.metrics |= update(run, step, batches)
                step.metrics["policy/old_decay"] = refresh_old(run, step)
            show(run, step, rollout)


def roll_out(run: MediaRun[Args], step: Step) -> MediaRollout:
    """Return this rank's samples of a step, with pending scores."""
    with sampling_policy(run):
        run.sync(step, version=step.version)
        with run.phase("rollout"):
            return sample(run, step_prompts(run, step), replace(run.base_params, solver=run.args.solver))


def sampling_policy(run: MediaRun[Args]) -> AbstractContextManager[None]:
    """Make the net the sampling policy in the `with` block."""
    return run.policy.use_old() if run.args.sample_with == "old" else nullcontext()


def refresh_old(run: MediaRun[Args], step: Step) -> float:
    """Move the old policy towards the trained one, and return its decay."""
    args, num_steps = run.args, step.number + 1
    if num_steps % args.old_every:
        return 1.0
    # The published schedules count optimizer steps.
    num_updates = num_steps * args.data.num_minibatches * args.num_inner_epochs
    decay = min(old_policy_decay(num_updates, schedule=args.old_schedule), args.old_decay_max)
    run.policy.move_old(decay)
    return decay


def noise_batch(run: MediaRun[Args], step: Step, batch: TrainBatch) -> list[Noised]:
    """Return the batch at each of its noise levels, one per stratum of the trained part of the rollout's schedule.

    If two experts share a stratum, one of them is chosen for the step.
    """
    args, (low, high, count) = run.args, trained_levels(run.args)
    x0, sigmas = batch.trajectory.x0, batch.trajectory.sigmas
    group_seeds = {prompt.group: prompt.seed for prompt in reversed(batch.trajectory.prompts)}
    is_shared = ALGOS[args.algo].shares_noise
    seeds = [group_seeds[prompt.group] if is_shared else prompt.seed for prompt in batch.trajectory.prompts]
    first = args.sampling.num_inference_steps  # lower indices are the rollout's noise
    uniform = torch.special.ndtr(step_noise(seeds, first + count, (count,)).double())
    if run.model.boundary:
        first_low = int((run.model.sigmas(batch.trajectory.params)[:-1] >= run.model.boundary).sum())
        cuts = [(first_low - low) * count / (high - low) - k for k in range(count)]
        uniform = torch.stack(
            [restrict_to_expert(run, step, uniform[:, k], cut, k) for k, cut in enumerate(cuts)], dim=1
        )
    index = low + ((torch.arange(count) + uniform) * (high - low) / count).long().clamp(max=high - low - 1)
    index, points = to_device(index, x0.device), []
    for k in range(count):
        noise, sigma = to_device(step_noise(seeds, first + k, x0.shape[1:]), x0.device), sigmas[index[:, k]]
        points.append(Noised(batch, noise, sigma, add_noise(x0, noise, sigma)))
    return points


def predict(run: MediaRun[Args], net: torch.nn.Module, noised: Noised) -> Tensor:
    """Return the velocity [B, ...] at the noised samples."""
    trajectory = noised.batch.trajectory
    return run.model.predict_velocity(net, noised.x_t, noised.sigma, trajectory.cond, trajectory.params)


def sampler_velocities(run: MediaRun[Args], points: list[Noised], num_first: int) -> list[Tensor | None]:
    """Return velocities of the sampling policy at each point, or None where it equals the trained policy."""
    skip = num_first if run.args.sample_with == "policy" else 0
    with sampling_policy(run), torch.set_grad_enabled(run.gate != "exact"):
        return [None] * skip + [predict(run, run.policy.net, noised).detach() for noised in points[skip:]]


def starts_as_old(args: Args, step: Step) -> bool:
    """Return True if the trained policy equals the old one when the step begins."""
    return step.number == 0 or (args.old_schedule == "copy" and args.old_every == 1)


def repeated_gap(run: MediaRun[Args], points: list[Noised], sampler: list[Tensor | None], forward: int) -> Tensor:
    """Recompute the velocity [B, ...] of a forward of the update, and subtract the sampling policy's."""
    velocity, old = predict(run, run.policy.net, points[forward]), sampler[forward]
    return torch.zeros_like(velocity) if old is None else velocity - old


@torch.no_grad()
def anchor_velocities(run: MediaRun[Args], points: list[Noised]) -> dict[str, list[Tensor]]:
    """Return the velocities, at each point, of the other policies that the loss needs."""
    velocities = {}
    if run.args.old_kl_coef:
        with run.policy.use_old():
            velocities["old"] = [predict(run, run.policy.net, noised) for noised in points]
    if run.args.has_reference:
        with run.policy.reference() as net:
            velocities["reference"] = [predict(run, net, noised) for noised in points]
    return velocities


def update(run: MediaRun[Args], step: Step, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Take an optimizer step on each minibatch; metrics are means over batches, noise levels and ranks."""
    args, dist, loss_of = run.args, run.dist, ALGOS[run.args.algo].loss
    if run.streams:
        loss_of = loss_by_stream(
            list(run.streams.values()), stream_weights(run.streams.values(), args.streams.sound_weight), loss_of
        )
    points = [noised for batch in batches for noised in noise_batch(run, step, batch)]
    size = len(points) // args.data.num_minibatches
    sampler, anchors = sampler_velocities(run, points, size), anchor_velocities(run, points)
    forwards, results = [], []
    for number, minibatch in enumerate(run.minibatches(step, epochs=args.num_inner_epochs)):
        for i in range(minibatch * size, (minibatch + 1) * size):
            velocity, old = predict(run, run.policy.net, points[i]), sampler[i]
            sampler[i] = old = velocity.detach() if old is None else old  # before the first update
            others = {"sampler": old} | {policy: velocities[i] for policy, velocities in anchors.items()}
            out = loss_of(args, velocity, others, points[i])
            loss, metrics = out.loss, dict(out.metrics)
            for policy, coef in (("reference", args.kl_coef), ("old", args.old_kl_coef)):
                if coef:
                    distance = velocity_kl(velocity, anchors[policy][i]).mean()
                    loss, metrics[f"{policy}_velocity_kl"] = loss + coef * distance, distance.detach()
            # Gradients are summed over batches, noise levels and ranks; this makes the sum a mean.
            run.policy.backward(loss / (size * dist.dp_size), of=size)
            forwards.append(metrics | {"loss": loss.detach()})
        if number == 0 and "ratio_max_dev" in forwards[0] and starts_as_old(args, step):
            gaps, gap_of = [m["ratio_max_dev"] for m in forwards], partial(repeated_gap, run, points, sampler)
            limit = 0.0 if run.gate == "exact" else run.rounding
            if run.check_ratio(gaps, limit, step, gap_of=gap_of, limit=run.rounding) is None:
                return update(run, step, batches)
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


if __name__ == "__main__":
    launch(main, ARGS)
