"""Preferences between text answers to any input: DPO, online and offline.

    online:   prompts -> rollout -> score -> best and worst of each group -> update (log-probs -> loss -> step)
    offline:  preference file -> update

A pair is a preferred and a rejected answer to one prompt. The model learns to raise the log-prob of the preferred
answer relative to a reference, and to lower that of the other one (DPO, arXiv 2305.18290). The reference is the policy
before training.

    omni-rl train dpo_tokens --preset tiny-beeps
    omni-rl train dpo_tokens --nproc-per-node 8 --preset qwen25-lora --preferences pairs.jsonl --eval.prompts eval.jsonl
    torchrun --standalone --nproc-per-node 8 apps/train_dpo_tokens.py ...  # the same, without the command

A line of --preferences is a prompt with a "chosen" and a "rejected" answer; docs/tokens.md describes it.

Differences from TRL's DPOTrainer:
1. Answers end with the end-of-answer token, without the text that the chat template adds after it.
2. Means are over the pairs of all batches and ranks of an optimizer step.
3. Online, groups with equal scores and samples without a score yield no pairs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from omni_rl.settings import groups
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import TokenEval
from omni_rl.settings.fields import Flat, at_least, between, require
from omni_rl.settings.token_args import TokenArgs, check_answers, check_tokens

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.

SIDES = ("chosen", "rejected")  # keys of a pair's answers


@dataclass(frozen=True)
class Args(TokenArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first. Offline, a group is a pair."""

    RATES = (1e-6, 5e-6)

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
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 5e-6 with LoRA, 1e-6 without

    # Algorithm
    preferences: str = ""  # File of pairs (.jsonl) for offline training, instead of --prompts
    dpo_beta: Annotated[float, at_least(1e-12)] = 0.1  # Strength of the regularization towards the reference

    def __post_init__(self) -> None:
        """Set `prompts` to the file of pairs, so that printed and saved settings include it."""
        super().__post_init__()
        vars(self).update(data=replace(self.data, prompts=self.preferences or self.data.prompts))


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    data = args.data
    if args.preferences:
        check_answers(args, SIDES, name="--preferences")
    check_tokens(args)
    require(
        (not (args.preferences and args.sampling.draw_ahead),
         f"--draw-ahead must be 0 with --preferences, of which nothing is sampled, got {args.sampling.draw_ahead}"),
        (data.batch_size % 2 == 0, f"--batch-size must be even, as a pair is two samples, got {data.batch_size}"),
        (args.preferences or data.batch_size % data.group_size == 0,
         f"--batch-size must hold whole groups of --group-size ({data.group_size}), got {data.batch_size}"),
        (not args.preferences or data.group_size == 2,
         f"--group-size must be 2 with --preferences, as a pair is two samples, got {data.group_size}"),
        (data.num_minibatches <= data.prompts_per_step,
         f"--num-minibatches must be <= --prompts-per-step, got {data.num_minibatches}"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_dpo_tokens", description=__doc__)

# 2. A step's pairs

import torch
from omni_losses import best_worst_pairs, sequence_dpo_loss
from omni_rl.flow.scoring import Rollout, step_rewards, wait_and_grade
from omni_rl.flow.tokens import evaluate_set, expand_prompts, sample_round, show_answers, split_rows
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.run import Step, TokenRun
from omni_rl.run.sources import sample_steps
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.texts import export, open_engine, open_scorers, read_texts
from omni_rl.run.world import World
from omni_rollout.engines.transformers import trajectory_from_texts
from omni_rollout.tokens import TokenTrajectory, score_tokens
from omni_train.dist import gather_json
from omni_train.prompts.chats import answer_text
from torch import Tensor, nn


@dataclass(frozen=True)
class Pairs:
    """This rank's n pairs of answers to the same prompts, and each pair's place among the prompts of the step.

    Without any pairs there is one filler row, and `places` is empty.
    """

    win: TokenTrajectory
    lose: TokenTrajectory
    places: Sequence[int]


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    offline = bool(args.preferences)
    answers = SIDES if offline else ()
    inputs = read_texts(args, world, policies=["reference"], scored=not offline, answers=answers)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="dpo")
    with Loop(run, evaluate_set, export) as steps:
        for step, rollout in sample_steps(run, steps, roll_out):
            pairs = select_pairs(run, step, rollout) if rollout else read_pairs(run, step)
            with run.updating(step):
                step.metrics |= update(run, step, pairs)
            run.sync(step)


def roll_out(run: TokenRun[Args], step: Step) -> Rollout[TokenTrajectory] | None:
    """Return this rank's answers of a step, with pending scores, or None offline."""
    return None if run.args.preferences else sample_round(run, step.number)


def select_pairs(run: TokenRun[Args], step: Step, rollout: Rollout[TokenTrajectory]) -> Pairs:
    """Return the best and the worst answer of each of this rank's groups of the step, and show answers."""
    pairs = wait_and_grade(run, step, rollout, choose_pairs)
    show_answers(run, step, rollout)
    return pairs


def choose_pairs(run: TokenRun[Args], step: Step, rollout: Rollout[TokenTrajectory]) -> Pairs:
    """Return the best and the worst answer of each of this rank's groups. Batches hold whole groups."""
    rewards, trajectory = step_rewards(run, step, rollout), TokenTrajectory.cat(rollout.batches)
    row_of = {index: row for row, index in enumerate(trajectory.indices.tolist())}
    pairs = [pair for pair in best_worst_pairs(rewards, rollout.groups) if pair[0] in row_of]
    win, lose = (trajectory.select([row_of[pair[side]] for pair in pairs] or [0]) for side in range(2))
    return Pairs(win, lose, [prompt.group for prompt in win.prompts[: len(pairs)]])


def read_pairs(run: TokenRun[Args], step: Step) -> Pairs:
    """Return this rank's pairs of the step from the preference file."""
    dist, records = run.dist, run.prompts.at(step.number)
    places = range(dist.dp_rank, len(records), dist.dp_size)
    with run.phase("read"):
        rank_records = [records[i] for i in places] or records[:1]
        prompts = expand_prompts(rank_records, 1, seed=run.args.run.seed, step=step.number)
        win, lose = (
            trajectory_from_texts(
                run.model, prompts, [answer_text(p.meta[side], side, p.text) for p in prompts], run.base_params
            )
            for side in SIDES
        )
    return Pairs(win, lose, places)


# 3. The update


@dataclass(frozen=True)
class PairBatch:
    """B answers of one forward: B/2 pairs, preferred answers first. Only the first `count` pairs count."""

    trajectory: TokenTrajectory
    count: int


def minibatch_pairs(args: Args, pairs: Pairs, number: int) -> list[PairBatch]:
    """Return this rank's batches of one optimizer step, of pairs of similar length, as `split_rows` splits them."""
    data, max_lengths = args.data, torch.stack([pairs.win.lengths, pairs.lose.lengths]).amax(dim=0).tolist()
    sizes = [(len(e["input_ids"]), length) for e, length in zip(pairs.win.encoded, max_lengths, strict=True)]
    numbers = [place * data.num_minibatches // data.prompts_per_step for place in pairs.places]
    rows = [i for i, update_number in enumerate(numbers) if update_number == number]
    return [
        build_batch(pairs, batch_rows, len(batch_rows))
        for batch_rows in split_rows(rows, sizes, data.batch_size // 2, -(-data.tokens_per_batch // 2))
    ]


def build_batch(pairs: Pairs, rows: Sequence[int], count: int) -> PairBatch:
    """Return a batch of the pairs in these rows."""
    return PairBatch(TokenTrajectory.cat([pairs.win.select(rows), pairs.lose.select(rows)]).trim(), count)


def answer_log_probs(run: TokenRun[Args], net: nn.Module, batch: PairBatch) -> Tensor:
    """Return the log-prob [B] of each answer of a batch, in nats."""
    log_prob = score_tokens(run.model, net, batch.trajectory).log_prob
    return log_prob.where(batch.trajectory.sampled.to(log_prob.device), 0.0).sum(dim=1)


def update(run: TokenRun[Args], step: Step, pairs: Pairs) -> dict[str, float]:
    """Take an optimizer step on each minibatch of pairs; metrics are means over all pairs."""
    args, dist, num_updates = run.args, run.dist, run.args.data.num_minibatches
    rank_batches = [minibatch_pairs(args, pairs, number) for number in range(num_updates)]
    counts = torch.tensor(
        gather_json(dist, [[sum(b.count for b in batches), len(batches)] for batches in rank_batches])
    )
    num_pairs, num_batches = counts.sum(dim=0)[:, 0].tolist(), counts.amax(dim=0)[:, 1].tolist()
    # All ranks compute the same number of batches, as sharded weights require.
    padded = [b + [build_batch(pairs, [0], 0)] * (n - len(b)) for b, n in zip(rank_batches, num_batches, strict=True)]
    with torch.no_grad(), run.policy.reference() as net:
        references = [[answer_log_probs(run, net, batch) for batch in batches] for batches in padded]
    forwards, results = [], []
    for number in range(num_updates):
        for batch, old in zip(padded[number], references[number], strict=True):
            new = answer_log_probs(run, run.policy.net, batch)
            out = sequence_dpo_loss(*new.chunk(2), *old.chunk(2), dpo_beta=args.dpo_beta)
            # Gradients are summed over batches and ranks; this makes the sum a mean.
            run.policy.backward(out.loss * batch.count / num_pairs[number], of=len(padded[number]))
            forwards.append({k: v * batch.count for k, v in (out.metrics | {"loss": out.loss.detach()}).items()})
        results.append(run.optimizer_step(step, has_signal=num_pairs[number] > 0))
    step.metrics["policy/pairs"] = float(sum(num_pairs))
    if not forwards:
        step.has_signal = False
        return {"policy/skipped_updates": float(num_updates)}
    share = dist.dp_size / sum(num_pairs)
    means = {name: torch.stack([m[name] for m in forwards]).sum() * share for name in forwards[0]}
    return run.policy_metrics([means], results)


if __name__ == "__main__":
    launch(main, ARGS)
