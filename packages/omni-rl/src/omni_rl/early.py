"""An update that begins with the groups whose scores are there, while others are still being scored.

Where a rank draws whole groups, and each is divided by its own deviation or by none, the advantages of a batch need the
scores of its own groups alone. The first minibatch waits for no more than these, batch by batch. Batches keep their
order, whichever scores come first, so that no bit depends on the scorer's speed. Before the first optimizer step all
scores of all ranks are there and graded, as in an update that waits for them: where a scorer has failed, the weights
are untouched.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from omni_losses import group_advantages
from omni_reward import Score
from omni_rollout import Prompt
from omni_rollout.types import to_device

from omni_rl.args import JudgedArgs
from omni_rl.run import Run, Step
from omni_rl.scoring import Pending, TrainBatch, collect, groups_of, rewards_of, values_of

Grade = Callable[[list[Score]], object]


def goes_by_group(args: JudgedArgs, num_ranks: int, *, unit: int = 1) -> bool:
    """Whether the advantage of a sample depends on its group alone, and each rank draws whole groups.

    unit: as `omni_rl.sampling.deal` has it.
    """
    is_whole = num_ranks == 1 or max(args.batch_size, unit) % args.group_size == 0
    return is_whole and args.adv_std != "batch" and not args.reward_parts


def as_scored(
    run: Run[JudgedArgs], step: Step, chosen: Sequence[TrainBatch], pending: Sequence[Pending], grade: Grade
) -> list[TrainBatch]:
    """The batches, whose advantages, and weights if any, become those of their scores when they `wait`.

    Where a scorer has failed they stay as they are, as ranks go through a sharded net together; the first optimizer
    step then raises on every rank.

    Args:
        chosen: all samples of this rank, in the order of `pending`.
        grade: takes the scores of this rank before the first optimizer step, and gathers those of all ranks.
    """

    def confirm() -> None:
        with run.phase("reward_wait"):
            grade(collect(run.dist, pending))

    step.confirm = cache(confirm)
    prompts = list({prompt.index: prompt for batch in chosen for prompt in batch.trajectory.prompts}.values())
    return [replace(batch, wait=cache(partial(_fill, run, batch, prompts, pending))) for batch in chosen]


def _fill(run: Run[JudgedArgs], batch: TrainBatch, prompts: Sequence[Prompt], pending: Sequence[Pending]) -> None:
    """Put into a batch what scores of its groups give, as soon as the scores up to the end of the last one are there.

    prompts: of this rank, group by group.
    """
    requests, scores = iter(pending), list[Score]()
    num_needed = sum(prompt.group <= batch.trajectory.prompts[-1].group for prompt in prompts)
    with run.phase("reward_wait"):
        while len(scores) < num_needed:
            if (request := next(requests)).exception():
                return
            scores += request.result()
    groups = groups_of(prompts[: len(scores)])
    rewards = rewards_of(torch.tensor(values_of(scores)), groups)
    advantages = group_advantages(rewards, groups, std=run.args.adv_std, correction=run.args.adv_correction)
    is_own = torch.isin(torch.tensor([p.index for p in prompts[: len(scores)]]), batch.trajectory.indices)
    batch.advantages.copy_(to_device(advantages[is_own], run.dist.device))
    if batch.weights is not None:
        batch.weights.copy_(to_device((~rewards[is_own].isnan()).float(), run.dist.device))
