"""The part of a rank that only samples, while others train: `--sharding.rollout-ranks`."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from omni_reward import RewardError, Score
from omni_train.roles import Roles
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_rl.flow.scoring import MediaRollout
from omni_rl.run.run import AnyRun, Step
from omni_rl.run.samplers import Counts, samples_message, scores_message

RunT = TypeVar("RunT", bound=AnyRun)


def serve(run: RunT, roles: Roles, roll_out: Callable[[RunT, Step], MediaRollout]) -> None:
    """Sample what the ranks that train order, with the weights that they send before, until they end."""
    tensors = iter(run.policy.sampled_with)
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(lambda: None)
        while (order := roles.next_order())[0] != []:
            head, weights = order
            if head is None:
                for i in range(len(weights)):
                    copy_full(weights[str(i)], next(tensors))
                continue
            number, version = head
            tensors, begin = iter(run.policy.sampled_with), time.process_time()
            run.calls.clear()
            run.sync_weights(version)
            rollout = roll_out(run, Step(number, version))
            cpu_ms = round(1000 * (time.process_time() - begin))
            counts = {"forwards": sum(run.calls.values()), "cpu_ms": cpu_ms}
            if sent.done():
                sent.result()  # raises what went wrong
            sent = sender.submit(send, roles, rollout, counts)


@torch.no_grad()
def copy_full(full: Tensor, into: Tensor) -> None:
    """Copy a tensor into one that may be sharded over the ranks of this role."""
    if isinstance(into, DTensor):
        full = distribute_tensor(full, into.device_mesh, into.placements, src_data_rank=None).to_local()
        into = into.to_local()
    into.copy_(full)


def send(roles: Roles, rollout: MediaRollout, counts: Counts) -> None:
    """Send a rollout's batches and then their scores, each to the rank that trains on it."""
    owners = [batch.prompts[0].index // rollout.in_a_row % roles.num_trainers for batch in rollout.batches]
    for batch, trainer in zip(rollout.batches, owners, strict=True):
        roles.send(samples_message(batch, counts, with_media=trainer == 0), trainer)
        counts = {}
    for scores, trainer in zip(graded(rollout), owners, strict=True):
        roles.send(scores_message(scores), trainer)


def graded(rollout: MediaRollout) -> Sequence[Sequence[Score] | RewardError]:
    """Return the scores of each batch, or the error for each."""
    try:
        scores = iter(rollout.scores)
    except RewardError as exc:
        return [exc] * len(rollout.batches)
    return [[next(scores) for _ in range(len(batch))] for batch in rollout.batches]
