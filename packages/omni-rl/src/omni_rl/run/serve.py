"""The program of a rank that only samples while others train: `--sharding.rollout-ranks`."""

import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any, TypeVar

import torch
from omni_reward import RewardError, Score
from omni_train.progress import start_phase
from omni_train.roles import Roles
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_rl.flow.scoring import MediaRollout
from omni_rl.run.failures import catch_failures
from omni_rl.run.run import AnyRun, Step
from omni_rl.run.samplers import samples_message, scores_message

Order = tuple[Any, dict[str, Tensor]]
RunT = TypeVar("RunT", bound=AnyRun)


def serve(run: RunT, roll_out: Callable[[RunT, Step], MediaRollout]) -> None:
    """Sample the steps that the training ranks request, with the weights that they send, until they end.

    Then close the run.

    Raises:
        BrokenRunError: as in `omni_rl.run.failures.catch_failures`.
    """
    roles: Roles = run.world.roles  # type: ignore[assignment]  # never None on a sampling rank
    receiver, sender = ThreadPoolExecutor(1), ThreadPoolExecutor(1)  # no `with`: it would wait for both after an error
    tensors, sent = iter(run.policy.sampling_tensors), set[Future[None]]()
    start_phase("")
    with catch_failures(run):
        while (order := wait_for_order(receiver.submit(roles.next_order), sent))[0] != []:
            head, weights = order
            if head is None:
                for i in range(len(weights)):
                    copy_full(weights[str(i)], next(tensors))
                continue
            number, version = head
            tensors = iter(run.policy.sampling_tensors)
            run.calls.clear()
            run.sync_weights(version)
            rollout = roll_out(run, Step(number, version))
            forwards = math.nan if run.breakers.calls.is_off else sum(run.calls.values())
            sent.add(sender.submit(send, run, roles, rollout, forwards))
        sender.shutdown()


def wait_for_order(order: Future[Order], sent: set[Future[None]]) -> Order:
    """Return the next request, or raise an error of the sends in progress."""
    while not order.done():
        wait(list[Future[Any]]([order, *sent]), return_when=FIRST_COMPLETED)
        for send in [future for future in sent if future.done()]:
            sent.remove(send)
            send.result()
    return order.result()


@torch.no_grad()
def copy_full(full: Tensor, into: Tensor) -> None:
    """Copy a tensor into one that may be sharded over the ranks of this role."""
    if isinstance(into, DTensor):
        full = distribute_tensor(full, into.device_mesh, into.placements, src_data_rank=None).to_local()
        into = into.to_local()
    into.copy_(full)


def send(run: AnyRun, roles: Roles, rollout: MediaRollout, forwards: float) -> None:
    """Send a rollout's batches and then their scores, each to the rank that trains on it.

    forwards: number of samples that passed through the nets for it, or NaN if unknown.
    """
    owners = [batch.prompts[0].index // rollout.consecutive % roles.num_trainers for batch in rollout.batches]
    owned = [*zip(owners, rollout.batches, strict=True)]
    roles.send([(owner, samples_message(batch, with_media=owner == 0)) for owner, batch in owned])
    error, scores = None, list[Score]()
    try:
        scores = rollout.scores
    except RewardError as exc:
        error = f"rank {roles.whole.rank}: {exc}"
    used = {"cpu_ms": time.process_time(), "busy_ms": run.scorer.busy_s}  # since this rank started
    counts = {name: round(1000 * value) - run.counts[name] for name, value in used.items()}
    run.counts.update(counts)
    firsts = accumulate([len(batch) for batch in rollout.batches], initial=0)
    heads = [counts | {"forwards": forwards}, *[{}] * (len(owned) - 1)]
    roles.send(
        (owner, scores_message(scores[first : first + len(batch)], error, head))
        for (owner, batch), first, head in zip(owned, firsts, heads, strict=False)
    )
