"""UniGRPO, for models that write a thought before an image: policy gradients for tokens and denoising steps.

    prompts -> rollout (thought -> image) -> score -> advantages -> update (tokens and steps -> loss -> step) -> sync

The model generates a group of samples for each prompt: first a thought, token by token, then an image, with a few
stochastic steps. A scorer gets the image and the thought; rules can grade the thought too. A sample has one reward
and one advantage for its tokens and steps (UniGRPO, arXiv 2603.23500): tokens are trained by GRPO, steps by
Flow-GRPO, each with its own clip range.

    omni-rl train unigrpo --preset tiny-colors
    omni-rl train unigrpo --nproc-per-node 8 --preset bagel-pickscore-lora --scorer.url http://scorer:8100
    torchrun --standalone --nproc-per-node 8 apps/train_unigrpo.py ...  # the same, without the command

Design decisions, because no code has been released:
1. Before the first update of every step the ratios of tokens and of steps must be 1, or the run stops. The old
   log-probs of tokens are computed as in the update, in the same batches, those of steps come from the rollout; with
   --draw-ahead both are computed as in the update, and importance weights correct samples from older weights.
2. A step encodes the thought again instead of using its cache, so that gradients reach the layers that read it.
3. The loss of a thought is the mean over its tokens. Both parts are means over the samples of all ranks.
4. Samples depend only on (seed, step, prompt, sample), not on the number of ranks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from omni_rl.settings import groups
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import ThoughtEval
from omni_rl.settings.fields import Flat, at_least, between
from omni_rl.settings.token_args import ThinkingArgs, check_thinking

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class Args(ThinkingArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.MediaPolicy] = groups.MediaPolicy()
    lora: groups.Lora = groups.Lora()
    sharding: groups.RolloutSharding = groups.RolloutSharding()
    memory: groups.MediaMemory = groups.MediaMemory()
    data: Flat[groups.GroupData] = groups.GroupData()
    eval: ThoughtEval = ThoughtEval()
    sampling: Flat[groups.ThinkingSampling] = groups.ThinkingSampling()
    scorer: groups.ScoredScorer = groups.ScoredScorer()
    optim: groups.MediaOptim = groups.MediaOptim()
    streams: groups.Streams = groups.Streams()
    window: Flat[groups.Window] = groups.Window()
    advantages: Flat[groups.Advantages] = groups.Advantages(adv_std="group")
    thought_reward: str = ""  # Rules that grade thoughts, added to the image's score, such as '0.5*contains'
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-4 with LoRA, 1e-5 without

    # Algorithm
    clip_range: Annotated[float, at_least(1e-6)] = 1e-4  # PPO clip half-width of a step's ratio
    thought_clip_low: Annotated[float, at_least(1e-6)] = 0.2  # Clip width of a token's ratio below 1
    thought_clip_high: Annotated[float, at_least(1e-6)] = 0.2  # Clip width of a token's ratio above 1
    thought_weight: Annotated[float, at_least(0)] = 1.0  # Weight of the thought's loss relative to the image's
    kl_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the thoughts' KL to the initial policy
    velocity_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the squared distance to the initial velocity
    ratio_tolerance: float | None = None  # Largest |ratio - 1| of sampled tokens; none: 1e-4 in float32, or any


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    check_thinking(args)


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_unigrpo", description=__doc__)

# 2. A training step: rollout, score, advantages, update

import torch
from omni_losses import (
    LossOutput,
    distill_velocity_loss,
    grpo_loss,
    k3_kl,
    rollout_weights,
    token_grpo_loss,
    token_rollout_weights,
)
from omni_rl.flow.batches import TrainBatch, subsample_rollout, train_batches
from omni_rl.flow.sampling import evaluate_set, sample, show, step_prompts, window_params
from omni_rl.flow.scoring import MediaRollout
from omni_rl.flow.tokens import gather_lengths
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.media import check_trained_steps, export
from omni_rl.run.run import Step, ThinkingRun
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.thoughts import open_engine, open_scorers, read_thoughts
from omni_rl.run.world import World
from omni_rollout import Samples, Trajectory
from omni_rollout.thoughts import ThoughtTrajectory
from omni_rollout.tokens import TokenScores, TokenTrajectory, score_tokens
from omni_sched import Transition, sde_step
from torch import Tensor, nn

STEP_BOUNDS, TOKEN_CAP = (0.99, 1.01), 2.0  # bounds of importance weights with --draw-ahead


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    policies = ["reference"] if args.kl_coef or args.velocity_coef else []
    inputs = read_thoughts(args, world, policies=policies)
    check_trained_steps(args, world, inputs, args.window.steps(args.sampling), sde_step)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="unigrpo")
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            # Tokens and steps share advantages.
            subsampled = subsample_rollout(rollout, args.window.timestep_fraction)
            batches = train_batches(run, step, subsampled, args.advantages)
            with run.updating(step):
                step.metrics |= update(run, step, batches) | length_metrics(run, rollout)
            run.sync(step)
            show(run, step, rollout)


def roll_out(run: ThinkingRun[Args], step: Step) -> MediaRollout:
    """Return this rank's samples of a step, with pending scores."""
    with run.phase("rollout"):
        return sample(run, step_prompts(run, step), window_params(run, step, run.args.window))


def length_metrics(run: ThinkingRun[Args], rollout: MediaRollout) -> dict[str, float]:
    """Return metrics of the lengths of all ranks' thoughts."""
    thoughts = [get_thoughts(batch) for batch in rollout.batches]
    tokens, ended = gather_lengths(run.dist, thoughts, len(rollout.prompts))
    return {"thought/tokens_mean": tokens.mean().item(), "thought/truncated_ratio": 1 - ended.mean().item()}


def update(run: ThinkingRun[Args], step: Step, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Take an optimizer step on each minibatch of this rank's batches; metrics are means."""
    args, dist = run.args, run.dist
    size, num_kept = len(batches) // args.data.num_minibatches, batches[0].trajectory.num_kept
    old = [old_scores(run, batch) for batch in batches]
    steps = [old_steps(run, step, batch, is_first=i < size) for i, batch in enumerate(batches)]
    gap = (
        run.check_ratio(thought_gaps(batches, old), torch.inf if step.staleness else resolve_tolerance(args), step)
        or 0.0
    )
    if run.gate != "exact" and not step.staleness:
        run.check_ratio(step_gaps(batches, steps), run.rounding, step)
    forwards, results = list[dict[str, Tensor]](), []
    deviations = list[Tensor]()
    for first in range(0, len(batches), size):
        for i in range(first, first + size):
            batch, old_score = batches[i], old[i]
            # Gradients are summed over batches, kept steps and ranks; the divisors make the sum a mean.
            total, parts = size * dist.dp_size, []
            for k in range(num_kept):
                parts.append(step_loss(run, batch, k, steps[i]))
                run.policy.backward(parts[-1].loss / (total * num_kept), of=size * (num_kept + 1))
            thought = thought_loss(run, batch, old_score)
            run.policy.backward(args.thought_weight * thought.loss / total, of=size * (num_kept + 1))
            image = torch.stack([part.loss.detach() for part in parts]).mean()
            loss = image + args.thought_weight * thought.loss.detach()
            forwards += [part.metrics for part in parts]
            forwards.append({f"thought_{name}": value for name, value in thought.metrics.items()} | {"loss": loss})
            deviations += [part.metrics["ratio_max_dev"] for part in (*parts, thought)]
        if first == 0:
            gap_of = partial(repeated_gap, run, batches, old)
            allowed = 0.0 if run.gate == "exact" else resolve_tolerance(args)
            deviation = run.check_ratio(deviations, allowed, step, gap_of=gap_of, limit=resolve_tolerance(args))
            if deviation is None:
                return update(run, step, batches)
            step.metrics["policy/first_ratio_max_dev"] = deviation
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results) | {"policy/thought_rollout_gap": gap}


def old_scores(run: ThinkingRun[Args], batch: TrainBatch) -> TokenScores:
    """Return the thoughts' scores before the update; with gradients if kernels with and without them differ."""
    with torch.no_grad():
        scores = score(run, run.policy.net, batch.trajectory)
    if run.gate == "exact":
        return scores
    return replace(scores, log_prob=score(run, run.policy.net, batch.trajectory).log_prob.detach())


def old_steps(run: ThinkingRun[Args], step: Step, batch: TrainBatch, *, is_first: bool) -> list[Tensor]:
    """Return the log-prob [B] of each kept step before the update: the engine's, or recomputed with gradients.

    is_first: True for the first minibatch. If its samples are from older weights, the update adds the log-probs itself.
    """
    trajectory = batch.trajectory
    if run.gate == "exact" and not step.staleness:
        return [*trajectory.rollout_log_prob.unbind(dim=1)]
    if run.gate == "exact" and is_first:
        return []
    return [replay_step(run, run.policy.net, trajectory, k)[1].log_prob.detach() for k in range(trajectory.num_kept)]


def repeated_gap(
    run: ThinkingRun[Args], batches: Sequence[TrainBatch], old: Sequence[TokenScores], forward: int
) -> Tensor:
    """Return the recomputed log-probs of a forward of the update minus the old ones: of a step, or of tokens."""
    num_kept = batches[0].trajectory.num_kept
    i, k = divmod(forward, num_kept + 1)
    trajectory = batches[i].trajectory
    if k < num_kept:
        return replay_step(run, run.policy.net, trajectory, k)[1].log_prob - trajectory.rollout_log_prob[:, k]
    difference = score(run, run.policy.net, trajectory).log_prob - old[i].log_prob
    return difference[get_thoughts(trajectory).mask.to(difference.device)]


def step_loss(run: ThinkingRun[Args], batch: TrainBatch, k: int, old: list[Tensor]) -> LossOutput:
    """Return the loss of the k-th kept step: Flow-GRPO's, plus the squared distance to the initial velocity.

    old: log-probs [B] before the update; this step's is appended if it is the next.
    """
    args, trajectory = run.args, batch.trajectory
    velocity, new = replay_step(run, run.policy.net, trajectory, k)
    if k == len(old):
        old.append(new.log_prob.detach())
    weights, metrics = step_weights(old[k], trajectory, k) if args.sampling.draw_ahead else (None, {})
    out = grpo_loss(new.log_prob, old[k], batch.advantages, clip_range=args.clip_range, weights=weights)
    out = replace(out, metrics=out.metrics | metrics)
    if not args.velocity_coef:
        return out
    with torch.no_grad(), run.policy.reference() as net:
        reference, _ = replay_step(run, net, trajectory, k)
    drift = distill_velocity_loss(velocity, reference)
    return LossOutput(out.loss + args.velocity_coef * drift.loss, out.metrics | {"velocity_drift": drift.loss.detach()})


def step_weights(old: Tensor, trajectory: Trajectory, k: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return importance weights [B] of the k-th kept step, sampled by older weights, and metrics. old: [B]."""
    low, high = STEP_BOUNDS
    sampled = trajectory.rollout_log_prob[:, k : k + 1]
    weights, metrics = rollout_weights(old[:, None], sampled, level="step", low=low, high=high)
    named = {f"correction_{name}": value for name, value in metrics.items()}
    return weights[:, 0], named | {"rollout_gap": metrics["abs_diff_max"].expm1()}


def thought_weights(old: TokenScores, trajectory: Trajectory, mask: Tensor) -> Tensor:
    """Return importance weights [B, T] of tokens, divided for the mean over thoughts of the mean over their tokens."""
    sampled = get_thoughts(trajectory).rollout_log_prob.to(mask.device)
    weights, _ = token_rollout_weights(old.log_prob, sampled, mask, cap=TOKEN_CAP)
    return weights / (len(mask) * mask.sum(dim=1, keepdim=True).clamp(min=1))


def replay_step(run: ThinkingRun[Args], net: nn.Module, trajectory: Trajectory, k: int) -> tuple[Tensor, Transition]:
    """Return the velocity of `net` at the k-th kept step, and the step: identical to the sample if `net` sampled it."""
    x, params = trajectory.x[:, k], trajectory.params
    velocity = run.model.predict_velocity(net, x, trajectory.sigma(k), trajectory.cond, params)
    return velocity, params.rule(
        velocity,
        x,
        trajectory.sigma(k),
        trajectory.sigma_next(k),
        noise_level=params.noise_level,
        x_next=trajectory.x_next[:, k],
    )


def thought_loss(run: ThinkingRun[Args], batch: TrainBatch, old_score: TokenScores) -> LossOutput:
    """Return the loss of the thoughts' tokens: GRPO's, plus the KL to the initial policy."""
    args, log_prob = run.args, score(run, run.policy.net, batch.trajectory).log_prob
    mask = get_thoughts(batch.trajectory).mask.to(log_prob.device)
    weights = thought_weights(old_score, batch.trajectory, mask) if args.sampling.draw_ahead else None
    clip = {"clip_low": args.thought_clip_low, "clip_high": args.thought_clip_high}
    out = token_grpo_loss(log_prob, old_score.log_prob, batch.advantages, mask, weights=weights, **clip)
    metrics = out.metrics | {"entropy": old_score.entropy[mask].mean()}
    if not args.kl_coef:
        return LossOutput(out.loss, metrics)
    with torch.no_grad(), run.policy.reference() as net:
        reference = score(run, net, batch.trajectory).log_prob
    kl = k3_kl(log_prob.where(mask, 0.0), reference.where(mask, 0.0))  # masked values may overflow, and 0 * inf is NaN
    mean = (kl.sum(dim=1) / mask.sum(dim=1)).mean()
    return LossOutput(out.loss + args.kl_coef * mean, metrics | {"kl": mean.detach()})


def score(run: ThinkingRun[Args], net: nn.Module, trajectory: Trajectory) -> TokenScores:
    """Return the log-probs of the thoughts' tokens under `net`."""
    return score_tokens(run.model, net, get_thoughts(trajectory))


def get_thoughts(trajectory: Samples) -> TokenTrajectory:
    """Return the thoughts of these samples."""
    assert isinstance(trajectory, ThoughtTrajectory)
    return trajectory.thoughts


def thought_gaps(batches: Sequence[TrainBatch], old: Sequence[TokenScores]) -> list[Tensor]:
    """Return the largest |ratio - 1| of a token in each batch, between the sampler and the policy before the update."""
    largest = []
    for batch, old_score in zip(batches, old, strict=True):
        thoughts = get_thoughts(batch.trajectory)
        difference = old_score.log_prob.cpu() - thoughts.rollout_log_prob
        largest.append(difference[thoughts.mask].abs().max().expm1())
    return largest


def step_gaps(batches: Sequence[TrainBatch], old: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the largest |ratio - 1| of each kept step of each batch, between sampling and update."""
    return [
        (old_log_prob - batch.trajectory.rollout_log_prob[:, k]).abs().max().expm1()
        for batch, steps in zip(batches, old, strict=True)
        for k, old_log_prob in enumerate(steps)
    ]


def resolve_tolerance(args: Args) -> float:
    """Return the largest allowed |ratio - 1|."""
    return {"float32": 1e-4}.get(args.policy.dtype, torch.inf) if args.ratio_tolerance is None else args.ratio_tolerance


if __name__ == "__main__":
    launch(main, ARGS)
