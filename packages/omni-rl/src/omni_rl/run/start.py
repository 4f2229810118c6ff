"""The functions that make a run, in the order in which the `main` of a trainer calls them.

    inputs = read_media(args, world)  # of `omni_rl.run.media`, `texts` or `thoughts`, as are the scorer and the engine
    session = open_session(args, world, inputs)
    if args.dry_run:
        tell_plan(args, world, inputs, session)
    args, servers = start_servers(args, world)
    scorer = open_scorer(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, scorer, policy, model, engine, servers, ...)

A mistake in the settings raises ValueError or OSError on every rank, before any weight is loaded.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from omni_rollout import Model, Params
from omni_rollout.models.hub import hub_fault, local_folder, released_models
from omni_rollout.offload import bring_blocks
from omni_rollout.tokens import TokenModel, TokenParams
from omni_rollout.types import WeightedEngine
from omni_train import lora, progress
from omni_train.dist import Dist, context_mesh, deterministic, gather_json, same_error, shard_mesh
from omni_train.experts import find_experts, num_gathered
from omni_train.flops import FlopTable, device_name, peak_tflops
from omni_train.kernels import BACKENDS, check_attention, check_compiler, check_float8, check_float16
from omni_train.memory.offload import HostAdamW
from omni_train.memory.quantized import BYTES
from omni_train.memory.recompute import Recompute
from omni_train.optim import SummedBackward, build_adamw, scaled_backward
from omni_train.prepare import Lora, Preparation, adapt, adapt_like, prepare
from omni_train.prompts.files import PromptRecord, RecordCheck
from omni_train.prompts.sampler import PromptSampler
from omni_train.shard import shard
from omni_train.weights.adapters import load_adapter
from omni_train.weights.full import named_weights, saved_files
from omni_train.weights.snapshot import Ema, Snapshot
from torch import nn
from torch.amp import GradScaler
from torch.nn.attention import sdpa_kernel

from omni_rl.flow.evals import HeldOut, Shown, params_of
from omni_rl.flow.scorers import AnyScorer, Scorer, with_server
from omni_rl.run.policy import Policy
from omni_rl.run.run import ModelT, ParamsT, Run, Seen, first_input
from omni_rl.run.samplers import Samplers
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import (
    MediaArgs,
    RunArgs,
    load_records,
    num_ranks,
    num_samplers,
    num_trainers,
    offloaded,
    sharding,
    without_secrets,
)
from omni_rl.settings.early import LOSS_SCALE, files_of
from omni_rl.settings.eval_sets import GOLD, loose_limits, setting_of
from omni_rl.settings.fields import as_flags, change, flag, flags_by_name, flat, require, values_of
from omni_rl.settings.token_args import ThinkingArgs, TokenLora
from omni_rl.settings.toml import to_toml

SHIPPED = "omni-rollout's, with a token for each word of a prompt, as {} cannot be fetched: {}"
MAX_GATHERED = 1e9  # bytes of weights that sharded ranks may gather for every token
STEP = "--memory.device-gb GB plans its memory, and the host's, for an accelerator of that size"
OwnArgsT = TypeVar("OwnArgsT", bound=RunArgs)
OwnModelT = TypeVar("OwnModelT", bound=Model | TokenModel)
OwnEngineT = TypeVar("OwnEngineT", bound=WeightedEngine)
OwnScorerT = TypeVar("OwnScorerT", bound=AnyScorer)
InputsT = TypeVar("InputsT", bound="Inputs[Any, Any]")
AnyParamsT = TypeVar("AnyParamsT", bound=Params | TokenParams)


@dataclass
class Inputs(Generic[ModelT, ParamsT]):
    """Inputs of a run that are read before any weight.

    about: the model in a few words. trained: its experts that are trained, as `Model.nets` has them. canary: the prompt
    with which scorers are tried. sizes: (height, width) of all prompts. how: what is done to the net. config: what else
    must be the same when the run goes on. files: full weights to start from, by expert; adapters: folders of adapters
    instead, and `part` the prefix of names in their files. beside: the policies beside the trained one, of "old", for
    `Policy.as_old`, and "reference". teachers: folders of weights, by name and expert. lr_scales: of experts with
    another learning rate. parts: of scores, which steps log. streams: as `Run`. watch: a second scorer of evaluations,
    once it is open. token_engine: the engine for each of whose tokens sharded ranks would gather the weights, if any.
    reads_files: True if the net is filled from files, False if the model loads it.
    """

    model: ModelT
    base_params: ParamsT
    prompts: PromptSampler
    held_out: list[HeldOut[Any, Any]]
    canary: PromptRecord
    how: Preparation
    about: str
    trained: Mapping[str, str]
    config: dict[str, object] = field(default_factory=dict)
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    part: str = "transformer"
    beside: Collection[str] = ()
    teachers: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    parts: Sequence[str] = ()
    streams: Mapping[str, int] = field(default_factory=dict)
    sizes: Collection[tuple[int, int]] = ()
    watch: Scorer | None = None
    token_engine: str = ""
    reads_files: bool = True


@contextmanager
def reading(part: str, size: int) -> Iterator[None]:
    """Show that a part of so many bytes is read in the `with` block, and count it after."""
    with progress.doing(part):
        yield
    progress.advance(size)


# 1. What the kinds share in reading


def model_place(args: RunArgs) -> str | Path:
    """Return --model; for a dry run that cannot fetch it, the folder in omni-rollout with its configuration, if any."""
    folder = released_models().get(args.model)
    if folder and args.dry_run:
        try:
            local_folder(args.model)
        except ValueError:
            return folder
    return args.model


def preparation(
    args: RunArgs, device: torch.device, model: Any, is_frozen: Callable[[str], bool], *, compiles: bool = False
) -> Preparation:
    """Return what the settings say is done to the net of a model.

    Raises:
        ValueError: the device has no such kernels of attention, no float8, or no compiler.
    """
    own = args.lora
    adapters = Lora(
        own.targets.split(",") if own.targets else model.LORA_TARGETS,
        own.rank,
        own.alpha,
        own.init,
        args.seed,
        exclude=own.exclude.split(",") if own.exclude else (),
        parameters=own.target_parameters.split(",") if isinstance(own, TokenLora) and own.target_parameters else (),
        use_rslora=own.use_rslora,
        use_dora=own.use_dora,
        in_float32=own.dtype == "float32",
    )
    on_host = "activations" in offloaded(args)
    recompute = Recompute(args.memory.keep_products_gb * 1e9, compiled=compiles, on_host=on_host)
    dtype: torch.dtype = getattr(torch, args.dtype)
    with as_flags(flags_by_name(type(args))):
        check_attention(args.attention, device, dtype)
        if args.dtype == "float16" and not args.dry_run:
            check_float16(device)
        if args.memory.base_dtype == "fp8":
            check_float8(device)
        if compiles:
            check_compiler(device)
    with as_flags(flags_by_name(type(args), "lora") | {"parameters": "--lora.target-parameters"}):
        if own.rank:
            options = {"exclude": adapters.exclude, "parameters": adapters.parameters}
            lora.find_layers(model.empty_net(), adapters.targets, **options, rank=own.rank, init=own.init)
    experts = model.EXPERT_NAMES if args.sharding.experts else ()
    if args.sharding.experts:
        with flag("--sharding.experts: "):
            find_experts(model.empty_net(), experts, num_ranks())
    return Preparation(
        device,
        model.BLOCK_NAMES,
        dtype,
        lora=adapters if own.rank else None,
        is_frozen=is_frozen,
        base_dtype=args.memory.base_dtype,
        attention=args.attention,
        compile=compiles,
        recompute=recompute if args.memory.gradient_checkpointing else None,
        expert_names=experts,
    )


def with_policies(
    inputs: InputsT, beside: Collection[str], teachers: Mapping[str, Mapping[str, Path]] = MappingProxyType({})
) -> InputsT:
    """Note the policies beside the trained one in the inputs, and return these; with LoRA they are adapters too.

    Without adapters to start from the reference is the net without adapters.
    """
    inputs.beside, inputs.teachers = beside, teachers
    how, adapters = inputs.how, inputs.adapters
    if how.lora:
        require((not teachers or how.lora.init != "pissa", "--lora.init pissa does not go with teachers"))
        kept = [name for name in ("old", "reference") if name in beside and (name == "old" or adapters)]
        others = (*kept, *(f"teacher_{name}" for name in teachers))
        inputs.how = replace(how, lora=replace(how.lora, others=others))
    return inputs


def read_sets(
    args: RunArgs,
    records: Sequence[PromptRecord],
    params: AnyParamsT,
    check: RecordCheck,
    check_graded: RecordCheck,
    check_params: Callable[[AnyParamsT], None] = lambda params: None,
) -> list[HeldOut[AnyParamsT, Any]]:
    """Return the sets of an evaluation, the first of which has the records of --eval.prompts.

    check: called with each prompt of a set that has its own scorer; check_graded: of the gold set, and of all others.
    """
    samples, threshold = args.eval.samples_per_prompt, args.eval.pass_threshold
    sets: list[HeldOut[AnyParamsT, Any]] = [HeldOut("", records, params, samples=samples, threshold=threshold)]
    for number, own in enumerate(args.eval.all_sets, start=1):
        is_graded = own.name == GOLD or not own.scorer_url
        with flag(f"{setting_of(own, number, 'prompts')}: "):
            found = load_records(args, own.prompts, check_graded if is_graded else check)
        few = own.name == GOLD and len(found) < 2  # for an error bar
        require((not few, f"--eval.gold-prompts must have at least 2 prompts, got {len(found)}"))
        with flag(f"eval.sets[{number}]: "):
            check_params(own_params := params_of(own, params))
        limit = threshold if own.pass_threshold is None else own.pass_threshold
        own_samples = own.samples_per_prompt or samples
        sets.append(HeldOut(own.name, found[: own.num_prompts or None], own_params, own.seed, own_samples, limit))
    return sets


def graded_by_run(
    args: RunArgs, training: Sequence[PromptRecord], sets: Sequence[HeldOut[Any, Any]]
) -> dict[str, Sequence[PromptRecord]]:
    """Return the prompts that the run's own scorer grades, by the settings that name them."""
    names = [(setting_of(own, i, "prompts"), own.name == GOLD or not own.scorer_url)
             for i, own in enumerate(args.eval.all_sets, start=1)]  # fmt: skip
    held = {name: own.records for (name, is_graded), own in zip(names, sets[1:], strict=True) if is_graded}
    return {**({"--prompts": training} if training else {}), "--eval.prompts": sets[0].records, **held}


def open_set_scorers(args: RunArgs, sets: list[HeldOut[Any, Any]], connect: Callable[[str, str, Any], Any]) -> None:
    """Open the scorers of evaluation sets.

    connect: takes a URL, the setting's name and the set's prompts; returns a scorer, and its name and version.
    """
    for place, own in enumerate(args.eval.all_sets, start=1):
        if own.scorer_url:
            is_started = own.name == GOLD and args.eval.gold_scorer
            name = "--eval.gold-scorer" if is_started else setting_of(own, place, "scorer_url")
            scorer, version = connect(own.scorer_url, name, sets[place].records)
            sets[place] = replace(sets[place], scorer=scorer, version=version)


# 2. What `main` calls, in this order, and the parts of it


def open_session(args: RunArgs, world: World, inputs: Inputs[Any, Any]) -> Session:
    """Return the session of a new run, or of the one that runs/NAME holds, to go on where it stopped.

    Raises:
        ValueError: ranks have other settings, or the checkpoint is damaged or of other ones.
    """
    dist, whole, model = world.dist, world.whole, inputs.model
    with same_error(whole):
        if sharding(args, dist.world_size) == "fsdp2" and args.sharding.unshard == "none" and not args.sharding.experts:
            check_gathered(args, inputs, model.empty_net())
        config = flat(without_secrets(args)) | files_of(args, model.folder) | inputs.config
    check_alike(whole, flat(args) | config)
    for line in loose_limits(args.eval, [len(held.records) for held in inputs.held_out]) if whole.is_main else ():
        print(line, flush=True)
    session = Session(args, dist)
    session.config = config
    session.check(args, lambda: adapt(model.empty_net(), inputs.how))
    return session


def check_gathered(args: RunArgs, inputs: Inputs[Any, Any], net: nn.Module) -> None:
    """Raise ValueError if sharded ranks would gather too much for each token that they sample."""
    given = values_of(args)["engine"]
    size = num_gathered(net) * getattr(torch, args.dtype).itemsize if given == inputs.token_engine else 0
    rule = (
        f"--sharding.mode fsdp2 would gather {size / 1e9:.1f} GB of weights for every token that "
        f"--engine {given} samples: give --sharding.unshard rollout, which gathers them once a step, or "
        "--sharding.mode ddp with --lora.rank > 0"
    )
    require((size <= MAX_GATHERED, rule))


def check_alike(dist: Dist, settings: dict[str, object]) -> None:
    """Raise ValueError on every rank unless all have the same settings and files."""
    by_rank = gather_json(dist, settings)
    for rank, other in enumerate(by_rank):
        names = sorted(name for name, value in by_rank[0].items() if other[name] != value)
        if names:
            values = ", ".join(f"{name} = {other[name]!r} (rank 0: {by_rank[0][name]!r})" for name in names)
            raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")


def tell_plan(args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session) -> None:
    """Print the settings and the plan of a run, and end the program; on planned ranks go on to plan a step."""
    model, how = inputs.model, inputs.how
    model.reads_weights, own = False, replace(how, lora=how.lora and replace(how.lora, others=()))
    net = adapt(model.load_net(device="meta", dtype=how.weight_dtype), own)
    world.tell("\n".join([to_toml(without_secrets(args)), *plan_of(args, world.dist, inputs, session, net)]))


def plan_of(args: RunArgs, dist: Dist, inputs: Inputs[Any, Any], session: Session, net: nn.Module) -> list[str]:
    """Return a rank's part of a training step and the memory of its weights. net: with its adapters, without values."""
    mode, num_ranks, samplers = sharding(args, dist.world_size), dist.world_size, num_samplers(args)
    lora_rank = args.lora.rank
    num_weights = sum(p.numel() for p in net.parameters())
    num_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    num_nets = 0 if lora_rank else ("reference" in inputs.beside) + len(inputs.teachers)
    num_frozen = num_weights - num_trained + num_weights * num_nets
    copies = 4 + bool(args.ema_decay) + ("old" in inputs.beside)  # float32: weight, gradient, moments, averages
    share = args.sharding.size or num_ranks if mode == "fsdp2" else 1
    num_initial = num_trained if args.lora.init == "pissa" else 0  # float32
    frozen_mb, trained_mb = (
        number / share / 2**20
        for number in (
            4 * num_initial + (num_frozen - num_initial) * BYTES.get(args.memory.base_dtype, inputs.how.dtype.itemsize),
            num_trained * 4 * copies,
        )
    )
    samples = args.prompts_per_step * args.group_size
    is_shipped = inputs.model.folder == released_models().get(args.model)
    given = values_of(args)
    can_plan = not (args.eval.only or isinstance(args, ThinkingArgs) or given.get("engine") == "vllm")
    has_step = bool(args.memory.device_gb)
    url = "that of --scorer.url, which no file keeps" if given.get("scorer.url") else ""
    who = "rank" if dist.context == 1 else f"{dist.context} ranks, each with a part of every sample's tokens"
    lines = {
        "model": inputs.about,
        **({"configuration": SHIPPED.format(args.model, hub_fault() or "the hub refuses it")} if is_shipped else {}),
        "ranks": f"{num_ranks}, weights {mode}"
        + ", experts on a rank each" * args.sharding.experts
        + (f"; {samplers} more only sample" if samplers else ""),
        "samples per step": f"{samples}, {samples // dist.num_shares} per {who}, {args.batch_size} per forward",
        "optimizer steps per training step": str(args.num_minibatches),
        "evaluations": _evaluations(args, inputs),
        "scorer": url or given.get("scorer.name") or "none",
        "learning rate": f"{args.lr:g}"
        + (f", LoRA of rank {lora_rank} with alpha {args.lora.alpha}" * bool(lora_rank)),
        "weights of the net": f"{num_weights / 1e6:.1f} M, trained {num_trained / 1e6:.1f} M",
        "memory per rank": f"{frozen_mb:.0f} MB frozen weights, {trained_mb:.0f} MB for what is trained (weights, "
        "gradients, optimizer, averages); what is not trained and activations come on top",
        **({"a step": STEP} if can_plan and not has_step else {}),
        **(_forward(args, inputs, net) if isinstance(args, MediaArgs) and not has_step else {}),
        "start": f"{session.begins}, in {session.folder}",
    }
    return [f"plan: {name}: {value}" for name, value in lines.items()]


def _forward(args: MediaArgs, inputs: Inputs[Any, Any], net: nn.Module) -> dict[str, str]:
    """Return what a forward takes, by running one without values; of thoughts, whose lengths are not known, nothing.

    Raises:
        ValueError: the forward fails, as of data types that do not fit.
    """
    from omni_rl.tools.plan_forward import count_forward

    if isinstance(args, ThinkingArgs):
        return {}
    dtype = inputs.how.dtype
    for param in net.parameters() if sharding(args, num_trainers(args)) == "fsdp2" else ():
        param.data = param.data.to(dtype)  # as they are gathered
    with flag(f"--dtype {args.dtype}: "):
        flops = count_forward(inputs.model, net, dtype, inputs.base_params, inputs.prompts.at(0)[0])
    return {"a forward of one sample": f"{flops / 1e12:.4g} TFLOP in {args.dtype}"}


def _evaluations(args: RunArgs, inputs: Inputs[Any, Any]) -> str:
    """Return how many evaluations a run has, and what one of them takes beside the rollout of a training step."""

    def forwards(samples: int, params: Params | TokenParams) -> int:
        return samples * (params.num_inference_steps if isinstance(params, Params) else 1)

    count = args.eval.first + math.ceil(args.train_steps / args.eval.every)
    samples = [len(held.records) * held.samples for held in inputs.held_out]
    one = sum(forwards(number, held.params) for number, held in zip(samples, inputs.held_out, strict=True))
    share = one / forwards(args.prompts_per_step * args.group_size, inputs.base_params)
    return f"{count}, each of {sum(samples)} samples, which takes as long as {share:.2g} rollouts"


def start_servers(args: OwnArgsT, world: World) -> tuple[OwnArgsT, ExitStack]:
    """Start the scorers that the settings name; return the settings with their URLs, and what ends them.

    Raises:
        ValueError: a server could not be started.
    """
    progress.begin("opening the scorer")
    servers = ExitStack()
    return with_server(args, world.whole, servers), servers


def open_net(args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session) -> nn.Module:
    """Make this the run that writes into the session's folder, and return the net, ready to train.

    Raises:
        ValueError, OSError: another run has the folder, or the weights could not be read.
    """
    dist, mode = world.dist, sharding(args, world.dist.world_size)
    progress.begin("loading", inputs.model.weight_bytes(), "bytes")
    session.take(args, world, mode)
    inputs.model.reading = reading
    inputs.how = replace(
        inputs.how,
        mesh=shard_mesh(dist, args.sharding.size) if mode == "fsdp2" else None,
        context_mesh=context_mesh(dist) if dist.context > 1 else None,
    )
    with same_error(world.whole):
        return load_net(args, world, inputs)


def load_net(args: RunArgs, world: World, inputs: Inputs[Any, Any]) -> nn.Module:
    """Return the net. Where nothing speaks against it, it has the checkpoint's weights as they are."""
    how, model, host = inputs.how, inputs.model, torch.device("cpu")
    streams = "blocks" in offloaded(args)

    def begin(net: nn.Module) -> None:
        with flag("--init-weights: "):
            for expert, home in inputs.adapters.items():
                for adapter in how.lora.names if how.lora else ():
                    load_adapter(net.get_submodule(expert), home, adapter=adapter, part=inputs.part)
        for teacher, found in inputs.teachers.items() if how.lora else ():
            for expert, home in found.items():
                load_adapter(net.get_submodule(expert), home, adapter=f"teacher_{teacher}")

    if inputs.files or not args.lora.rank or how.mesh or args.memory.base_dtype != "auto":
        net, files = unfilled(inputs, how, inputs.files)
        net = prepare(net, replace(how, device=host, run_on=how.device) if streams else how, files, begin=begin)
    else:
        waits = world.has_numbers and not args.has_trained_engine  # until the engine adopts what it has
        device = host if streams or waits else how.device
        net = prepare(model.load_net(device=device, dtype=how.dtype), replace(how, device=device), begin=begin)
    if streams:
        bring_blocks(net, how.block_names, how.device)
    return net


def unfilled(
    inputs: Inputs[Any, Any], how: Preparation, files: Mapping[str, Sequence[Path]]
) -> tuple[nn.Module, dict[str, Sequence[Path]] | None]:
    """Return the net on the meta device, and the files with its weights: these, or the checkpoint's own.

    A model that loads its net itself has it on the host, and no files.
    """
    model = inputs.model
    if not model.reads_weights:
        return model.empty_net(buffers=True), None
    if not inputs.reads_files:
        return model.load_net(device="cpu", dtype=how.weight_dtype), None
    own = {name: files.get(name) or model.weight_files(part) for name, part in model.nets.items()}
    return model.empty_net(buffers=True), own


def share_weights(args: RunArgs, dist: Dist, engine: WeightedEngine, net: nn.Module, *, is_started: bool) -> None:
    """Give an engine with weights of its own the net's, and the net what both have.

    is_started: True if training starts from other weights than the engine has loaded.
    """
    if engine.shares_weights or sharding(args, dist.world_size) == "fsdp2":
        return
    if is_started:
        engine.load_weights(named_weights(net), version=0)
    engine.adopt(lora.unadapted_params(net))
    net.to(dist.device)  # what the engine does not hold


def phases_unsharded(args: RunArgs, world: World, net: nn.Module, engine: WeightedEngine) -> tuple[str, ...]:
    """Return the phases in which the sharded net is gathered once; "auto" keeps most of the memory for the rest."""
    choice = args.sharding.unshard
    if choice == "auto":
        size = num_gathered(net) * getattr(torch, args.dtype).itemsize
        share = max(gather_json(world.dist, size / max(world.free_memory(), 1)))  # the same on every rank
        choice = "all" if share <= 1 / 4 else "rollout" if share <= 1 / 2 else "none"
    phases = {"rollout": choice != "none" and engine.shares_weights, "update": choice == "all"}
    return tuple(phase for phase, is_kept in phases.items() if is_kept)


def open_policy(
    args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session, net: nn.Module, engine: WeightedEngine
) -> Policy:
    """Share weights between engine and net, shard the net, and return its policy with those beside it.

    Raises:
        ValueError, OSError: sharded ranks would gather too much, or weights beside the net could not be read.
    """
    dist, how, mode = world.dist, inputs.how, sharding(args, world.dist.world_size)
    if world.roles:
        kinds = gather_json(world.whole, device_name(dist.device) or torch.backends.cpu.get_cpu_capability())
        engine.is_exact &= len({*kinds}) == 1  # another kind of card rounds in another way
    share_weights(args, dist, engine, net, is_started=bool(inputs.files))
    unshard = phases_unsharded(args, world, net, engine) if mode == "fsdp2" else ()
    if mode == "fsdp2" and "rollout" not in unshard:
        check_gathered(args, inputs, net)
    if args.lora.rank and mode != "fsdp2":
        shard(net, dist.mesh, mode=mode)
    policy = load_policy(change(args, ema_decay=0.0) if dist.first else args, inputs, net, session)
    policy.unshard = unshard
    if mode != "none":
        policy.backward = SummedBackward(net, how.mesh or dist.mesh, mode=mode)
    if policy.scaler:
        policy.backward = scaled_backward(policy.backward, policy.scaler)
    if dist.context > 1:  # whose attention is computed again in the backward pass
        policy.backward = sdpa_kernel(BACKENDS[args.attention])(policy.backward)
    if args.deterministic:
        policy.backward = deterministic()(policy.backward)
    with same_error(world.whole):
        if not dist.first:
            open_frozen(inputs, policy)
    return policy


def load_policy(args: RunArgs, inputs: Inputs[Any, Any], net: nn.Module, session: Session) -> Policy:
    """Return the policy with the state of the checkpoint, if there is one."""
    trained, optim = [p for p in net.parameters() if p.requires_grad], args.optim
    optimizer = build_adamw(
        trained,
        lr=args.lr or 0.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay,
        eps=optim.adam_epsilon,
        on_host="optimizer" in offloaded(args),
        foreach=True if inputs.how.lora and inputs.how.mesh else None,  # of sharded adapters, many and small
    )
    for expert, scale in inputs.lr_scales.items():
        own, group = set(net.get_submodule(expert).parameters()), optimizer.param_groups[0]
        group["params"] = [p for p in trained if p not in own]
        optimizer.add_param_group({"params": [p for p in trained if p in own], "lr_scale": scale})
    policy = Policy(net, optimizer, Ema(trained, decay=args.ema_decay))
    policy.adapters = inputs.how.lora.others if inputs.how.lora else ()
    if args.dtype == "float16":
        policy.scaler = GradScaler(inputs.how.device.type)
        if LOSS_SCALE in session.config:
            policy.scaler.load_state_dict(session.config[LOSS_SCALE])  # type: ignore[arg-type]  # as it was saved
    if "old" in inputs.beside and not args.lora.rank:
        policy.old = Snapshot(trained, name="copy")
    if session.saved:
        with lora.same_initial_weights(net):
            session.checkpoints.load(session.saved, net, optimizer, policy.averages)
        if isinstance(optimizer, HostAdamW):
            optimizer.rest()
    return policy


def open_frozen(inputs: Inputs[Any, Any], policy: Policy) -> None:
    """Give the policy the frozen nets beside it, where these policies are no adapters of its own net."""
    if inputs.how.lora:
        return
    how = inputs.how.frozen()

    def filled(files: Mapping[str, Sequence[Path]]) -> nn.Module:
        net, found = unfilled(inputs, how, files)
        return prepare(net, how, found)

    policy.reference_net = filled(inputs.files) if "reference" in inputs.beside else None
    policy.teachers = {
        name: filled({expert: saved_files(home) for expert, home in found.items()})
        for name, found in inputs.teachers.items()
    }


def open_run(  # noqa: PLR0913 - a run has that many parts
    args: OwnArgsT,
    world: World,
    inputs: Inputs[OwnModelT, ParamsT],
    session: Session,
    scorer: OwnScorerT,
    policy: Policy,
    model: OwnModelT,
    engine: OwnEngineT,
    servers: ExitStack,
    *,
    algorithm: str,
    evaluate_set: Callable[[Any, HeldOut[Any, Any]], tuple[dict[str, float], Shown]],
    export: Callable[[Any, Mapping[str, object] | None], None],
    seen: Seen = first_input,
) -> Run[OwnArgsT, OwnModelT, OwnEngineT, ParamsT, OwnScorerT]:
    """Return the run, whose log is open and whose engine has the weights.

    algorithm, evaluate_set, export: as in `Run`. seen: of a forward's inputs the number of samples and the shape of
    one, or None.
    """
    dist, net = world.dist, policy.net
    run = Run(
        args,
        world,
        model,
        policy,
        engine,
        scorer,
        session,
        inputs.prompts,
        inputs.base_params,
        held_out=inputs.held_out,
        watch=inputs.watch,
        evaluate_set=evaluate_set,
        export=export,
        trained=inputs.trained,
        streams=inputs.streams,
        algorithm=algorithm,
        base=args.init_weights if args.lora.rank and inputs.files else args.model,
        parts=inputs.parts,
        open_servers=servers,
        sleeps="engine" in offloaded(args) or (args.memory.engine_sleep and not engine.shares_weights),
        samplers=Samplers(world.roles, policy) if world.roles and not dist.first else None,
    )
    run.count_calls(seen)
    run.count_backwards()
    nets = [each for each in {engine.net, net} if each is not None]
    session.open_log(args, world, nets, [held.metric("reward") for held in inputs.held_out[1:]], policy.unshard)
    if dist.is_main:
        run.peak_tflops = run.breakers.peak(peak_tflops, dist.device)
        run.flops = FlopTable(lambda: adapt_like(inputs.model.empty_net(), inputs.how, net), net)
    run.sync_weights(max(session.first_step - 1, 0))
    return run
