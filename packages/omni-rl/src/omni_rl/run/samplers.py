"""Ranks that only sample, as those that train see them: `--sharding.rollout-ranks`.

Before a step is sampled, its number and the weights that sample it are sent, in the order of the trainer's program:
which weights sample which step is then that of a run whose ranks all train, to the bit. Samples come back as tensors,
and their scores after them, as the ranks that sample also ask the scorer. Media come to the first rank only, which
shows them.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from typing import Any

from omni_reward import RewardError, Score
from omni_rollout import Params, Prompt, Trajectory
from omni_train.roles import Roles, pack
from omni_train.weights.full import gather_in_groups
from torch import Tensor

from omni_rl.flow.scorers import Pending
from omni_rl.run.policy import Policy

Counts = dict[str, int]  # what a message adds to `Run.counts`


class Samplers:
    """The ranks that only sample. Every rank that trains calls every method, in one order."""

    def __init__(self, roles: Roles, policy: Policy, wait_s: float) -> None:
        """Take the policy that they sample with. wait_s: longest time for a step's samples."""
        self._roles, self._policy, self._wait_s = roles, policy, wait_s
        self._sender = ThreadPoolExecutor(1)
        self._receivers = [ThreadPoolExecutor(1) for _ in range(roles.num_samplers)]
        self._orders = deque[Future[None]]()
        self._arrivals = deque[tuple[list[Trajectory], list[Future[Trajectory]], list[Counts]]]()

    def order(self, number: int, version: int) -> None:
        """Have a step sampled by the weights as they are now, the number of whose finished steps is `version`."""
        for group in gather_in_groups(self._policy.sampled_with):
            self._send(None, group)
        self._send([number, version], [])

    def expect(
        self, prompts: Sequence[Sequence[Prompt]], params: Params, in_a_row: int
    ) -> tuple[list[Trajectory], list[Pending]]:
        """Return the batches of the step that was ordered, empty until `arrive`, and their scores to come.

        prompts: of this rank's batches. in_a_row: number of consecutive samples that one rank samples.
        """
        batches, counts = list[Trajectory](), list[Counts]()
        samples, scores = [Future[Trajectory]() for _ in prompts], [Pending() for _ in prompts]
        for number, receiver in enumerate(self._receivers):
            rows = [i for i, own in enumerate(prompts) if own[0].index // in_a_row % len(self._receivers) == number]
            makes = [partial(self._trajectory, prompts[i], params, counts) for i in rows]
            own = [samples[i] for i in rows], [scores[i] for i in rows]
            receiver.submit(_fill, partial(self._roles.receive, number), makes, *own)
        self._arrivals.append((batches, samples, counts))
        return batches, scores

    def arrive(self) -> Counter[str]:
        """Wait for the batches of the step that was expected first; return what it adds to `Run.counts`.

        Raises:
            RuntimeError: a rank that samples has ended, or takes longer than `wait_s`.
        """
        batches, samples, counts = self._arrivals.popleft()
        while self._orders and self._orders[0].done():
            self._orders.popleft().result()
        try:
            batches += [future.result(self._wait_s) for future in samples]
        except TimeoutError:
            text = f"ranks that sample have sent no samples for {self._wait_s:g} s: they hang, or"
            raise RuntimeError(f"{text} --hang-timeout-s must be longer than a rollout takes") from None
        return sum(map(Counter[str], counts), Counter[str]())

    def close(self) -> None:
        """Have the ranks that sample end."""
        self._send([], [])
        self._sender.shutdown()

    def _send(self, head: object, tensors: Sequence[Tensor]) -> None:
        if self._roles.dist.is_main:
            message = pack(head, {str(i): tensor for i, tensor in enumerate(tensors)})
            self._orders.append(self._sender.submit(self._roles.announce, message))

    def _trajectory(
        self, prompts: Sequence[Prompt], params: Params, counts: list[Counts], head: Any, tensors: dict[str, Tensor]
    ) -> Trajectory:
        counts.append(head["counts"])
        nested = dict[str, dict[str, Tensor]](media={}, cond={})
        whole = dict[str, Tensor | None](rollout_mean=None)
        for name, tensor in tensors.items():
            place, _, own = name.partition("/")
            moved = tensor.to(self._roles.dist.device) if name in head["on_device"] else tensor
            if own:
                nested[place][own] = moved
            else:
                whole[place] = moved
        shared = {"prompts": tuple(prompts), "rates": head["rates"], "weight_version": head["version"]}
        return Trajectory(**shared, **nested, **whole, params=params.of_size(prompts[0].size))  # type: ignore[arg-type]


def samples_message(batch: Trajectory, counts: Counts, *, with_media: bool) -> Tensor:
    """Return the message with a batch."""
    tensors = dict[str, Tensor]()
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif field.name == "cond" or (field.name == "media" and with_media):
            tensors |= {f"{field.name}/{name}": tensor for name, tensor in value.items()}
    on_device = [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    head = {"rates": batch.rates, "version": batch.weight_version, "counts": counts, "on_device": on_device}
    return pack(head, tensors)


def scores_message(scores: Sequence[Score] | RewardError) -> Tensor:
    """Return the message with the scores of a batch, or why there are none."""
    return pack(str(scores) if isinstance(scores, RewardError) else [asdict(score) for score in scores], {})


def _fill(
    receive: Callable[[], tuple[Any, dict[str, Tensor]]],
    makes: Sequence[Callable[[Any, dict[str, Tensor]], Trajectory]],
    samples: Sequence[Future[Trajectory]],
    scores: Sequence[Pending],
) -> None:
    """Receive the batches and then the scores that one rank sends; a failure is that of all that are missing."""
    try:
        for make, future in zip(makes, samples, strict=True):
            future.set_result(make(*receive()))
        for graded in scores:
            found, _ = receive()
            if isinstance(found, str):
                graded.set_exception(RewardError(found))
            else:
                graded.set_result([Score(**score) for score in found])
    except Exception as exc:  # of the connection
        for missing in chain[Future[Any]](samples, scores):
            if not missing.done():
                missing.set_exception(exc)
