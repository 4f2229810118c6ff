"""A run: its checks, its start or continuation, and what every part of a step needs of it.

    run = Run.start(args)

A mistake in the settings ends the program with one line and exit code 2, before any weight is loaded.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from omni_rollout import Engine, Model, Params
from omni_rollout.conditioning import TextCache
from omni_rollout.model import wrap
from omni_rollout.models import open_model
from omni_rollout.offload import in_slices
from omni_rollout.routes import ExpertLoad, replay_routes, routing_of
from omni_rollout.sampler import check_images
from omni_rollout.tokens import TokenModel, TokenParams
from omni_rollout.types import WeightedEngine
from omni_train import lora
from omni_train.attention import BACKENDS, check_attention, choose_attention
from omni_train.checkpoint.store import Checkpoint, check_config
from omni_train.compiled import check_compiler, compile_blocks
from omni_train.dist import (
    Dist,
    gather_json,
    mean_metrics,
    memory,
    merge_metric,
    same_error,
    shard_mesh,
)
from omni_train.files import file_digest, probe_digest, write_atomically
from omni_train.flops import Calls, FlopTable
from omni_train.hub import FETCHED, local_file, pinned
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder
from omni_train.memory.bits import BYTES, reduce_bits
from omni_train.memory.offload import HostAdamW
from omni_train.memory.recompute import Recompute
from omni_train.optim import StepResult, SummedBackward, build_adamw, optimizer_step, plain_backward, warmup_lr
from omni_train.profiling import ProfiledLog
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.prompts.sampler import PromptSampler
from omni_train.shard import gathered, reshard, shard
from omni_train.weights.full import (
    LORA_FILE,
    check_adapter,
    check_weights,
    homes,
    load_adapter,
    named_weights,
    save_weights,
    saved_files,
)
from omni_train.weights.load import load_sharded
from omni_train.weights.snapshot import Ema, Snapshot
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut, params_of
from omni_rl.flow.scorers import AnyScorer, Scorer
from omni_rl.media.images import reference_sizes
from omni_rl.report import write_versions
from omni_rl.report.process import ReportProcess
from omni_rl.run.engines import ENGINES
from omni_rl.run.metrics import COLUMNS, EXTREMES
from omni_rl.run.world import World
from omni_rl.settings.args import MediaArgs, RunArgs, offloaded, parse_numbers, secret_flags, sharding, without_secrets
from omni_rl.settings.eval_sets import EvalSet
from omni_rl.settings.fields import MAY_CHANGE, SECRET, flag, marked, require
from omni_rl.settings.toml import to_toml

ArgsT = TypeVar("ArgsT", bound=RunArgs, covariant=True)
MediaT = TypeVar("MediaT", bound=MediaArgs, covariant=True)
OwnArgsT = TypeVar("OwnArgsT", bound=MediaArgs)


class AnyRun(ABC, Generic[ArgsT]):
    """One rank of a run, whatever it draws: `Run` draws media, `omni_rl.flow.tokens.TokenRun` draws text.

    params: what is trained. ema: their moving average, for evaluations. snapshot: the old policy of a run without LoRA,
    if it has one. reference_net: the frozen reference of such a run, if it has one. offload: the parts that wait on the
    host. sleeps: whether the engine sleeps during updates. first_step: finished steps with which the loop begins.
    counts: samples that were `drawn`. calls: those that have passed the nets. version: of the weights that the engine
    has. unshard: the phases in which sharded weights are gathered once. report: what rank 0 shows its pictures to.
    backward: adds the gradient of a loss, `of` of which come before each optimizer step. load: of the engine's experts,
    if its net is a mixture of such. eval_records, eval_params: of --eval-prompts; eval_more: the tables [[eval]].
    """

    model: Model | TokenModel
    engine: WeightedEngine
    scorer: AnyScorer
    eval_params: Params | TokenParams

    def __init__(
        self, args: ArgsT, algorithm: str, world: World, *, old_policy: bool = False, reference: bool = False
    ) -> None:
        self.args, self.algorithm, self.world, self.dist = args, algorithm, world, world.dist
        dist = world.dist
        self.mode = sharding(args, dist.world_size)
        self.offload = offloaded(args)
        self.lr = args.lr or 0.0  # a number, as Args settles it
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.attention = args.attention
        self.compiles = False
        self.adapter_form: dict[str, str] = {}  # the names in an adapter's file, where they are not diffusers'
        self.flops: FlopTable | None = None
        self.folder = Path("runs") / args.name
        self.checkpoints = Checkpoint(
            self.folder / "checkpoints", dist, keep=args.keep_checkpoints, wait_for=self._await_samples
        )
        self.counts: Counter[str] = Counter()
        self.calls: Calls = Counter()
        self.version = -1
        self.unshard: tuple[str, ...] = ()
        self.backward: Callable[..., None] = plain_backward
        self.snapshot: Snapshot | None = None
        self.reference_net: nn.Module | None = None
        self.report: ReportProcess | None = None
        self.load: ExpertLoad | None = None
        self.eval_more: list[HeldOut[Any, Any]] = []
        self._start_files: dict[str, list[Path]] = {}  # full weights in --init-weights, by expert
        self._adapters: dict[str, Path] = {}  # folders of adapters there, by expert
        self._wants = (["old"] if old_policy else []) + (["reference"] if reference else [])  # policies to keep

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within the `with` block, time counts as `time/<name>_s`, and what breaks is said to break in this phase."""
        with self.log.phase(name), gathered(self.net) if name in self.unshard else nullcontext():
            yield

    def optimizer_step(self, step: "Step") -> StepResult:
        """Clip the gradients, which `backward` has summed over ranks, and step; without a signal only clear them.

        Without a signal momentum and weight decay alone would move the weights.

        Raises:
            RewardError: of `step.settle`, on every rank, before the weights are touched.
        """
        step.settle()
        args, dist = self.args, self.dist
        decay_steps = args.train_steps if args.lr_decay else 0
        lr = warmup_lr(step.number, lr=self.lr, warmup_steps=args.warmup_steps, decay_steps=decay_steps)
        step.metrics["policy/lr"] = lr
        if not step.has_signal:
            self.optimizer.zero_grad(set_to_none=True)
            return StepResult(grad_norm=0.0, skipped=True)
        return optimizer_step(self.optimizer, self.params, lr=lr, max_grad_norm=args.max_grad_norm, dist=dist)

    @contextmanager
    def updating(self, step: "Step") -> Iterator[None]:
        """Within the `with` block the engine sleeps; afterwards the moving average follows the new weights."""
        step.metrics |= self.memory("rollout_")
        with self.phase("update"):
            if self.sleeps:
                self.engine.sleep()
            step.metrics |= self.memory("asleep_")
            yield
            if self.args.ema_decay:
                self.ema.update(step.number)
            if self.sleeps:
                self.engine.wake()

    def sync(self, step: "Step", *, version: int | None = None) -> None:
        """Bring the weights to the engine, as those after `version` training steps; None is the step and all before."""
        with self.phase("sync"):
            step.metrics["perf/sync_mb"] = self.sync_weights(step.number + 1 if version is None else version) / 2**20

    def sync_weights(self, version: int) -> int:
        """Bring the weights to the engine; the bytes that were copied. Every rank calls it."""
        self.engine.load_weights(() if self.engine.shares_weights else named_weights(self.net), version=version)
        self.version = version
        return self.engine.moved_bytes

    @contextmanager
    def old_policy(self) -> Iterator[None]:
        """Within the `with` block `net` is the old policy."""
        with self.snapshot.applied() if self.snapshot else lora.adapter(self.net, "old"):
            if self.snapshot:
                reshard(self.net)
            yield
        if self.snapshot:
            reshard(self.net)

    def move_old_policy(self, decay: float) -> None:
        """Move the old policy towards the trained one; it keeps the share `decay` of itself."""
        if self.snapshot:
            self.snapshot.move(decay)
        else:
            lora.ema_update(self.net, "default", "old", decay)

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The policy as it was before training, for the length of the `with` block."""
        if self.reference_net is not None:
            yield self.reference_net
        else:
            with lora.adapter(self.net, "reference") if "reference" in self.frozen else lora.reference(self.net):
                yield self.net

    def memory(self, when: str, *, peak: bool = False) -> dict[str, float]:
        """Metrics of the memory in use, and of the most that ever was."""
        now = memory(self.dist.device)
        return {f"perf/memory_{when}mb": now.current_mb} | ({"perf/peak_memory_mb": now.peak_mb} if peak else {})

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts after `step` training steps, `eval/reward` among them if there is one."""

    @abstractmethod
    def export(self, card: Mapping[str, object] | None) -> None:
        """Write what was trained to runs/NAME/weights, with the facts of a model card. Every rank calls it."""

    def close(self) -> None:
        """Free what samples and scores."""
        for scorer in (self.scorer, *(held.scorer for held in self.eval_more if held.scorer)):
            scorer.close()
        self.engine.close()
        self.lock.release()

    # The parts of `start`, in their order

    def _await_samples(self) -> None:
        """Wait until the samples of evaluations are on the disk: what comes before a checkpoint is not drawn again."""
        if self.report:
            self.report.wait()

    def _check_settings(self) -> None:
        """Compare the settings of all ranks and find what the run continues from; a dry run prints its plan.

        Raises:
            ValueError: ranks differ, or the checkpoint does not fit; the same on every rank.
        """
        self._check_alike()
        self._find_checkpoint()
        if self.args.dry_run:
            self.world.tell(f"{to_toml(without_secrets(self.args))}\n{self._plan()}")

    def _begin(self) -> None:
        """Take the folder, load what is trained and what samples, and open the log."""
        self._take_folder()
        self._load()
        self._continue()
        self._open_log()
        self.sync_weights(max(self.first_step - 1, 0))

    def _read_inputs(self) -> None:
        """Open the model, read the prompts, and find what training starts from.

        Raises:
            ValueError: some file is missing, incomplete or malformed; the message begins with the flag.
        """
        args = self.args
        self._open_model()
        model = self.model
        with flag("--"):  # the message itself begins with the setting
            check_attention(self.attention, self.dist.device, self.dtype)
            if self.compiles:
                check_compiler(self.dist.device)
        with flag("--prompts: "):
            self.prompts = PromptSampler(
                args.prompts,
                prompts_per_step=args.prompts_per_step,
                seed=args.seed,
                check=self._check_graded,
                media_root=args.media_root,
            )
        with flag("--eval-prompts: "):
            self.eval_records = load_prompts(args.eval_prompts, check=self._check_graded, media_root=args.media_root)
        self.eval_more = [self._read_set(own, f"eval[{number}]") for number, own in enumerate(args.eval, start=1)]
        if args.init_weights:
            with flag("--init-weights: "):
                self._read_start(args.init_weights)
        kept = [name for name in self._wants if name == "old" or self._adapters]
        self.frozen = tuple(kept) if args.lora_rank else ()  # adapters beside the trained one
        self.base = args.init_weights if args.lora_rank and self._start_files else args.model
        start = sorted(Path(args.init_weights).rglob("*.safetensors")) if args.init_weights else []
        digest = probe_digest([*sorted(model.folder.rglob("*.safetensors")), *start])
        self.config: dict[str, object] = asdict(without_secrets(args))
        self.config |= {"prompts": pinned(args.prompts), "prompts_digest": file_digest(local_file(args.prompts))}
        self.config["weights_digest"] = digest

    def _read_set(self, own: EvalSet, at: str) -> HeldOut[Any, Any]:
        """An evaluation set, whose scorer is opened later. at: what messages call it."""
        check = self._check_record if own.scorer_url else self._check_graded
        with flag(f"{at}.prompts: "):
            records = load_prompts(own.prompts, check=check, media_root=self.args.media_root)[: own.num_prompts or None]
        with flag(f"{at}: "):
            params = params_of(own, self.eval_params)
            self._check_params(params)
        samples = own.samples_per_prompt or self.args.eval_samples_per_prompt
        threshold = self.args.pass_threshold if own.pass_threshold is None else own.pass_threshold
        return HeldOut(own.name, records, params, own.seed, samples, threshold)

    @property
    def held_out(self) -> list[HeldOut[Any, Any]]:
        """The sets of an evaluation; that of --eval-prompts is the first."""
        samples, threshold = self.args.eval_samples_per_prompt, self.args.pass_threshold
        first: HeldOut[Any, Any] = HeldOut(
            "", self.eval_records, self.eval_params, samples=samples, threshold=threshold
        )
        return [first, *self.eval_more]

    def _read_start(self, folder: str) -> None:
        """Check the weights to start from, which are full ones or an adapter; of either of two experts, or of both."""
        net, found = self.model.empty_net(), homes(folder, self.model.nets)
        for name, home in found.items():
            check_weights(net.get_submodule(name), home)
        self._start_files = {name: files for name, home in found.items() if (files := saved_files(home))}
        if len(self._start_files) < len(found):
            require(
                (self.args.lora_rank, f"{folder} holds a LoRA adapter, which needs --lora-rank > 0"),
                (not self._start_files, f"{folder} must hold full weights or adapters, got both"),
            )
            trial = self._add_adapters(net)  # without weights: layers and rank must fit
            for name, home in found.items():
                check_adapter(trial.get_submodule(name), home)
            self._adapters = found

    def _check_alike(self) -> None:
        """Raise ValueError on every rank unless all have the same settings and files."""
        by_rank = gather_json(self.dist, asdict(self.args) | self.config)
        for rank, other in enumerate(by_rank):
            names = sorted(name for name, value in by_rank[0].items() if other[name] != value)
            if names:
                values = ", ".join(f"{name} = {other[name]!r} (rank 0: {by_rank[0][name]!r})" for name in names)
                raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")

    def _find_checkpoint(self) -> None:
        """Verify the newest checkpoint of the folder, if there is one."""
        args = self.args
        self.saved = self.checkpoints.latest()
        self.first_step = self.saved.step + 1 if self.saved else 0
        if self.saved:
            more = () if args.lr_decay else ("train_steps",)  # a falling rate depends on it
            check_config(self.saved, self.config, ignore=(*marked(type(args), MAY_CHANGE, SECRET), *more, "scorer"))
            self.checkpoints.verify(self.saved, self._add_adapters(self.model.empty_net(), *self.frozen))
        if args.eval_only:
            self.folder /= f"eval-{max(self.first_step - 1, 0):06}"

    def _plan(self) -> str:
        """A rank's part of a training step and the memory of its weights, from the model's configuration alone."""
        args, num_ranks = self.args, self.dist.world_size
        net = self._add_adapters(self.model.empty_net())
        num_weights = sum(p.numel() for p in net.parameters())
        num_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        num_frozen = num_weights - num_trained + num_weights * self._num_frozen_nets()
        copies = 4 + bool(args.ema_decay) + ("old" in self._wants)  # float32: weight, gradient, two moments, averages
        share = args.shard_size or num_ranks if self.mode == "fsdp2" else 1
        frozen_mb, trained_mb = (
            number / share / 2**20
            for number in (num_frozen * BYTES.get(args.base_dtype, self.dtype.itemsize), num_trained * 4 * copies)
        )
        samples = args.prompts_per_step * args.group_size
        lines = {
            "model": self._describe(),
            "ranks": f"{num_ranks}, weights {self.mode}",
            "samples per step": f"{samples}, {samples // num_ranks} per rank, {args.batch_size} per forward",
            "optimizer steps per training step": str(args.num_minibatches),
            "learning rate": f"{self.lr:g}"
            + (f", LoRA of rank {args.lora_rank} with alpha {args.lora_alpha}" if args.lora_rank else ""),
            "weights of the net": f"{num_weights / 1e6:.1f} M, trained {num_trained / 1e6:.1f} M",
            "memory per rank": f"{frozen_mb:.0f} MB frozen weights, {trained_mb:.0f} MB for what is trained (weights, "
            "gradients, optimizer, averages); what is not trained and activations come on top",
            "start": f"{f'continues after step {self.saved.step}' if self.saved else 'anew'}, in {self.folder}",
        }
        return "\n".join(f"plan: {name}: {value}" for name, value in lines.items())

    def _take_folder(self) -> None:
        """Make this the one run that writes into its folder, and print the first line."""
        args, dist, saved = self.args, self.dist, self.saved
        self.lock = RunLock(self.folder, dist)
        if self.checkpoints.latest() != saved:
            raise ValueError(f"{self.folder} has another checkpoint, from a run that has ended meanwhile: start again")
        claim_folder(dist, self.folder, has_checkpoint=saved is not None)
        if dist.is_main:
            start = f"continues after step {saved.step}" if saved else "begins"
            start = f"evaluates step {saved.step if saved else 0}" if args.eval_only else start
            ranks = f"{dist.world_size} {'rank' if dist.world_size == 1 else 'ranks'} on {dist.device.type}"
            place = f"report in {self.folder}/report.html; loading {args.model}"
            print(f"{self.folder} {start}: {ranks}, weights {self.mode}; {place}", flush=True)

    def _load(self) -> None:
        """The engine, and the net, ready to train, whose weights are the engine's own wherever that can be."""
        args, dist = self.args, self.dist
        self.mesh = shard_mesh(dist, args.shard_size) if self.mode == "fsdp2" else dist.mesh
        is_filled = bool(self._start_files or not args.lora_rank or self.mode == "fsdp2" or args.base_dtype != "auto")
        with same_error(dist):
            own = self._fill(trained=True) if is_filled else None
        self.engine, self.net = self._open_engine(own)
        self.sleeps = "engine" in self.offload or (args.engine_sleep and not self.engine.shares_weights)
        if not is_filled:
            self._add_adapters(self.net, *self.frozen)
        with flag("--init-weights: "):
            for name, home in self._adapters.items():
                for adapter in ("default", *self.frozen):
                    load_adapter(self.net.get_submodule(name), home, adapter=adapter, **self.adapter_form)
        self._set_kernels(self.net)
        if args.gradient_checkpointing:
            on_host = "activations" in self.offload
            run_block = Recompute(args.keep_products_gb * 1e9, compiled=self.compiles, on_host=on_host)
            self._recompute(run_block)
        if not self.engine.shares_weights and self.mode != "fsdp2":
            if self._start_files:  # the engine has loaded the checkpoint's
                self.engine.load_weights(named_weights(self.net), version=0)
            self.engine.adopt(lora.unadapted_params(self.net))
            self.net.to(dist.device)  # what the engine does not hold
        if self.mode == "fsdp2":
            self.unshard = self._unshard()
        elif args.lora_rank:
            shard(self.net, dist.mesh, mode=self.mode)

    def _unshard(self) -> tuple[str, ...]:
        """The phases in which the sharded net is gathered once; "auto" keeps most of the free memory for the rest."""
        choice = self.args.unshard
        if choice == "auto":
            size = sum(p.numel() for p in self.net.parameters()) * self.dtype.itemsize
            share = max(gather_json(self.dist, size / max(self.world.free_memory(), 1)))  # the same on every rank
            choice = "all" if share <= 1 / 4 else "rollout" if share <= 1 / 2 else "none"
        phases = {"rollout": choice != "none" and self.engine.shares_weights, "update": choice == "all"}
        return tuple(phase for phase, is_kept in phases.items() if is_kept)

    def _continue(self) -> None:
        """Make the optimizer and the other policies, all as the checkpoint has them, if there is one."""
        args = self.args
        self.params = [p for p in self.net.parameters() if p.requires_grad]
        if self.mode != "none":
            self.backward = SummedBackward(self.net, self.dist.mesh, mode=self.mode)
        on_host = "optimizer" in self.offload
        self.optimizer = build_adamw(self.params, lr=self.lr, weight_decay=args.weight_decay, on_host=on_host)
        self._group_params()
        self.ema = Ema(self.params, decay=args.ema_decay)
        if self._keeps("old"):
            self.snapshot = Snapshot(self.params, name="copy")
        if self.saved:
            self.checkpoints.load(self.saved, self.net, self.optimizer, self.averages())
            if isinstance(self.optimizer, HostAdamW):
                self.optimizer.rest()
        with same_error(self.dist):
            if self._keeps("reference"):
                self.reference_net = self._fill(trained=False)
                self._set_kernels(self.reference_net)
        for net in {self.engine.net, self.net, self.reference_net}:  # the embedded engine's is the trainer's
            if net is not None:
                net.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def trained(self) -> Mapping[str, str]:
        """The experts that are trained, as `Model.nets` has them."""
        return self.model.nets

    def averages(self) -> tuple[Ema | Snapshot, ...]:
        """What checkpoints hold besides the net and its optimizer."""
        return (self.ema, self.snapshot) if self.snapshot else (self.ema,)

    def _keeps(self, policy: str) -> bool:
        """Whether weights of their own hold that policy; with LoRA it is an adapter, or the net without its adapter."""
        return policy in self._wants and not self.args.lora_rank

    def _num_frozen_nets(self) -> int:
        """The nets beside the trained one."""
        return int(self._keeps("reference"))

    def _add_adapters(self, net: nn.Module, *frozen: str) -> nn.Module:
        """The net with what is trained: a fresh adapter, and frozen ones that equal it, or all weights."""
        args = self.args
        targets = args.lora_targets.split(",") if args.lora_targets else self.model.LORA_TARGETS
        add = partial(lora.add_lora, net, targets, rank=args.lora_rank, alpha=args.lora_alpha, init=args.lora_init)
        for name in ("default", *frozen) if args.lora_rank else ():
            add(adapter=name, seed=args.seed)
        if not args.lora_rank:
            net.requires_grad_(True)
        for name in self.model.nets.keys() - self.trained.keys():
            net.get_submodule(name).requires_grad_(False)
        return net

    def _set_kernels(self, net: nn.Module) -> None:
        """Have the blocks of a net compiled, if they shall be, and their attention computed as --attention says."""
        if self.compiles:
            compile_blocks(net, self.model.BLOCK_NAMES, attention=self.attention)
        choose_attention(net, self.attention, self.model.BLOCK_NAMES)

    def _count(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Count the samples that pass a net."""
        first = next(iter((*args, *kwargs.values())))  # the first input of any model is a batch
        self.calls[self.log.last_phase, torch.is_grad_enabled(), first[0].shape] += len(first)

    def _open_log(self) -> None:
        """Open the log of the run, with its report and tracker as a sink; beside it the settings and all versions."""
        args, dist, folder = self.args, self.dist, self.folder
        if dist.is_main:
            write_atomically(folder / "config.toml", to_toml(without_secrets(args)))
            facts = {"ranks": dist.world_size, "device": str(dist.device), "threads": torch.get_num_threads()}
            facts["attention"] = ", ".join(backend.name for backend in BACKENDS[self.attention])
            facts |= {"gathered": "once in " + " and ".join(self.unshard)} if self.unshard else {}
            facts |= {"hub": ", ".join(map(pinned, FETCHED))} if FETCHED else {}
            changed = [name for name, value in asdict(args).items() if value != getattr(type(args)(), name)]
            write_versions(folder, hide=secret_flags(args), changed=changed, facts=facts)
            self.report = ReportProcess(folder, args.track, args.project)
        nets = {net for net in (self.engine.net, self.net) if net is not None}
        self.log = self.world.open_log(
            partial(ProfiledLog, step=args.profile, nets=nets) if args.profile else RunLog,
            folder=folder,
            is_main=dist.is_main,
            total_steps=args.train_steps,
            eval_every=args.eval_every,
            columns=[*COLUMNS[:2], *(held.metric("reward") for held in self.eval_more), *COLUMNS[2:]],
            resume_step=-1 if args.eval_only else self.first_step - 1,
            sinks=[self.report] if self.report else [],
        )

    def _name_scorer(self, version: str) -> None:
        """Note the server's scorer and its version.

        Raises:
            ValueError: the run began with another one.
        """
        self.config["scorer"] = version
        was = self.saved.config.get("scorer", "") if self.saved else version
        if was != version and not (self.args.eval_only or self.args.dry_run):
            raise ValueError(f"--scorer-url must be the scorer that the run began with, {was}, got {version}")

    def _open_set_scorers(self, connect: Callable[[str, str, PromptRecord], AnyScorer]) -> None:
        """Open what grades an evaluation set alone. connect: a function of its URL, the setting's name and a prompt."""
        for place, own in enumerate(self.args.eval):
            if own.scorer_url:
                canary = self._canary(self.eval_more[place].records)
                scorer = connect(own.scorer_url, f"eval[{place + 1}].scorer_url", canary)
                self.eval_more[place] = replace(self.eval_more[place], scorer=scorer)

    # What depends on what is drawn

    @abstractmethod
    def _open_model(self) -> None:
        """Open the model, and check it and the settings of what it draws."""

    @abstractmethod
    def _check_record(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt that the model does not take."""

    def _check_graded(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt that the model, or what grades the run, does not take."""
        self._check_record(record)

    def _check_params(self, params: Any) -> None:
        """Raise ValueError for settings of an evaluation set that the model does not take."""

    @abstractmethod
    def _canary(self, records: Sequence[PromptRecord]) -> PromptRecord:
        """The one of these prompts with which what scores them is tried."""

    @abstractmethod
    def _describe(self) -> str:
        """The model in a few words."""

    @abstractmethod
    def _open_engine(self, net: nn.Module | None) -> tuple[WeightedEngine, nn.Module]:
        """The engine, and the net that is trained; None loads the checkpoint's own."""

    @abstractmethod
    def _fill(self, *, trained: bool) -> nn.Module:
        """The net with the weights that training starts from, each rank's rows alone where it is sharded.

        trained: with what is trained, adapters or all weights in float32; else frozen, in the type of --dtype.
        """

    @abstractmethod
    def _recompute(self, run_block: Recompute) -> None:
        """Have the net compute its blocks through `run_block`."""

    def _group_params(self) -> None:
        """Give parameters learning rates of their own."""


class Run(AnyRun[MediaT]):
    """One rank of a run that draws pictures, videos or sound.

    base_params, eval_params: what training and evaluations sample with, without any stochastic step. teachers: folders
    of the teachers' weights by name and expert. teacher_nets: the teachers that are no adapters.
    """

    model: Model
    engine: Engine
    scorer: Scorer
    eval_params: Params

    def __init__(
        self, args: MediaT, algorithm: str, world: World, *, old_policy: bool = False, reference: bool = False
    ) -> None:
        super().__init__(args, algorithm, world, old_policy=old_policy, reference=reference)
        self.watch: Scorer | None = None
        self.compiles = args.compile
        true_cfg = {"true_cfg_scale": args.true_cfg_scale} if args.true_cfg_scale != 1 else {}
        self.base_params = Params(
            num_inference_steps=args.num_inference_steps,
            height=args.height,
            width=args.width,
            num_frames=args.num_frames,
            frame_rate=args.frame_rate,
            guidance_scale=args.guidance_scale,
            guidance=parse_numbers(args.guidance, "--guidance") | true_cfg,
        )
        self.eval_params = replace(self.base_params, num_inference_steps=args.eval_num_inference_steps)
        self.sizes: set[tuple[int, int]] = set()  # (height, width) of all prompts
        self.teachers: dict[str, dict[str, Path]] = {}
        self.teacher_nets: dict[str, nn.Module] = {}

    @staticmethod
    def start(  # noqa: PLR0913 - all but two are keyword-only, and each is a different need of a trainer
        args: OwnArgsT,
        world: World,
        algorithm: str,
        *,
        scorer: str | Callable[[Dist], Scorer],
        parts: Sequence[str] = (),
        old_policy: bool = False,
        reference: bool = False,
        steps: tuple[int, int] | None = None,
        needs: Collection[str] = (),
        teachers: Mapping[str, str] | None = None,
        teaching: Callable[[Params], Params] | None = None,
    ) -> "Run[OwnArgsT]":
        """A new run, or the one that runs/NAME holds where it stopped. With --dry-run, print the plan and end.

        algorithm: its name, for the model card. scorer: URL of a reward server, or what opens another scorer.
        parts: that its scores must name. old_policy: keep an older policy, for `old_policy()`. reference: keep the
        first one, for `reference()`. steps: the first of the schedule that is trained at, and one past the last.
        needs: what the model must have: `streams`, as the loss takes frames and sound apart; `routes`, to be replayed.
        teachers: folders of weights by name, for `teacher()`. teaching: what teachers sample with, of `base_params`.

        Raises:
            ValueError, OSError: something in the settings does not fit; the same on every rank.
        """
        run = Run(args, algorithm, world, old_policy=old_policy, reference=reference)
        return run._start(scorer, parts, steps=steps, needs=needs, teachers=teachers, teaching=teaching)

    def _start(
        self,
        scorer: str | Callable[[Dist], Scorer],
        parts: Sequence[str] = (),
        *,
        steps: tuple[int, int] | None,
        needs: Collection[str] = (),
        teachers: Mapping[str, str] | None = None,
        teaching: Callable[[Params], Params] | None = None,
    ) -> Self:
        """The run itself, as `start` has it."""
        with same_error(self.dist):
            self._read_inputs()
            self._read_teachers(teachers or {})
            if teaching:
                with flag("--teacher-guidance-scale and --teacher-true-cfg-scale: "):
                    self.model.check(teaching(self.base_params))
            self._check_steps(steps)
            require(
                ("streams" not in needs or self.model.streams(self.base_params),
                 "--sound-weight and --reward-media need a model that draws video with sound"),
                ("streams" not in needs or len(self.sizes) == 1,
                 "--sound-weight and --reward-media need prompts of one size"),
                ("routes" not in needs or routing_of(self.model.empty_net()),
                 "--route-replay needs a model that is a mixture of experts"),
            )  # fmt: skip
        self._check_settings()
        with same_error(self.dist):
            self._open_scorers(scorer, parts)
        self._begin()
        return self

    def replay_routes(self) -> None:
        """Have updates take the experts that the rollout took, of a model that has `routes`."""
        routing = routing_of(self.engine.net)
        assert routing is not None
        self.model, self.engine = replay_routes(self.model, self.engine, routing)

    @contextmanager
    def teacher(self, name: str) -> Iterator[nn.Module]:
        """The teacher of that name, for the length of the `with` block."""
        if name in self.teacher_nets:
            yield self.teacher_nets[name]
        else:
            with lora.adapter(self.net, f"teacher_{name}"):
                yield self.net

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of samples that are drawn without injected noise, as `AnyRun.evaluate`."""
        from omni_rl.flow.sampling import evaluate  # which imports this module

        return evaluate(self, step)

    def export(self, card: Mapping[str, object] | None) -> None:
        """Write a folder for each expert that is trained, as `AnyRun.export`."""
        for name, part in self.trained.items():
            net, folder = self.net.get_submodule(name), self.folder / "weights" / name
            save_weights(net, folder, self.dist, into=part, card=card)

    def close(self) -> None:
        """As `AnyRun.close`."""
        if self.watch:
            self.watch.close()
        super().close()

    def _open_model(self) -> None:
        args = self.args
        with flag("--model: "):
            self.model = model = self._open_checkpoint()
            self.world.check_files(model)
        only = " or ".join(("both", *filter(None, model.nets)))
        require(
            (self.trained, f"--train-experts must be {only} for this model, got {args.train_experts}"),
            (args.low_expert_lr is None or (len(self.trained) == 2 and self.lr),
             "--low-expert-lr needs two experts that are trained, and --lr > 0"),
            (not args.freeze_audio or "audio" in model.BRANCHES,
             "--freeze-audio needs a model that draws video with sound"),
        )  # fmt: skip
        kind = model.config["_class_name"]
        model.host_encoders = "encoder" in self.offload
        require((model.encoders or "encoder" not in self.offload, f"--offload encoder: a {kind} has no text encoder"))
        with flag("--"):  # the message itself begins with height, width or another setting
            for params in (self.base_params, self.eval_params):
                model.check(params)
        with flag("--model: "):
            model.sigmas(self.base_params)

    def _open_checkpoint(self) -> Model:
        """The model of --model."""
        return open_model(self.args.model)

    def _num_frozen_nets(self) -> int:
        return super()._num_frozen_nets() + (0 if self.args.lora_rank else len(self.teachers))

    def _add_adapters(self, net: nn.Module, *frozen: str) -> nn.Module:
        still = self.model.BRANCHES["audio"] if self.args.freeze_audio else ()
        for name, weight in super()._add_adapters(net, *frozen).named_parameters():
            if not set(still).isdisjoint(name.split(".")):
                weight.requires_grad_(False)
        return net

    def _read_inputs(self) -> None:
        super()._read_inputs()
        records = load_prompts(self.args.prompts, media_root=self.args.media_root)
        self.canary = self._canary([*self.eval_records, *records])
        images = sorted({image for record in records for image in record.images})
        if images:
            self.config["images_digest"] = probe_digest(images, num_blocks=1)

    def _canary(self, records: Sequence[PromptRecord]) -> PromptRecord:
        least = min(records, key=lambda record: len(record.images))
        return replace(least, meta={**least.meta, "fps": self.args.frame_rate})

    def _read_teachers(self, teachers: Mapping[str, str]) -> None:
        """Check the weights of the teachers, which have the form of what is trained."""
        if not teachers:
            return
        rank, files = self.args.lora_rank, list[Path]()
        net = self._add_adapters(self.model.empty_net())
        for name, folder in teachers.items():
            with flag(f"--teachers: {name}: "):
                self.teachers[name] = found = homes(folder, self.model.nets)
                trained = " or ".join(self.trained)
                require((self.trained.keys() & found, f"{folder} must have weights of {trained}, which is trained"))
                for expert, home in found.items():
                    full = saved_files(home)
                    require((rank or full, f"{home} holds a LoRA adapter, which needs --lora-rank > 0"))
                    (check_adapter if rank else check_weights)(net.get_submodule(expert), home)
                    files += [home / LORA_FILE] if rank else full
        self.config["teachers_digest"] = probe_digest(files)
        self.frozen += tuple(f"teacher_{name}" for name in teachers) if rank else ()

    def _load(self) -> None:
        super()._load()
        for name, found in self.teachers.items() if self.args.lora_rank else ():
            for expert, home in found.items():
                load_adapter(self.net.get_submodule(expert), home, adapter=f"teacher_{name}")

    def _continue(self) -> None:
        super()._continue()
        for name, found in self.teachers.items() if not self.args.lora_rank else ():
            with same_error(self.dist):
                net = self._fill(trained=False, start={expert: saved_files(home) for expert, home in found.items()})
            self._set_kernels(net)
            net.register_forward_pre_hook(self._count, with_kwargs=True)
            self.teacher_nets[name] = net

    def _check_steps(self, steps: tuple[int, int] | None) -> None:
        """Raise ValueError for steps of the schedule at which only an expert runs that is not trained."""
        if not self.model.boundary or steps is None:
            return
        high = (self.model.sigmas(self.base_params)[:-1] >= self.model.boundary).tolist()
        least, most = 0 if "high" in self.trained else sum(high), len(high) if "low" in self.trained else sum(high)
        which, last = self.args.train_experts, steps[1] - 1
        rule = f"--train-experts {which} takes steps {least} to {most - 1} of {len(high)}, got trained steps"
        require((least <= steps[0] and last < most, f"{rule} {steps[0]} to {last}"))

    def _check_record(self, record: PromptRecord) -> None:
        check_images(self.model, reference_sizes(record))
        size = record.size or (self.args.height, self.args.width)
        if size not in self.sizes:
            self.model.check(self.base_params.of_size(size))
            self.sizes.add(size)

    def _describe(self) -> str:
        latents = [self.model.latent_shape(self.base_params.of_size(size)) for size in sorted(self.sizes)]
        return f"{self.model.__class__.__name__}, latents {' and '.join(map(str, latents))}"

    def _open_scorers(self, scorer: str | Callable[[Dist], Scorer], parts: Sequence[str]) -> None:
        """Open what scores samples, and what else evaluations ask."""
        args, version, name = self.args, "", "--watch-scorer-url"
        image = np.full((1, *max(self.sizes, key=math.prod), 3), 127, np.uint8)
        grey = {"image": image, "video": np.repeat(image[:, None], args.num_frames, axis=1)}
        ask = partial(self.world.connect, args=args, canary=self.canary, kinds=self.model.MEDIA, samples=grey)
        if args.watch_scorer_url:
            self.watch, _ = ask(args.watch_scorer_url, name=name)
        if isinstance(scorer, str):
            self.scorer, version = ask(scorer, parts=parts)
        else:
            self.scorer = scorer(self.dist)
        self._name_scorer(version)
        self._open_set_scorers(lambda url, name, canary: ask(url, name=name, canary=canary)[0])

    def _check_params(self, params: Params) -> None:
        self.model.check(params)

    def _open_engine(self, net: nn.Module | None) -> tuple[Engine, nn.Module]:
        args = self.args
        self.model = model = self.world.watched(self.model)
        if args.decode_batch_size:
            self.model = model = wrap(model, decode=in_slices(model.decode, args.decode_batch_size))
        return self._make_engine(net, TextCache(args.text_cache_mb, args.text_cache))

    def _make_engine(self, net: nn.Module | None, texts: TextCache) -> tuple[Engine, nn.Module]:
        return ENGINES[self.args.engine].open(self.model, net, self.dist, self.dtype, texts)

    def _open_log(self) -> None:
        super()._open_log()
        if self.dist.is_main:
            self.flops = FlopTable(lambda: self._add_adapters(self.model.empty_net()), self.net)

    def _recompute(self, run_block: Recompute) -> None:
        self.net.enable_gradient_checkpointing(run_block)  # type: ignore[operator]  # as all diffusers models have

    def _group_params(self) -> None:
        args = self.args
        if routing := routing_of(self.engine.net):
            self.load = ExpertLoad(routing, counts=lambda: self.log.last_phase == "rollout")
        if self.model.boundary:
            self.net.register_forward_pre_hook(self._count_trained, with_kwargs=True)
        if args.low_expert_lr is not None:
            low, group = set(self.net.get_submodule("low").parameters()), self.optimizer.param_groups[0]
            group["params"] = [p for p in self.params if p not in low]
            own = {"params": [p for p in self.params if p in low], "lr_scale": args.low_expert_lr / self.lr}
            self.optimizer.add_param_group(own)

    @property
    def trained(self) -> dict[str, str]:
        """The experts that are trained, as `Model.nets` has them."""
        return {name: part for name, part in self.model.nets.items() if self.args.train_experts in ("both", name)}

    def _fill(self, *, trained: bool, start: Mapping[str, list[Path]] | None = None) -> nn.Module:
        """The net as `AnyRun._fill` has it, or with the weights of other files by expert."""
        args, is_sharded, model = self.args, self.mode == "fsdp2", self.model
        net, files = model.empty_net(buffers=True), None
        if model.reads_weights:
            files = {
                name: (start or self._start_files).get(name) or model.weight_files(part)
                for name, part in model.nets.items()
            }
        net = load_sharded(
            self._add_adapters(net, *self.frozen) if trained else net,
            files,
            self.mesh if is_sharded else None,
            device=self.dist.device if args.base_dtype == "auto" else "cpu",
            block_names=model.BLOCK_NAMES,
            compute_dtype=self.dtype if is_sharded else None,
            param_dtype=torch.float32 if trained and not args.lora_rank else self.dtype,
        ).eval()
        if args.base_dtype != "auto":
            net = reduce_bits(net, args.base_dtype, model.BLOCK_NAMES, self.dist.device).to(self.dist.device)
        for name in ("default", *self.frozen) if args.lora_rank else ():
            lora.draw_adapter(net, name, seed=args.seed, init=args.lora_init)
        return net

    def _count_trained(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, str]) -> None:
        """Count the forwards that train an expert."""
        self.counts[kwargs["expert"]] += torch.is_grad_enabled()


class Step:
    """One training step: its `number`, counted from 0, and the `metrics` to log of it.

    has_signal: True if any sample of any rank has an advantage; a trainer that can tell sets it. settle: grades the
    samples of all ranks, on every rank, where the update began before all scores were there; see `flow.scoring`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.metrics: dict[str, float] = {}
        self.has_signal = True
        self.settle: Callable[[], object] = lambda: None


def policy_metrics(dist: Dist, seen: Sequence[Mapping[str, Tensor]], results: Sequence[StepResult]) -> dict[str, float]:
    """Metrics `policy/...` of an update: means or extremes over forwards and ranks, and the optimizer's steps.

    seen: 0-d tensors of each forward of this rank.

    Raises:
        FloatingPointError: the loss is not finite; raised on every rank.
    """
    merged = [merge_metric(torch.stack([m[name] for m in seen]), EXTREMES.get(name, "mean")) for name in seen[0]]
    own = dict(zip(seen[0], torch.stack(merged).tolist(), strict=True))
    named = mean_metrics(dist, own, merges=EXTREMES, finite=("loss",)) | {
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "skipped_updates": sum(result.skipped for result in results),
    }
    return {f"policy/{name}": value for name, value in named.items()}
