"""An accelerator named `npu` for every machine with a C++ compiler: `device.cpp`, built once and loaded here.

`load` gives the calling process eight of them, so it is called in separate processes. `watch` records what the device
does.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import distributed as torch_dist
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")
OURS = ("/packages/", "/apps/")


@dataclass(frozen=True)
class Event:
    """One event of the device.

    kind: "to device" and "to host" for copies, "sync", "collective". name: the operator's name. waits: True if the host
    blocked until all queued work was done. place: file and function of omni-rl's code that caused it.
    """

    kind: str
    name: str
    num_bytes: int
    waits: bool
    place: str


def build() -> Path:
    """Return the library, compiled once per version of its source and of torch; concurrent builds wait for the first.

    Raises:
        RuntimeError: the compiler is missing or fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError(
            "the emulated accelerator needs a C++ compiler: install g++ (apt-get install g++), or set CXX"
        )
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20", abi]
    version = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {compiler} {flags}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-rl-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"emulated-{version}.so"
    with (folder / f"{library.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            half = library.with_suffix(".half")
            includes = [f"-I{path}" for path in include_paths()]
            links = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu", "-lc10"]
            command = [compiler, *flags, *includes, str(SOURCE), "-o", str(half), *links]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the emulated accelerator does not build: {done.stderr[:4000]}")
            half.rename(library)
    return library


@cache
def load() -> ctypes.CDLL:
    """Register the accelerator `npu` with torch, with a collective backend that runs gloo on the same memory."""
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    library.emulated_start()
    for name in ("operators", "bytes", "peak"):
        getattr(library, f"emulated_{name}").restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch_dist.Backend.register_backend("emulated", _gloo, devices=["npu", "cpu"])
    return library


def load_strict() -> ctypes.CDLL:
    """Like `load`, with torch_npu's settings, and without float64, float8, complex numbers and internal formats."""
    library = load()
    library.emulated_refuse_types()

    class Config:
        def __setattr__(self, name: str, value: bool) -> None:
            assert name == "allow_internal_format"
            library.emulated_convert(value)

    settings = {"config": Config(), "conv": types.SimpleNamespace(), "matmul": types.SimpleNamespace()}
    vars(torch.get_device_module("npu")).update(settings, set_compile_mode=lambda jit_compile: None)
    return library


def _gloo(store: torch_dist.Store, rank: int, size: int, timeout: object) -> torch_dist.ProcessGroup:
    """Return the backend of both devices: collectives run on the CPU's view of the device memory."""
    return torch_dist.ProcessGroupGloo(store, rank, size, timeout=timeout)  # type: ignore[call-arg,arg-type]


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """Return the `torch.npu` module that torch expects."""
    module, accelerator = types.ModuleType("torch.npu"), torch.accelerator
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": torch._C._accelerator_hooks_device_count,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "synchronize": accelerator.synchronize,
        "current_stream": accelerator.current_stream,
        "stream": lambda stream: stream,  # a torch.Stream is a context manager
        "Stream": partial(torch.Stream, device="npu"),
        "Event": partial(torch.Event, device="npu"),
        "device": torch.device,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=0: torch.get_rng_state(),  # operators sample with the CPU's generator
        "set_rng_state": lambda state, device=0: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_allocated": lambda device=None: library.emulated_bytes(),
        "max_memory_allocated": lambda device=None: library.emulated_peak(),
        "reset_peak_memory_stats": lambda device=None: library.emulated_reset_peak(),
    }
    vars(module).update(functions)
    return module


def execute(program: str, folder: str) -> None:
    """Run a program in this process with the accelerator; its output goes to stdout and stderr in `folder`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    exec(program, {"torch": torch, "nn": torch.nn, "watch": watch, "load": load, "library": load()})
    sys.stdout.flush()
    os._exit(0)  # threads of a backward pass may break the teardown


@contextmanager
def watch(told: list[Event]) -> Iterator[None]:
    """Append the device's events to a list within the `with` block."""
    tell(told.append)
    yield
    tell(None)


def tell(to: Callable[[Event], None] | None) -> None:
    """Call `to` for every event of the device from now on, or stop with None."""
    global _listener

    def listen(kind: bytes, name: bytes, num_bytes: int, waits: int) -> None:
        to(Event(kind.decode(), name.decode(), num_bytes, bool(waits), place()))

    _listener = _LISTENER(listen) if to else _LISTENER()
    load().emulated_listen(_listener)


_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)
_listener = _LISTENER()  # the library's callback must stay alive


def place() -> str:
    """Return the innermost running file and function of omni-rl."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS) and "site-packages" not in name:
            function = frame.f_code.co_qualname.replace(".<locals>", "").split(".<")[0]
            return f"{Path(name).name} {function}"
        frame = frame.f_back
    return "elsewhere"
