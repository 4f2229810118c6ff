"""Policy gradients for models that generate text from any input: GSPO, GRPO, DAPO, CISPO and Dr. GRPO.

    prompts -> rollout -> answers -> score -> advantages -> update (log-probs -> loss -> step) -> sync

The model generates a group of answers for each prompt, and rules grade them. Answers above the mean of their group
become more likely, the others less. GSPO has one ratio per answer (arXiv 2507.18071), the others one per token.

    omni-rl train gspo --preset tiny-beeps
    omni-rl train gspo --nproc-per-node 8 --preset qwen3-omni-lora --prompts a.jsonl --eval.prompts b.jsonl
    torchrun --standalone --nproc-per-node 8 apps/train_gspo.py ...  # the same, without the command

Differences from the released code of the papers:
1. Old log-probs are computed by the same function and in the same batches as in the update. Before the first update of
   every step the ratio must be 1, or the run stops. The sampler's log-probs must be close to them; with --draw-ahead,
   samples from older weights are corrected by importance weights instead.
2. Means over tokens or answers are over all batches and ranks of an optimizer step.
3. Dynamic sampling takes new prompts in at most --rounds rounds, and uses the first groups whose scores differ.
4. Samples depend only on (seed, step, prompt, sample), not on the number of ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import TokenEval
from omni_rl.settings.fields import Flat, at_least, between, require
from omni_rl.settings.token_args import TokenArgs, check_tokens

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


Correction = Literal["auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class Args(TokenArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.Policy] = groups.Policy()
    lora: groups.TokenLora = groups.TokenLora()
    sharding: groups.Sharding = groups.Sharding()
    memory: groups.Memory = groups.Memory()
    data: Flat[groups.TokenGroupData] = groups.TokenGroupData()
    eval: TokenEval = TokenEval()
    sampling: Flat[groups.TokenRolloutSampling] = groups.TokenRolloutSampling()
    scorer: groups.TokenScorer = groups.TokenScorer()
    optim: groups.Optim = groups.Optim()
    tool: groups.ToolCalls = groups.ToolCalls()
    reward: str = ""  # Rules that grade answers, such as 'math + 0.1*format=PATTERN'; empty: exact, or scorer
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-6 with LoRA, 1e-6 without

    # Algorithm
    algo: Literal["gspo", "grpo", "dapo", "cispo", "dr-grpo"] = "gspo"  # Algorithm, a row of the table ALGOS
    clip_low: Annotated[float | None, at_least(1e-6)] = None  # Clip width below 1; none: the algorithm's
    clip_high: Annotated[float | None, at_least(1e-6)] = None  # Clip width above 1; none: the algorithm's
    num_iterations: Annotated[int, at_least(1)] = 1  # Passes of the update over the answers of a step
    rounds: Annotated[int, at_least(1)] = 4  # Maximum rollouts per step, for dapo
    overlong_tokens: Annotated[int | None, at_least(0)] = None  # Last tokens with a penalty; none: a fifth, or 0
    mask_truncated: bool = False  # Drop truncated answers from the update
    kl_coef: Annotated[float, at_least(0)] = 0.0  # Weight of the KL to the initial policy
    ratio_tolerance: Annotated[float | None, at_least(0)] = None  # Largest |ratio - 1|; none: 1e-4, 1e-3 or any
    rollout_correction: Correction = "auto"  # Importance weights for vllm or --draw-ahead, or off
    rollout_correction_cap: Annotated[float, at_least(1)] = 2.0  # Importance weight to truncate at, or mask above


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    check_tokens(args)
    require(
        ((args.overlong_tokens or 0) <= args.sampling.max_new_tokens,
         f"--overlong-tokens must be <= --max-new-tokens ({args.sampling.max_new_tokens}), got {args.overlong_tokens}"),
        (args.data.num_minibatches <= args.data.prompts_per_step * args.data.group_size,
         f"--num-minibatches must be <= a step's samples, got {args.data.num_minibatches}"),
        (args.sampling.engine == "vllm" or args.sampling.draw_ahead or args.rollout_correction in ("auto", "off"),
         "--rollout-correction needs --engine vllm, as the other engine is exact, or --draw-ahead, got "
         f"{args.rollout_correction}"),
        (not args.sampling.draw_ahead or args.algo != "dapo" or args.rounds == 1,
         f"--draw-ahead must be 0 with --rounds {args.rounds}, which waits for scores before it samples more, "
         f"got {args.sampling.draw_ahead}"),
        (args.algo != "gspo" or not args.rollout_correction.startswith("token"),
         f"--rollout-correction must be of a sequence for gspo, got {args.rollout_correction}"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_gspo", description=__doc__)

# 2. Algorithms. To add one, add a row.

import torch
from omni_losses import (
    LossOutput,
    filter_groups,
    group_advantages,
    gspo_loss,
    k3_kl,
    overlong_penalty,
    token_cispo_loss,
    token_grpo_loss,
    token_rollout_weights,
)
from omni_losses.advantages import Std
from omni_losses.sequence import TokenMean
from omni_rl.flow.scoring import Rollout, gather_rewards, log_advantages, step_rewards, wait_and_grade
from omni_rl.flow.tokens import TokenBatch, evaluate_set, gather_lengths, pack, sample_round, show_answers
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.run import Step, TokenRun
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.texts import export, open_engine, open_scorers, read_texts
from omni_rl.run.world import World
from omni_rollout.tokens import TokenScores, TokenTrajectory, score_tokens
from torch import Tensor


def sequence_loss(
    log_prob: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, weights: Tensor, **clip: float
) -> LossOutput:
    """Return GSPO's loss, with weights of whole answers."""
    return gspo_loss(log_prob, old, advantages, mask, weights=weights * mask.sum(dim=1), **clip)


@dataclass(frozen=True)
class Algo:
    """A loss with its clip range, its mean over tokens, the standard deviation of advantages, and extras.

    The loss is called as `loss(log_prob, old_log_prob, advantages, mask, weights=..., clip_low=..., clip_high=...)`.
    """

    loss: Callable[..., LossOutput]
    clip: tuple[float, float]
    mean: TokenMean = "sequence"
    std: Std = "group"
    dynamic: bool = False  # sample until there are as many groups with differing scores as prompts in a step
    overlong: bool = False  # penalize answers near --max-new-tokens


ALGOS = {
    "gspo": Algo(sequence_loss, (3e-4, 4e-4)),
    "grpo": Algo(token_grpo_loss, (0.2, 0.2)),
    "dapo": Algo(token_grpo_loss, (0.2, 0.28), mean="token", dynamic=True, overlong=True),
    "cispo": Algo(token_cispo_loss, (1.0, 4.0), mean="token"),
    "dr-grpo": Algo(token_grpo_loss, (0.2, 0.2), mean="constant", std="none"),
}


def resolve_auto(args: Args) -> Args:
    """Replace None and auto in the settings by values."""
    algo = ALGOS[args.algo]
    overlong, is_exact = args.sampling.max_new_tokens // 5 * algo.overlong, args.sampling.engine == "transformers"
    tolerance = torch.inf if args.policy.dtype != "float32" else 1e-4 if is_exact else 1e-3
    weighted: Correction = "sequence_truncate" if args.algo == "gspo" else "token_truncate"
    correction: Correction = "off" if is_exact and not args.sampling.draw_ahead else weighted
    return replace(
        args,
        clip_low=args.clip_low or algo.clip[0],
        clip_high=args.clip_high or algo.clip[1],
        rounds=args.rounds if algo.dynamic else 1,
        overlong_tokens=overlong if args.overlong_tokens is None else args.overlong_tokens,
        ratio_tolerance=tolerance if args.ratio_tolerance is None else args.ratio_tolerance,
        rollout_correction=correction if args.rollout_correction == "auto" else args.rollout_correction,
    )


# 3. A training step: rollout, score, advantages, update


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    inputs = read_texts(args, world, policies=["reference"] if args.kl_coef else [])
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm=args.algo)
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            minibatches = wait_and_grade(run, step, rollout, grade)
            with run.updating(step):
                step.metrics |= update(run, step, minibatches)
            run.sync(step)
            show_answers(run, step, rollout)


def roll_out(run: TokenRun[Args], step: Step) -> Rollout[TokenTrajectory]:
    """Return the answers of a step. With dynamic sampling, sample rounds until enough groups have differing scores."""
    rounds = resolve_auto(run.args).rounds
    first = step.number * rounds
    rollout = sample_round(run, first)
    for number in range(first + 1, first + rounds):
        if wait_and_grade(run, step, rollout, has_enough_groups):
            break
        rollout = sample_round(run, number, rollout)
    step.metrics["reward/rounds"] = len(rollout.prompts) / (run.args.data.prompts_per_step * run.args.data.group_size)
    return rollout


def has_enough_groups(run: TokenRun[Args], step: Step, rollout: Rollout[TokenTrajectory]) -> bool:
    """Return True if at least as many groups as prompts in a step have differing scores."""
    rewards = gather_rewards(run.dist, rollout.batches, rollout.scores, rollout.groups)
    return len(differing_groups(rewards, rollout.groups)) >= run.args.data.prompts_per_step


def differing_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the groups with differing scores, in order."""
    return groups[filter_groups(rewards, groups)].unique()


def grade(run: TokenRun[Args], step: Step, rollout: Rollout[TokenTrajectory]) -> list[list[TokenBatch]]:
    """Return this rank's batches of each minibatch, or none without a signal. Needs all scores."""
    advantages, keep = compute_advantages(run, step, rollout)
    return pack(run, rollout.batches, advantages, keep, mean=ALGOS[run.args.algo].mean) if step.has_signal else []


def compute_advantages(run: TokenRun[Args], step: Step, rollout: Rollout[TokenTrajectory]) -> tuple[Tensor, Tensor]:
    """Return advantages [N] of all ranks' samples, and the mask [N] of samples to train on."""
    args, algo, groups = resolve_auto(run.args), ALGOS[run.args.algo], rollout.groups
    scored = rewards = step_rewards(run, step, rollout)
    lengths, ended = gather_lengths(run.dist, rollout.batches, len(groups))
    if args.overlong_tokens:
        longest = args.sampling.max_new_tokens
        rewards = rewards + overlong_penalty(lengths, max_tokens=longest, buffer=args.overlong_tokens)
    advantages, without_eps = (group_advantages(rewards, groups, std=algo.std, eps=eps) for eps in (1e-4, 1e-30))
    keep = ~rewards.isnan()
    if algo.dynamic:  # only the first groups, if there are more than needed
        keep &= torch.isin(groups, differing_groups(scored, groups)[: args.data.prompts_per_step])
    if args.mask_truncated:
        keep &= ended.bool()
    keep &= bool(advantages[keep].any())
    log_advantages(step, advantages, without_eps)
    step.has_signal = bool(keep.any())
    step.metrics |= {
        "answer/tokens_mean": lengths.mean().item(),
        "answer/tokens_max": lengths.max().item(),
        "answer/truncated_ratio": 1 - ended.mean().item(),
        "reward/trained_ratio": keep.float().mean().item(),
    }
    return advantages, keep


def update(run: TokenRun[Args], step: Step, minibatches: list[list[TokenBatch]]) -> dict[str, float]:
    """Take an optimizer step on each minibatch; metrics are means over batches and ranks."""
    args, dist = resolve_auto(run.args), run.dist
    if not minibatches:
        return {}
    loss_of = partial(ALGOS[args.algo].loss, clip_low=args.clip_low, clip_high=args.clip_high)
    old = [[old_scores(run, batch) for batch in batches] for batches in minibatches]
    with torch.no_grad():
        references = [[reference_log_probs(run, batch) for batch in batches] for batches in minibatches]
    with_old = zip(chain(*minibatches), chain(*old), strict=True)
    gaps = [max_ratio_deviation(b, old_score.log_prob, b.trajectory.rollout_log_prob) for b, old_score in with_old]
    gap = run.check_ratio(gaps, torch.inf if step.staleness else args.ratio_tolerance or 0.0, step) or 0.0
    forwards: list[dict[str, Tensor]] = []
    deviations: list[Tensor] = []
    results = []
    scale = sum(map(len, minibatches)) * dist.world_size / len(minibatches)  # to log a sum over forwards and ranks
    for number, m in enumerate(run.minibatches(step, epochs=args.num_iterations)):
        batches, old_of_minibatch = minibatches[m], old[m]
        for batch, old_score, reference in zip(batches, old_of_minibatch, references[m], strict=True):
            log_prob, mask = score(run, batch).log_prob, batch.trajectory.sampled.to(dist.device)
            weights, from_sampler = correction_weights(args, batch, old_score.log_prob, mask)
            out = loss_of(log_prob, old_score.log_prob, batch.advantages, mask, weights=weights)
            kl = kl_penalty(log_prob, reference, mask)
            loss = out.loss + args.kl_coef * (kl.sum(dim=1) * batch.weights).sum()
            # Gradients are summed over batches and ranks; the weights make the sum a mean.
            run.policy.backward(loss, of=len(batches))
            means = from_sampler | {"kl": kl.detach().sum() / mask.sum(), "entropy": old_score.entropy[mask].mean()}
            forwards.append(batch.weigh(out.metrics, of_answers=args.algo == "gspo") | batch.weigh(means))
            forwards[-1]["loss"] = loss.detach() * scale
            deviations.append(max_ratio_deviation(batch, log_prob.detach(), old_score.log_prob))
        if number == 0:
            limit, gap_of = args.ratio_tolerance or 0.0, partial(repeated_gap, run, batches, old_of_minibatch)
            allowed = 0.0 if run.gate == "exact" else limit
            deviation = run.check_ratio(deviations, allowed, step, gap_of=gap_of, limit=limit)
            if deviation is None:
                return update(run, step, minibatches)
            step.metrics["policy/first_ratio_max_dev"] = deviation
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results) | {"policy/rollout_gap": gap}


def correction_weights(args: Args, batch: TokenBatch, old: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss weights [B] or [B, T] of the batch, and metrics of the sampler's deviation from `old` [B, T]."""
    if args.sampling.engine == "transformers" and not args.sampling.draw_ahead:
        return batch.weights, {}
    is_off, rollout_log_prob = args.rollout_correction == "off", batch.trajectory.rollout_log_prob.to(old.device)
    mode = "token_truncate" if is_off else args.rollout_correction
    weights, metrics = token_rollout_weights(old, rollout_log_prob, mask, mode=mode, cap=args.rollout_correction_cap)  # type: ignore[arg-type]  # not auto
    named = {f"correction_{name}": value for name, value in metrics.items()}
    if is_off:
        return batch.weights, named
    return batch.weights * weights[:, 0] if mode.startswith("sequence") else batch.weights[:, None] * weights, named


def kl_penalty(log_prob: Tensor, reference: Tensor | None, mask: Tensor) -> Tensor:
    """Return the KL [B, T] of each token to the initial policy, 0 after the end, or zeros without `reference`."""
    if reference is None:
        return torch.zeros_like(log_prob)
    # masked values may overflow, and 0 * inf is NaN
    return k3_kl(log_prob.where(mask, 0.0), reference.where(mask, 0.0))


def max_ratio_deviation(batch: TokenBatch, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return the largest |ratio - 1| of the batch's tokens, from log-probs [B, T] under two policies."""
    mask = batch.trajectory.sampled.to(log_prob.device)
    return (log_prob - old_log_prob.to(log_prob.device))[mask].abs().max().expm1()


def score(run: TokenRun[Args], batch: TokenBatch) -> TokenScores:
    """Return the log-probs of the batch's tokens under the trained weights."""
    return score_tokens(run.model, run.policy.net, batch.trajectory)


def old_scores(run: TokenRun[Args], batch: TokenBatch) -> TokenScores:
    """Return `score` before the update; with gradients if kernels with and without them differ."""
    with torch.no_grad():
        scores = score(run, batch)
    return scores if run.gate == "exact" else replace(scores, log_prob=score(run, batch).log_prob.detach())


def repeated_gap(run: TokenRun[Args], batches: list[TokenBatch], old: list[TokenScores], forward: int) -> Tensor:
    """Recompute the log-probs of a forward of the update, and subtract the old ones; return a vector over tokens."""
    difference = score(run, batches[forward]).log_prob - old[forward].log_prob
    return difference[batches[forward].trajectory.sampled.to(difference.device)]


def reference_log_probs(run: TokenRun[Args], batch: TokenBatch) -> Tensor | None:
    """Return the log-probs [B, T] of the batch's tokens under the initial policy, or None if the loss needs none."""
    if not run.args.kl_coef:
        return None
    with run.policy.reference() as net:
        return score_tokens(run.model, net, batch.trajectory).log_prob


if __name__ == "__main__":
    launch(main, ARGS)
