"""Distillation of models that generate text: a student learns all token probabilities of a teacher of any size.

    prompts -> rollout of the student -> the teacher's log-probs of all tokens -> divergence -> step

The student answers, and a teacher computes the probabilities of the whole vocabulary after each token of the answer, so
that the student is corrected on its own answers (GKD, arXiv 2306.13649). With --completion-key it learns from given
answers instead. The loss is the KL divergence in either direction, or the Jensen-Shannon divergence.

    omni-rl train distill_tokens --preset tiny-beeps
    omni-rl train distill_tokens --nproc-per-node 8 --model Qwen/Qwen2.5-3B-Instruct --teacher runs/big/weights \\
        --prompts questions.jsonl --eval.prompts eval.jsonl
    torchrun --standalone --nproc-per-node 8 apps/train_distill_tokens.py ...  # the same, without the command

The teacher has the student's vocabulary, and reads the student's tokens. Training needs no reward; --reward grades only
answers of evaluations.

Differences from TRL's GKDTrainer:
1. All answers are the student's or all are given, not a random mix.
2. The mean is over the answers' tokens of all batches and ranks of an optimizer step.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from omni_rl.settings import groups
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import TokenEval
from omni_rl.settings.fields import REQUIRED, Flat, between, require
from omni_rl.settings.token_args import TokenArgs, check_answers, check_tokens

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class StudentData(groups.TokenData):
    """Prompts that the student answers."""

    group_size: Annotated[int, between(1, 65_536)] = 1  # Samples of each prompt
    completion_key: str = ""  # Key or column of given answers; empty: the student's own answers


@dataclass(frozen=True)
class Args(TokenArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    RATES = (1e-6, 1e-5)

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.Policy] = groups.Policy()
    lora: groups.TokenLora = groups.TokenLora()
    sharding: groups.Sharding = groups.Sharding()
    memory: groups.Memory = groups.Memory()
    data: Flat[StudentData] = StudentData()
    eval: TokenEval = TokenEval()
    sampling: Flat[groups.TokenSampling] = groups.TokenSampling()
    scorer: groups.TokenScorer = groups.TokenScorer()
    optim: groups.Optim = groups.Optim()
    tool: groups.ToolCalls = groups.ToolCalls()
    reward: str = ""  # Rules that grade answers of evaluations, such as 'math + 0.1*format=PATTERN'; empty: exact
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-5 with LoRA, 1e-6 without

    # Algorithm
    teacher: Annotated[str, REQUIRED] = ""  # Teacher: folder or hub id of a model with the student's vocabulary
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"  # Reverse KL, forward KL or Jensen-Shannon


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    data = args.data
    check_tokens(args)
    if data.completion_key:
        check_answers(args, [data.completion_key])
    require(
        (not data.completion_key or data.group_size == 1,
         f"--group-size must be 1 with --completion-key, as a line has one answer, got {data.group_size}"),
        (data.num_minibatches <= data.prompts_per_step * data.group_size,
         f"--num-minibatches must be <= a step's samples, got {data.num_minibatches}"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_distill_tokens", description=__doc__)

# 2. The teacher, and a step's answers

import torch
from omni_losses import token_divergence
from omni_rl.flow.tokens import (
    TokenBatch,
    Unscored,
    evaluate_set,
    expand_prompts,
    pack_all,
    read_answers,
    sample_answers,
)
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.run import Step, TokenRun
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.texts import (
    Teacher,
    export,
    open_engine,
    open_scorers,
    open_teacher,
    read_teacher,
    read_texts,
)
from omni_rl.run.world import World
from omni_rollout.tokens import TokenTrajectory, score_logits, token_log_probs
from torch import Tensor


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    key = args.data.completion_key
    inputs = read_texts(args, world, scored=False, answers=[key] if key else [])
    inputs, teacher_model = read_teacher(args, world, inputs, args.teacher)
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    teacher = open_teacher(world, inputs, teacher_model)
    policy = open_policy(args, world, inputs, session, net, engine)
    policy.teachers = {"teacher": teacher.net}  # so that its forwards are counted too
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="distill")
    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            answers = read_answers(run, step, key) if key else roll_out(run, step)
            with run.updating(step):
                step.metrics |= update(run, step, pack_all(run, answers), teacher)
            run.sync(step)


def roll_out(run: TokenRun[Args], step: Step) -> list[TokenTrajectory]:
    """Return this rank's batches of the student's answers."""
    data = run.args.data
    prompts = expand_prompts(run.prompts.at(step.number), data.group_size, seed=run.args.run.seed, step=step.number)
    with run.phase("rollout"):
        return [*sample_answers(run, prompts, run.base_params, Unscored()).batches]


# 3. The update


def update(
    run: TokenRun[Args], step: Step, minibatches: Sequence[Sequence[TokenBatch]], teacher: Teacher
) -> dict[str, float]:
    """Take an optimizer step on each minibatch; metrics are means over tokens and ranks."""
    forwards, results = [], []
    for batches in minibatches:
        for batch in batches:
            divergence = compare(run, batch.trajectory, teacher)
            mask = batch.trajectory.sampled.to(divergence.device)
            divergence = divergence.where(mask, 0.0)
            # Gradients are summed over batches and ranks; the weights make the sum a mean.
            run.policy.backward((divergence.sum(dim=1) * batch.weights).sum(), of=len(batches))
            forwards.append(batch.weigh({"loss": divergence.detach().sum() / mask.sum()}))
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


def compare(run: TokenRun[Args], batch: TokenTrajectory, teacher: Teacher) -> Tensor:
    """Return the divergence [B, T] of student and teacher at each token of the answers, in nats.

    The teacher's log-probs of all tokens take 4 bytes each: 0.6 GB for 1,000 tokens and a vocabulary of 150,000.
    """

    def log_probs(logits: Tensor, _: Tensor) -> Tensor:
        return token_log_probs(logits[:, : teacher.vocab_size], run.model.suppressed, batch.params)

    def diverge(logits: Tensor, target: Tensor) -> Tensor:
        student = token_log_probs(logits[:, : teacher.vocab_size], run.model.suppressed, batch.params)
        return token_divergence(student, target, divergence=run.args.divergence)[:, None]

    with torch.no_grad():
        target = score_logits(teacher.model, teacher.net, batch, batch.tokens, log_probs)
    return score_logits(run.model, run.policy.net, batch, target, diverge)[..., 0]


if __name__ == "__main__":
    launch(main, ARGS)
