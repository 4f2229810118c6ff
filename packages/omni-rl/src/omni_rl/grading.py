"""Scores to advantages, and batches that wait for them when they are read.

Where a rank samples whole groups, and each is divided by its own deviation or by none, the advantages of a batch need
only the scores of its own groups. The first minibatch then waits for no more than these, batch by batch. Batches keep
their order, whichever scores come first, so that no bit depends on the scorer's speed. Before the first optimizer step
all scores of all ranks are graded, as in an update that waits for them: where a scorer has failed, the weights are
untouched.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from omni_losses import group_advantages
from omni_reward import Score
from omni_rollout import Prompt, Samples, Trajectory
from omni_rollout.types import to_device
from torch import Tensor

from omni_rl.args import JudgedArgs
from omni_rl.run import Run, Step
from omni_rl.scoring import (
    Grades,
    Pending,
    TrainBatch,
    collect,
    describe_rewards,
    gather_rewards,
    groups_of,
    in_minibatches,
    rewards_of,
    values_of,
)
from omni_rl.streams import part_advantages

Grade = Callable[[list[Score]], list[TrainBatch]]


def advantages_of(
    run: Run[JudgedArgs], step: Step, prompts: Sequence[Prompt], batches: Sequence[Samples], scores: Sequence[Score]
) -> tuple[Tensor, Tensor]:
    """Return advantages [N], or [N, M] of M streams, and rewards [N] of all ranks' samples; the step logs both.

    Raises:
        RuntimeError: no sample has a score, and --on-failure asks for one.
    """
    args, groups = run.args, groups_of(prompts)
    rewards = gather_rewards(run.dist, batches, scores, groups)
    step.metrics |= describe_rewards(rewards, groups, scores, need_one=args.on_failure == "raise")
    if args.reward_parts:
        advantages = part_advantages(run, batches, scores, rewards, groups)
    else:
        advantages = group_advantages(rewards, groups, std=args.adv_std, correction=args.adv_correction)
    step.has_signal = bool(advantages.any())
    step.metrics |= {"advantage/min": advantages.min().item(), "advantage/max": advantages.max().item()}
    return advantages, rewards


def graded(
    run: Run[JudgedArgs],
    step: Step,
    batches: Sequence[Trajectory],
    pending: Sequence[Pending],
    grade: Grade,
    *,
    by_group: bool,
    weighted: bool = False,
    num_minibatches: int = 1,
) -> list[TrainBatch]:
    """Return the batches to train on; by group each waits for its scores when it is read.

    Args:
        run: the run.
        step: has a signal once all scores are graded.
        batches: of this rank, as they were sampled.
        pending: their scores, in the same order.
        grade: makes the batches to train on of this rank's scores, and gathers those of all ranks.
        by_group: as `needs_own_group` says; `grade` then changes no batch but as the next two say.
        weighted: whether a sample without a score has weight 0.
        num_minibatches: as `omni_rl.scoring.select` takes it.

    Raises:
        RewardError: the scorer failed for some rank; on every rank, at the latest before the first optimizer step.
    """

    @cache
    def settle() -> list[TrainBatch]:
        with run.phase("reward_wait"):
            return grade(collect(run.dist, pending))

    if not by_group:
        return settle()
    step.settle = settle
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    own = [TrainBatch(b, cache(partial(_own_grades, run, b, prompts, pending, weighted))) for b in batches]
    return in_minibatches(own, math.gcd(len(own), num_minibatches), num_minibatches)


def needs_own_group(args: JudgedArgs, num_ranks: int, *, unit: int = 1) -> bool:
    """Return whether a sample's advantage needs only its group's scores, and each rank samples whole groups.

    unit: as `omni_rl.sampling.deal` has it.
    """
    is_whole = num_ranks == 1 or max(args.batch_size, unit) % args.group_size == 0
    return is_whole and args.adv_std != "batch" and not args.reward_parts


def _own_grades(
    run: Run[JudgedArgs], batch: Trajectory, prompts: Sequence[Prompt], pending: Sequence[Pending], weighted: bool
) -> Grades:
    """Return a batch's grades as soon as the scores up to the end of its last group are there.

    Those of a scorer that failed are 0, as ranks go through a sharded net together; the first optimizer step then
    raises on every rank.

    prompts: of this rank, group by group.
    """
    requests, scores = iter(pending), list[Score]()
    num_needed = sum(prompt.group <= batch.prompts[-1].group for prompt in prompts)
    onto = partial(to_device, device=run.dist.device)
    with run.phase("reward_wait"):
        while len(scores) < num_needed:
            if (request := next(requests)).exception():
                zeros = onto(torch.zeros(len(batch)))
                return Grades(zeros, zeros if weighted else None)
            scores += request.result()
    groups = groups_of(prompts[: len(scores)])
    rewards = rewards_of(torch.tensor(values_of(scores)), groups)
    advantages = group_advantages(rewards, groups, std=run.args.adv_std, correction=run.args.adv_correction)
    is_own = torch.isin(torch.tensor([p.index for p in prompts[: len(scores)]]), batch.indices)
    return Grades(onto(advantages[is_own]), onto((~rewards[is_own].isnan()).float()) if weighted else None)
