"""Will it fit? The trainer's own step on a device that is not there, its memory, and what to change.

    plan: memory per rank, GB: load 59.7, rollout 65.7, decode 74.2, update 84.2, sync 62.9, save 63.1
    plan: --device-memory-gb 80 is too little by 4.2 GB, in update
    plan: fits with --offload encoder: 67.6 GB

Changes are tried in an order of cost, each on top of those before, and the first that fits is named.

The trainer runs two steps, so that the optimizer has its moments. Of the forwards and backwards of the net, and the
forwards of text encoders and decoder, the first of a shape alone runs, kernel by kernel; later ones take the same
memory and do as many operations.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from omni_reward import Score
from omni_rollout import Model, Params
from omni_rollout.types import Cond, Parts
from omni_train.dist import Dist
from omni_train.log import RunLog
from omni_train.lora_linear import LoraLinear
from omni_train.parts import part_files
from omni_train.planned import PlannedDevice, planned_ranks
from omni_train.recompute import Recompute
from omni_train.state import train_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from omni_rl import scoring
from omni_rl.args import MediaArgs, Mode, RunArgs, num_batches, num_ranks, sharding
from omni_rl.run import Step, current_plan
from omni_rl.scoring import LocalScorer

if TYPE_CHECKING:
    from omni_rl.run import AnyRun, Run

ArgsT = TypeVar("ArgsT", bound=MediaArgs)
GB = 1e9
PHASES = ("load", "encode", "rollout", "decode", "update", "sync", "save")
MAX_RANKS = 64  # to which a change may spread the weights
NEAR = 2**11  # lengths of texts count as one that differ by less than this share of a sample's numbers
DECODED = 4  # pictures that a change has the VAE decode at a time
FLAGS = {
    "unshard": "--unshard {}",
    "decode_batch_size": "--decode-batch-size {}",
    "offload": "--offload {}",
    "gradient_checkpointing": "--gradient-checkpointing",
    "batch_size": "--batch-size {}",
    "base_dtype": "--base-dtype {}",
}


def fit(main: Callable[[ArgsT], None], args: ArgsT) -> int:
    """Plan a step of the trainer and print it, and where it does not fit, what would; the exit code: 0 if it fits."""
    if int(os.environ.get("RANK", "0")):
        return 0  # the first rank speaks
    limit, ranks = args.device_memory_gb * GB, num_ranks()
    plan = measure(main, args, ranks, tells=True)
    print(plan.describe(), flush=True)
    if plan.peak <= limit:
        print(f"plan: fits --device-memory-gb {args.device_memory_gb:g}, with {(limit - plan.peak) / GB:.3g} GB left")
        return 0
    over = {name: peak - limit for name, peak in plan.peaks.items() if peak > limit}
    told = ", ".join(f"{over[name] / GB:.3g} GB in {name}" for name in ordered(over))
    print(f"plan: --device-memory-gb {args.device_memory_gb:g} is too little: by {told}", flush=True)
    start = args if plan.unshard else replace(args, unshard="none")  # where nothing is gathered for long
    too_large = {_weights(args, ranks)} if plan.peaks["load"] > limit else set()
    for changed, world_size, flags in changes(start, ranks, plan.offloads, over):
        if _weights(changed, world_size) in too_large:
            continue
        trial = measure(main, changed, world_size)
        if trial.peak <= limit:
            print(f"plan: fits with {flags}: {trial.peak / GB:.3g} GB", flush=True)
            return 1
        if trial.peaks["load"] > limit:
            too_large.add(_weights(changed, world_size))
        worst = max(trial.peaks, key=lambda name: trial.peaks[name])
        print(f"plan: does not fit with {flags}: {trial.peak / GB:.3g} GB in {worst}", flush=True)
    print("plan: no change of offloading, recomputation, batch size, bits, sharding and ranks fits", flush=True)
    return 1


def changes(
    args: ArgsT, ranks: int, offloads: Sequence[str], over: Collection[str]
) -> Iterator[tuple[ArgsT, int, str]]:
    """Settings that need less memory, with their ranks and as flags: first those that cost least.

    Gathering weights block by block and offloaded parts cost copies, recomputed activations a third more operations,
    small batches slow kernels, weights in fewer bits precision, sharded ones traffic, and ranks money.

    offloads: the parts that --offload may name. over: the phases that need too much.
    """
    first, mode = args, sharding(args, ranks)

    def flags(changed: ArgsT, *wider: str) -> str:
        pairs = [(text, getattr(changed, name), getattr(first, name)) for name, text in FLAGS.items()]
        return " ".join([*(text.format(now) for text, now, before in pairs if now != before), *wider])

    if args.unshard != "none" and mode == "fsdp2":
        args = replace(args, unshard="none")
        yield args, ranks, flags(args)
    if "decode" in over and (args.decode_batch_size or args.batch_size) > DECODED:
        args = replace(args, decode_batch_size=DECODED)
        yield args, ranks, flags(args)
    for part in offloads:
        if part == "activations" and not args.gradient_checkpointing:
            args = replace(args, gradient_checkpointing=True)
            yield args, ranks, flags(args)
        if part not in args.offload:
            args = replace(args, offload=",".join(filter(None, [args.offload, part])))
            yield args, ranks, flags(args)
    spread: list[tuple[Mode, int]] = [(mode, ranks)]
    count = ranks if (mode != "fsdp2" or args.shard_size) and ranks > 1 else ranks * 2
    while count <= MAX_RANKS:
        spread.append(("fsdp2", count))
        count *= 2
    is_free = args.lora_rank and mode != "fsdp2" and args.base_dtype == "auto"
    fewer = [replace(args, base_dtype="int8"), replace(args, base_dtype="nf4")] if is_free else []
    ways = [(mode, ranks, way) for way in (args, *fewer)]
    for mode, world_size, way in [*ways, *((*place, replace(args, base_dtype="auto")) for place in spread[1:])]:
        wider = [f"--shard {mode}"] * (mode != spread[0][0]) + [f"{world_size} ranks"] * (world_size != ranks)
        shard_size = 0 if (mode, world_size) != spread[0] else args.shard_size
        wider += ["--shard-size 0"] * (shard_size != args.shard_size)
        size = args.batch_size
        while size > 1:
            changed = replace(way, shard=mode, shard_size=shard_size, batch_size=size)
            if (wider or changed != replace(args, shard=mode)) and _is_divisible(changed, world_size):
                yield changed, world_size, flags(changed, *wider)
            size //= 2


def measure(
    main: Callable[[ArgsT], None], args: ArgsT, ranks: int, *, tells: bool = False, remembers: bool = True
) -> "Plan":
    """Run two steps of the trainer on as many planned ranks."""
    with planned_ranks(ranks) as dist, PlannedDevice() as device:
        plan = Plan(dist, device, tells, remembers)
        token, kept = current_plan.set(plan), scoring.gather_by_index
        scoring.gather_by_index = _of_all_ranks
        try:
            main(replace(args, text_cache=""))
        finally:
            current_plan.reset(token)
            scoring.gather_by_index = kept
            plan.forget()
            gc.collect()
    return plan


@dataclass
class Plan:
    """A step as it is planned. tells: print the settings too. remembers: run one forward of a shape, not all.

    unshard: the phases in which sharded weights are gathered once. offloads: the parts that --offload may name.
    """

    dist: Dist
    device: PlannedDevice
    tells: bool = False
    remembers: bool = True
    unshard: tuple[str, ...] = ()
    offloads: Sequence[str] = ()
    _seen: dict[object, "_Seen"] = field(default_factory=dict)
    _measured: list[Callable[[], None]] = field(default_factory=list)  # what ends the backward pass that is measured
    _forwards: Counter[str] = field(default_factory=Counter)  # samples through the net, by phase
    _tokens: Counter[str] = field(default_factory=Counter)  # of all of them

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes in each phase."""
        return {name or "others": peak for name, peak in self.device.peaks.items()}

    @property
    def peak(self) -> int:
        """The most bytes of all."""
        return max(self.peaks.values())

    def describe(self) -> str:
        """Memory, forwards and operations of each phase, a line each."""
        memory = ", ".join(f"{name} {self.peaks[name] / GB:.3g}" for name in ordered(self.peaks))
        flops = {name: count for name, count in self.device.flops.items() if count}
        work = ", ".join(f"{name} {flops[name] / 2e12:.4g}" for name in ordered(flops))  # of one of the two steps
        through = ", ".join(
            f"{name} {self._forwards[name] / 2:g} of {self._tokens[name] / self._forwards[name]:,.0f}"
            for name in ordered(self._forwards)
        )
        lines = [
            f"most memory per rank, GB: {memory}",
            f"forwards of a sample per rank and step, and their tokens: {through}",
            f"operations per rank and step, TFLOP: {work}",
            *([f"sharded weights are gathered once in {' and '.join(self.unshard)}"] if self.unshard else []),
        ]
        return "\n".join(f"plan: {line}" for line in lines)

    def prepare(self, run: "Run[MediaArgs]", scorer: str | Callable[[Dist], Any], parts: Sequence[str]) -> None:
        """Give a run that has read its inputs a scorer, a log, and a model that is watched."""
        model: Any = run.model
        self.offloads = [part for part in run.args.OFFLOAD.split() if part != "encoder" or model.encoders]
        if self.remembers:
            model.predict_velocity = self._remembered(model.predict_velocity, model)
            model.decode = self._once(model.decode, lambda parts, x0, *_: x0.shape, {})
            model.load = self._loaded(model.load, model.encoders)
        model.encode, model.decode = (self._phased(name, getattr(model, name)) for name in ("encode", "decode"))
        run.watch = None
        run.scorer = LocalScorer(_grader(parts), run.model.MEDIA) if isinstance(scorer, str) else scorer(self.dist)
        run.log = _Log(self.device)

    def settle(self, run: "Run[MediaArgs]") -> None:
        """Have the optimizer take all parameters at once, as torch has it on an accelerator, except sharded ones.

        Without gradients one block of those that are alike runs, of recomputed ones that are not sharded the first and
        last two, and without `remembers` all.
        """
        self.unshard = run.unshard
        done: dict[object, tuple[Any, int, int]] = {}
        alike: dict[object, list[nn.Module]] = {}
        for block in run.net.modules() if self.remembers else ():
            if type(block).__name__.removeprefix("FSDP") in run.model.BLOCK_NAMES:
                alike.setdefault(_weights_of(block), []).append(block)
                block.forward = self._once(block.forward, _block_key(block), done)
        if run.args.gradient_checkpointing and not run.args.keep_products_gb and run.mode != "fsdp2":
            on_host = "activations" in run.args.offload
            run._recompute(_Recomputed(self.device, on_host, list(alike.values())))
        for group in run.optimizer.param_groups:
            group["foreach"] = not any(isinstance(p, DTensor) for p in group["params"])

    def steps(self, run: "AnyRun[RunArgs]") -> Iterator[Step]:
        """Two steps, as the optimizer has its moments from the second on; then what a checkpoint holds."""
        yield from (Step(0), Step(0))
        with run.phase("save"):
            part_files(replace(self.dist, is_planned=False), train_state(run.net, run.optimizer, run.averages()))

    def forget(self) -> None:
        """Drop what was remembered, which keeps tensors alive."""
        self._seen.clear()

    def _phased(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def phased(*args: Any, **kwargs: Any) -> Any:
            with self.device.phase(self.device.current if self.device.current == "update" else name):
                return function(*args, **kwargs)

        return phased

    def _remembered(self, predict: Callable[..., Tensor], model: Model) -> Callable[..., Tensor]:
        def remembered(net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
            active = next((layer.active for layer in net.modules() if isinstance(layer, LoraLinear)), None)
            unit = max(1, x[0].numel() // NEAR)
            shapes = {name: (-(-t.shape[1] // unit), t.shape[2:]) for name, t in cond.items() if t.ndim > 1}
            scales = params.guidance_scale, params.guidance, model.boundary and sigma.tolist()[0] < model.boundary
            key = repr((id(net), torch.is_grad_enabled(), x.shape, x.requires_grad, active, shapes, scales))
            seen = self._seen.get(key)
            if seen and (seen.trained or not seen.is_graph):  # to the end of its backward pass
                out = seen.repeat()
            else:
                self._seen[key] = seen = _Seen(self.device, net, self._measured)
                with _tokens_of(net, model.BLOCK_NAMES) as blocks:
                    out = seen.record(lambda: predict(net, x, sigma, cond, params))
                seen.tokens = max(blocks.values(), key=sum, default=[])
            self._forwards[self.device.current] += len(seen.tokens)
            self._tokens[self.device.current] += sum(seen.tokens)
            return out

        return remembered

    def _loaded(self, load: Callable[..., Parts], encoders: Sequence[str]) -> Callable[..., Parts]:
        def loaded(**options: Any) -> Parts:
            parts = load(**options)
            for part in (getattr(parts, name) for name in encoders):
                part.forward = self._once(part.forward, _shapes, {})
            return parts

        return loaded

    def _once(
        self, function: Callable[..., Any], key: Callable[..., object], done: dict[object, tuple[Any, int, int]]
    ) -> Callable[..., Any]:
        """Without gradients a function runs once for a key; then it gives tensors alike, after as much memory."""
        device = self.device

        def once(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*args, **kwargs)
            if (seen := key(*args, **kwargs)) in done:
                shapes, peak, flops = done[seen]
                device.burst(peak, flops)
                return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=device.device), shapes)
            around, base, before = device.window, device.start_window(), device.flops.total()
            out = function(*args, **kwargs)
            shapes = tree_map(_shape_of, out)
            done[seen] = shapes, device.window - base, device.flops.total() - before
            device.window = max(device.window, around)
            return out

        return once


class _Seen:
    """What a forward of the net, and its backward, needed.

    Of several forwards in one backward pass the last is gone through first, and all of it before the next.

    net: whose parameters get gradients. measured: what ends the backward that is measured, or nothing.
    """

    def __init__(self, device: PlannedDevice, net: nn.Module, measured: list[Callable[[], None]]) -> None:
        self.device, self.net, self.measured = device, net, measured
        self.held = self.forward_flops = self.forward_peak = self.backward_flops = self.backward_peak = 0
        self.trained: list[nn.Parameter] = []
        self.tokens: list[int] = []  # of each sample

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """What `run` returns; at its end, and during the backward pass, notes what it took."""
        device = self.device
        base, flops = device.start_window(), device.flops.total()
        out = run()
        self.shape, self.dtype, self.is_graph = out.shape, out.dtype, out.requires_grad
        self.forward_flops, self.held = device.flops.total() - flops, device.live - base - out.nbytes
        self.forward_peak = device.window - base - (0 if self.is_graph else self.held)  # what stays is there already
        return _Record.apply(out, self) if self.is_graph else out

    def repeat(self) -> Tensor:
        """A tensor in the place of the net's output, after as much memory and as many operations."""
        self.device.burst(self.forward_peak, self.forward_flops)
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device.device)
        return _Repeat.apply(out.requires_grad_(), self) if self.is_graph else out

    def begin_backward(self) -> None:
        """Note from here on what the backward pass takes; gradients that stay are left out."""
        self.end_measured()
        device = self.device
        have = {p for p in self.net.parameters() if p.grad is not None}
        base, flops = device.start_window(), device.flops.total()

        def count(p: nn.Parameter) -> None:
            if p not in have:
                have.add(p)
                self.trained.append(p)
                device.aside += (p.to_local() if isinstance(p, DTensor) else p).nbytes  # of this rank's rows

        def end() -> None:
            self.backward_peak, self.backward_flops = device.window - base, device.flops.total() - flops
            self.trained = list(have)
            for hook in hooks:
                hook.remove()

        hooks = [p.register_post_accumulate_grad_hook(count) for p in self.net.parameters() if p.requires_grad]
        self.measured.append(end)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_measured)

    def end_measured(self) -> None:
        """End the measurement that is under way, if any."""
        while self.measured:
            self.measured.pop()()

    def repeat_backward(self) -> None:
        """Take as much memory as the backward pass did, leave the gradients, and free what the forward kept."""
        self.end_measured()
        self.device.burst(self.backward_peak, self.backward_flops)
        self.device.add(-self.held)
        for p in self.trained:
            if p.grad is None:
                p.grad = torch.empty_like(p)


class _Recomputed(Recompute):
    """Runs recomputed blocks: of those that are alike two tell what the others take.

    The second one tells of a forward, the last but one of a backward. These run, as do the first and the last, whose
    inputs or outputs may need no gradient.
    """

    def __init__(self, device: PlannedDevice, on_host: bool, alike: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__(0.0, on_host=on_host)
        self.device = device
        self.places: dict[nn.Module, tuple[int, int]] = {}  # kind of a block, and blocks of it that are left but one
        for kind, blocks in enumerate(alike):
            self.places |= {
                block: (kind, len(blocks) - 2 - i) for i, block in enumerate(blocks) if 0 < i < len(blocks) - 1
            }
        self.forwards: dict[object, tuple[Any, int, int]] = {}
        self.backwards: dict[object, tuple[int, int]] = {}

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        kind, left = self.places.get(block, (None, 0))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if kind is None or not any(tensor.requires_grad for tensor in tensors):
            return super().__call__(block, *args)
        key = kind, _shapes(*args)
        if not left:
            return self._with_backward(key, block, args, tensors)
        if key not in self.forwards:
            begun = self._begin()
            out = super().__call__(block, *args)
            self.forwards[key] = tree_map(_shape_of, out), *self._end(begun)
            return out
        shapes, *taken = self.forwards[key]
        if not all(isinstance(shape, Tensor) for shape in tree_leaves(shapes)):
            return super().__call__(block, *args)
        self.device.burst(*taken)
        params = [p for p in block.parameters() if p.requires_grad]
        with self.inputs():
            outs = _RepeatBlock.apply(self, key, tree_leaves(shapes), len(tensors), *tensors, *params)
        return outs if isinstance(shapes, tuple) else outs[0]

    def _with_backward(self, key: object, block: nn.Module, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> Any:
        """What the block gives; its backward pass is measured."""
        begun: list[int] = []

        def end() -> None:
            if begun:
                self.backwards[key] = self._end(begun)

        marked = iter(_Mark.apply(end, *tensors))
        out = super().__call__(block, *(next(marked) if isinstance(arg, Tensor) else arg for arg in args))
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            return out
        outs = _Mark.apply(lambda: begun.extend(self._begin()), *(out if isinstance(out, tuple) else (out,)))
        return outs if isinstance(out, tuple) else outs[0]

    def _begin(self) -> list[int]:
        device = self.device
        return [device.window, device.aside, device.flops.total(), device.start_window()]

    def _end(self, begun: Sequence[int]) -> tuple[int, int]:
        """The most bytes since then, and the operations; the window around this one goes on."""
        device, (window, aside, flops, base) = self.device, begun
        peak = device.window - base
        device.window, device.aside = max(window, device.window - aside), device.aside + aside
        return peak, device.flops.total() - flops


class _Mark(torch.autograd.Function):
    """Tensors as they are; their gradients call a function."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        out = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(
            *(view for view, tensor in zip(out, tensors, strict=True) if not tensor.requires_grad)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


class _RepeatBlock(torch.autograd.Function):
    """Outputs in the place of a block's, which keeps its inputs; gradients for all that need one."""

    @staticmethod
    def forward(
        ctx: Any, seen: _Recomputed, key: object, shapes: Sequence[Tensor], num_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.seen, ctx.key = seen, key
        ctx.save_for_backward(*tensors[:num_inputs])
        ctx.wanted = [(t.shape, t.dtype) if t.requires_grad else None for t in tensors]
        return tuple(torch.empty_like(shape, device=seen.device.device) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen.device.burst(*ctx.seen.backwards[ctx.key])
        made = (w and torch.empty(w[0], dtype=w[1], device=ctx.seen.device.device) for w in ctx.wanted)
        return None, None, None, None, *made


@contextmanager
def _tokens_of(net: nn.Module, block_names: Collection[str]) -> Iterator[dict[nn.Module, list[int]]]:
    """Within the `with` block, the tokens of each sample that goes through a block of the net."""
    seen: dict[nn.Module, list[int]] = {}

    def note(block: nn.Module, args: object, out: object) -> None:
        streams = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.dim() == 3]
        seen.setdefault(block, []).extend([sum(t.shape[1] for t in streams)] * len(streams[0]))

    blocks = [block for block in net.modules() if type(block).__name__.removeprefix("FSDP") in block_names]
    hooks = [block.register_forward_hook(note) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class _Record(torch.autograd.Function):
    """The output of the net, from which a backward pass begins."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, seen: _Seen) -> Tensor:
        ctx.seen = seen
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.begin_backward()
        return grad, None


class _Repeat(torch.autograd.Function):
    """An output in the place of the net's, with what its graph would keep."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, seen: _Seen) -> Tensor:
        ctx.seen = seen
        seen.device.add(seen.held)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.seen.repeat_backward()
        return None, None


class _Log(RunLog):
    """A log of a run that writes nothing, whose phases are those of the memory."""

    def __init__(self, device: PlannedDevice) -> None:
        super().__init__("", is_main=False, total_steps=1)
        self._device = device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count as that phase within the `with` block, its memory as that of the outer one, if any."""
        with self._device.phase(self._within or name), super().phase(name):
            yield


def ordered(phases: Mapping[str, float]) -> list[str]:
    """The phases, in the order of a step; the others, which have no name, only where they are the largest."""
    known = [name for name in PHASES if name in phases]
    rest = [name for name in phases if name not in PHASES and phases[name] >= max(phases.values())]
    return known + rest


def _shape_of(leaf: Any) -> Any:
    """A tensor of that shape which takes no memory; a number as it is, and nothing for what may hold tensors."""
    if isinstance(leaf, Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf if isinstance(leaf, float | int) else None


def _weights_of(block: nn.Module) -> object:
    """Names, shapes and types of all that a block holds."""
    held = (*block.named_parameters(), *block.named_buffers())
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in held)


def _block_key(block: nn.Module) -> Callable[..., object]:
    """What tells a block's call from those of others: its weights, inputs and adapter."""
    weights = _weights_of(block)
    layer = next((layer for layer in block.modules() if isinstance(layer, LoraLinear)), None)
    return lambda *args, **kwargs: (weights, layer and layer.active, _shapes(*args, **kwargs))


def _shapes(*args: Any, **kwargs: Any) -> object:
    """Those of all tensors that a module gets."""
    return tuple(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _grader(parts: Sequence[str]) -> Callable[[Mapping[str, np.ndarray], Sequence[str]], list[Score]]:
    """Scores that differ, so that there is something to learn."""

    def grade(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
        return [Score(float(i), parts=dict.fromkeys(parts, float(i))) for i in range(len(texts))]

    return grade


def _of_all_ranks(dist: Dist, indices: Tensor, values: Tensor, total: int) -> Tensor:
    """Values of all ranks' samples in the place of those that the others would send: different ones."""
    return torch.linspace(0, 1, total)


def _weights(args: MediaArgs, ranks: int) -> tuple[object, ...]:
    """What decides on the memory of the weights alone, whatever is done with them."""
    return sharding(args, ranks), ranks, args.shard_size, "encoder" in args.offload, args.base_dtype


def _is_divisible(args: MediaArgs, ranks: int) -> bool:
    """Whether a step's samples can be split into batches of that size for so many ranks."""
    try:
        return bool(num_batches(args, ranks))
    except ValueError:
        return False
