"""Reverse-process policy gradients for flow-matching models: FlowGRPO, DanceGRPO, MixGRPO, GRPO-Guard, Flow-DPPO.

    prompts -> rollout -> Trajectory -> score -> advantages -> update (replay -> loss -> step) -> sync

The model generates a group of samples for each prompt, with a few stochastic steps. A scorer grades them over HTTP. The
steps of samples above the mean of their group become more likely, the others less (Flow-GRPO, arXiv 2505.05470).

    omni-rl train flowgrpo --preset tiny-signs
    omni-rl train flowgrpo --nproc-per-node 8 --preset qwen-image-ocr-lora --scorer.url http://scorer:8100
    torchrun --standalone --nproc-per-node 8 apps/train_flowgrpo.py ...  # the same, without the command

Differences from the released code of the papers:
1. Before the first update of every step the ratio must be 1, or the run stops; with --draw-ahead this is
   checked only if the weights have not changed since sampling.
2. `std` is the true standard deviation of a step, so the KL term is the true KL (theirs misses a factor |dt|).
3. A sample without a score never counts as 0: its advantage is 0, and it is excluded from means.
4. Noise depends only on (seed, step, prompt, sample), not on the number of ranks.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import MediaEval
from omni_rl.settings.fields import Flat, at_least, between, require
from omni_rl.settings.rules import check_scored, check_window

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.

Name = Literal[
    "flowgrpo",
    "flowgrpo-cps",
    "dancegrpo",
    "mixgrpo",
    "mixgrpo-decay",
    "mixgrpo-exp-decay",
    "mixgrpo-flash",
    "grpo-guard",
    "flow-dppo",
    "tempflow",
]


@dataclass(frozen=True)
class Correction:
    """Importance weights for a rollout by another engine, or by older weights."""

    level: Literal["auto", "step", "trajectory"] = "auto"  # Weights per step or trajectory; auto: step if off-policy
    mode: Literal["truncate", "mask"] = "truncate"  # Treatment of weights beyond the bounds
    low: Annotated[float, at_least(0)] = 0.99  # Smallest weight per latent element
    high: Annotated[float, at_least(1 + 1e-6)] = 1.01  # Largest weight per latent element


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
    window: Flat[groups.Window] = groups.Window()
    advantages: Flat[groups.JudgedAdvantages] = groups.JudgedAdvantages()
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-4 with LoRA, 1e-5 without

    # Algorithm
    algo: Name = "flowgrpo"  # Algorithm, a row of the table ALGOS
    num_inner_epochs: Annotated[int, at_least(1)] = 1  # Passes of the update over the samples of a step
    iters_per_window: Annotated[int, at_least(1)] = 1  # Training steps that share a window
    window_stride: Annotated[int, at_least(1)] = 1  # Steps by which a sliding window moves
    same_start_noise: bool = False  # Start a group from the same noise, and share the steps before its window
    clip_range: Annotated[float, at_least(1e-6)] = 1e-4  # PPO clip half-width
    kl_threshold: Annotated[float, at_least(1e-12)] = 1e-5  # flow-dppo's trust region, in nats per latent element
    adv_clip_max: Annotated[float, at_least(1e-6)] = 5.0  # Bound on advantages
    best_worst_n: Annotated[int, at_least(0)] = 0  # Samples of a group to train on, best and worst; 0: all
    filter_groups: bool = False  # Drop groups whose samples have equal scores
    kl_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the KL to the initial policy
    old_log_prob: Literal["auto", "rollout", "recompute", "correct"] = "auto"  # Source of the old log-probs
    ratio_tolerance: float | None = None  # Largest |ratio - 1| before the first update; none: 0 if exact
    route_replay: bool = False  # Use the rollout's expert routing in the update, for a mixture of experts
    correction: Correction = Correction()  # Importance weights of --old-log-prob correct

    def __post_init__(self) -> None:
        """Set the unit of importance weights, so that printed and saved settings include it."""
        super().__post_init__()
        if self.correction.level == "auto":
            level: Literal["step", "trajectory"] = "step" if self.is_off_policy else "trajectory"
            vars(self).update(correction=replace(self.correction, level=level))

    @property
    def source(self) -> str:
        """The source of the old log-probs; "auto" if it depends on the engine."""
        return "correct" if self.old_log_prob == "auto" and self.is_off_policy else self.old_log_prob

    @property
    def is_off_policy(self) -> bool:
        """True if samples come from older weights, or from quantized ones."""
        return bool(self.sampling.draw_ahead) or self.memory.rollout_dtype != "auto"


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    size = check_window(args.window, args.sampling)
    num_trained = max(1, int(size * args.window.timestep_fraction))
    corrects, is_off_policy = args.source == "correct", args.is_off_policy
    by_trajectory = corrects and args.correction.level == "trajectory"
    check_scored(args, num_trained=1 if by_trajectory else num_trained)
    by_rollout = args.source == "rollout" or (args.source == "auto" and args.sampling.has_trained_engine)
    default = ", the default with --draw-ahead or --memory.rollout-dtype," if is_off_policy else ""
    correct = f"--old-log-prob correct{default}"
    require(
        (not (is_off_policy and args.source == "rollout"),
         "--old-log-prob rollout does not go with --draw-ahead or --memory.rollout-dtype: nearly all ratios would be "
         "clipped"),
        (args.window.window_size or not args.algo.startswith(("dance", "mix")),
         f"--window-size must be set for {args.algo}"),
        (args.window_stride <= size, f"--window-stride must be <= --window-size ({size}), got {args.window_stride}"),
        (args.correction.low <= 1 - 1e-6, f"--correction.low must be <= 0.999999, got {args.correction.low}"),
        (args.window.noise_level <= 1 or args.algo != "flowgrpo-cps", "--noise-level must be <= 1 for flowgrpo-cps"),
        (args.best_worst_n % 2 == 0 and args.best_worst_n <= args.data.group_size,
         f"--best-worst-n must be even and <= --group-size ({args.data.group_size}), got {args.best_worst_n}"),
        (not by_trajectory or not may_repack(args),
         f"{correct} needs --correction.level step for --best-worst-n or --filter-groups"),
        (not by_trajectory or args.window.timestep_fraction == 1,
         f"{correct} needs --correction.level step for --timestep-fraction {args.window.timestep_fraction}"),
        (not corrects or args.algo != "flowgrpo-cps",
         f"{correct} does not go with flowgrpo-cps, whose log-prob is no density: give --old-log-prob recompute"),
        (not by_rollout or args.algo == "flow-dppo" or (args.ratio_tolerance or 0.0) <= args.clip_range / 3,
         f"--ratio-tolerance must be <= a third of --clip-range ({args.clip_range:g}) where the old log-probs are the "
         f"rollout's, or --old-log-prob be recompute, got {args.ratio_tolerance}"),
        (not args.streams.has_separate_losses or (args.algo not in ("grpo-guard", "flow-dppo") and not corrects),
         f"--streams.sound-weight and --streams.reward-media do not go with grpo-guard, flow-dppo or {correct}"),
        (not args.streams.reward_media or not may_repack(args),
         "--streams.reward-media does not go with --best-worst-n or --filter-groups, which rank by one advantage"),
    )  # fmt: skip


def may_repack(args: Args) -> bool:
    """Return True if samples may be left out, so that the others are repacked into new batches."""
    return bool(args.best_worst_n) or args.filter_groups


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_flowgrpo", description=__doc__)

# 2. Algorithms. To add one, add a row.

import torch
from omni_losses import (
    LossOutput,
    flow_dppo_loss,
    gaussian_kl,
    grpo_guard_loss,
    grpo_loss,
    rollout_weights,
    tempflow_weights,
)
from omni_rl.flow.batches import TrainBatch, subsample_rollout, train_batches
from omni_rl.flow.sampling import evaluate_set, sample, show, step_prompts, window_params
from omni_rl.flow.scoring import MediaRollout
from omni_rl.flow.streams import loss_over_streams, stream_weights
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import check_trained_steps, export, open_engine, open_scorers, read_media
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.serve import serve
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.world import World
from omni_rollout import Params, replay
from omni_rollout.types import Solver
from omni_sched import Transition, cps_step, dance_step, sde_step
from torch import Tensor


@dataclass(frozen=True)
class Algo:
    """A step rule, the strategy of its window, and a function that binds the loss to the settings.

    A loss is called as `loss(log_prob, old_log_prob, advantages, weights=...)`. moments: True to also pass `mean`,
    `old_mean` and `std`. weigh: returns the weights [B] of a step from (batch, step, std). solver: solver for the steps
    after the window. compress_ratio: fraction of these steps to take.
    """

    rule: Callable[..., Transition]
    window: Literal["random", "sliding", "decay", "exp_decay", "subset"]
    loss: Callable[[Args], Callable[..., LossOutput]]
    moments: bool = False
    weigh: Callable[[TrainBatch, int, Tensor], Tensor] | None = None
    solver: Solver = "euler"
    compress_ratio: float = 1.0


def clipped_loss(a: Args) -> Callable[..., LossOutput]:
    """Return PPO's clipped loss."""
    return partial(grpo_loss, clip_range=a.clip_range, adv_clip_max=a.adv_clip_max)


def guarded_loss(a: Args) -> Callable[..., LossOutput]:
    """Return PPO's clipped loss with ratios centered at 1 and of equal spread at every step (GRPO-Guard)."""
    return partial(grpo_guard_loss, clip_range=a.clip_range, adv_clip_max=a.adv_clip_max)


def trust_region_loss(a: Args) -> Callable[..., LossOutput]:
    """Return the unclipped loss within a trust region in the KL of the step (Flow-DPPO)."""
    return partial(flow_dppo_loss, kl_threshold=a.kl_threshold)


def length_weights(batch: TrainBatch, k: int, std: Tensor) -> Tensor:
    """Return 1 / -dt of the k-th kept step, which makes gradients independent of the step's length (GRPO-Guard)."""
    return 1 / (batch.trajectory.sigma(k) - batch.trajectory.sigma_next(k))


def noise_weights(batch: TrainBatch, k: int, std: Tensor) -> Tensor:
    """Return weights proportional to the noise of the step (TempFlow-GRPO)."""
    return tempflow_weights(std)


ALGOS = {
    "flowgrpo": Algo(sde_step, "random", clipped_loss),
    "flowgrpo-cps": Algo(cps_step, "random", clipped_loss),
    "dancegrpo": Algo(dance_step, "subset", clipped_loss),
    "mixgrpo": Algo(sde_step, "sliding", clipped_loss),
    "mixgrpo-decay": Algo(sde_step, "decay", clipped_loss),
    "mixgrpo-exp-decay": Algo(sde_step, "exp_decay", clipped_loss),
    "mixgrpo-flash": Algo(sde_step, "sliding", clipped_loss, solver="dpmpp", compress_ratio=0.4),
    "grpo-guard": Algo(sde_step, "random", guarded_loss, moments=True, weigh=length_weights),
    "flow-dppo": Algo(sde_step, "random", trust_region_loss, moments=True),
    "tempflow": Algo(sde_step, "random", clipped_loss, weigh=noise_weights),
}

# 3. A training step: rollout, score, advantages, update


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    policies = ["reference"] if args.kl_coef else []
    inputs = read_media(args, world, policies=policies, routes=args.route_replay)
    check_trained_steps(args, world, inputs, args.window.steps(args.sampling), ALGOS[args.algo].rule)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net, routes=args.route_replay)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm=args.algo)
    if world.is_sampler:
        serve(run, roll_out)
        return
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            batches = train_batches(
                run,
                step,
                subsample_rollout(rollout, args.window.timestep_fraction),
                args.advantages,
                best_worst=args.best_worst_n,
                drop_silent_groups=args.filter_groups,
                num_minibatches=args.data.num_minibatches,
            )
            with run.updating(step):
                step.metrics |= update(run, step, batches)
            run.sync(step)
            show(run, step, rollout)


def roll_out(run: MediaRun[Args], step: Step) -> MediaRollout:
    """Return this rank's samples of a step, with pending scores."""
    prompts = step_prompts(run, step, same_start_noise=run.args.same_start_noise)
    with run.phase("rollout"):
        return sample(run, prompts, step_params(run, step), consecutive=num_consecutive(run))


def num_consecutive(run: MediaRun[Args]) -> int:
    """Return the number of consecutive samples of a rank: a group, if it shares the steps before its window."""
    data = run.args.data
    has_groups = not data.group_size % data.batch_size and not data.prompts_per_step % run.dist.dp_size
    return data.group_size if run.args.same_start_noise and has_groups else 1


QUANTIZED_TOLERANCE = 2e-2  # largest |ratio - 1| explained by 8-bit linear layers


def source_and_tolerance(run: MediaRun[Args], batches: Sequence[TrainBatch]) -> tuple[str, float]:
    """Return the source of the old log-probs, and the largest |ratio - 1| allowed before the first update."""
    args = run.args  # exact: the same arithmetic on both sides
    is_exact = run.engine.is_exact and batches[0].is_as_sampled and run.gate == "exact"
    source, tolerance = args.source, args.ratio_tolerance
    if source == "auto":
        source = "rollout" if is_exact else "recompute"
    if tolerance is None:
        tolerance = 0.0 if is_exact else run.rounding if args.memory.rollout_dtype == "auto" else QUANTIZED_TOLERANCE
    return source, tolerance


def step_params(run: MediaRun[Args], step: Step) -> Params:
    """Return the sampling parameters of a training step. All ranks have the same window."""
    args, algo = run.args, ALGOS[run.args.algo]
    moves = {"iters_per_window": args.iters_per_window, "stride": args.window_stride}
    params = window_params(run, step, args.window, rule=algo.rule, strategy=algo.window, **moves)
    return replace(params, keep_mean=algo.moments, solver=algo.solver, compress_ratio=algo.compress_ratio)


@dataclass(frozen=True)
class OldStep:
    """A stochastic step under the policy before the update. log_prob: [B]. mean: [B, ...] if the loss needs it."""

    log_prob: Tensor
    mean: Tensor | None


def update(run: MediaRun[Args], step: Step, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Take an optimizer step on each minibatch of this rank's batches; return metrics, as means."""
    args, dist, algo = run.args, run.dist, ALGOS[run.args.algo]
    source, tolerance = source_and_tolerance(run, batches)
    size, num_kept = len(batches) // args.data.num_minibatches, batches[0].trajectory.num_kept
    old, loss_of = old_policy(run, batches, source), algo.loss(args)
    if run.streams:
        loss_of = loss_over_streams(loss_of, stream_weights(run.streams.values(), args.streams.sound_weight))
    forwards, results = [], []
    for number, minibatch in enumerate(run.minibatches(step, epochs=args.num_inner_epochs)):
        rows = slice(minibatch * size, (minibatch + 1) * size)
        for batch, steps in zip(batches[rows], old[rows], strict=True):
            for k in range(num_kept):
                new = replay(run.model, run.policy.net, batch.trajectory, k)
                if k == len(steps):  # before the first update
                    steps.append(to_old_step(algo, new))
                correction, metrics = correction_weights(args, steps, batch, k) if source == "correct" else (None, {})
                moments = {"mean": new.mean, "old_mean": steps[k].mean, "std": new.std} if algo.moments else {}
                weights = step_weights(args, batch, k, new.std, correction)
                out = loss_of(new.log_prob, steps[k].log_prob, batch.advantages, weights=weights, **moments)
                kl = kl_to_reference(run, batch, k, new) if args.kl_coef else torch.zeros_like(out.loss)
                loss = out.loss + args.kl_coef * kl
                # Gradients are summed over batches, kept steps and ranks; this makes the sum a mean.
                run.policy.backward(loss / (size * num_kept * dist.dp_size), of=size * num_kept)
                gap = gap_to_rollout(batch, k, new).abs().max().expm1()
                forwards.append(metrics | out.metrics | {"loss": loss.detach(), "kl": kl.detach(), "rollout_gap": gap})
        if number == 0 and not step.staleness:
            is_fixed = args.ratio_tolerance == 0 or args.source == "rollout"
            gaps = [metrics["rollout_gap"] for metrics in forwards]
            gap_of = None if is_fixed else partial(replayed_gap, run, batches)
            deviation = run.check_ratio(gaps, tolerance, step, gap_of=gap_of, limit=run.rounding)
            if deviation is None:
                return update(run, step, batches)
            step.metrics["policy/first_ratio_max_dev"] = deviation
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


def old_policy(run: MediaRun[Args], batches: Sequence[TrainBatch], source: str) -> list[list[OldStep]]:
    """Return each batch's steps under the policy before the update; [] if the batch's own forwards add them."""
    algo, num_kept = ALGOS[run.args.algo], batches[0].trajectory.num_kept
    if source == "rollout":
        return [[rollout_step(batch, k) for k in range(num_kept)] for batch in batches]
    # Before the first update a forward's log-prob is the old one; weights of trajectories need all steps at once.
    adds_during_update = source == "recompute" or run.args.correction.level == "step"
    num_first = len(batches) // run.args.data.num_minibatches if adds_during_update else 0
    later = [batch.trajectory for batch in batches[num_first:]]  # with gradients, because other kernels may run without
    old = [[to_old_step(algo, replay(run.model, run.policy.net, t, k)) for k in range(num_kept)] for t in later]
    return [[] for _ in range(num_first)] + old


def gap_to_rollout(batch: TrainBatch, k: int, new: Transition) -> Tensor:
    """Return the log-prob [B] of the k-th kept step minus the engine's."""
    return new.log_prob.detach() - batch.trajectory.rollout_log_prob[:, k]


def replayed_gap(run: MediaRun[Args], batches: Sequence[TrainBatch], forward: int) -> Tensor:
    """Recompute a forward of the update, counted batch by batch, and return its `gap_to_rollout`."""
    batch, k = batches[forward // batches[0].trajectory.num_kept], forward % batches[0].trajectory.num_kept
    return gap_to_rollout(batch, k, replay(run.model, run.policy.net, batch.trajectory, k))


def rollout_step(batch: TrainBatch, k: int) -> OldStep:
    """Return the k-th kept step as sampled by the engine."""
    means = batch.trajectory.rollout_mean
    return OldStep(batch.trajectory.rollout_log_prob[:, k], None if means is None else means[:, k])


def to_old_step(algo: Algo, step: Transition) -> OldStep:
    """Return the detached log-prob of a step under the old policy, and its mean if the loss needs it."""
    return OldStep(step.log_prob.detach(), step.mean.detach() if algo.moments else None)


def correction_weights(args: Args, old: list[OldStep], batch: TrainBatch, k: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return importance weights [B] of the k-th kept step or of whole trajectories, and their metrics."""
    rows = slice(k, k + 1) if args.correction.level == "step" else slice(None)
    log_prob = torch.stack([step.log_prob for step in old[rows]], dim=1)
    weights, metrics = rollout_weights(log_prob, batch.trajectory.rollout_log_prob[:, rows], **vars(args.correction))
    return weights[:, min(k, weights.shape[1] - 1)], {f"correction_{name}": value for name, value in metrics.items()}


def step_weights(args: Args, batch: TrainBatch, k: int, std: Tensor, correction: Tensor | None) -> Tensor | None:
    """Return weights [B] of the samples in the loss of the k-th kept step, or None if all are 1."""
    factors = [factor for factor in (batch.weights, correction) if factor is not None]
    if weigh := ALGOS[args.algo].weigh:
        factors.append(weigh(batch, k, std))
    return torch.stack(factors).prod(dim=0) if factors else None


def kl_to_reference(run: MediaRun[Args], batch: TrainBatch, k: int, new: Transition) -> Tensor:
    """Return the mean KL of the k-th kept step to the same step of the initial policy."""
    with torch.no_grad(), run.policy.reference() as net:
        reference = replay(run.model, net, batch.trajectory, k)
    kl = gaussian_kl(new.mean, reference.mean, new.std)
    return (kl if batch.weights is None else kl * batch.weights).mean()


if __name__ == "__main__":
    launch(main, ARGS)
