"""Memory plan of a training step: run the trainer's own step on a simulated device, and find settings that fit.

    plan: memory per rank, GB: load 59.7, rollout 65.7, decode 74.2, update 84.2, sync 62.9, save 63.1
    plan: --memory.device-gb 80 is too little: by 10.6 GB in update, beside 6.4 GB for context, NCCL and fragmentation
    plan: fits with --memory.offload encoder: 67.6 GB

The plan counts tensors, and leaves a share of the accelerator's memory for everything else. If a step does not fit,
changes of settings are tried in order of their cost, each on top of the earlier ones, and the first that fits is named.

The trainer runs two steps with few prompts, so that the optimizer has its moments, and two with a few more. All prompts
are as large as the largest in the file. Tensors kept per batch add up, and everything else is the same for each batch,
so memory is extrapolated linearly to the step's own number of prompts. The first forward and backward of the net, and
the first encoding and decoding, of each shape runs kernel by kernel; later ones are assumed to take the same memory and
number of operations.
"""

import gc
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from omni_reward import Score
from omni_reward.cli import read_options
from omni_reward.scorers import empty_networks
from omni_rollout import Model, Params, Prompt
from omni_rollout.decoding import num_decoded
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.engines.vllm_omni.formats import quantized_names
from omni_rollout.model import wrap
from omni_rollout.tokens import TokenParams, TokenTrajectory
from omni_rollout.types import Cond
from omni_train.checkpoint.parts import num_bytes, part_files
from omni_train.checkpoint.state import train_state
from omni_train.dist import memory
from omni_train.log import RunLog
from omni_train.lora import unadapted_params
from omni_train.lora_layer import AdaptedLayer
from omni_train.planned import PLANNED, PlannedDevice, planned_ranks
from omni_train.prompts.files import PromptRecord
from omni_train.prompts.sampler import PromptSampler
from omni_train.prompts.splits import data_files
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from omni_rl.flow.scorers import LocalScorer, scorer_to_start
from omni_rl.media.images import reference_sizes
from omni_rl.run.engines import ENGINES
from omni_rl.run.run import Step
from omni_rl.run.world import World
from omni_rl.settings.args import (
    MediaArgs,
    RunArgs,
    dp_size,
    load_records,
    next_milestone,
    num_batches,
    num_ranks,
    parse_offload,
    sharding_mode,
)
from omni_rl.settings.fields import change, flag_of, prefix_errors, values_of
from omni_rl.settings.groups import Scorer
from omni_rl.tools.plan_engine import PlannedVllmOmni
from omni_rl.tools.plan_tokens import sample_ends, with_distinct_scores

ArgsT = TypeVar("ArgsT", bound=RunArgs)
GB = 1e9
RESERVED = 0.08  # share of an accelerator left for context, NCCL, workspaces of libraries, and fragmentation
PHASES = ("load", "encode", "rollout", "decode", "update", "sync", "save")
MORE_RANKS = 8  # least number of ranks in the last change, which otherwise doubles them
DECODED = 4  # images decoded at once after a change


def fit(main: Callable[[ArgsT, World], None], args: ArgsT) -> int:
    """Plan a step of the trainer and print the plan and, if it does not fit, changes that fit.

    Return the exit code, 0 if the step fits. Ctrl-C and SIGTERM end the program at once, because there is nothing to
    save.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # an exception would be lost if the signal arrived in the callback of a weak reference
        signal.signal(number, lambda number, _: os._exit(128 + number))
    gc.freeze()  # so that collections do not scan all libraries again
    limit, ranks = (1 - RESERVED) * args.memory.device_gb * GB, num_ranks()
    reserve_note = f"beside {RESERVED * args.memory.device_gb:.3g} GB for context, NCCL and fragmentation"
    libraries = memory(torch.device("cpu")).current_mb * 2**20  # this program has the same imports as a run
    plan = measure(main, args, ranks, verbose=True)
    print("\n".join([plan.describe(), plan.describe_host(libraries, copies=args.run.async_save)]), flush=True)
    if plan.peak <= limit:
        spare = (limit - plan.peak) / GB
        print(f"plan: fits --memory.device-gb {args.memory.device_gb:g}, with {spare:.3g} GB left {reserve_note}")
        return 0
    excess = {name: peak - limit for name, peak in plan.peaks.items() if peak > limit}
    excess_text = ", ".join(f"{excess[name] / GB:.3g} GB in {name}" for name in order_phases(excess))
    print(
        f"plan: --memory.device-gb {args.memory.device_gb:g} is too little: by {excess_text}, {reserve_note}",
        flush=True,
    )
    for changed_args, world_size, flags in propose_changes(args, ranks, plan.offloads, excess):
        trial = measure(main, changed_args, world_size)
        if trial.peak <= limit:
            print(f"plan: fits with {flags}: {trial.peak / GB:.3g} GB", flush=True)
            return 1
        worst = max(trial.peaks, key=lambda name: trial.peaks[name])
        print(f"plan: does not fit with {flags}: {trial.peak / GB:.3g} GB in {worst}", flush=True)
    print("plan: no change of offloading, recomputation, batch size, bits, sharding and ranks fits", flush=True)
    return 1


def propose_changes(
    args: ArgsT, ranks: int, offloads: Sequence[str], excess: Collection[str]
) -> Iterator[tuple[ArgsT, int, str]]:
    """Yield settings that need less memory, with their number of ranks and their flags; each includes earlier changes.

    The costs: gathering weights block by block and offloading parts take copies, recomputed activations a third more
    operations, small batches slower kernels, offloaded blocks a copy of the net in each forward, quantized weights
    precision, and more ranks money.

    offloads: the parts that --memory.offload may name. excess: the phases that need too much memory.
    """
    first, mode, is_text = args, sharding_mode(args, ranks), not isinstance(args, MediaArgs)
    # text is not sampled without it
    gathering: dict[str, object] = {"sharding.unshard": "rollout" if is_text else "none"}
    adapters = bool(args.lora.rank) and args.lora.init != "pissa"  # PiSSA needs the values of weights
    streams = adapters and mode != "fsdp2" and not values_of(args).get("compile") and "blocks" in offloads
    parts = [part for part in offloads if part != "blocks" or part in parse_offload(args.memory)]
    kept_parts = [part for part in parts if part != "activations"]
    decode: dict[str, object] = {}
    if "decode" in excess and isinstance(args, MediaArgs):  # only media are decoded
        memory = args.memory
        at_once = num_decoded(memory.decode_batch_size, args.sampling.height, args.sampling.width, memory.decode_tile)
        at_once = min(args.data.batch_size, at_once)
        decode = {"memory.decode_batch_size": DECODED} if at_once > DECODED else {}
    proposals: list[dict[str, object]] = [
        gathering if mode == "fsdp2" else {},
        decode if set(excess) == {"decode"} else {},
        decode | {"memory.offload": ",".join(kept_parts)},
        {"memory.gradient_checkpointing": True},
        {"memory.offload": ",".join(parts)},
        {"batch_size": min(args.data.batch_size, max(2, args.data.batch_size // 2))},
        {"batch_size": min(args.data.batch_size, max(2, args.data.batch_size // 4))},
        {"memory.offload": ",".join(offloads)} if streams else {},
        {"memory.base_dtype": "nf4"} if args.lora.rank and mode != "fsdp2" and args.sampling.has_trained_engine else {},
        {"memory.base_dtype": "auto", "sharding.mode": "fsdp2", "sharding.size": 0}
        | ({"lora.init": "default"} if args.lora.init == "pissa" else {})
        | {"memory.offload": ",".join(part for part in parts if part != "blocks")}
        | (gathering if is_text else {}),
    ]
    is_rounded = args.policy.dtype != "float32" and (args.lora.use_dora or args.lora.dtype == "float32")  # by fsdp2
    for changes in proposals[:-1] if is_rounded else proposals:
        is_last = changes is proposals[-1]
        changed = change(args, **changes)
        context_size = ranks // dp_size(args, ranks)
        world_size = -(-max(MORE_RANKS, 2 * ranks) // context_size) * context_size if is_last else ranks
        if (changed == args and not is_last) or not _is_divisible(changed, world_size):
            continue
        args = changed
        values, first_values = values_of(args), values_of(first)
        flags = [
            flag_of(name) if values[name] is True else f"{flag_of(name)} {values[name]}"
            for name in dict.fromkeys(chain.from_iterable(proposals))
            if values[name] != first_values[name]
        ]
        yield args, world_size, " ".join(flags + [f"{world_size} ranks"] * is_last)


def measure(
    main: Callable[[ArgsT, World], None], args: ArgsT, ranks: int, *, verbose: bool = False, cache_forwards: bool = True
) -> "Figures":
    """Return the figures of a step on planned ranks, extrapolated from two small numbers of prompts.

    verbose: True to also print the settings and check the model's files. cache_forwards: True to run only one
    forward per shape.
    """
    shares = dp_size(args, ranks)
    counts = _prompt_counts(args, shares)
    defaults = {"memory.text_cache": "", "memory.text_cache_mb": 0.0, "attention": "auto"}
    plain_args = change(args, **{name: value for name, value in defaults.items() if name in values_of(args)})
    scorer = scorer_bytes(args.scorer, ranks)
    with planned_ranks(ranks) as dist, PlannedDevice() as device:
        sleeps = args.scorer.sleep
        device.add(0 if sleeps else scorer.total())
        plan = PlannedWorld(replace(dist, context=ranks // shares), args, device, counts, verbose, cache_forwards)
        try:
            with device.phase("load"):
                main(plain_args, plan)
        finally:
            plan.clear_cache()
            gc.collect()
    first_figures, last_figures = plan.figures[0], plan.figures[-1]
    times = (args.data.prompts_per_step - counts[0]) / max(1, counts[-1] - counts[0])

    def extrapolate(low: Counter[str], high: Counter[str]) -> Counter[str]:
        return Counter({key: round(low[key] + (high[key] - low[key]) * times) for key in high})

    peaks = extrapolate(first_figures.peaks, last_figures.peaks)
    if sleeps:
        peaks["reward_wait"] += scorer.total()
    return replace(
        last_figures,
        peaks=peaks,
        flops=extrapolate(first_figures.flops, last_figures.flops),
        forwards=extrapolate(first_figures.forwards, last_figures.forwards),
        tokens=extrapolate(first_figures.tokens, last_figures.tokens),
        scorer=scorer,
        sleeps=sleeps,
    )


def scorer_bytes(scorer_args: Scorer, ranks: int) -> Counter[str]:
    """Return the bytes on a rank's device of the scorer that the run starts, by purpose.

    Its architecture is the published one, or that of its files, and its batch is of maximum size.

    Raises:
        ValueError: the run could not start the scorer.
    """
    name, options = scorer_to_start(scorer_args)
    if not name:
        return Counter()
    with prefix_errors("--scorer: "), PlannedDevice() as device, torch.no_grad():
        networks = empty_networks(name, str(PLANNED), read_options(options), ranks)
        weights = device.live
        for network in networks.values():
            network.call()
    return Counter({"weights": weights, "a batch": max(device.peaks.values(), default=0) - weights})


def _prompt_counts(args: RunArgs, ranks: int) -> list[int]:
    """Return two numbers of prompts whose steps have the same form as the full step, or the full number if it is small.

    A rank has at least two batches, and ranks, groups and minibatches divide the samples in the same way. ranks: number
    of ranks with their own samples.
    """
    group, minibatches, samples_per_round = (
        args.data.group_size,
        args.data.num_minibatches,
        ranks * args.data.batch_size,
    )
    pairs = ranks * minibatches * args.data.batch_size if "levels_per_pair" in vars(args) else 1  # pairs fill batches

    def shape(count: int) -> object:
        remainders = count * group % samples_per_round, count % ranks, count % minibatches
        return (
            math.gcd(count * group // samples_per_round, minibatches),
            [bool(remainder) for remainder in remainders],
            2 * count % pairs,
        )

    num_prompts = args.data.prompts_per_step
    counts = [
        n for n in range(1, num_prompts) if n * group >= 2 * samples_per_round and shape(n) == shape(num_prompts)
    ][:2]
    return counts if len(counts) == 2 else [num_prompts]


@dataclass(frozen=True)
class Figures:
    """Memory and operations of `num_steps` steps.

    peaks: peak bytes of each phase. flops: operations of each phase. forwards, tokens: of samples through the net, by
    phase. unshard: the phases in which sharded weights are gathered once. offloads: the parts that --memory.offload may
    name. scorer: the scorer's bytes in each peak, by purpose. sleeps: True if they are used only during the wait for
    scores. host: peak bytes of tensors on the host, such as offloaded parts, and weights before they are quantized.
    checkpoint: bytes that this rank saves.
    """

    peaks: Counter[str]
    flops: Counter[str]
    forwards: Counter[str]
    tokens: Counter[str]
    unshard: tuple[str, ...]
    offloads: Sequence[str]
    scorer: Counter[str] = field(default_factory=Counter)
    sleeps: bool = False
    host: int = 0
    checkpoint: int = 0
    num_steps: int = 2

    @property
    def peak(self) -> int:
        """The peak bytes over all phases."""
        return max(self.peaks.values())

    def describe(self) -> str:
        """Return lines on the memory, forwards and operations of each phase."""
        memory = ", ".join(f"{name} {self.peaks[name] / GB:.3g}" for name in order_phases(self.peaks))
        scorer = ", ".join(f"{name} {count / GB:.3g}" for name, count in self.scorer.items())
        phases = f"the wait for scores, {self.peaks['reward_wait'] / GB:.3g}," if self.sleeps else "these"
        flops = {name: count for name, count in self.flops.items() if count}
        work = ", ".join(f"{name} {flops[name] / self.num_steps / 1e12:.4g}" for name in order_phases(flops))
        forwards = ", ".join(
            f"{name} {self.forwards[name] / self.num_steps:g} of {self.tokens[name] / self.forwards[name]:,.0f}"
            for name in order_phases(self.forwards)
        )
        lines = [
            f"most memory per rank, GB: {memory}",
            *([f"of {phases} the scorer's, GB: {self.scorer.total() / GB:.3g} ({scorer})"] if scorer else []),
            f"most host memory per rank, beside libraries and checkpoints, GB: {self.host / GB:.3g}",
            f"forwards of a sample per rank and step, and their tokens: {forwards}",
            f"operations per rank and step, TFLOP: {work}",
            *([f"sharded weights are gathered once in {' and '.join(self.unshard)}"] if self.unshard else []),
        ]
        return "\n".join(f"plan: {line}" for line in lines)

    def describe_host(self, libraries: float, *, copies: bool) -> str:
        """Return a line on the total host memory of a rank.

        libraries: bytes of a program after its imports. copies: True if saves copy what they write.
        """
        parts = {"libraries": libraries, "tensors": self.host, "a checkpoint's copy": self.checkpoint * copies}
        breakdown = ", ".join(f"{name} {count / GB:.2f}" for name, count in parts.items())
        note = "on top come an accelerator's driver, or, on a CPU, the rank's memory above"
        return f"plan: host memory per rank in all, GB: {sum(parts.values()) / GB:.3g} ({breakdown}); {note}"


@dataclass(frozen=True)
class PlannedWorld(World):
    """Simulated ranks that plan two steps for each number of prompts in `counts`.

    args: the original settings. verbose, cache_forwards: see `measure`. figures: the figures of the steps.
    """

    args: RunArgs
    device: PlannedDevice
    counts: Sequence[int] = ()
    verbose: bool = False
    cache_forwards: bool = True
    figures: list[Figures] = field(default_factory=list)
    signals: ClassVar[Sequence[Any]] = ()  # nothing to save
    has_values: ClassVar[bool] = False
    _cached_forwards: dict[object, "_MeasuredForward"] = field(default_factory=dict)
    _trained: list[nn.Parameter] = field(default_factory=list)  # the rank's own rows, if sharded
    _measured: list[Callable[[], None]] = field(default_factory=list)  # ends the measurement of a backward pass
    _forwards: Counter[str] = field(default_factory=Counter)  # samples through the net, by phase
    _tokens: Counter[str] = field(default_factory=Counter)  # tokens of all of them

    def check_files(self, model: Any) -> None:
        """Check the configurations of the model's parts, only once for all plans."""
        model.reads_weights = False
        if self.verbose:
            model.check_files()

    def print_plan(self, lines: str) -> bool:
        """Print the lines of a dry run; return False, because a step is planned too."""
        if self.verbose:
            print(f"{lines}\nplan: a step without weights runs now, for a minute or more", flush=True)
        return False

    def connect(
        self, urls: str, scorer_args: Scorer, canary: PromptRecord, kinds: Sequence[str], **options: Any
    ) -> tuple[Any, str]:
        """Return a scorer with distinct scores, so that advantages are nonzero."""
        return LocalScorer(_grader(options.get("parts", ())), kinds), ""

    def instrument(self, model: Any) -> Any:
        """Return a model whose forwards are counted, and run once per shape."""
        if not isinstance(self.args, MediaArgs):
            return wrap(model, predict=self._cache_scores(model)) if self.cache_forwards else model
        prompts = _RepeatedPrompt(self.args)
        predict, decode, encode = model.predict_velocity, model.decode, model.encode
        if self.cache_forwards:
            predict = self._cache_velocities(predict, model)
            decode = self._run_once(decode, lambda parts, x0, *_: x0.shape)
            encode = self._run_once(encode, lambda parts, prompt, **options: repr(options))
        count_cache = self._count_text_cache(prompts.num_known)
        return wrap(
            model,
            predict_velocity=predict,
            decode=self._in_phase("decode", decode),
            encode=self._in_phase("encode", count_cache(encode)),
            condition=count_cache(model.condition),
        )

    def open_engine(self, name: str, *options: Any) -> Any:
        """Return the embedded engine, or a simulation of the memory of vLLM-Omni's."""
        if not ENGINES[name].library:
            return super().open_engine(name, *options)
        model, net, _, dtype, form, texts = options
        quantized = quantized_names(model)
        if form != "auto" and not quantized:
            raise ValueError(f"--memory.rollout-dtype must be auto for a {model.config['_class_name']}, got {form}")
        quantized = quantized if form != "auto" else []
        is_sharded = sharding_mode(self.args, self.dist.world_size) == "fsdp2"
        adopted = [] if is_sharded else [p for name, p in unadapted_params(net) if name not in quantized]
        return PlannedVllmOmni(
            model, self.device, dtype, texts, quantized=quantized, shared=sum(p.nbytes for p in adopted)
        )

    def free_memory(self) -> float:
        """Return the number of free bytes on the device."""
        return (1 - RESERVED) * self.args.memory.device_gb * GB - self.device.live

    def open_log(self, log_class: Callable[..., RunLog], **options: Any) -> RunLog:
        """Return a log that writes nothing."""
        return _Log(self.device)

    def steps(self, run: Any, remaining: Iterable[Any]) -> Iterator[Any]:
        """Yield two steps for each number of prompts, plus --draw-ahead more, and save.

        There are two because the optimizer has its moments only from the second step on.
        """
        device, never_offloaded = self.device, set() if run.args.sampling.has_trained_engine else {"blocks"}
        parts = [part for part in run.args.memory.OFFLOAD.split() if part not in never_offloaded]
        offloads = [part for part in parts if part != "encoder" or run.model.encoders]
        run.prompts, load_peaks = _RepeatedPrompt(run.args), Counter(device.peaks)
        if not isinstance(run.args, MediaArgs):
            run.scorer, run.engine = with_distinct_scores(run.scorer), self._cache_answers(run.engine)
        self._trained[:] = run.policy.params
        _fuse(run.policy.optimizer)
        _repeat_steps(run.policy.optimizer, device)
        num_ahead = min(run.args.sampling.draw_ahead, next_milestone(run.args, 0) - 1)
        num_steps = 2 + num_ahead  # after this many rollouts memory has reached its peak
        if run.args.sampling.draw_ahead:
            run.args = change(
                run.args, draw_ahead=num_ahead, train_steps=num_steps, save_every=num_steps, eval_every=num_steps
            )
        for run.prompts.prompts_per_step in self.counts:
            run.args = change(run.args, prompts_per_step=run.prompts.prompts_per_step)
            for counter in (device.peaks, device.flops, self._forwards, self._tokens):
                counter.clear()
            with device.phase(""):
                yield from (Step(number if num_ahead else 0) for number in range(num_steps))
                with run.phase("save"):
                    one_rank = replace(self.dist, is_planned=False)
                    state = train_state(run.policy.net, run.policy.optimizer, run.policy.averages)
                    num_saved = sum(map(num_bytes, part_files(one_rank, state).values()))
            peaks = Counter({name or "others": peak for name, peak in (load_peaks | device.peaks).items()})
            flops, forwards, tokens = (Counter(counter) for counter in (device.flops, self._forwards, self._tokens))
            extras = {"host": device.host_peak, "checkpoint": num_saved, "num_steps": num_steps}
            self.figures.append(Figures(peaks, flops, forwards, tokens, run.policy.unshard, offloads, **extras))

    def clear_cache(self) -> None:
        """Clear the cache, which keeps tensors alive."""
        self._cached_forwards.clear()

    def _in_phase(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def phased(*args: Any, **kwargs: Any) -> Any:
            with self.device.phase(self.device.current if self.device.current == "update" else name):
                return function(*args, **kwargs)

        return phased

    def _cache_velocities(self, predict: Callable[..., Tensor], model: Model) -> Callable[..., Tensor]:
        def cached_predict(net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
            shapes = {name: t.shape[1:] for name, t in cond.items()}
            scales = params.guidance_scale, params.guidance, model.boundary and sigma.tolist()[0] < model.boundary
            key = x.shape, x.requires_grad, shapes, scales
            return self._run_forward(net, key, model.BLOCK_NAMES, lambda: predict(net, x, sigma, cond, params))

        return cached_predict

    def _cache_scores(self, model: Any) -> Callable[..., Tensor]:
        predict = model.predict

        def cached_predict(net: nn.Module, inputs: Cond) -> Tensor:
            shapes = {name: tensor.shape for name, tensor in inputs.items()}
            head = net.get_output_embeddings()  # type: ignore[operator]  # together with targets, which the graph keeps
            return self._run_forward(net, shapes, model.BLOCK_NAMES, lambda: predict(net, inputs), retained=head)

        return cached_predict

    def _cache_answers(self, engine: TransformersEngine) -> TransformersEngine:
        """Return the engine; it samples one batch and reuses its answers for others of the same shape."""
        sample = self._run_once(
            partial(sample_ends, engine, self.device), lambda prompts, params: (len(prompts), params)
        )

        def generate(prompts: Sequence[Prompt], params: TokenParams) -> TokenTrajectory:
            with torch.no_grad():
                answers: TokenTrajectory = sample(prompts, params)
            self._count([len(encoded["input_ids"]) + params.max_new_tokens - 1 for encoded in answers.encoded])
            return replace(answers, prompts=tuple(prompts), weight_version=engine.weight_version)

        return wrap(engine, generate=generate)

    def _run_forward(
        self,
        net: nn.Module,
        shapes: object,
        block_names: Collection[str],
        forward: Callable[[], Tensor],
        *,
        retained: object = None,
    ) -> Tensor:
        """Return the output of a forward of the net, or a tensor like that of an earlier forward with the same shapes.

        retained: object that the graph of a forward keeps alive, besides the forward's own tensors.
        """
        active = next((layer.active for layer in net.modules() if isinstance(layer, AdaptedLayer)), None)
        key = repr((id(net), torch.is_grad_enabled(), active, shapes))
        measured = self._cached_forwards.get(key)
        if measured and (measured.trained or not measured.is_graph):  # recorded including its backward pass
            out = measured.repeat(retained)
        else:
            self._cached_forwards[key] = measured = _MeasuredForward(self.device, self._trained, self._measured)
            with _tokens_of(net, block_names) as blocks:
                out = measured.record(forward)
            measured.tokens = max(blocks.values(), key=sum, default=[])
        self._count(measured.tokens)
        return out

    def _count(self, tokens: Sequence[int]) -> None:
        """Count forwards of samples, given the number of tokens of each."""
        self._forwards[self.device.current] += len(tokens)
        self._tokens[self.device.current] += sum(tokens)

    def _count_text_cache(self, num_prompts: int) -> Callable[[Callable[..., Cond]], Callable[..., Cond]]:
        """Return a decorator that, at the first prompt, counts the cache's memory for the results of all prompts."""
        free_bytes = values_of(self.args)["memory.text_cache_mb"] * 2**20

        def decorator(encode: Callable[..., Cond]) -> Callable[..., Cond]:
            is_first = True

            def counted_encode(*args: Any, **kwargs: Any) -> Cond:
                nonlocal is_first, free_bytes
                cond = encode(*args, **kwargs)
                if is_first:
                    used = min(free_bytes, num_prompts * sum(tensor.nbytes for tensor in cond.values()))
                    free_bytes -= used
                    self.device.add(int(used))
                is_first = False
                return cond

            return counted_encode

        return decorator

    def _run_once(self, function: Callable[..., Any], key: Callable[..., object]) -> Callable[..., Any]:
        """Without gradients, run a function once per key; later calls return like tensors and count the same memory."""
        device = self.device
        results: dict[object, tuple[Any, int, int]] = {}

        def cached_function(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*args, **kwargs)
            if (call_key := key(*args, **kwargs)) in results:
                shapes, peak, flops = results[call_key]
                device.add_transient(peak, flops)
                return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=PLANNED) if t.is_meta else t, shapes)
            base, flops_before = device.start_window(), device.flops.total()
            out = function(*args, **kwargs)
            shapes = tree_map(_shape_of, out)
            results[call_key] = shapes, device.window - base, device.flops.total() - flops_before
            return out

        return cached_function


class _MeasuredForward:
    """Memory and operations of a forward of the net and of its backward.

    If one backward pass covers several forwards, it processes the last forward first, and completes it before the next.

    params: parameters that get gradients. measured: holds the function that ends the current measurement, if any.
    """

    def __init__(self, device: PlannedDevice, params: list[nn.Parameter], measured: list[Callable[[], None]]) -> None:
        self.device, self.params, self.measured = device, params, measured
        self.held = self.forward_flops = self.forward_peak = self.backward_flops = self.backward_peak = 0
        self.trained: list[nn.Parameter] = []
        self.tokens: list[int] = []  # of each sample

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """Return the result of `run`, and record the memory and operations of it and its backward pass."""
        device = self.device
        base, flops = device.start_window(), device.flops.total()
        out = run()
        self.shape, self.dtype, self.is_graph = out.shape, out.dtype, out.requires_grad
        self.forward_flops, self.held = device.flops.total() - flops, device.live - base - out.nbytes
        self.forward_peak = device.window - base - (0 if self.is_graph else self.held)  # held tensors are counted
        return _Record.apply(out, self) if self.is_graph else out

    def repeat(self, retained: object = None) -> Tensor:
        """Return a tensor in place of the net's output, after counting the same memory and operations.

        retained: see `PlannedWorld._run_forward`.
        """
        self.device.add_transient(self.forward_peak, self.forward_flops)
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device.device)
        return _Repeat.apply(out.requires_grad_(), self, retained) if self.is_graph else out

    def begin_backward(self) -> None:
        """Begin to measure the backward pass, without the gradients that it leaves."""
        self.end_measured()
        device = self.device
        with_grad = {p for p in self.params if p.grad is not None}
        base, flops = device.start_window(), device.flops.total()

        def count(p: nn.Parameter) -> None:
            if p not in with_grad:
                with_grad.add(p)
                self.trained.append(p)
                device.excluded += (p.to_local() if isinstance(p, DTensor) else p).nbytes  # only this rank's rows

        def end() -> None:
            self.backward_peak, self.backward_flops = device.window - base, device.flops.total() - flops
            self.trained = list(with_grad)
            for hook in hooks:
                hook.remove()

        hooks = [p.register_post_accumulate_grad_hook(count) for p in self.params]
        self.measured.append(end)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_measured)

    def end_measured(self) -> None:
        """End the current measurement, if any."""
        while self.measured:
            self.measured.pop()()

    def repeat_backward(self, graph: "_Graph") -> None:
        """Count the memory of the backward pass, create the gradients, and free the forward's tensors."""
        self.end_measured()
        self.device.add_transient(self.backward_peak, self.backward_flops)
        graph.free()
        for p in self.trained:
            if p.grad is None:
                p.grad = torch.empty_like(p)


@contextmanager
def _tokens_of(net: nn.Module, block_names: Collection[str]) -> Iterator[dict[nn.Module, list[int]]]:
    """Record, in the `with` block, the number of tokens of each sample that passes through each block of the net."""
    tokens_by_block: dict[nn.Module, list[int]] = {}

    def count_tokens(block: nn.Module, args: object, out: object) -> None:
        streams = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.dim() == 3]
        samples = len(streams[0]) if streams else 0  # blocks of encoder towers have no batch axis
        tokens_by_block.setdefault(block, []).extend([sum(t.shape[1] for t in streams)] * samples)

    with ExitStack() as hooks:
        for block in net.modules():
            if type(block).__name__.removeprefix("FSDP") in block_names:
                hooks.enter_context(block.register_forward_hook(count_tokens))
        yield tokens_by_block


class _Record(torch.autograd.Function):
    """The output of the net, from which a backward pass begins."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, measured: _MeasuredForward) -> Tensor:
        ctx.measured = measured
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.measured.begin_backward()
        return grad, None


class _Repeat(torch.autograd.Function):
    """A replacement for the net's output, with the memory that its graph would keep."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, measured: _MeasuredForward, retained: object) -> Tensor:
        ctx.measured, ctx.graph = measured, _Graph(measured, retained)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.measured.repeat_backward(ctx.graph)
        return None, None, None


class _Graph:
    """Memory that a forward keeps until its backward pass or until it is released."""

    def __init__(self, measured: _MeasuredForward, retained: object) -> None:
        self._device, self._held, self._kept = measured.device, measured.held, retained
        self._device.add(self._held)

    def free(self) -> None:
        """Free the memory, once."""
        self._device.add(-self._held)
        self._held, self._kept = 0, None

    __del__ = free


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer process all parameters at once, as torch does on an accelerator, except sharded weights."""
    for group in optimizer.param_groups:
        group["foreach"] = group["foreach"] or not any(isinstance(p, DTensor) for p in group["params"])


def _repeat_steps(optimizer: torch.optim.Optimizer, device: PlannedDevice) -> None:
    """Let each step from the third on count the memory of the second, the first with existing moments."""
    step_bytes: list[int] = []  # bytes of each step beyond those allocated before it
    depth = 0  # a step may call several steps of its base class

    def before(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and len(step_bytes) < 2:
            step_bytes.append(-device.start_window())
        elif depth == 1:
            device.add_transient(step_bytes[1], 0)
            optimizer.zero_grad()  # without gradients, step does nothing

    def after(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if not depth and step_bytes[-1] < 0:
            step_bytes[-1] += device.window

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


class _Text(str):
    """A text that is encoded although an equal text was encoded before."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__


class _RepeatedPrompt(PromptSampler):
    """A sampler that repeats the largest prompt of the file, as if its copies were different prompts."""

    def __init__(self, args: RunArgs) -> None:
        default_size = (args.sampling.height, args.sampling.width) if isinstance(args, MediaArgs) else (0, 0)

        def size(record: PromptRecord) -> tuple[int, ...]:
            references = sum(math.prod(size) for size in reference_sizes(record))
            media_bytes = sum(file.stat().st_size for file in (record.audio, record.video) if file)
            texts = record.text + record.negative + ("" if isinstance(args, MediaArgs) else str(record.meta))
            return math.prod(record.size or default_size), references, media_bytes, len(texts)

        records = load_records(args.data, args.data.prompts)
        self.num_known, self._largest = len(records), max(records, key=size)
        self.prompts_per_step, self.folder = args.data.prompts_per_step, data_files(args.data.prompts)[0].parent

    def at(self, step: int) -> list[PromptRecord]:
        """Return the prompts of any step."""
        largest = self._largest
        return [replace(largest, index=i, text=_Text(largest.text)) for i in range(self.prompts_per_step)]


class _Log(RunLog):
    """A log that writes nothing and passes its phases to the planned device."""

    def __init__(self, device: PlannedDevice) -> None:
        super().__init__("", is_main=False, total_steps=1)
        self._device = device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the `with` block as this phase, and its memory as that of the outer phase, if any."""
        with self._device.phase(self._current_phase or name), super().phase(name):
            yield


def order_phases(phases: Mapping[str, float]) -> list[str]:
    """Return the phases in the order of a step, then others only if they are the largest."""
    step_phases = [name for name in PHASES if name in phases]
    largest_others = [name for name in phases if name not in PHASES and phases[name] >= max(phases.values())]
    return step_phases + largest_others


def _shape_of(leaf: Any) -> Any:
    """Return a meta tensor in place of a tensor on the planned device without values; return other leaves unchanged."""
    is_blank = isinstance(leaf, Tensor) and leaf.device == PLANNED and not hasattr(leaf, "known")
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if is_blank else leaf


def _grader(parts: Sequence[str]) -> Callable[[Mapping[str, np.ndarray], Sequence[str]], list[Score]]:
    """Return a function with distinct scores, so that advantages are nonzero."""

    def grade(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
        return [Score(float(i), parts=dict.fromkeys(parts, float(i))) for i in range(len(texts))]

    return grade


def _is_divisible(args: RunArgs, ranks: int) -> bool:
    """Return True if a step's samples can be split into batches of --batch-size on this number of ranks."""
    try:
        return bool(num_batches(args, ranks))
    except ValueError:
        return False
