"""Supervised fine-tuning of models that generate text from any input: a cold start for reinforcement learning.

    file of prompts and answers -> log-probs -> negative log-likelihood -> step

The model learns the answer of each line: the loss is the mean cross-entropy of the answers' tokens, including their end
tokens. Tokens of prompts are not trained. Training does not sample.

    omni-rl train sft_tokens --preset tiny-beeps
    omni-rl train sft_tokens --nproc-per-node 8 --preset qwen25-lora --prompts chats.jsonl --eval.prompts eval.jsonl
    torchrun --standalone --nproc-per-node 8 apps/train_sft_tokens.py ...  # the same, without the command

A line of --prompts is a chat that ends with a message of the assistant, or a prompt with a "completion"; docs/tokens.md
describes both. Evaluations sample answers, which --reward grades. Any other trainer on text can start from
runs/NAME/weights.

Differences from TRL's SFTTrainer:
1. Only the last message of a chat is trained, as with its `completion_only_loss`. It ends with the end-of-answer token,
   without the text that the chat template adds after it.
2. The mean is over the answers' tokens of all batches and ranks of an optimizer step.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from omni_rl.settings import groups
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.eval_sets import TokenEval
from omni_rl.settings.fields import Flat, between, require
from omni_rl.settings.token_args import TokenArgs, check_answers, check_tokens

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.


@dataclass(frozen=True)
class AnswerData(groups.TokenData):
    """Prompts with answers to imitate."""

    group_size: Annotated[int, between(1, 1)] = 1  # Answers per prompt, always 1
    completion_key: str = "completion"  # Key or column of the answer; a chat's last message is "completion"


@dataclass(frozen=True)
class Args(TokenArgs):
    """Settings of a run; --preset NAME and --config FILE.toml are read first."""

    RATES = (1e-5, 1e-4)

    run: Flat[groups.Run] = groups.Run()
    policy: Flat[groups.Policy] = groups.Policy()
    lora: groups.TokenLora = groups.TokenLora()
    sharding: groups.Sharding = groups.Sharding()
    memory: groups.Memory = groups.Memory()
    data: Flat[AnswerData] = AnswerData()
    eval: TokenEval = TokenEval()
    sampling: Flat[groups.TokenSampling] = groups.TokenSampling()
    scorer: groups.TokenScorer = groups.TokenScorer()
    optim: groups.Optim = groups.Optim()
    tool: groups.ToolCalls = groups.ToolCalls()
    reward: str = ""  # Rules that grade answers of evaluations, such as 'math + 0.1*format=PATTERN'; empty: exact
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-4 with LoRA, 1e-5 without


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together."""
    check_tokens(args)
    check_answers(args, [args.data.completion_key])
    require(
        (args.data.num_minibatches <= args.data.prompts_per_step,
         f"--num-minibatches must be <= --prompts-per-step, got {args.data.num_minibatches}"),
    )  # fmt: skip


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="train_sft_tokens", description=__doc__)

# 2. A training step: answers, their log-probs, the loss

from omni_losses import token_nll_loss
from omni_rl.flow.tokens import TokenBatch, evaluate_set, pack_all, read_answers
from omni_rl.run.failures import launch
from omni_rl.run.loop import Loop
from omni_rl.run.run import Step, TokenRun
from omni_rl.run.start import open_net, open_policy, open_run, open_session, print_plan, start_servers
from omni_rl.run.texts import export, open_engine, open_scorers, read_texts
from omni_rl.run.world import World
from omni_rollout.tokens import score_tokens


def main(args: Args, world: World) -> None:
    """Train the run, or resume it. Evaluated weights are written to runs/NAME/weights."""
    inputs = read_texts(args, world, scored=False, answers=[args.data.completion_key])
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm="sft")
    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            minibatches = pack_all(run, read_answers(run, step, args.data.completion_key))
            with run.updating(step):
                step.metrics |= update(run, step, minibatches)
            run.sync(step)


def update(run: TokenRun[Args], step: Step, minibatches: Sequence[Sequence[TokenBatch]]) -> dict[str, float]:
    """Take an optimizer step on each minibatch; metrics are means over tokens and ranks."""
    forwards, results = [], []
    for batches in minibatches:
        for batch in batches:
            log_prob, mask = score_tokens(run.model, run.policy.net, batch.trajectory).log_prob, batch.trajectory.mask
            out = token_nll_loss(log_prob, mask.to(run.dist.device), weights=batch.weights)
            # Gradients are summed over batches and ranks; the weights make the sum a mean.
            run.policy.backward(out.loss, of=len(batches))
            forwards.append(batch.weigh({"loss": out.metrics["nll"]}))
        results.append(run.optimizer_step(step))
    return run.policy_metrics(forwards, results)


if __name__ == "__main__":
    launch(main, ARGS)
