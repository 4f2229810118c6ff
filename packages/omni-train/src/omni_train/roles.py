"""Ranks that only sample, separate from those that train, and the messages between them.

The first ranks train, the last ones sample. Each role has its own `Dist`, so code that communicates within a role needs
nothing else. Messages are safetensors with JSON and tensors, sent over gloo from host to host. Orders go from the first
rank to all sampling ranks, in one order; results go from each sampling rank to each training rank. Between orders, the
first rank sends heartbeats while its program makes progress, so that sampling ranks notice if it hangs.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from omni_train.dist import Dist, machine_groups
from omni_train.progress import mark_alive

_HEAD = "head"  # the entry of a message that holds its JSON
_NO_LIMIT = timedelta(days=365)  # for receiving results; waiting for orders detects a rank that hangs
HEARTBEATS = 4  # number of heartbeats within the longest wait for a rank


@dataclass(frozen=True)
class Roles:
    """This process's role. whole: all ranks. dist: the ranks of its role. num_trainers: T of W ranks.

    timeout_s: longest wait for a rank.
    """

    whole: Dist
    dist: Dist
    num_trainers: int
    orders: torch_dist.ProcessGroup | None  # group of the first rank and the sampling ranks; None on other ranks
    results: torch_dist.ProcessGroup
    timeout_s: float

    @property
    def num_samplers(self) -> int:
        """The number of ranks that only sample."""
        return self.whole.world_size - self.num_trainers

    def announce(self, message: Tensor) -> None:
        """Send an order, as returned by `pack`, from the first rank."""
        for part in with_length(message):
            torch_dist.broadcast(part, 0, group=self.orders)

    def send_heartbeat(self) -> None:
        """Send a heartbeat from the first rank, from the thread that sends orders."""
        torch_dist.broadcast(torch.zeros(1, dtype=torch.int64), 0, group=self.orders)

    def next_order(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the next order on a sampling rank.

        Raises:
            RuntimeError: the first rank has ended, or sends no heartbeat.
        """
        while (order := unpack(lambda part: torch_dist.broadcast(part, 0, group=self.orders))) is None:
            pass
        return order

    def send(self, messages: Iterable[tuple[int, Tensor]]) -> None:
        """Send results, each to a training rank, and wait until all ranks have received theirs, in any order."""
        parts = [(rank, part) for rank, message in messages for part in with_length(message)]
        for work in [torch_dist.isend(part, rank, group=self.results) for rank, part in parts]:
            if work is not None:
                work.wait(_NO_LIMIT)

    def receive(self, sampler: int) -> tuple[Any, dict[str, Tensor]]:
        """Return the next result from a sampling rank. sampler: index of that rank among the sampling ranks."""
        message = unpack(lambda part: torch_dist.recv(part, self.num_trainers + sampler, group=self.results))
        mark_alive()
        if message is None:
            raise RuntimeError(f"rank {self.num_trainers + sampler} has sent no result")
        return message


def split(whole: Dist, num_samplers: int, *, timeout_s: float) -> Roles:
    """Assign the sampling role to the last ranks. Every rank calls it.

    timeout_s: seconds after which a collective of a role fails if a rank is missing, and the wait for a result, an
        order or a heartbeat. A sampling rank checks them between two orders, each of which takes less time.
    """
    count, timeout = whole.world_size - num_samplers, timedelta(seconds=timeout_s)
    samples = whole.rank >= count
    ranks = [*range(count)], [*range(count, whole.world_size)]
    group = [torch_dist.new_group(members, timeout=timeout) for members in ranks][samples]
    mesh = DeviceMesh.from_group(group, whole.device.type, mesh_dim_names=("dp",))
    first, size = (count if samples else 0), len(ranks[samples])
    ring = replace(whole, rank=whole.rank - first, world_size=size, mesh=mesh, machines=None, first=first)
    # The names of its groups count the earlier groups of each rank.
    dist = replace(ring, machines=machine_groups(ring, timeout))
    orders = torch_dist.new_group([0, *ranks[1]], timeout=timeout, backend="gloo")
    results = torch_dist.new_group(timeout=timeout, backend="gloo")
    return Roles(whole, dist, count, orders if samples or whole.rank == 0 else None, results, timeout_s)


def pack(head: object, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a message, bytes [n] on the host, from JSON and host tensors that do not share memory."""
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(save(whole | {_HEAD: text})), dtype=torch.uint8)


def with_length(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a message to send: its length [1], int64, and its bytes."""
    return torch.tensor([len(message)]), message


def unpack(take: Callable[[Tensor], object]) -> tuple[Any, dict[str, Tensor]] | None:
    """Return the JSON and the tensors of a message; None for a heartbeat.

    take: receives the parts of `with_length`, one after the other.
    """
    take(length := torch.empty(1, dtype=torch.int64))
    if not length:
        return None
    take(message := torch.empty(int(length), dtype=torch.uint8))
    tensors = load(message.numpy().tobytes())
    return json.loads(tensors.pop(_HEAD).numpy().tobytes()), tensors
