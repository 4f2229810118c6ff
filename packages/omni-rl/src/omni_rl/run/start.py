"""The functions that build a run, in the order in which the `main` of a trainer calls them.

    inputs = read_media(args, world)  # from `omni_rl.run.media`, `texts` or `thoughts`, like open_scorers, open_engine
    session = open_session(args, world, inputs)
    if args.run.dry_run and print_plan(args, world, inputs, session):
        return
    args = start_servers(args, world, session)
    scorer, held_out = open_scorers(args, world, inputs, session)
    net = open_net(args, world, inputs, session)
    model, engine = open_engine(args, world, inputs, net)
    policy = open_policy(args, world, inputs, session, net, engine)
    run = open_run(args, world, inputs, session, model, policy, engine, scorer, held_out, algorithm=...)

Errors in the settings raise ValueError or OSError on every rank, before any weights are loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from omni_rollout import Model
from omni_rollout.offload import offload_blocks
from omni_rollout.tokens import TokenModel
from omni_rollout.types import WeightedEngine
from omni_train import lora, progress
from omni_train.dist import deterministic, gather_json, same_error
from omni_train.experts import num_gathered
from omni_train.flops import FlopTable, device_name, peak_tflops
from omni_train.kernels import BACKENDS
from omni_train.memory.offload import HostAdamW
from omni_train.optim import SummedBackward, build_adamw, scaled_backward
from omni_train.prepare import Preparation, adapt, adapt_like, prepare
from omni_train.shard import shard
from omni_train.weights.adapters import load_adapter
from omni_train.weights.full import named_weights, saved_files
from omni_train.weights.snapshot import Ema, Snapshot
from torch import nn
from torch.amp import GradScaler
from torch.nn.attention import sdpa_kernel

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import AnyScorer, start_scorer_servers
from omni_rl.run.dry_run import describe_plan
from omni_rl.run.inputs import Inputs
from omni_rl.run.policy import Policy
from omni_rl.run.run import ParamsT, Run
from omni_rl.run.samplers import Samplers
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import MediaArgs, RunArgs, parse_offload, sharding_mode, without_secrets
from omni_rl.settings.fields import change, flatten, prefix_errors, require
from omni_rl.settings.saved import LOSS_SCALE, file_digests
from omni_rl.settings.token_args import ThinkingArgs, TokenArgs
from omni_rl.settings.toml import to_toml

MAX_GATHERED = 1e9  # bytes of weights that sharded ranks may gather for every token
OwnArgsT = TypeVar("OwnArgsT", bound=RunArgs)
OwnModelT = TypeVar("OwnModelT", bound=Model | TokenModel)
OwnEngineT = TypeVar("OwnEngineT", bound=WeightedEngine)
OwnScorerT = TypeVar("OwnScorerT", bound=AnyScorer)


@contextmanager
def report_reading(part: str, size: int) -> Iterator[None]:
    """Report the progress of reading a part of `size` bytes in the `with` block."""
    with progress.phase(part):
        yield
    progress.advance(size)


def open_session(args: RunArgs, world: World, inputs: Inputs[Any, Any]) -> Session:
    """Return the session of a new run, or of the run in runs/NAME, to resume it.

    Raises:
        ValueError: ranks have different files, or the checkpoint is damaged or has other settings.
    """
    dist, all_ranks, model = world.dist, world.all_ranks, inputs.model
    with same_error(all_ranks):
        if (
            sharding_mode(args, dist.world_size) == "fsdp2"
            and args.sharding.unshard == "none"
            and not args.sharding.experts
        ):
            check_gathered(args, model.empty_net())
        config = flatten(without_secrets(args)) | file_digests(args, model.folder) | dict(inputs.digests)
    world.check_same_settings(config)
    session = Session(args, dist)
    session.config = config
    session.check(args, lambda: adapt(model.empty_net(), inputs.preparation))
    return session


def check_gathered(args: RunArgs, net: nn.Module) -> None:
    """Raise ValueError if sharded ranks would gather too many weights for each token that they sample."""
    samples_tokens = isinstance(args, TokenArgs | ThinkingArgs) and args.sampling.has_trained_engine
    size = gathered_bytes(args, net) if samples_tokens else 0
    rule = (
        f"--sharding.mode fsdp2 would gather {size / 1e9:.1f} GB of weights for every token that "
        f"--engine {args.sampling.engine} samples: give --sharding.unshard rollout, which gathers them once a step, or "
        "--sharding.mode ddp with --lora.rank > 0"
    )
    require((size <= MAX_GATHERED, rule))


def gathered_bytes(args: RunArgs, net: nn.Module) -> int:
    """Return the number of bytes of weights that sharded ranks would gather."""
    return num_gathered(net) * int(getattr(torch, args.policy.dtype).itemsize)


def print_plan(args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session) -> bool:
    """Print the settings and the plan of a run; return False if `world` also plans a training step."""
    model, preparation = inputs.model, inputs.preparation
    model.reads_weights, adapters = False, preparation.lora and replace(preparation.lora, others=())
    net = adapt(model.load_net(device="meta", dtype=preparation.weight_dtype), replace(preparation, lora=adapters))
    return world.print_plan(
        "\n".join([to_toml(without_secrets(args)), *describe_plan(args, world.dist, inputs, session, net)])
    )


def start_servers(args: OwnArgsT, world: World, session: Session) -> OwnArgsT:
    """Start servers of the scorers in the settings until the session ends; return the settings with their URLs.

    Raises:
        ValueError: a server could not be started.
    """
    progress.start_phase("opening the scorer")
    return start_scorer_servers(args, world.all_ranks, session.servers)


def open_net(args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session) -> nn.Module:
    """Lock the session's folder for this run, and return the net, ready to train.

    Raises:
        ValueError, OSError: another run uses the folder, or the weights could not be read.
    """
    progress.start_phase("loading", inputs.model.weight_bytes(), "bytes")
    session.claim(args, world, sharding_mode(args, world.dist.world_size))
    inputs.model.reading = report_reading
    with same_error(world.all_ranks):
        return load_net(args, world, inputs)


def load_net(args: RunArgs, world: World, inputs: Inputs[Any, Any]) -> nn.Module:
    """Return the net with its weights.

    Each rank reads them itself if they are trained, sharded, quantized or from other files, else the model loads them.
    """
    preparation, model, host = inputs.preparation, inputs.model, torch.device("cpu")
    streams = "blocks" in parse_offload(args.memory)

    def load_adapters(net: nn.Module) -> None:
        with prefix_errors("--init-weights: "):
            for expert, folder in inputs.adapters.items():
                for adapter in preparation.lora.names if preparation.lora else ():
                    load_adapter(net.get_submodule(expert), folder, adapter=adapter, part=inputs.adapter_prefix)
        for teacher, folders in inputs.teachers.items() if preparation.lora else ():
            for expert, folder in folders.items():
                load_adapter(net.get_submodule(expert), folder, adapter=f"teacher_{teacher}")

    if inputs.files or not args.lora.rank or preparation.mesh or args.memory.base_dtype != "auto":
        net, files = open_empty_net(inputs, preparation, inputs.files)
        if streams:
            preparation = replace(preparation, device=host, run_on=preparation.device)
        net = prepare(net, preparation, files, begin=load_adapters)
    else:
        stays_on_host = world.has_values and not args.sampling.has_trained_engine  # until the engine shares its weights
        device = host if streams or stays_on_host else preparation.device
        net = model.load_net(device=device, dtype=preparation.dtype)
        net = prepare(net, replace(preparation, device=device), begin=load_adapters)
    if streams:
        offload_blocks(net, preparation.block_names, inputs.preparation.device)
    return net


def open_empty_net(
    inputs: Inputs[Any, Any], preparation: Preparation, files: Mapping[str, Sequence[Path]]
) -> tuple[nn.Module, dict[str, Sequence[Path]] | None]:
    """Return the net on the meta device, and the files of its weights: `files`, or the checkpoint's for other experts.

    If the model loads its net itself, return the net on the CPU and None.
    """
    model = inputs.model
    if not model.reads_weights:
        return model.empty_net(buffers=True), None
    if not hasattr(model, "weight_files"):
        return model.load_net(device="cpu", dtype=preparation.weight_dtype), None
    files_by_net = {name: files.get(name) or model.weight_files(part) for name, part in model.nets.items()}
    return model.empty_net(buffers=True), files_by_net


def share_weights(engine: WeightedEngine, net: nn.Module, device: torch.device, *, is_started: bool) -> None:
    """Let the net share storage with an engine that has its own weights, for the weights that both have.

    is_started: True if training starts from weights that differ from the engine's, which are then sent to it.
    """
    if engine.shares_weights:
        return
    if is_started:
        engine.load_weights(named_weights(net), version=0)
    engine.adopt(lora.unadapted_params(net))
    net.to(device)  # the weights that are not in the engine


def gathered_phases(args: RunArgs, world: World, net: nn.Module, engine: WeightedEngine) -> tuple[str, ...]:
    """Return the phases in which the sharded net is gathered once.

    "auto" gathers it if it takes at most a quarter of the free memory, or, in the rollout only, at most half.
    """
    choice = args.sharding.unshard
    if choice == "auto":
        share = gathered_bytes(args, net) / max(world.free_memory(), 1)
        share = max(gather_json(world.dist, share))  # the same on every rank
        choice = "all" if share <= 1 / 4 else "rollout" if share <= 1 / 2 else "none"
    phases = {"rollout": choice != "none" and engine.shares_weights, "update": choice == "all"}
    return tuple(phase for phase, is_gathered in phases.items() if is_gathered)


def open_policy(
    args: RunArgs, world: World, inputs: Inputs[Any, Any], session: Session, net: nn.Module, engine: WeightedEngine
) -> Policy:
    """Share weights between engine and net, shard the net, and return the policy with its frozen nets.

    Raises:
        ValueError, OSError: sharded ranks would gather too many weights, or weights of a frozen net could not be read.
    """
    dist, preparation, mode = world.dist, inputs.preparation, sharding_mode(args, world.dist.world_size)
    if world.roles:
        kinds = gather_json(world.all_ranks, device_name(dist.device) or torch.backends.cpu.get_cpu_capability())
        engine.is_exact &= len({*kinds}) == 1  # different devices round differently
    unshard: tuple[str, ...] = ()
    if mode == "fsdp2":
        unshard = gathered_phases(args, world, net, engine)
        if "rollout" not in unshard:
            check_gathered(args, net)
    else:
        share_weights(engine, net, dist.device, is_started=bool(inputs.files))
        if args.lora.rank:
            shard(net, dist.mesh, mode=mode)
    policy = load_policy(change(args, ema_decay=0.0) if world.is_sampler else args, inputs, net, session)
    policy.unshard = unshard
    if mode != "none":
        policy.backward = SummedBackward(net, preparation.mesh or dist.mesh, mode=mode)
    if policy.scaler:
        policy.backward = scaled_backward(policy.backward, policy.scaler)
    if dist.context > 1:  # attention is recomputed in the backward pass
        policy.backward = sdpa_kernel(BACKENDS[args.policy.attention])(policy.backward)
    if args.policy.deterministic:
        policy.backward = deterministic()(policy.backward)
    with same_error(world.all_ranks):
        if not world.is_sampler:
            open_frozen(inputs, policy)
    return policy


def load_policy(args: RunArgs, inputs: Inputs[Any, Any], net: nn.Module, session: Session) -> Policy:
    """Return the policy, with the state of the checkpoint if there is one."""
    trained, optim, preparation = [p for p in net.parameters() if p.requires_grad], args.optim, inputs.preparation
    optimizer = build_adamw(
        trained,
        lr=args.lr or 0.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay,
        eps=optim.adam_epsilon,
        on_host="optimizer" in parse_offload(args.memory),
        foreach=True if preparation.lora and preparation.mesh else None,  # sharded adapters are many small tensors
    )
    if isinstance(args, MediaArgs) and args.optim.low_expert_lr is not None:
        low_params, group = set(net.get_submodule("low").parameters()), optimizer.param_groups[0]
        group["params"] = [p for p in trained if p not in low_params]
        scale = args.optim.low_expert_lr / (args.lr or 1.0)
        optimizer.add_param_group({"params": [p for p in trained if p in low_params], "lr_scale": scale})
    policy = Policy(net, optimizer, Ema(trained, decay=args.policy.ema_decay))
    policy.adapters = preparation.lora.others if preparation.lora else ()
    if args.policy.dtype == "float16":
        policy.scaler = GradScaler(preparation.device.type)
        if LOSS_SCALE in session.config:
            policy.scaler.load_state_dict(session.config[LOSS_SCALE])  # type: ignore[arg-type]  # as it was saved
    if "old" in inputs.policies and not args.lora.rank:
        policy.old = Snapshot(trained, name="copy")
    if session.saved:
        with lora.same_initial_weights(net):
            session.checkpoints.load(session.saved, net, optimizer, policy.averages)
        if isinstance(optimizer, HostAdamW):
            optimizer.offload()
    return policy


def open_frozen(inputs: Inputs[Any, Any], policy: Policy) -> None:
    """Load the reference and the teachers of the policy as frozen nets, unless they are adapters of its net."""
    if inputs.preparation.lora:
        return
    preparation = inputs.preparation.frozen()

    def load_frozen(files: Mapping[str, Sequence[Path]]) -> nn.Module:
        net, found_files = open_empty_net(inputs, preparation, files)
        return prepare(net, preparation, found_files)

    policy.reference_net = load_frozen(inputs.files) if "reference" in inputs.policies else None
    policy.teachers = {
        name: load_frozen({expert: saved_files(folder) for expert, folder in found_files.items()})
        for name, found_files in inputs.teachers.items()
    }


def open_run(  # noqa: PLR0913 - a run has many parts
    args: OwnArgsT,
    world: World,
    inputs: Inputs[OwnModelT, ParamsT],
    session: Session,
    model: OwnModelT,
    policy: Policy,
    engine: OwnEngineT,
    scorer: OwnScorerT,
    held_out: Sequence[HeldOut[Any, Any]],
    *,
    algorithm: str,
) -> Run[OwnArgsT, OwnModelT, OwnEngineT, ParamsT, OwnScorerT]:
    """Return the run, with its log open and the weights sent to its engine. algorithm: its name in the model card."""
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
        inputs.params,
        held_out,
        trained=inputs.trained,
        streams=inputs.streams,
        algorithm=algorithm,
        base=args.policy.init_weights if args.lora.rank and inputs.files else args.policy.model,
        score_parts=inputs.score_parts,
        sleeps="engine" in parse_offload(args.memory) or (args.memory.engine_sleep and not engine.shares_weights),
        samplers=Samplers(world.roles, policy) if world.roles and not world.is_sampler else None,
    )
    run.count_calls(inputs.count_samples)
    run.count_backwards()
    nets = [candidate for candidate in {engine.net, net} if candidate is not None]
    session.open_log(args, world, nets, [eval_set.metric("reward") for eval_set in held_out[1:]], policy.unshard)
    if dist.is_main:
        run.peak_tflops = run.breakers.peak(peak_tflops, dist.device)
        run.flops = FlopTable(lambda: adapt_like(inputs.model.empty_net(), inputs.preparation, net), net)
    run.sync_weights(max(session.num_done, 0))
    return run
