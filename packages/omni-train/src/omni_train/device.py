"""The device a rank computes on. The only file of this package that may name a kind of device.

Everything goes through `torch.accelerator`, which covers cuda, npu, xpu and mps alike. Without an accelerator most of
its functions raise; here the CPU is a device like any other. Memory is in MB of 2**20 bytes.
"""

import math
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

_MB = 2**20


@dataclass(frozen=True)
class Memory:
    """Memory in use now and at its highest, MB: device allocations, or the process's resident set on a CPU."""

    current_mb: float
    peak_mb: float


def local_device(local_rank: int = 0) -> torch.device:
    """The device of this process, made current: accelerator number `local_rank`, or the CPU when there is none.

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
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def process_group_backend(device: torch.device) -> str:
    """The collective backend registered for `device`: gloo for cpu, nccl for cuda, hccl for npu."""
    return str(torch.distributed.get_default_backend_for_device(device))


def default_compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the model's matrix products unless asked otherwise: float32 on a CPU, bfloat16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def synchronize() -> None:
    """Wait until the device has done all queued work; nothing to wait for on a CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def memory(device: torch.device) -> Memory:
    """Memory of this process on `device`, or on a CPU its resident set size; NaN where no one tells."""
    if device.type == "cpu":
        statm, unit = Path("/proc/self/statm"), 1 if sys.platform == "darwin" else 1024
        pages = int(statm.read_text().split()[1]) if statm.exists() else math.nan
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Memory(current_mb=pages * resource.getpagesize() / _MB, peak_mb=peak / _MB)
    try:
        current, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    except RuntimeError:  # of an allocator that torch.accelerator cannot ask, as MPS's
        return Memory(math.nan, math.nan)
    return Memory(current_mb=current / _MB, peak_mb=peak / _MB)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak from the current use; where that cannot be done, as of a process on a CPU, it does nothing."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # as in `memory`
            torch.accelerator.reset_peak_memory_stats(device)
