"""The start of a run: its checks, what it continues from, its policy, its engine, its scorer and its session.

    run = MEDIA.start(args, world, "flowgrpo", reference=True)

A mistake in the settings ends the program with one line and exit code 2, before any weight is loaded.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from omni_rollout import Params
from omni_rollout.models.hub import hub_fault, local_folder, released_models
from omni_rollout.offload import bring_blocks
from omni_rollout.tokens import TokenParams
from omni_rollout.types import WeightedEngine
from omni_train import lora
from omni_train.dist import Dist, context_mesh, deterministic, gather_json, same_error, shard_mesh
from omni_train.experts import find_experts, num_gathered
from omni_train.flops import FlopTable, device_name
from omni_train.kernels import BACKENDS, check_attention, check_compiler, check_float8, check_float16
from omni_train.memory.offload import HostAdamW
from omni_train.memory.quantized import BYTES
from omni_train.memory.recompute import Recompute
from omni_train.optim import SummedBackward, build_adamw, scaled_backward
from omni_train.prepare import Lora, Preparation, adapt, prepare
from omni_train.prompts.files import PromptRecord, RecordCheck, load_prompts
from omni_train.prompts.sampler import PromptSampler
from omni_train.shard import shard
from omni_train.weights.full import load_adapter, named_weights, saved_files
from omni_train.weights.snapshot import Ema, Snapshot
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import sdpa_kernel

from omni_rl.flow.evals import HeldOut, Shown, params_of
from omni_rl.flow.scorers import Scorer, with_server
from omni_rl.run.policy import Policy
from omni_rl.run.run import EngineT, ModelT, ParamsT, Run, ScorerT
from omni_rl.run.samplers import Samplers
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import RunArgs, num_ranks, num_samplers, offloaded, sharding, without_secrets
from omni_rl.settings.early import LOSS_SCALE, files_of
from omni_rl.settings.eval_sets import GOLD, setting_of
from omni_rl.settings.fields import change, flag, flat, require, values_of
from omni_rl.settings.groups import TokenLora
from omni_rl.settings.toml import to_toml

SHIPPED = "omni-rollout's, with a token for each word of a prompt, as {} cannot be fetched: {}"
OwnArgsT = TypeVar("OwnArgsT", bound=RunArgs)
AnyParamsT = TypeVar("AnyParamsT", bound=Params | TokenParams)


@dataclass(frozen=True)
class Needs:
    """What a trainer needs of its run.

    old_policy: an older policy, for `Policy.as_old`. reference: the first one, for `Policy.reference`. steps: the first
    of the schedule that is trained at, and one past the last. routes: a mixture of experts, whose routes are replayed.
    scorer: opens another scorer than --scorer.url. teachers: folders of weights by name, for `Policy.teacher`.
    teaching: what teachers sample with, of what the run samples with. gate_parts: as --gate-parts. scored: False if
    only evaluations ask the scorer.
    """

    old_policy: bool = False
    reference: bool = False
    steps: tuple[int, int] | None = None
    routes: bool = False
    scorer: Callable[[Dist, Sequence[str]], Scorer] | None = None
    teachers: Mapping[str, str] = field(default_factory=dict)
    teaching: Callable[[Params], Params] | None = None
    gate_parts: str = ""
    scored: bool = True


@dataclass
class Inputs(Generic[ModelT, ParamsT]):
    """What a run reads before any weight.

    about: the model in a few words. trained: its experts that are trained, as `Model.nets` has them. canary: the prompt
    with which scorers are tried. sizes: (height, width) of all prompts. how: what is done to the net. config: what else
    must be the same when the run goes on. files: full weights to start from, by expert; adapters: folders of adapters
    instead, and in `form` the names in their files where they are not diffusers'. teachers: folders of weights, by name
    and expert. lr_scales: of experts with another learning rate. parts: of scores, which steps log. streams: as `Run`.
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
    form: Mapping[str, str] = field(default_factory=dict)
    teachers: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    lr_scales: Mapping[str, float] = field(default_factory=dict)
    parts: Sequence[str] = ()
    streams: Mapping[str, int] = field(default_factory=dict)
    sizes: Collection[tuple[int, int]] = ()


@dataclass(frozen=True)
class Kind(Generic[ModelT, EngineT, ParamsT, ScorerT]):
    """What a run of media does in one way and a run of text in another, as functions.

    read: `(args, world, needs) -> Inputs`. open_scorer: `(args, world, inputs, needs) -> scorer, version, watch`; it
    opens those of evaluation sets too. source: `(inputs, how, files) -> net, files`, what `prepare` takes.
    open_engine: `(args, world, inputs, net, needs) -> model, engine`. check_gathered: raises ValueError where sharded
    ranks would gather too much. seen: of a forward's inputs the number of samples and the shape of one, or None.
    evaluate_set, export: as in `Run`.
    """

    read: Callable[[Any, World, Needs], Inputs[ModelT, ParamsT]]
    open_scorer: Callable[[Any, World, Any, Needs], tuple[ScorerT, str, Scorer | None]]
    source: Callable[[Any, Preparation, Mapping[str, Sequence[Path]]], tuple[nn.Module, Any]]
    open_engine: Callable[[Any, World, Any, nn.Module, Needs], tuple[ModelT, EngineT]]
    evaluate_set: Callable[[Any, HeldOut[Any, Any]], tuple[dict[str, float], Shown]]
    export: Callable[[Any, Mapping[str, object] | None], None]
    seen: Callable[[Mapping[str, Tensor], tuple[Tensor, ...]], tuple[int, torch.Size] | None]
    check_gathered: Callable[[Any, nn.Module], None] = lambda args, net: None

    def start(  # noqa: PLR0913 - one call names everything that a trainer needs
        self,
        args: OwnArgsT,
        world: World,
        algorithm: str,
        *,
        old_policy: bool = False,
        reference: bool = False,
        steps: tuple[int, int] | None = None,
        routes: bool = False,
        scorer: Callable[[Dist, Sequence[str]], Scorer] | None = None,
        teachers: Mapping[str, str] = MappingProxyType({}),
        teaching: Callable[[Params], Params] | None = None,
        gate_parts: str = "",
        scored: bool = True,
    ) -> Run[OwnArgsT, ModelT, EngineT, ParamsT, ScorerT]:
        """Return a new run, or the one that runs/NAME holds where it stopped. With --dry-run, print the plan and end.

        The options are those of `Needs`.

        Raises:
            ValueError, OSError: something in the settings does not fit; the same on every rank.
        """
        needs = Needs(old_policy, reference, steps, routes, scorer, teachers, teaching, gate_parts, scored)
        return start(self, args, world, algorithm, needs)


def start(
    kind: Kind[ModelT, EngineT, ParamsT, ScorerT], args: OwnArgsT, world: World, algorithm: str, needs: Needs
) -> Run[OwnArgsT, ModelT, EngineT, ParamsT, ScorerT]:
    """Do what `Kind.start` says, in the order of these lines.

    Raises:
        ValueError, OSError: something in the settings does not fit; the same on every rank.
    """
    dist, whole, mode = world.dist, world.whole, sharding(args, world.dist.world_size)
    with same_error(whole):
        inputs = kind.read(args, world, needs)
        if mode == "fsdp2" and args.sharding.unshard == "none" and not args.sharding.experts:
            kind.check_gathered(args, inputs.model.empty_net())
        config = flat(without_secrets(args)) | files_of(args, inputs.model.folder) | inputs.config
    check_alike(whole, flat(args) | config)
    session, how, model = Session(args, dist), inputs.how, inputs.model
    session.config = config
    session.check(args, adapt(model.empty_net(), how))
    if args.dry_run:
        world.tell("\n".join([to_toml(without_secrets(args)), *plan_of(args, dist, inputs, needs, session)]))
    open_servers = ExitStack()
    args = with_server(args, whole, open_servers)
    with same_error(whole):
        scorer, version, watch = kind.open_scorer(args, world, inputs, needs)
        session.name_scorer(args, version)
    check_alike(whole, {"scorer": version})  # each machine may have a server of its own
    session.take(args, dist, mode)
    inputs.how = how = replace(how, mesh=shard_mesh(dist, args.sharding.size) if mode == "fsdp2" else None)
    if dist.context > 1:
        inputs.how = how = replace(how, context_mesh=context_mesh(dist))
    with same_error(whole):
        net = open_net(args, world, kind, inputs)
    model, engine = kind.open_engine(args, world, inputs, net, needs)
    if world.roles:
        kinds = gather_json(whole, device_name(dist.device) or torch.backends.cpu.get_cpu_capability())
        engine.is_exact &= len({*kinds}) == 1  # another kind of card rounds in another way
    share_weights(args, dist, engine, net, is_started=bool(inputs.files))
    unshard = phases_unsharded(args, world, net, engine) if mode == "fsdp2" else ()
    if mode == "fsdp2" and "rollout" not in unshard:
        kind.check_gathered(args, net)
    if args.lora.rank and mode != "fsdp2":
        shard(net, dist.mesh, mode=mode)
    policy = open_policy(change(args, ema_decay=0.0) if dist.first else args, inputs, needs, net, session)
    policy.unshard = unshard
    if mode != "none":
        policy.backward = SummedBackward(net, how.mesh or dist.mesh, mode=mode)
    if policy.scaler:
        policy.backward = scaled_backward(policy.backward, policy.scaler)
    if dist.context > 1:  # whose attention is computed again in the backward pass
        policy.backward = sdpa_kernel(BACKENDS[args.attention])(policy.backward)
    if args.deterministic:
        policy.backward = deterministic()(policy.backward)
    with same_error(whole):
        if not dist.first:
            open_frozen(kind, inputs, needs, policy)
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
        watch=watch,
        evaluate_set=kind.evaluate_set,
        export=kind.export,
        trained=inputs.trained,
        streams=inputs.streams,
        algorithm=algorithm,
        base=args.init_weights if args.lora.rank and inputs.files else args.model,
        parts=inputs.parts,
        open_servers=open_servers,
        sleeps="engine" in offloaded(args) or (args.memory.engine_sleep and not engine.shares_weights),
        samplers=Samplers(world.roles, policy) if world.roles and not dist.first else None,
    )
    run.count_calls(kind.seen)
    nets = [each for each in {engine.net, net} if each is not None]
    session.open_log(args, world, nets, [held.metric("reward") for held in inputs.held_out[1:]], unshard)
    if dist.is_main:
        run.flops = FlopTable(lambda: adapt(inputs.model.empty_net(), how), net)
    run.sync_weights(max(session.first_step - 1, 0))
    return run


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
    with flag("--"):  # the message itself begins with the setting
        check_attention(args.attention, device, dtype)
        if args.dtype == "float16" and not args.dry_run:
            check_float16(device)
        if args.memory.base_dtype == "fp8":
            check_float8(device)
        if compiles:
            check_compiler(device)
        if args.memory.adam_8bit:
            check_compiler(device, "memory.adam-8bit")
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


def beside(how: Preparation, needs: Needs, adapters: Mapping[str, Path]) -> Preparation:
    """Return what is done to the net where the policies beside the trained one are adapters too.

    adapters: from which training starts; without any the reference is the net without adapters.
    """
    if not how.lora:
        return how
    require((not needs.teachers or how.lora.init != "pissa", "--lora.init pissa does not go with teachers"))
    kept = ["old"] * needs.old_policy + ["reference"] * bool(needs.reference and adapters)
    return replace(how, lora=replace(how.lora, others=(*kept, *(f"teacher_{name}" for name in needs.teachers))))


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
            found = load_prompts(own.prompts, check=check_graded if is_graded else check, media_root=args.media_root)
        few = own.name == GOLD and len(found) < 2  # for an error bar
        require((not few, f"--eval.gold-prompts must have at least 2 prompts, got {len(found)}"))
        with flag(f"eval.sets[{number}]: "):
            check_params(own_params := params_of(own, params))
        limit = threshold if own.pass_threshold is None else own.pass_threshold
        own_samples = own.samples_per_prompt or samples
        sets.append(HeldOut(own.name, found[: own.num_prompts or None], own_params, own.seed, own_samples, limit))
    return sets


def open_set_scorers(args: RunArgs, sets: list[HeldOut[Any, Any]], connect: Callable[[str, str, Any], Any]) -> None:
    """Open the scorers of evaluation sets. connect: takes a URL, the setting's name and the set's prompts."""
    for place, own in enumerate(args.eval.all_sets, start=1):
        if own.scorer_url:
            scorer = connect(own.scorer_url, setting_of(own, place, "scorer_url"), sets[place].records)
            sets[place] = replace(sets[place], scorer=scorer)


# 2. The parts of `start`, in their order


def check_alike(dist: Dist, settings: dict[str, object]) -> None:
    """Raise ValueError on every rank unless all have the same settings and files."""
    by_rank = gather_json(dist, settings)
    for rank, other in enumerate(by_rank):
        names = sorted(name for name, value in by_rank[0].items() if other[name] != value)
        if names:
            values = ", ".join(f"{name} = {other[name]!r} (rank 0: {by_rank[0][name]!r})" for name in names)
            raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")


def plan_of(args: RunArgs, dist: Dist, inputs: Inputs[Any, Any], needs: Needs, session: Session) -> list[str]:
    """Return a rank's part of a training step and the memory of its weights; only configurations are read."""
    mode, num_ranks, samplers = sharding(args, dist.world_size), dist.world_size, num_samplers(args)
    lora_rank = args.lora.rank
    net = adapt(
        inputs.model.empty_net(), replace(inputs.how, lora=inputs.how.lora and replace(inputs.how.lora, others=()))
    )
    num_weights = sum(p.numel() for p in net.parameters())
    num_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    num_nets = 0 if lora_rank else needs.reference + len(inputs.teachers)
    num_frozen = num_weights - num_trained + num_weights * num_nets
    copies = 2 + bool(args.ema_decay) + needs.old_policy  # float32: weight, gradient, averages
    share = args.sharding.size or num_ranks if mode == "fsdp2" else 1
    trained = [p.numel() for p in net.parameters() if p.requires_grad]
    in_8bit = sum(n for n in trained if n >= 4096 * share and n % 256 == 0) if args.memory.adam_8bit else 0
    moments = 8 * num_trained - (8 - 2 * (1 + 4 / 256)) * in_8bit  # bytes
    num_initial = num_trained if args.lora.init == "pissa" else 0  # float32
    frozen_mb, trained_mb = (
        number / share / 2**20
        for number in (
            4 * num_initial + (num_frozen - num_initial) * BYTES.get(args.memory.base_dtype, inputs.how.dtype.itemsize),
            num_trained * 4 * copies + moments,
        )
    )
    samples = args.prompts_per_step * args.group_size
    is_shipped = inputs.model.folder == released_models().get(args.model)
    given = values_of(args)
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
        "start": f"{session.begins}, in {session.folder}",
    }
    return [f"plan: {name}: {value}" for name, value in lines.items()]


def _evaluations(args: RunArgs, inputs: Inputs[Any, Any]) -> str:
    """Return how many evaluations a run has, and what one of them takes beside the rollout of a training step."""

    def forwards(samples: int, params: Params | TokenParams) -> int:
        return samples * (params.num_inference_steps if isinstance(params, Params) else 1)

    count = args.eval.first + math.ceil(args.train_steps / args.eval.every)
    samples = [len(held.records) * held.samples for held in inputs.held_out]
    one = sum(forwards(number, held.params) for number, held in zip(samples, inputs.held_out, strict=True))
    share = one / forwards(args.prompts_per_step * args.group_size, inputs.base_params)
    return f"{count}, each of {sum(samples)} samples, which takes as long as {share:.2g} rollouts"


def open_net(args: RunArgs, world: World, kind: Kind[Any, Any, Any, Any], inputs: Inputs[Any, Any]) -> nn.Module:
    """Return the net, ready to train. Where nothing speaks against it, it has the checkpoint's weights as they are."""
    how, model, host = inputs.how, inputs.model, torch.device("cpu")
    streams = "blocks" in offloaded(args)

    def begin(net: nn.Module) -> None:
        with flag("--init-weights: "):
            for expert, home in inputs.adapters.items():
                for adapter in how.lora.names if how.lora else ():
                    load_adapter(net.get_submodule(expert), home, adapter=adapter, **inputs.form)
        for teacher, found in inputs.teachers.items() if how.lora else ():
            for expert, home in found.items():
                load_adapter(net.get_submodule(expert), home, adapter=f"teacher_{teacher}")

    if inputs.files or not args.lora.rank or how.mesh or args.memory.base_dtype != "auto":
        net, files = kind.source(inputs, how, inputs.files)
        net = prepare(net, replace(how, device=host, run_on=how.device) if streams else how, files, begin=begin)
    else:
        waits = world.has_numbers and not args.has_trained_engine  # until the engine adopts what it has
        device = host if streams or waits else how.device
        net = prepare(model.load_net(device=device, dtype=how.dtype), replace(how, device=device), begin=begin)
    if streams:
        bring_blocks(net, how.block_names, how.device)
    return net


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


def open_policy(args: RunArgs, inputs: Inputs[Any, Any], needs: Needs, net: nn.Module, session: Session) -> Policy:
    """Return the policy as the checkpoint has it, if there is one."""
    trained, optim = [p for p in net.parameters() if p.requires_grad], args.optim
    optimizer = build_adamw(
        trained,
        lr=args.lr or 0.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay,
        eps=optim.adam_epsilon,
        on_host="optimizer" in offloaded(args),
        in_8bit=args.memory.adam_8bit,
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
    if needs.old_policy and not args.lora.rank:
        policy.old = Snapshot(trained, name="copy")
    if session.saved:
        session.checkpoints.load(session.saved, net, optimizer, policy.averages)
        if isinstance(optimizer, HostAdamW):
            optimizer.rest()
    return policy


def open_frozen(kind: Kind[Any, Any, Any, Any], inputs: Inputs[Any, Any], needs: Needs, policy: Policy) -> None:
    """Give the policy the frozen nets beside it, where these policies are no adapters of its own net."""
    if inputs.how.lora:
        return
    how = inputs.how.frozen()

    def filled(files: Mapping[str, Sequence[Path]]) -> nn.Module:
        net, found = kind.source(inputs, how, files)
        return prepare(net, how, found)

    policy.reference_net = filled(inputs.files) if needs.reference else None
    policy.teachers = {
        name: filled({expert: saved_files(home) for expert, home in found.items()})
        for name, found in inputs.teachers.items()
    }
