"""The CPU as a device, and an accelerator played by a stand-in."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omni_train import dist as devices

CPU = torch.device("cpu")


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def accelerator(monkeypatch):
    """Two devices of a kind torch knows by name; the calls made to them are kept in order."""
    calls = []

    def record(name, answer=None):
        def call(*args):
            calls.append((name, *args))
            return answer

        monkeypatch.setattr(torch.accelerator, name, call)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    record("set_device_index")
    record("synchronize")
    record("memory_allocated", 3 * 2**20)
    record("max_memory_allocated", 5 * 2**20)
    record("max_memory_reserved", 7 * 2**20)
    record("get_memory_info", (11 * 2**20, 24 * 2**20))
    record("reset_peak_memory_stats")
    return calls


def test_without_an_accelerator_every_rank_uses_the_cpu(no_accelerator):
    assert devices.local_device(0) == devices.local_device(7) == CPU
    devices.synchronize()
    devices.reset_peak_memory(CPU)


def test_a_rank_gets_its_own_accelerator_and_makes_it_current(accelerator):
    assert devices.local_device(1) == torch.device("xpu", 1)
    assert accelerator == [("set_device_index", 1)]


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_more_ranks_than_accelerators_is_an_error(accelerator, local_rank):
    with pytest.raises(ValueError, match=rf"local_rank must be .*\(2\), got {local_rank}"):
        devices.local_device(local_rank)


def test_moments_are_points_of_what_is_queued_and_only_their_difference_is_waited_for(accelerator, monkeypatch):
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def query(self):
            return False

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, other):
            return 1500.0

    monkeypatch.setattr(torch, "Event", Event)
    start, end = devices.now(), devices.now()
    assert calls == ["record", "record"]
    assert devices.seconds(start, end) == 1.5
    assert calls == ["record", "record", "wait"]


def test_on_a_cpu_moments_are_those_of_the_clock(no_accelerator):
    start = devices.now()
    assert start.event is None
    assert devices.seconds(start, devices.Moment(start.host_s + 2.0)) == 2.0


def test_accelerator_memory_is_in_mb(accelerator):
    device = torch.device("xpu", 1)
    assert devices.memory(device) == devices.Memory(current_mb=3.0, peak_mb=5.0, reserved_mb=7.0, used_mb=13.0)
    assert devices.free_memory(device) == 11 * 2**20
    devices.reset_peak_memory(device)
    assert accelerator[-1] == ("reset_peak_memory_stats", device)


def test_memory_that_an_allocator_does_not_tell_is_nan(accelerator, monkeypatch):
    def no_device_allocator(device):
        raise RuntimeError("Allocator for xpu is not a DeviceAllocator.")

    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "max_memory_reserved",
        "get_memory_info",
        "reset_peak_memory_stats",
    ):
        monkeypatch.setattr(torch.accelerator, name, no_device_allocator)
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    told = devices.memory(torch.device("xpu", 1))
    assert all(map(math.isnan, vars(told).values()))
    assert devices.free_memory(torch.device("xpu", 1)) == 0
    devices.reset_peak_memory(torch.device("xpu", 1))
    module.memory_allocated = module.max_memory_allocated = module.max_memory_reserved = lambda device: 2**20
    module.mem_get_info = lambda device: (2**20, 3 * 2**20)
    assert devices.memory(torch.device("xpu", 1)) == devices.Memory(1.0, 1.0, reserved_mb=1.0, used_mb=2.0)


ALLOCATORS = {  # the environment, kind, whether segments may grow -> what the environment has then
    "by default": ({}, "cuda", True, "expandable_segments:True,pinned_max_round_threshold_mb:64"),
    "beside vLLM's allocator": ({}, "cuda", False, "pinned_max_round_threshold_mb:64"),
    "with the user's own": ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "cuda", True, None),
    "on another accelerator": ({}, "xpu", True, None),
    "on a CPU": ({}, None, True, None),
}


@pytest.mark.parametrize("case", ALLOCATORS)
def test_segments_of_cuda_grow_unless_the_user_or_an_engine_objects(case, monkeypatch):
    environ, kind, may_grow, expected = ALLOCATORS[case]
    monkeypatch.setattr(devices.os, "environ", dict(environ))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    devices.set_allocator(expandable_segments=may_grow)
    assert devices.os.environ == environ | ({"PYTORCH_ALLOC_CONF": expected} if expected else {})


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_an_engine_refuses_are_refused_at_once(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    devices.set_allocator(expandable_segments=True)
    with pytest.raises(ValueError, match="must not have expandable_segments:True, which vLLM's sleep mode refuses"):
        devices.set_allocator(expandable_segments=False)


def test_torch_reads_the_allocators_settings_after_its_import():
    lines = """
import torch
from omni_train.dist import set_allocator
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
set_allocator(expandable_segments=True)
print(torch._C._accelerator_getAllocatorSettings())
"""
    environ = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", lines], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "expandable_segments:True,pinned_max_round_threshold_mb:64\n"


def test_a_system_without_proc_tells_the_peak_only(monkeypatch):
    here = devices.memory(CPU).peak_mb
    monkeypatch.setattr("omni_train.dist.Path.exists", lambda path: False)
    monkeypatch.setattr("sys.platform", "darwin")  # where the peak is in bytes, here in KB
    told = devices.memory(CPU)
    assert math.isnan(told.current_mb)
    assert told.peak_mb == pytest.approx(here / 1024, rel=0.1)


def test_cpu_memory_is_the_resident_set():
    mb = 256  # glibc serves more than 32 MiB by new pages only, never from what was freed before
    before = devices.memory(CPU)
    held = torch.ones(mb * 2**20 // 4)
    after = devices.memory(CPU)
    assert 0.75 * mb < after.current_mb - before.current_mb < 1.5 * mb
    assert after.peak_mb >= after.current_mb * 0.9
    assert held.sum() > 0


def test_compute_dtype_is_float32_on_a_cpu_only():
    assert devices.default_compute_dtype(CPU) == torch.float32
    assert devices.default_compute_dtype(torch.device("xpu", 0)) == torch.bfloat16
