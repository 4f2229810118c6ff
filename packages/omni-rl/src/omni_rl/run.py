"""A run: its checks, its start or continuation, and what every part of a step needs of it.

    run = Run.start(args)

A mistake in the settings ends the program with one line and exit code 2, before any weight is loaded.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from omni_rollout import Engine, Model, Params
from omni_rollout.models import open_model
from omni_rollout.sampler import check_images
from omni_train import lora
from omni_train.checkpoint import Checkpoint, Saved, check_config
from omni_train.data import PromptRecord, PromptSampler, load_prompts
from omni_train.device import memory
from omni_train.dist import Dist, gather_json, init_distributed, mean_metrics, same_error, shutdown
from omni_train.ema import Ema
from omni_train.files import file_digest, probe_digest, write_atomically
from omni_train.load import load_sharded
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder
from omni_train.optim import StepResult, build_adamw, optimizer_step, warmup_lr
from omni_train.shard import Mode, reduce_gradients, shard
from omni_train.snapshot import Snapshot
from omni_train.weights import check_adapter, check_weights, load_adapter, named_weights, saved_files
from torch import Tensor, nn

from omni_rl.args import MAY_CHANGE, SECRET, RunArgs, parse_numbers, sharding, without_secrets
from omni_rl.cli import flag, require, to_toml
from omni_rl.engines import ENGINES
from omni_rl.report import write_versions
from omni_rl.scoring import Scorer, connect
from omni_rl.sinks import check_tracker, report, tracker

ArgsT = TypeVar("ArgsT", bound=RunArgs, covariant=True)
OwnArgsT = TypeVar("OwnArgsT", bound=RunArgs)
COLUMNS = ("reward/mean", "eval/reward", "policy/first_ratio_max_dev", "policy/grad_norm")
HIDDEN = ["--" + name.replace("_", "-") for name in SECRET]


@dataclass
class Run(Generic[ArgsT]):
    """One rank of a run.

    params: what is trained. ema: their moving average, for evaluations. snapshot: the old policy of a run without
    LoRA, if it has one. reference_net: the frozen reference of such a run, if it has one. first_step: finished steps
    with which the loop begins. lock: of the folder. counts: samples that have passed the nets, as `forwards`, and that
    were `drawn`. version: of the weights that the engine has.
    """

    args: ArgsT
    algorithm: str
    base: str
    config: dict[str, object]
    dist: Dist
    mode: Mode
    model: Model
    engine: Engine
    net: nn.Module
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    snapshot: Snapshot | None
    reference_net: nn.Module | None
    has_reference_adapter: bool
    scorer: Scorer
    watch: Scorer | None
    prompts: PromptSampler
    eval_records: list[PromptRecord]
    folder: Path
    checkpoints: Checkpoint
    log: RunLog
    first_step: int
    lock: RunLock
    counts: Counter[str]
    version: int = -1

    @staticmethod
    def start(
        args: OwnArgsT,
        algorithm: str,
        *,
        scorer: str | Callable[[Dist], Scorer],
        parts: Sequence[str] = (),
        old_policy: bool = False,
        reference: bool = False,
    ) -> "Run[OwnArgsT]":
        """A new run, or the one that runs/NAME holds where it stopped. With --dry-run, print the plan and end.

        algorithm: its name, for the model card. scorer: URL of a reward server, or what opens another scorer.
        parts: that its scores must name. old_policy: keep an older policy, for `old_policy()`. reference: keep the
        first one, for `reference()`.

        Raises:
            ValueError, OSError: something in the settings does not fit; the same on every rank.
        """
        dist = init_distributed(timeout_s=args.hang_timeout_s)
        if dist.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # fast beside a scorer, and the same bits on any number of cores
        mode = sharding(args, dist.world_size)
        with same_error(dist):
            model, prompts, eval_records = _read_inputs(args)
            config = asdict(without_secrets(args)) | _digests(model, args)
        _check_alike(dist, asdict(args) | config)
        frozen = _frozen_adapters(model, args, old_policy=old_policy, reference=reference)
        folder = Path("runs") / args.name
        checkpoints = Checkpoint(folder / "checkpoints", dist, keep=args.keep_checkpoints)
        saved = checkpoints.latest()
        if saved:
            check_config(saved, config, ignore=(*_may_change(args), "scorer"))
            checkpoints.verify(saved, _add_adapters(model.empty_net(), model, args, frozen))
        if args.dry_run:
            if dist.is_main:
                copies = 4 + bool(args.ema_decay) + old_policy  # 4: weight, gradient, two moments
                separate = reference and not args.lora_rank
                plan = _plan(args, dist, mode, model, copies, saved, has_reference=separate)
                print(to_toml(without_secrets(args)), plan, sep="\n")
            shutdown()
            sys.exit(0)
        with same_error(dist):
            opened, watch, versions = _open_scorers(args, dist, model, eval_records[0], scorer, parts)
            if saved and saved.config.get("scorer") != versions:
                was = saved.config.get("scorer")
                raise ValueError(f"--scorer-url must be the scorer that the run began with, {was}, got {versions}")
        lock = RunLock(folder, dist)
        if checkpoints.latest() != saved:
            raise ValueError(f"{folder} has got another checkpoint from a run that has ended meanwhile: start again")
        claim_folder(dist, folder, has_checkpoint=saved is not None)
        if dist.is_main:
            print(_greeting(args, dist, mode, saved), flush=True)
        engine, net = _load(args, dist, mode, model, frozen)
        params = [p for p in net.parameters() if p.requires_grad]
        optimizer = build_adamw(params, lr=args.lr, weight_decay=args.weight_decay)
        ema = Ema(params, decay=args.ema_decay)
        snapshot = Snapshot(params, name="copy") if old_policy and not args.lora_rank else None
        if saved:
            checkpoints.load(saved, net, optimizer, (ema, snapshot) if snapshot else (ema,))
        with same_error(dist):
            separate = reference and not args.lora_rank  # with LoRA it is the net without its adapter
            reference_net = _fill(model, args, dist, mode, trained=False) if separate else None
        first_step = saved.step + 1 if saved else 0
        run = Run(
            args=args,
            algorithm=algorithm,
            base=args.init_weights if args.lora_rank and _start_files(model, args) else args.model,
            config=config | {"scorer": versions},
            dist=dist,
            mode=mode,
            model=model,
            engine=engine,
            net=net,
            params=params,
            optimizer=optimizer,
            ema=ema,
            snapshot=snapshot,
            reference_net=reference_net,
            has_reference_adapter="reference" in frozen,
            scorer=opened,
            watch=watch,
            prompts=prompts,
            eval_records=eval_records,
            folder=folder,
            checkpoints=checkpoints,
            log=_open_log(args, dist, folder, resume_step=first_step - 1),
            first_step=first_step,
            lock=lock,
            counts=_count_forwards(engine.net, net, reference_net),
        )
        run.sync_weights(max(first_step - 1, 0))
        return run

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Within the `with` block, time counts as `time/<name>_s`, and what breaks is said to break in this phase."""
        return self.log.phase(name)

    def optimizer_step(self, step: "Step") -> StepResult:
        """Sum the gradients over the ranks, clip them, step and clear them; without a signal only clear them.

        Without a signal momentum and weight decay alone would move the weights.
        """
        args, dist = self.args, self.dist
        decay_steps = args.train_steps if args.lr_decay else 0
        lr = warmup_lr(step.number, lr=args.lr, warmup_steps=args.warmup_steps, decay_steps=decay_steps)
        step.metrics["policy/lr"] = lr
        if not step.has_signal:
            self.optimizer.zero_grad(set_to_none=True)
            return StepResult(grad_norm=0.0, skipped=True)
        reduce_gradients(self.params, dist.mesh, mode=self.mode)
        return optimizer_step(self.optimizer, self.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist)

    @contextmanager
    def updating(self, step: "Step") -> Iterator[None]:
        """Within the `with` block the engine sleeps; afterwards the moving average follows the new weights."""
        step.metrics |= self.memory("rollout_")
        with self.phase("update"):
            if self.args.engine_sleep:
                self.engine.sleep()
            step.metrics |= self.memory("asleep_")
            yield
            self.ema.update(step.number)
            self.engine.wake()

    def sync(self, step: "Step", *, version: int | None = None) -> None:
        """Bring the weights to the engine, as those after `version` training steps; None is the step and all before."""
        with self.phase("sync"):
            moved = self.sync_weights(step.number + 1 if version is None else version)
        step.metrics["perf/sync_mb"] = moved / 2**20

    def sync_weights(self, version: int) -> int:
        """Bring the weights to the engine; the bytes that were copied. Every rank calls it."""
        self.engine.load_weights(() if self.engine.shares_weights else named_weights(self.net), version=version)
        self.version = version
        return self.engine.moved_bytes

    @contextmanager
    def old_policy(self) -> Iterator[None]:
        """Within the `with` block `net` is the old policy."""
        with self.snapshot.applied() if self.snapshot else lora.adapter(self.net, "old"):
            yield

    def move_old_policy(self, decay: float) -> None:
        """Move the old policy towards the trained one; it keeps the share `decay` of itself."""
        if self.snapshot:
            trained, old = zip(*self.snapshot.pairs(), strict=True)
            lora.ema_update_params(trained, old, decay)
        else:
            lora.ema_update(self.net, "default", "old", decay)

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The policy as it was before training, for the length of the `with` block."""
        if self.reference_net is not None:
            yield self.reference_net
        elif self.has_reference_adapter:
            with lora.adapter(self.net, "reference"):
                yield self.net
        else:
            with lora.reference(self.net):
                yield self.net

    def memory(self, when: str, *, peak: bool = False) -> dict[str, float]:
        """Metrics of the memory in use, and of the most that ever was."""
        now = memory(self.dist.device)
        return {f"perf/memory_{when}mb": now.current_mb} | ({"perf/peak_memory_mb": now.peak_mb} if peak else {})

    def close(self) -> None:
        """Free what samples and scores."""
        self.scorer.close()
        if self.watch:
            self.watch.close()
        self.engine.close()
        self.lock.release()


class Step:
    """One training step: its `number`, counted from 0, and the `metrics` to log of it.

    has_signal: whether any sample of any rank says where to go; a trainer that can tell sets it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.metrics: dict[str, float] = {}
        self.has_signal = True


def base_params(args: RunArgs) -> Params:
    """The parameters that the run samples with, without any stochastic step."""
    true_cfg = {"true_cfg_scale": args.true_cfg_scale} if args.true_cfg_scale != 1 else {}
    return Params(
        num_inference_steps=args.num_inference_steps,
        height=args.height,
        width=args.width,
        guidance_scale=args.guidance_scale,
        guidance=parse_numbers(args.guidance, "--guidance") | true_cfg,
    )


def eval_params(args: RunArgs) -> Params:
    """The parameters that evaluations sample with."""
    return replace(base_params(args), num_inference_steps=args.eval_num_inference_steps)


def policy_metrics(dist: Dist, seen: Sequence[Mapping[str, Tensor]], results: Sequence[StepResult]) -> dict[str, float]:
    """Metrics `policy/...` of an update: means over forwards and ranks, and the optimizer's steps.

    seen: 0-d tensors of each forward of this rank.

    Raises:
        FloatingPointError: the loss is not finite; raised on every rank.
    """
    means = {name: torch.stack([metrics[name] for metrics in seen]).mean() for name in seen[0]}
    named = mean_metrics(dist, means, finite=("loss",)) | {
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "skipped_updates": sum(result.skipped for result in results),
    }
    return {f"policy/{name}": value for name, value in named.items()}


def _check_alike(dist: Dist, settings: Mapping[str, object]) -> None:
    """Raise ValueError on every rank unless all have the same settings and files."""
    by_rank: list[Any] = gather_json(dist, settings)
    for rank, other in enumerate(by_rank):
        names = sorted(name for name, value in by_rank[0].items() if other[name] != value)
        if names:
            values = ", ".join(f"{name} = {other[name]!r} (rank 0: {by_rank[0][name]!r})" for name in names)
            raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")


def _may_change(args: RunArgs) -> tuple[str, ...]:
    """Settings that may differ from the checkpoint's; a falling learning rate depends on the number of steps."""
    return MAY_CHANGE if args.lr_decay else (*MAY_CHANGE, "train_steps")


def _open_scorers(
    args: RunArgs,
    dist: Dist,
    model: Model,
    canary: PromptRecord,
    scorer: str | Callable[[Dist], Scorer],
    parts: Sequence[str],
) -> tuple[Scorer, Scorer | None, str]:
    """What scores samples, what else evaluations ask, and the name and version of the first, "" without a server."""
    watch: Scorer | None = None
    if args.watch_scorer_url:
        watch, _ = connect(args.watch_scorer_url, args, dist, canary, model.MEDIA, name="--watch-scorer-url")
    if not isinstance(scorer, str):
        return scorer(dist), watch, ""
    client, version = connect(scorer, args, dist, canary, model.MEDIA, parts=parts)
    return client, watch, version


def _digests(model: Model, args: RunArgs) -> dict[str, str]:
    """Digests of the files that decide what is learned: prompts and references, the model, weights to start from."""
    images = sorted({image for record in load_prompts(args.prompts) for image in record.images})
    start = sorted(Path(args.init_weights).rglob("*.safetensors")) if args.init_weights else []
    weights = [*sorted(model.folder.glob("*/*.safetensors")), *start]
    digests = {"prompts_digest": file_digest(args.prompts), "weights_digest": probe_digest(weights)}
    return digests | ({"images_digest": probe_digest(images, num_blocks=1)} if images else {})


def _frozen_adapters(model: Model, args: RunArgs, *, old_policy: bool, reference: bool) -> tuple[str, ...]:
    """The frozen adapters beside the trained one: the old policy, and the reference where training starts from one."""
    if not args.lora_rank:
        return ()
    starts_adapted = bool(args.init_weights) and not _start_files(model, args)
    return (*(["old"] if old_policy else []), *(["reference"] if reference and starts_adapted else []))


def _read_inputs(args: RunArgs) -> tuple[Model, PromptSampler, list[PromptRecord]]:
    """The model's door, what draws the training prompts, and the prompts of the evaluations.

    Raises:
        ValueError: some file is missing, incomplete or malformed; the message begins with the flag.
    """
    with flag("--track: "):
        check_tracker(args.track, args.project)
    with flag("--model: "):
        model = open_model(args.model)
        model.check_files()
    with flag("--"):  # the message itself begins with height, width or another setting
        for params in (base_params(args), eval_params(args)):
            model.check(params)
    with flag("--prompts: "):
        prompts = PromptSampler(args.prompts, prompts_per_step=args.prompts_per_step, seed=args.seed)
        check_images(model, len(prompts.at(0)[0].images))
    with flag("--eval-prompts: "):
        eval_records = load_prompts(args.eval_prompts)
        check_images(model, len(eval_records[0].images))
    if args.init_weights:
        with flag("--init-weights: "):
            check_weights(model.empty_net(), args.init_weights, part=model.NETS[0])
            if not _start_files(model, args):
                require((args.lora_rank, f"{args.init_weights} holds a LoRA adapter, which needs --lora-rank > 0"))
                trial = _add_adapters(model.empty_net(), model, args, ())  # without weights: layers and rank must fit
                check_adapter(trial, args.init_weights, part=model.NETS[0])
    return model, prompts, eval_records


def _add_adapters(net: nn.Module, model: Model, args: RunArgs, frozen: Sequence[str]) -> nn.Module:
    """The net with what is trained: a fresh adapter, and frozen ones that equal it, or all weights."""
    targets = args.lora_targets.split(",") if args.lora_targets else model.LORA_TARGETS
    for name in ("default", *frozen) if args.lora_rank else ():
        lora.add_lora(
            net,
            targets,
            rank=args.lora_rank,
            alpha=args.lora_alpha,
            adapter=name,
            seed=args.seed,
            init=args.lora_init,
        )
    return net if args.lora_rank else net.requires_grad_(True)


def _start_files(model: Model, args: RunArgs) -> list[Path]:
    """The full weights in --init-weights; none where it holds an adapter, or is not given."""
    return saved_files(args.init_weights, part=model.NETS[0]) if args.init_weights else []


def _load(args: RunArgs, dist: Dist, mode: Mode, model: Model, frozen: Sequence[str]) -> tuple[Engine, nn.Module]:
    """The engine and the net, ready to train, whose weights are the engine's own wherever that can be."""
    dtype = getattr(torch, args.dtype)
    with same_error(dist):
        own = None
        if not args.lora_rank:
            own = _fill(model, args, dist, mode, trained=True)
        elif _start_files(model, args):
            own = _fill(model, args, dist, "none", trained=False)
    engine, net = ENGINES[args.engine](model, own, dist, dtype)
    _add_adapters(net, model, args, frozen)
    starts = _start_files(model, args)
    if args.lora_rank and args.init_weights and not starts:
        with flag("--init-weights: "):
            for name in ("default", *frozen):
                load_adapter(net, args.init_weights, adapter=name, part=model.NETS[0])
    if args.gradient_checkpointing:
        net.enable_gradient_checkpointing()  # type: ignore[operator]  # a method of all diffusers models
    if not engine.shares_weights and mode != "fsdp2":
        if starts:  # the engine has loaded the checkpoint's
            engine.load_weights(named_weights(net), version=0)
        engine.adopt(lora.unadapted_params(net))
        net.to(dist.device)  # what the engine does not hold
    if args.lora_rank:
        compute_dtype = dtype if mode == "fsdp2" else None
        shard(net, dist.mesh, mode=mode, block_names=model.BLOCK_NAMES, compute_dtype=compute_dtype)
    return engine, net


def _fill(model: Model, args: RunArgs, dist: Dist, mode: Mode, *, trained: bool) -> nn.Module:
    """The net with the weights that training starts from, each rank's rows alone where it is sharded.

    trained: all in float32; else frozen, in the type of --dtype.
    """
    dtype = getattr(torch, args.dtype)
    return load_sharded(
        model.empty_net(),
        _start_files(model, args) or model.weight_files(model.NETS[0]),
        dist.mesh if mode == "fsdp2" else None,
        device=dist.device,
        block_names=model.BLOCK_NAMES,
        compute_dtype=dtype if mode == "fsdp2" else None,
        param_dtype=torch.float32 if trained else dtype,
        trainable=trained,
    ).eval()


def _greeting(args: RunArgs, dist: Dist, mode: Mode, saved: Saved | None) -> str:
    """The first line that a run prints."""
    start = f"continues after step {saved.step}" if saved else "begins"
    ranks = f"{dist.world_size} {'rank' if dist.world_size == 1 else 'ranks'} on {dist.device.type}, weights {mode}"
    return f"runs/{args.name} {start}: {ranks}; report in runs/{args.name}/report.html; loading {args.model}"


def _open_log(args: RunArgs, dist: Dist, folder: Path, *, resume_step: int) -> RunLog:
    """The log of the run, with its report and tracker as sinks; beside it the settings and all versions."""
    sinks = []
    if dist.is_main:
        write_atomically(folder / "config.toml", to_toml(without_secrets(args)))
        facts = {"ranks": dist.world_size, "device": str(dist.device), "threads": torch.get_num_threads()}
        changed = [name for name, value in asdict(args).items() if value != getattr(type(args)(), name)]
        write_versions(folder, hide=HIDDEN, changed=changed, facts=facts)
        sinks = [report(folder), *tracker(args.track, folder, args.project)]
    return RunLog(
        folder,
        is_main=dist.is_main,
        total_steps=args.train_steps,
        eval_every=args.eval_every,
        tty=None if dist.mesh is None else False,
        columns=COLUMNS,
        resume_step=resume_step,
        sinks=sinks,
    )


def _plan(
    args: RunArgs, dist: Dist, mode: Mode, model: Model, copies: int, saved: Saved | None, *, has_reference: bool
) -> str:
    """A rank's part of a training step and the memory of its weights, from the model's configuration alone.

    copies: float32 numbers that are held for each trained weight.
    """
    net = _add_adapters(model.empty_net(), model, args, ())
    num_weights = sum(p.numel() for p in net.parameters())
    num_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    share = dist.world_size if mode == "fsdp2" else 1
    num_frozen = num_weights - num_trained + num_weights * has_reference
    frozen_mb = num_frozen * getattr(torch, args.dtype).itemsize / share / 2**20
    trained_mb = 4 * num_trained * copies / share / 2**20
    samples = args.prompts_per_step * args.group_size
    lines = {
        "model": f"{type(model).__name__}, latents {model.latent_shape(base_params(args))}",
        "ranks": f"{dist.world_size}, weights {mode}",
        "samples per step": f"{samples}, {samples // dist.world_size} per rank, {args.batch_size} per forward",
        "optimizer steps per training step": str(args.num_minibatches),
        "weights of the net": f"{num_weights / 1e6:.1f} M, trained {num_trained / 1e6:.1f} M",
        "memory per rank": f"{frozen_mb:.0f} MB frozen weights, {trained_mb:.0f} MB for what is trained (weights, "
        "gradients, optimizer, averages); text encoder, VAE and activations come on top",
        "start": f"{f'continues after step {saved.step}' if saved else 'anew'}, in runs/{args.name}",
    }
    return "\n".join(f"plan: {name}: {value}" for name, value in lines.items())


def _count_forwards(*nets: nn.Module | None) -> Counter[str]:
    """Count, from here on, the samples that pass any of the nets."""
    seen: Counter[str] = Counter()

    def count(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen["forwards"] += len(next(iter((*args, *kwargs.values()))))  # the first input is a batch, in any model

    for net in {net for net in nets if net is not None}:  # the embedded engine's is the trainer's
        net.register_forward_pre_hook(count, with_kwargs=True)
    return seen
