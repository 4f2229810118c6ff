"""A simulated device: its tensors have shapes but no values, and all bytes that it would hold are counted.

    with PlannedDevice() as device:
        net = nn.Linear(4096, 4096, device=PLANNED)
        net(torch.randn(8, 4096).to(PLANNED)).sum().backward()
    device.peaks  # bytes, by phase

Tensors on PLANNED are torch's fake tensors; those on the host are real. A value that the host reads from the device is
known if it follows from few numbers that the host has sent, such as noise levels or a text mask. Otherwise it is
made up.
"""

import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as torch_dist
import torch.distributed.fsdp._fully_shard._fully_shard as fsdp
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from omni_train.dist import Dist

PLANNED = torch.device("cpu", 1)  # to torch a second CPU, so that its backward pass needs no driver
HOST = torch.device("cpu")
READ = 1e-30  # a number read from the device: finite and nonzero, like the norm of a gradient to be applied
MAX_KNOWN = {True: 2**12, False: 2**20}  # elements of a tensor whose values are tracked: floats, and integers

_ATEN = torch.ops.aten
_ATTENTION = "_scaled_dot_product_flash_attention"
_FLOPS: ChainMap[Any, Callable[..., int]] = ChainMap(
    {
        getattr(_ATEN, f"{_ATTENTION}_for_cpu{suffix}"): flop_registry[getattr(_ATEN, _ATTENTION + suffix)]
        for suffix in ("", "_backward")
    },
    flop_registry,
)
_FLOPS[_ATEN._grouped_mm] = lambda rows, weights, *_, **__: 2 * rows.numel() * weights.shape[-1]
_INTEGERS = (torch.bool, torch.uint8, torch.int32, torch.int64)
_DEVICE = torch.ops.prim.device.default  # every other call
_DRAWS = (_ATEN.uniform_.default, _ATEN.normal_.default)


class Meter(TorchDispatchMode):
    """Counts the bytes of all live tensors on a device, and the floating-point operations, by phase.

    live: bytes. peaks: peak of live bytes in each phase. flops: of matrix products, attention, convolutions.
    host and host_peak: bytes of the host's tensors and their peak, if the host is another device.
    Bytes are those of storages; an allocator's rounding and fragmentation come on top.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live = 0
        self.peaks: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.window = 0  # peak of bytes since it was last set, without those of `excluded`
        self.excluded = 0
        self.current = ""  # the current phase
        self.host = self.host_peak = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Callable[[int], None]]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count for this phase within the `with` block."""
        before, self.current = self.current, name
        self.add(0)
        try:
            yield
        finally:
            self.current = before

    def add(self, num_bytes: int) -> None:
        """Count allocated bytes; negative if freed."""
        self.live += num_bytes
        self.peaks[self.current] = max(self.peaks[self.current], self.live)
        self.window = max(self.window, self.live - self.excluded)

    def add_host(self, num_bytes: int) -> None:
        """Count bytes allocated on the host; negative if freed."""
        self.host += num_bytes
        self.host_peak = max(self.host_peak, self.host)

    def add_transient(self, num_bytes: int, flops: int) -> None:
        """Count bytes that are allocated and freed immediately, and operations."""
        self.add(num_bytes)
        self.add(-num_bytes)
        self.add_flops(flops)

    def start_window(self) -> int:
        """Start a new `window`, with nothing excluded; return the live bytes."""
        self.window, self.excluded = self.live, 0
        return self.live

    def add_flops(self, flops: int) -> None:
        """Count operations of this phase."""
        self.flops[self.current] += flops

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and return its result."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run and count one operator; for wrapper tensors, count the operators on their inner tensors."""
        if func is _DEVICE:
            return args[0].device
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = self.run(func, args, kwargs)
        for tensor in _tensors_of(out if isinstance(out, tuple | list) else (out,)):
            if tensor.device in (self.device, HOST):
                self._track(tensor.untyped_storage(), self.add if tensor.device == self.device else self.add_host)
        if (formula := _FLOPS.get(func._overloadpacket)) is not None:
            self.add_flops(formula(*args, **kwargs, out_val=out))
        return out

    def __enter__(self) -> Self:
        self._resize, meter = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            meter._resize(storage, size)
            if id(storage) in meter._alive:
                meter._track(storage, meter._alive[id(storage)][2])
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # how FSDP2 frees, unseen
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _track(self, storage: torch.UntypedStorage, add: Callable[[int], None]) -> None:
        """Count a storage from now until it is freed, or its new size."""
        key, size = id(storage), storage.nbytes()
        known, before, _ = self._alive.get(key, (None, 0, add))
        if known is None or size != before:
            self._alive[key] = known or weakref.ref(storage, partial(self._untrack, key)), size, add
            add(size - before)

    def _untrack(self, key: int, _: object) -> None:
        _, size, add = self._alive.pop(key)
        add(-size)


class PlannedDevice(Meter):
    """Runs operators on PLANNED with fake tensors and counts them; the host's own work runs normally."""

    def __init__(self) -> None:
        super().__init__(PLANNED)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._factories = _TensorFactories()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; return fake tensors on the device, or the values that the host reads."""
        if func in _DRAWS and not isinstance(args[0], FakeTensor) and args[0].numel() > MAX_KNOWN[True]:
            return args[0]  # initial weights, whose values are never read
        tensors, device = _tensors_of((*args, *kwargs.values())), kwargs.get("device")
        from_device = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not from_device and device != PLANNED:
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return read_values(args[0]).item()
        known = _compute_known(func, args, kwargs, tensors)
        if func is _ATEN.isin.Tensor_Tensor and known is None:  # made-up values are none of them
            known = torch.zeros(args[0].shape, dtype=torch.bool)
        if func is _ATEN.index.Tensor:
            args = args[0], [item for index in args[1] for item in _mask_indices(index)]
        if func is _ATEN.equal.default:
            return args[0].shape == args[1].shape if known is None else known
        if from_device and device is not None and device != PLANNED and not args[0].is_floating_point():
            return read_values(args[0]) if known is None else known  # images and masks copied to the host
        if func is _ATEN._to_copy.default and device == PLANNED and (args[0].numel() < 2 or not from_device):
            # torch's own fake tensors would leave so small a tensor on its device, and copy host data
            kwargs = {"dtype": kwargs.get("dtype", args[0].dtype), "device": PLANNED}
            func, args = _ATEN.empty.memory_format, (args[0].shape,)
        if func is _ATEN._grouped_mm.default:  # torch's own fake kernel accepts only bfloat16
            (rows, weights), offsets = args[:2], kwargs.get("offs", args[2] if len(args) > 2 else None)
            groups = [] if weights.dim() == 3 else [len(offsets)]
            kwargs = {"dtype": rows.dtype, "device": PLANNED}
            func, args = _ATEN.empty.memory_format, ([*groups, len(rows), weights.shape[-1]],)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except DynamicOutputShapeException:  # the shape depends on values
            if known is None:
                raise
            with self.fake:
                out = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=PLANNED), known)
        if known is None and func._schema.is_mutable and hasattr(args[0], "known"):
            del args[0].known
        if known is not None:
            outs, expected = ((output,) if isinstance(output, Tensor) else output for output in (out, known))
            for tensor, values in zip(outs, expected, strict=True):
                if isinstance(tensor, FakeTensor):
                    tensor.known = values  # type: ignore[attr-defined]
        return out

    def __enter__(self) -> Self:
        self._kept = torch.utils.swap_tensors, fsdp._get_device_from_mesh
        torch.utils.swap_tensors, fsdp._get_device_from_mesh = self._swap, lambda mesh: PLANNED
        self._factories.__enter__()
        self._eagerly = torch.compiler.set_stance("force_eager")  # a compiler would need values
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._eagerly.__exit__(*exc_info)
        self._factories.__exit__(*exc_info)
        torch.utils.swap_tensors, fsdp._get_device_from_mesh = self._kept

    def _swap(self, old: Tensor, new: Tensor) -> None:
        """Replace a tensor with another, for `Module.to`; torch's own swap does not accept fake tensors."""
        if isinstance(old, FakeTensor):
            old.data, old.fake_device = new.data, new.fake_device  # type: ignore[attr-defined]
        else:
            self._kept[0](old, new)


class _TensorFactories(TorchFunctionMode):
    """Moves tensors made from numbers to PLANNED, and audio from it, where a dispatch mode does not see it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            return read_values(args[0]).numpy()
        device = kwargs.get("device") if func in (torch.tensor, torch.as_tensor) else None
        if device is None or torch.device(device) != PLANNED:
            return func(*args, **kwargs)
        if isinstance(args[0], tuple | list):
            args = tree_map_only(FakeTensor, lambda t: read_values(t).tolist(), args)
        return func(*args, **{**kwargs, "device": None}).to(PLANNED)


@contextmanager
def planned_ranks(num_ranks: int) -> Iterator[Dist]:
    """Yield the first of several ranks on the planned device; messages of other ranks have only the right shapes.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if torch_dist.is_initialized():
        raise RuntimeError("a plan must be made without torchrun, got a process group")
    torch_dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        mesh._device_type = str(PLANNED)
        setattr(torch, str(PLANNED), torch.cpu)  # where a mesh looks up the number of devices
        yield Dist(rank=0, world_size=num_ranks, local_rank=0, device=PLANNED, mesh=mesh, is_planned=True)
    finally:
        torch_dist.destroy_process_group()


def _tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, including those in lists."""
    lists = [value if isinstance(value, tuple | list) else (value,) for value in values]
    return [value for items in lists for value in items if isinstance(value, Tensor)]


def _compute_known(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """Return an operator's result if it follows from few known numbers, computed on the host; otherwise None."""
    if any(t.numel() > MAX_KNOWN[t.dtype not in _INTEGERS] for t in tensors):
        return None
    if any(t.is_meta or (isinstance(t, FakeTensor) and not hasattr(t, "known")) for t in tensors):
        return None
    if "empty" in func.__name__ or "c10d" in func.namespace:  # not messages from other ranks
        return None
    if not tensors and kwargs.get("dtype") not in _INTEGERS and func._overloadpacket is not _ATEN.arange:
        return None
    args, kwargs = tree_map_only(FakeTensor, lambda t: t.known, (args, kwargs))
    host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
    return func(*args, **{**kwargs, **host})


def _mask_indices(index: Tensor | None) -> list[Tensor | None]:
    """Return a mask with known values as indices of its dimensions, and any other index unchanged."""
    if index is None or index.dtype != torch.bool or not hasattr(index, "known"):
        return [index]
    return [torch.empty(int(index.known.sum()), dtype=torch.int64, device=PLANNED)] * index.dim()


def read_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, made up if unknown."""
    known: Tensor | None = getattr(tensor, "known", None)
    if known is not None:
        return known
    if tensor.is_floating_point():
        return torch.full(tensor.shape, READ, dtype=torch.float64)
    return torch.ones(tensor.shape, dtype=tensor.dtype)
