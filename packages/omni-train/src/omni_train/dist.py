"""One process per device under torchrun: its device, its rank, gathers of small values, shutdown.

W ranks, n values per rank. A program started without torchrun is one rank without a process group, and every function
here then returns at once. Nothing is pickled: strings are sent as JSON bytes.

Small messages between ranks stay on the host, over gloo, and do not wait for the device. Only gradients and weights
are sent from device to device.

Devices are accessed through `torch.accelerator`, which covers all kinds. Most of its functions raise without an
accelerator; here the CPU is a device like any other. Memory is in MB of 2**20 bytes.

Work that runs in parallel to training (an asynchronous save, for example) must create its own group with
`torch.distributed.new_group`: two threads that issue collectives on one group receive each other's messages.
"""

import gc
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omni_train.progress import mark_alive

T = TypeVar("T")
Merge = Literal["mean", "max", "min"]  # how values of a metric are merged

_MB = 2**20
_ALLOCATOR = ("memory_allocated", "max_memory_allocated", "max_memory_reserved")
_FIRST_BYTES = 4096  # part of a message that all ranks exchange first; a longer message takes a second exchange
_RING_RANKS = 64  # maximum number of ranks that exchange messages in one ring, where each forwards all others' messages


@dataclass(frozen=True)
class Dist:
    """This process's place among the ranks. `mesh` is 1-D with the axis name "dp", or None without a process group.

    is_planned: True if the other ranks do not exist (`omni_train.planned`); they are assumed to send what this one
        does.
    machines: process groups for messages by machine: the ranks with this local number on all machines, and the ranks
        of this machine. None if messages go through one ring of all ranks.
    context: number of consecutive ranks that compute each forward pass together, on the same samples.
    first: number of ranks with another role before these, which only sample; see `omni_train.roles`.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    is_planned: bool = False
    machines: tuple[torch_dist.ProcessGroup, torch_dist.ProcessGroup] | None = None
    context: int = 1
    first: int = 0

    @property
    def dp_rank(self) -> int:
        """The index of this rank's group of `context` ranks: its rank in data parallelism."""
        return self.rank // self.context

    @property
    def dp_size(self) -> int:
        """The number of groups of `context` ranks, each with its own samples."""
        return self.world_size // self.context

    @property
    def is_main(self) -> bool:
        """True on global rank 0, the only rank that writes and prints."""
        return self.rank == self.first == 0 and not self.is_planned


@dataclass(frozen=True)
class Memory:
    """Current and peak memory, MB: device allocations, or the process's resident set on a CPU.

    reserved_mb: peak of the memory that the allocator has reserved on the device. used_mb: device memory used by all
    processes and libraries. Both are NaN if unknown, as on a CPU.
    """

    current_mb: float
    peak_mb: float
    reserved_mb: float = math.nan
    used_mb: float = math.nan


@dataclass(frozen=True)
class Moment:
    """A point in time: seconds of the host's clock and, on an accelerator, an event in its queue."""

    host_s: float
    event: torch.Event | None = None


def init_distributed(
    *, timeout_s: float = 1800.0, init_method: str = "env://", expandable_segments: bool = True
) -> Dist:
    """Join the process group of the ranks that torchrun started; return a single rank without torchrun.

    A rank ends when its torchrun has ended, so that it cannot write at the same time as the next run. Ranks connect
    over gloo when they first communicate, unless TORCH_GLOO_LAZY_INIT is set.

    Args:
        timeout_s: seconds after which a collective fails if a rank is missing.
        init_method: rendezvous for `torch.distributed.init_process_group`; torchrun needs the default.
        expandable_segments: as in `set_allocator`.
    """
    set_allocator(expandable_segments=expandable_segments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a device starts: reproducible products
    os.environ.setdefault("MKL_CBWR", "AUTO")  # read at the first product: the same bits at any memory alignment
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions then match a CPU's up to rounding
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for `deterministic`
    if "RANK" not in os.environ:
        return Dist(rank=0, world_size=1, local_rank=0, device=local_device(0), mesh=None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = local_device(local_rank)
    backend = torch_dist.get_default_backend_for_device(device)  # gloo, nccl on cuda, hccl on npu
    timeout = timedelta(seconds=timeout_s)
    has_old_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it outlives the ranks
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    torch_dist.init_process_group(  # without `device_id`: torch would split it for each mesh, as few backends can
        backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        init_method=None if has_old_store else init_method,
        store=_rendezvous(rank, world_size, timeout) if has_old_store else None,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    dist = Dist(rank=rank, world_size=world_size, local_rank=local_rank, device=device, mesh=mesh)
    return replace(dist, machines=machine_groups(dist, timeout))


def machine_groups(dist: Dist, timeout: timedelta) -> tuple[torch_dist.ProcessGroup, torch_dist.ProcessGroup] | None:
    """Return the process groups for messages by machine; None for few ranks or machines of different sizes.

    Every rank creates its own two groups, as the names of later groups count the earlier ones.
    """
    if dist.world_size <= _RING_RANKS:
        return None
    size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size))
    layout = [size, dist.rank - dist.local_rank]
    if gather_json(dist, layout) != [[size, rank - rank % size] for rank in range(dist.world_size)]:
        return None
    column, machine = range(dist.local_rank, dist.world_size, size), range(layout[1], layout[1] + size)
    between, within = (  # only members call it
        torch_dist.new_group(
            [dist.first + rank for rank in ranks], timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        for ranks in (column, machine)
    )
    return between, within


def shard_mesh(dist: Dist, size: int = 0) -> DeviceMesh | None:
    """Return the mesh over which `shard` spreads weights: one copy per `size` consecutive ranks; 0 means one for all.

    With several copies, it is a 2-D mesh with the axes "replicate" and "shard". Every rank calls it.

    Raises:
        ValueError: `size` does not divide the number of ranks.
    """
    if dist.world_size % (size or 1):
        raise ValueError(f"size must divide the {dist.world_size} ranks, got {size}")
    if dist.mesh is None or size in (0, dist.world_size):
        return dist.mesh
    shape = dist.world_size // size, size
    mesh = init_device_mesh(dist.device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh._device_type = dist.mesh.device_type  # may be that of a planned device
    return mesh


def context_mesh(dist: Dist) -> DeviceMesh:
    """Return the mesh of data and context parallelism, with the axis names of diffusers' context parallelism.

    They are "data" with `dp_size` ranks, "ring" with 1 and "ulysses" with `context`. Every rank calls it.
    """
    shape = dist.dp_size, 1, dist.context
    mesh = init_device_mesh(dist.device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))
    mesh._device_type = dist.mesh.device_type if dist.mesh else dist.device.type  # may be that of a planned device
    return mesh


def divide_work(mesh: DeviceMesh, work: Callable[[T], Tensor], items: Sequence[T]) -> list[Tensor]:
    """Return `work(item)` for all items, each computed by one rank of a 1-D mesh.

    All ranks of the mesh call it with the same items. All tensors must have the same shape and data type. With
    gradients enabled, every rank computes all items.
    """
    if torch.is_grad_enabled():
        return [work(item) for item in items]
    first, count, results = mesh.get_local_rank(), mesh.size(), list[Tensor]()
    for start in range(0, len(items), count):  # a rank without items left repeats one
        result = work(items[(start + first) % len(items)]).contiguous()
        gathered = [torch.empty_like(result) for _ in range(count)]
        torch_dist.all_gather(gathered, result, group=mesh.get_group())
        results += gathered
    return results[: len(items)]


def set_allocator(*, expandable_segments: bool) -> None:
    """Configure CUDA's allocators to waste less memory, unless the environment does; call it before their first use.

    Expandable segments leave no gaps. From torch 2.13 on, pinned memory of more than 64 MB is not rounded up to a power
    of two.

    expandable_segments: False in a process with an allocator that rejects them.

    Raises:
        ValueError: `expandable_segments` is False, but the environment enables them.
    """
    configs = [
        value for name, value in os.environ.items() if name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF")
    ]
    if not expandable_segments and "expandable_segments:true" in ",".join(configs).lower():
        raise ValueError("PYTORCH_ALLOC_CONF must not have expandable_segments:True, which vLLM's sleep mode refuses")
    device = torch.accelerator.current_accelerator()
    if not configs and device is not None and torch_dist.get_default_backend_for_device(device) == "nccl":
        settings = ["expandable_segments:True"] * expandable_segments
        settings += ["pinned_max_round_threshold_mb:64"] * (torch.__version__ >= "2.13")
        os.environ["PYTORCH_ALLOC_CONF"] = ",".join(settings)


def local_device(local_rank: int = 0) -> torch.device:
    """Make accelerator number `local_rank` the current device and return it; the CPU if there is no accelerator.

    Raises:
        ValueError: the machine has fewer accelerators than `local_rank + 1`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if not 0 <= local_rank < count:
        raise ValueError(
            f"local_rank must be below the number of {accelerator.type} devices ({count}), got {local_rank}"
        )
    _configure_npu(accelerator.type)
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _configure_npu(kind: str) -> None:
    """Configure an Ascend NPU, detected by its API: plain formats, full float32 and deterministic sums.

    Its plugin applies these settings at the first operator, for the whole process.
    """
    module = torch.get_device_module(kind)
    if not hasattr(module, "set_compile_mode"):
        return
    module.set_compile_mode(jit_compile=False)
    module.config.allow_internal_format = False
    module.conv.allow_hf32 = module.matmul.allow_hf32 = False
    os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # which takes time
    torch.use_deterministic_algorithms(True, warn_only=True)


def default_compute_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype of the model's matrix products: float32 on a CPU, bfloat16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@contextmanager
def deterministic(mode: int | str = "error") -> Iterator[None]:
    """Use deterministic algorithms in the `with` block, and raise RuntimeError for operators without one.

    mode: a different mode of `torch.set_deterministic_debug_mode`.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def synchronize() -> None:
    """Wait until the accelerator, if any, has finished all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def now() -> Moment:
    """Return the current moment; on an accelerator, the end of all work queued so far. It does not synchronize."""
    event = torch.Event(enable_timing=True) if torch.accelerator.is_available() else None
    if event is not None:
        event.record()
    return Moment(time.perf_counter(), event)


def seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments, waiting for both."""
    if start.event is None or end.event is None:
        return end.host_s - start.host_s
    if not end.event.query():
        end.event.synchronize()
    return float(start.event.elapsed_time(end.event)) / 1000


def memory(device: torch.device) -> Memory:
    """Return the memory of this process on `device`, or its resident set size on a CPU; NaN if unknown."""
    if device.type == "cpu":
        statm, unit = Path("/proc/self/statm"), 1 if sys.platform == "darwin" else 1024
        pages = int(statm.read_text().split()[1]) if statm.exists() else math.nan
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Memory(current_mb=pages * resource.getpagesize() / _MB, peak_mb=peak / _MB)
    free, total = _call_device(device, "get_memory_info", "mem_get_info", default=(0, math.nan))
    current, peak, reserved = (_call_device(device, name, default=math.nan) / _MB for name in _ALLOCATOR)
    return Memory(current, peak, reserved_mb=reserved, used_mb=(total - free) / _MB)


def free_memory(device: torch.device) -> float:
    """Return the free memory on `device` in bytes; infinite on a CPU, and 0 if unknown."""
    if device.type == "cpu":
        return math.inf
    return float(_call_device(device, "get_memory_info", "mem_get_info", default=(0, 0))[0])


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to the current use; do nothing if the device does not support it, as on a CPU."""
    if device.type == "cpu":
        return
    _call_device(device, "reset_peak_memory_stats")


def _call_device(device: torch.device, *names: str, default: object = None) -> Any:
    """Call the first of these functions that the device has; return the default if it has none."""
    for api in (torch.accelerator, torch.get_device_module(device)):  # some backends have only the second
        for name in names:
            with suppress(RuntimeError, AttributeError):
                return getattr(api, name)(device)
    return default


def shutdown() -> None:
    """End the process group, if any, after every rank has arrived. Call it only on success.

    A rank that failed never arrives, so a call from `finally` would make the others hang; torchrun ends them instead.
    """
    if torch_dist.is_initialized():
        gc.collect()  # sharded tensors refer to the group, which must be freed after them
        torch_dist.barrier()  # ranks that first connect here find each other in the store, which may end with rank 0
        torch_dist.barrier()
        torch_dist.destroy_process_group()


def deal(items: Sequence[T], dist: Dist, batch_size: int, *, consecutive: int = 1) -> list[Sequence[T]]:
    """Return this rank's batches: ranks take `batch_size` consecutive items in turn, or `consecutive` if that is more.

    Ranks that compute each forward pass together have the same batches.

    consecutive: number of consecutive items that one rank takes, such as a group.
    """
    per_turn = max(batch_size, consecutive)
    starts = range(dist.dp_rank * per_turn, len(items), dist.dp_size * per_turn)
    offsets = [first for start in starts for first in range(start, start + per_turn, batch_size)]
    return [items[first : first + batch_size] for first in offsets]


def gather_by_index(dist: Dist, indices: Tensor, values: Tensor, total: int) -> Tensor:
    """Return all ranks' values, each at its index, [total], with the dtype and device of `values`.

    Args:
        indices: [n] integers, the positions of this rank's values in 0 ... total - 1; n may differ between ranks.
        values: [n]; NaN passes through.
        total: number of positions.

    Raises:
        ValueError: an index (named in the message) is out of range, duplicate or missing; raised on every rank.
    """
    if dist.is_planned:
        return torch.linspace(0, 1, total, dtype=values.dtype)  # all different
    places, gathered = zip(*gather_json(dist, [indices.tolist(), values.tolist()]), strict=True)
    num_places, num_found = ([len(row) for row in rows] for rows in (places, gathered))
    if num_places != num_found:
        raise ValueError(f"indices and values must have one length, got {num_places} and {num_found} in rank order")
    place = torch.tensor([i for row in places for i in row], dtype=torch.int64)
    if outside := place[(place < 0) | (place >= total)].tolist():
        raise ValueError(f"indices must be from 0 to {total - 1}, got {outside[0]}")
    counts = torch.bincount(place, minlength=total)
    if (counts != 1).any():
        index, count = int(counts.argmax()), int(counts.max())
        fault = f"got {index} {count} times" if count > 1 else f"no rank has {int(counts.argmin())}"
        raise ValueError(f"every index must come once, {fault}")
    joined = torch.tensor([value for row in gathered for value in row], dtype=values.dtype)
    return joined[place.argsort()].to(values.device)


def gather_json(dist: Dist, value: object) -> list[Any]:
    """Return every rank's value, in rank order, sent as JSON: strings, numbers, None, and lists and dicts of these."""
    mark_alive()
    text = json.dumps(value).encode()
    rows = _gather(dist, len(text).to_bytes(8, "little") + text[:_FIRST_BYTES].ljust(_FIRST_BYTES))
    rest = max(int.from_bytes(row[:8], "little") for row in rows) - _FIRST_BYTES
    remainders = _gather(dist, text[_FIRST_BYTES:].ljust(rest)) if rest > 0 else [b""] * len(rows)
    return [json.loads(row[8:] + other) for row, other in zip(rows, remainders, strict=True)]  # JSON may end in spaces


def merge_metric(values: Tensor, merge: Merge = "mean") -> Tensor:
    """Return the mean, maximum or minimum of a metric's values [n]."""
    return values.amax() if merge == "max" else values.amin() if merge == "min" else values.mean()


def mean_metrics(
    dist: Dist, metrics: Mapping[str, float | Tensor], *, merges: Mapping[str, Merge] = {}, finite: Collection[str] = ()
) -> dict[str, float]:
    """Return each metric over all ranks. Every rank must pass the same names.

    merges: how to merge metrics other than by mean. finite: metrics that must be finite on every rank.

    Raises:
        ValueError: the names differ between ranks (raised on every rank).
        FloatingPointError: one of `finite` is NaN or infinite; the message names the rank (raised on every rank).
    """
    by_rank = gather_json(dist, {name: float(metrics[name]) for name in sorted(metrics)})
    if any(list(other) != list(by_rank[0]) for other in by_rank):
        names = [list(other) for other in by_rank]
        raise ValueError(f"metrics must have the same names on every rank, got {names} in rank order")
    for rank, row in enumerate(by_rank):
        for name in finite:
            if name in row and not math.isfinite(row[name]):
                raise FloatingPointError(f"{name} must be finite, but is {row[name]} on rank {rank}")
    values = {name: torch.tensor([row[name] for row in by_rank]) for name in by_rank[0]}
    return {name: merge_metric(values[name], merges.get(name, "mean")).item() for name in values}


@contextmanager
def same_error(dist: Dist) -> Iterator[None]:
    """Raise an OSError, ValueError, ImportError or RuntimeError of one rank in the block on every rank.

    The message is the same on every rank; running out of memory is a RuntimeError.

    Every rank enters the block, which must contain no collective: a failed rank would not join it.
    """
    kinds = (OSError, ValueError, ImportError, RuntimeError)
    error: OSError | ValueError | ImportError | RuntimeError | None = None
    try:
        yield
    except kinds as exc:
        error = exc
    report = None if error is None else [[isinstance(error, kind) for kind in kinds].index(True), str(error)]
    for rank, entry in enumerate(gather_json(dist, report)):
        if isinstance(entry, list):
            raise kinds[entry[0]](entry[1] if dist.mesh is None else f"rank {rank}: {entry[1]}") from error


def is_lost_rank(error: BaseException) -> bool:
    """True if a collective failed because another rank ended or timed out."""
    return isinstance(error, torch_dist.DistError) or "gloo/transport" in str(error)


def tell_failure(message: str, *, wait_s: float = 3.0) -> dict[int, str]:
    """Send the message of a rank that is about to fail; return the messages of all failing ranks, by rank.

    It waits for all ranks, at most `wait_s`: missing ranks still run, hang or were killed. It uses the store of the
    rendezvous, so it works where collectives no longer do. SIGTERM is ignored from this call on: torchrun sends it as
    soon as one rank has ended, but the messages must still be printed. Call it from the main thread.

    Args:
        message: "" if another rank is the cause.
        wait_s: seconds.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    messages = {rank: message}
    if world_size == 1 or "MASTER_PORT" not in os.environ:  # a single rank, or a rendezvous without a store
        return messages
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    place, wait = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=wait_s)
    start = os.environ.get("OMNI_START") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"failure/{start}/"
    deadline = time.monotonic() + wait_s
    try:
        store = torch_dist.TCPStore(*place, is_master=False, timeout=wait)
        store.set(f"{key}{rank}", message)
        while len(messages) < world_size and time.monotonic() < deadline:
            for other in set(range(world_size)) - set(messages):
                if store.check([f"{key}{other}"]):
                    messages[other] = store.get(f"{key}{other}").decode()
            time.sleep(0.05)
    except torch_dist.DistError:  # the process with the store has ended; messages received so far count
        pass
    return messages


def _rendezvous(rank: int, world_size: int, timeout: timedelta) -> torch_dist.Store:
    """Return torchrun's store with a new prefix, on which all ranks agree.

    The store still has the addresses of an earlier start's ranks, and this start has no number shared by all machines.
    So each rank writes a random name; the first rank publishes the names until every rank has found its own among them.
    torchrun ends the others if one has failed.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout)
    token = uuid4().hex[:16]
    store.set(f"name/{rank}", token)
    while True:
        if rank == 0:
            names = b",".join(store.multi_get([f"name/{i}" for i in range(world_size)])).decode()
            store.set("names", names)
        names = store.get("names").decode()
        if token in names:
            store.set(f"heard/{rank}", names)
            acks = [f"heard/{i}" for i in range(world_size)]
            if rank == 0 and store.check(acks) and set(store.multi_get(acks)) == {names.encode()}:
                store.set("agreed", names)
            if store.check(["agreed"]) and store.get("agreed").decode() == names:
                os.environ["OMNI_START"] = sha256(names.encode()).hexdigest()  # for `tell_failure`
                return torch_dist.PrefixStore(os.environ["OMNI_START"], store)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} did not meet {world_size - 1} others in {timeout.total_seconds():g} s")
        time.sleep(0.05)


def _gather(dist: Dist, message: bytes) -> list[bytes]:
    """Return every rank's message, in rank order; all have the same length.

    By machine: first among equal local ranks of all machines, then within each machine; for 128 machines of 8 ranks,
    this takes 127 + 7 hops instead of 1,023.
    """
    if dist.mesh is None or dist.is_planned:
        return [message] * (dist.world_size if dist.is_planned else 1)
    rows = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    for group in dist.machines or (dist.mesh.get_group(),):
        gathered = torch.empty(torch_dist.get_world_size(group), *rows.shape, dtype=torch.uint8)
        torch_dist.all_gather(list(gathered.unbind()), rows, group=group)
        rows = gathered
    if dist.machines:  # [ranks of a machine, machines, bytes]
        rows = rows.transpose(0, 1).flatten(0, 1)
    return [row.numpy().tobytes() for row in rows]


def _exit_with_parent(parent: int) -> None:
    """End this process, from any of its threads, when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    try:
        print(
            f"torchrun (pid {parent}) has ended: its rank with pid {os.getpid()} ends too", file=sys.stderr, flush=True
        )
    finally:
        os._exit(1)
