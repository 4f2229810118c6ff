"""The training side of ranks that only sample: `--sharding.rollout-ranks`.

The trainer sends the number of each step in program order, preceded by the weights if they have changed. Each step is
therefore sampled with the same weights as in a run whose ranks all train, bit by bit. Samples are returned as tensors
when the step is trained on, followed by their scores, because the sampling ranks also send the score requests. Only the
first rank, which shows them, receives media.
"""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from omni_reward import RewardError, Score
from omni_rollout import Params, Prompt, Trajectory
from omni_train import progress
from omni_train.progress import track
from omni_train.roles import HEARTBEATS, Roles, pack
from omni_train.weights.full import gather_in_groups
from torch import Tensor

from omni_rl.flow.scorers import DeferredScores, Pending
from omni_rl.run.policy import Policy


class Samplers:
    """The ranks that only sample. All training ranks call all methods in the same order."""

    def __init__(self, roles: Roles, policy: Policy) -> None:
        """Set up the ranks of `roles`, which sample with `policy`."""
        self._roles, self._policy, self._version = roles, policy, -1
        self._sender = ThreadPoolExecutor(1)  # copies queue on rank 0's host while ranks sample
        self._pending_sends = deque[Future[None]]()
        self._closed = threading.Event()
        if roles.dist.is_main:
            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def request(self, number: int, version: int) -> None:
        """Request samples of a step from the current weights, whose `version` is the number of finished steps."""
        if version != self._version:
            for group in gather_in_groups(self._policy.sampling_tensors):
                self._send(None, group)
        self._version = version
        self._send([number, version])

    def receive(
        self, prompts: Sequence[Sequence[Prompt]], params: Params, consecutive: int, counts: Counter[str]
    ) -> tuple[list[Trajectory], list[Pending]]:
        """Return this rank's batches of the oldest requested step, and their scores, which must be read in order.

        prompts: the prompts of each batch. consecutive: number of consecutive samples per sampling rank. counts:
        updated with the counts of the sampling ranks when scores are read.
        """
        sources = [batch_prompts[0].index // consecutive % self._roles.num_samplers for batch_prompts in prompts]
        parts = zip(track(prompts, "samples"), sources, strict=True)
        batches = [self._batch(batch_prompts, params, source) for batch_prompts, source in parts]
        return batches, [self._scores(source, counts) for source in sources]

    def close(self) -> None:
        """Tell the sampling ranks to end."""
        self._closed.set()
        self._send([])
        self._sender.shutdown()

    def _send_heartbeats(self) -> None:
        """Send heartbeats between requests, while the program makes progress or waits for other ranks."""
        sent: Future[None] | None = None
        while not self._closed.wait(self._roles.timeout_s / HEARTBEATS):
            if progress.seconds_silent() < self._roles.timeout_s and not (sent and not sent.done()):
                with suppress(RuntimeError):  # it has just been closed
                    sent = self._sender.submit(self._roles.send_heartbeat)

    def _send(self, head: object, tensors: Sequence[Tensor] = ()) -> None:
        if not self._roles.dist.is_main:
            return
        while self._pending_sends and self._pending_sends[0].done():
            self._pending_sends.popleft().result()
        copies = {str(i): tensor.to("cpu", copy=True) for i, tensor in enumerate(tensors)}
        self._pending_sends.append(self._sender.submit(lambda: self._roles.announce(pack(head, copies))))

    def _batch(self, prompts: Sequence[Prompt], params: Params, sampler: int) -> Trajectory:
        head, tensors = self._roles.receive(sampler)
        fields: dict[str, Any] = {"media": {}, "cond": {}, "rollout_mean": None}
        for name, tensor in tensors.items():
            field, _, key = name.partition("/")
            on_device = tensor.to(self._roles.dist.device) if name in head["on_device"] else tensor
            if key:
                fields[field][key] = on_device
            else:
                fields[field] = on_device
        shared = {"rates": head["rates"], "weight_version": head["version"], "params": params.of_size(prompts[0].size)}
        return Trajectory(tuple(prompts), **shared, **fields)

    def _scores(self, sampler: int, counts: Counter[str]) -> Pending:
        def receive() -> None:
            head, _ = self._roles.receive(sampler)
            counts.update(head["counts"])
            if head["error"] is None:
                scores.set_result([Score(**score) for score in head["scores"]])
            else:
                scores.set_exception(RewardError(head["error"]))

        scores = DeferredScores(receive)
        return scores


def samples_message(batch: Trajectory, *, with_media: bool) -> Tensor:
    """Return the message that contains a batch."""
    nested = {"cond": batch.cond, "media": batch.media if with_media else {}}
    tensors = {f"{field_name}/{name}": tensor for field_name, group in nested.items() for name, tensor in group.items()}
    for field in fields(batch):
        if isinstance(value := getattr(batch, field.name), Tensor):
            tensors[field.name] = value
    on_device = [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    return pack({"rates": batch.rates, "version": batch.weight_version, "on_device": on_device}, copies)


def scores_message(scores: Sequence[Score], error: str | None, counts: dict[str, int]) -> Tensor:
    """Return the message with the scores of a batch, or their error. counts: this rank's counts, to be added."""
    return pack({"scores": [asdict(score) for score in scores], "error": error, "counts": counts}, {})
