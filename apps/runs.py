"""What every trainer does around its steps: check, start or continue a run, evaluate, save, stop, say what broke.

    run = start(args, num_forwards)      None after --dry-run
    loop(run, train_step)                train_step(run, step) -> metrics

A mistake in the settings ends the program with one line and exit code 2, before any weight is loaded. What breaks later
ends it with exit code 1 and one message that names rank, phase and remedy; the last complete checkpoint stays.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from omni_reward import RewardClient, RewardError
from omni_rl.alarms import Alarm, new_alarms
from omni_rl.cli import flag, to_toml
from omni_rl.failures import BrokenRunError, say_failure, say_mistake
from omni_rl.report import write_alarm, write_versions
from omni_rl.report.folder import command_line
from omni_rl.sinks import report
from omni_rollout import Prompt, SamplingParams
from omni_rollout.models import qwen_image
from omni_train.checkpoint import Checkpoint, check_config
from omni_train.data import PromptSampler, load_prompts
from omni_train.device import memory
from omni_train.dist import Dist, gather_json, init_distributed, mean_metrics, same_error, shutdown
from omni_train.ema import Ema
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder, load_metrics
from omni_train.lora import unadapted_params
from omni_train.optim import StepResult, build_adamw
from omni_train.shard import shard
from omni_train.signals import catch_stop, resume_command
from omni_train.snapshot import Snapshot
from omni_train.weights import save_weights

import rollouts

Mode = Literal["none", "ddp", "fsdp2"]
COLUMNS = ("reward/mean", "eval/reward", "policy/first_ratio_max_dev", "policy/grad_norm")
SECRET = ("scorer_url", "scorer_token_file", "watch_scorer_url")  # settings that are not for files others may read
HIDDEN = ["--" + name.replace("_", "-") for name in SECRET]
MAY_CHANGE = (  # settings that a run may continue with although its checkpoint has others
    *SECRET, "name", "scorer_timeout_s", "on_failure", "hang_timeout_s", "save_every", "keep_checkpoints", "eval_every",
    "eval_num_steps", "eval_prompts", "shard", "engine_sleep", "dry_run",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What every part of a step needs. `args` are the trainer's; `copy` is empty unless `start` was asked for it."""

    args: Any
    on: rollouts.Rollouts
    sampler: PromptSampler
    eval_prompts: list[Prompt]
    net: torch.nn.Module
    mode: Mode
    params: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    copy: Snapshot
    folder: Path
    log: RunLog
    checkpoints: Checkpoint
    first_step: int


def connect(args: Any, dist: Dist) -> Any:
    """A client of the reward server that the settings name."""
    return connect_to(args.scorer_url, args, dist)


def connect_to(url: str, args: Any, dist: Dist) -> RewardClient:
    """A client of a reward server, with the settings' token, deadline and answer to failures."""
    options = {"timeout_s": args.scorer_timeout_s, "on_failure": args.on_failure}
    return rollouts.connect(url, args.scorer_token_file, dist, **options)


def start(
    args: Any,
    num_forwards: Mapping[str, int],
    *,
    connect: Callable[[Any, Dist], Any] = connect,
    frozen_adapters: Sequence[str] = (),
    keep_copy: bool = False,
) -> Run | None:
    """A new run, or the one that runs/NAME holds where it stopped; None with --dry-run, which prints the plan.

    num_forwards: forwards of `batch_size` samples that a rank computes in a training step, by what they are for.
    connect: returns who scores. frozen_adapters: names of further adapters with LoRA, which start as the trained one
    does. keep_copy: whether to keep a copy of the weights as they were given, without LoRA.

    Raises:
        ValueError, OSError: something in the settings does not fit; the same on every rank.
    """
    dist = init_distributed(timeout_s=args.hang_timeout_s)
    same_settings(dist, args)
    mode = sharding(args, dist)
    with same_error(dist):
        sampler, eval_prompts = read_inputs(args)
    folder = Path("runs") / args.name
    checkpoints = Checkpoint(folder / "checkpoints", dist, keep=args.keep_checkpoints)
    saved = checkpoints.latest()
    if saved:
        check_config(saved, asdict(public(args)), ignore=MAY_CHANGE if args.lr_decay else (*MAY_CHANGE, "steps"))
        checkpoints.verify(saved, empty_net(args, frozen_adapters))
    if args.dry_run:
        if dist.is_main:
            copies = 4 + bool(args.ema_decay) + (keep_copy and not args.lora_rank)  # 4: weight, gradient, two moments
            print(to_toml(public(args)), plan(args, dist, mode, num_forwards, copies), sep="\n")
            print(f"plan: start: {f'continues after step {saved.step}' if saved else 'anew'}, in {folder}")
        shutdown(dist)
        return None
    with same_error(dist):
        client = connect(args, dist)
        watch = connect_to(args.watch_scorer_url, args, dist) if args.watch_scorer_url else None
    RunLock(folder, dist)
    if checkpoints.latest() != saved:
        raise ValueError(f"{folder} has got another checkpoint from a run that has ended meanwhile: start again")
    claim_folder(dist, folder, has_checkpoint=saved is not None)
    engine, net = load(args, dist, mode, frozen_adapters)
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = build_adamw(params, lr=args.lr, weight_decay=args.weight_decay)
    ema = Ema(params, decay=args.ema_decay)
    copy = Snapshot(params if keep_copy and not args.lora_rank else (), name="copy")
    if saved:
        checkpoints.load(saved, net, optimizer, (ema, copy))
    done = saved.step if saved else -1  # the step of the last line that stays in the log
    rollouts.sync(engine, net, version=max(done, 0))
    on = rollouts.Rollouts(dist, engine, client, args.batch_size, watch, rollouts.count_forwards(engine, net))
    log = open_log(args, dist, folder, resume_step=done)
    return Run(
        args, on, sampler, eval_prompts, net, mode, params, optimizer, ema, copy, folder, log, checkpoints, done + 1
    )  # fmt: skip


def public(args: Any) -> Any:
    """The settings without what is not for files that others may read; a trainer need not have all of it."""
    return replace(args, **{name: "" for name in SECRET if hasattr(args, name)})


def read_inputs(args: Any) -> tuple[PromptSampler, list[Prompt]]:
    """What draws the training prompts, and the prompts of the evaluations; the model's folder is checked too.

    Raises:
        ValueError: some file is missing, incomplete or malformed; the message begins with the flag.
    """
    with flag("--"):  # the message itself begins with model, height or width
        qwen_image.check_folder(args.model, height=args.height, width=args.width)
    with flag("--prompts: "):
        sampler = PromptSampler(args.prompts, prompts_per_step=args.prompts_per_step, seed=args.seed)
    with flag("--eval-prompts: "):
        records = load_prompts(args.eval_prompts)
    return sampler, rollouts.samples(records, 1, seed=0, step=-1)  # the same for every run


def empty_net(args: Any, frozen_adapters: Sequence[str] = ()) -> torch.nn.Module:
    """The transformer with what is trained, names and shapes without weights."""
    net = qwen_image.empty_transformer(args.model)
    rollouts.make_trainable(
        net, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, seed=args.seed, frozen_adapters=frozen_adapters
    )
    return net


def same_settings(dist: Dist, args: Any) -> None:
    """Raises ValueError on every rank unless all were started with the same settings."""
    by_rank: list[Any] = gather_json(dist, asdict(args))
    for rank, other in enumerate(by_rank):
        names = sorted(name for name, value in by_rank[0].items() if other[name] != value)
        if names:
            values = ", ".join(f"{name} = {other[name]!r} (rank 0: {by_rank[0][name]!r})" for name in names)
            raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")


def sharding(args: Any, dist: Dist) -> Mode:
    """How the weights are spread: what --shard says, or for auto the simplest way that needs the least traffic."""
    auto: Mode = "none" if dist.world_size == 1 else "ddp" if args.lora_rank else "fsdp2"
    return auto if args.shard == "auto" else args.shard


def load(args: Any, dist: Dist, mode: Mode, frozen_adapters: Sequence[str]) -> tuple[Any, torch.nn.Module]:
    """The engine and the transformer, ready to train, whose weights are the engine's own wherever that can be."""
    dtype = getattr(torch, args.dtype)
    engine, net = rollouts.open_engine(args.engine, args.model, dist, dtype)
    rollouts.make_trainable(
        net, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, seed=args.seed, frozen_adapters=frozen_adapters
    )
    if args.gradient_checkpointing:
        net.enable_gradient_checkpointing()
    if args.engine != "diffusers" and mode != "fsdp2":
        engine.share(unadapted_params(net))
        net.to(dist.device)  # what the engine does not hold
    compute_dtype = dtype if mode == "fsdp2" else None
    shard(net, dist.mesh, mode=mode, block_names=qwen_image.BLOCK_NAMES, compute_dtype=compute_dtype)
    return engine, net


def open_log(args: Any, dist: Dist, folder: Path, *, resume_step: int) -> RunLog:
    """The log of the run, with its report as a sink; beside it the settings, and what the run was made with."""
    if dist.is_main:
        (folder / "config.toml").write_text(to_toml(public(args)))
        write_versions(folder, hide=HIDDEN, facts={"ranks": dist.world_size, "device": str(dist.device)})
    return RunLog(
        folder, is_main=dist.is_main, total_steps=args.steps, tty=None if dist.mesh is None else False,
        columns=COLUMNS, resume_step=resume_step, sinks=[report(folder)] if dist.is_main else [],
    )  # fmt: skip


def plan(args: Any, dist: Dist, mode: Mode, num_forwards: Mapping[str, int], copies: int) -> str:
    """What a rank does and holds in a training step, from the model's configuration alone.

    copies: float32 numbers that are held for each trained weight.
    """
    num_weights = sum(p.numel() for p in qwen_image.empty_transformer(args.model).parameters())
    num_trained = sum(p.numel() for p in empty_net(args).parameters() if p.requires_grad)
    share = dist.world_size if mode == "fsdp2" else 1
    frozen_mb = (num_weights if args.lora_rank else 0) * getattr(torch, args.dtype).itemsize / share / 2**20
    trained_mb = 4 * num_trained * copies / share / 2**20
    images = args.prompts_per_step * args.group_size
    lines = {
        "ranks": f"{dist.world_size}, weights {mode}",
        "images per step": f"{images}, {images // dist.world_size} per rank",
        **{f"forwards for {name}": f"{n} per rank, of {args.batch_size} samples" for name, n in num_forwards.items()},
        "optimizer steps per step": str(args.updates_per_step),
        "weights of the transformer": f"{num_weights / 1e6:.1f} M, trained {num_trained / 1e6:.1f} M",
        "memory per rank": f"{frozen_mb:.0f} MB frozen weights, {trained_mb:.0f} MB of what is trained (weights, "
        "gradients, optimizer, averages); text encoder, VAE and activations come on top",
    }
    return "\n".join(f"plan: {name}: {value}" for name, value in lines.items())


def loop(run: Run, train_step: Callable[[Run, int], dict[str, float]]) -> None:
    """Trains to the last step, evaluating and saving on the way; after SIGTERM it saves and returns.

    Raises:
        BrokenRunError: something broke; the message names the phase, `launch` also the rank and what to do.
    """
    args, dist = run.args, run.on.dist
    lines = load_metrics(run.folder / "metrics.jsonl") if dist.is_main else []
    with catch_stop() as stop, run.log, broken_runs(run):
        for step in range(run.first_step, args.steps + 1):  # line n of the log speaks of n finished steps
            busy_s = run.on.client.busy_s
            run.on.forwards.clear()
            try:
                metrics = train_step(run, step - 1) if step else {}
            except RewardError:  # of all ranks at once, before the weights were touched
                save(run, step - 1)
                raise
            if step:
                metrics |= {"reward/busy_s": run.on.client.busy_s - busy_s} | memory_now(run, "", peak=True)
                metrics["perf/forwards"] = rollouts.total(run.on, run.on.forwards["samples"])
            if step % args.eval_every == 0 or step == args.steps:
                with run.log.phase("eval"):
                    metrics |= hold_out(run, step)
            num_images = args.prompts_per_step * args.group_size // dist.world_size if step else 0
            run.log.log(step, metrics, num_images=num_images)
            if dist.is_main:
                lines.append({"step": step} | metrics)
                ring(run.folder, step, new_alarms(lines))
            stopping = stop.requested(dist)
            if stopping or step % args.save_every == 0 or step == args.steps:  # after the line, so that none is lost
                with run.log.phase("save"):
                    save(run, step)
            if stopping and step < args.steps:
                if dist.is_main:
                    print(f"stopped after step {step}; this continues:\n{resume_command()}", flush=True)
                return
    run.on.client.close()
    if dist.is_main:
        scores = held_out_scores(run.folder)
        told = "no held-out score"
        if math.isfinite(scores[-1]):
            told = f"held-out score {scores[0]:.3f} -> {scores[-1]:.3f}"
        print(f"{told}; report, weights and metrics in {run.folder}")


def save(run: Run, step: int) -> None:
    """A checkpoint of `step` finished steps, unless there is one."""
    newest = run.checkpoints.latest()
    if newest is None or newest.step < step:
        config = asdict(public(run.args))
        run.checkpoints.save(step, run.net, run.optimizer, (run.ema, run.copy), config=config)


def ring(folder: Path, step: int, alarms: Sequence[Alarm]) -> None:
    """Tells of alarms, on the terminal and in the report."""
    for alarm in alarms:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in alarm.numbers.items())
        print(f"ALARM after step {step}: {alarm.title} ({numbers}). {alarm.look}", file=sys.stderr, flush=True)
        write_alarm(folder, step, alarm.title, numbers=alarm.numbers, look=alarm.look)


def hold_out(run: Run, step: int) -> dict[str, float]:
    """Evaluates on fixed prompts and seeds without injected noise, and saves the weights that it has evaluated."""
    args = run.args
    params = SamplingParams(args.eval_num_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    with run.ema.applied():
        rollouts.sync(run.on.engine, run.net, version=step)
        metrics = rollouts.evaluate(run.on, run.eval_prompts, params, run.folder, step)
        if step:
            facts = card(run, metrics["eval/reward"]) if math.isfinite(metrics["eval/reward"]) else None
            save_weights(run.net, run.folder / "weights", run.on.dist, card=facts)
    rollouts.sync(run.on.engine, run.net, version=step)
    return metrics


def held_out_scores(folder: Path) -> list[float]:
    """The held-out scores in the log, in step order."""
    return [line["eval/reward"] for line in load_metrics(folder / "metrics.jsonl") if "eval/reward" in line]


def card(run: Run, score: float) -> dict[str, Any]:
    """What the model card beside the weights says."""
    first = held_out_scores(run.folder)[:1] if run.on.dist.is_main else []
    return {
        "base": run.args.model,
        "algorithm": getattr(run.args, "algo", "") or Path(sys.argv[0]).stem,
        "settings": asdict(public(run.args)),
        "scores": {"held-out": score, **({"held-out, base": first[0]} if first else {})},
        "command": command_line(sys.argv, hide=HIDDEN),
    }


@contextmanager
def broken_runs(run: Run) -> Iterator[None]:
    """Turns what breaks in the block into a BrokenRunError, which names the phase."""
    try:
        yield
    except Exception as exc:
        raise BrokenRunError(run.log.last_phase, exc) from exc


@contextmanager
def update_phase(run: Run, metrics: dict[str, float]) -> Iterator[None]:
    """The part of a step that updates the weights: the engine sleeps, and the memory before and then is logged."""
    metrics |= memory_now(run, "rollout_")
    with run.log.phase("update"):
        if getattr(run.args, "engine_sleep", True):  # a trainer whose engine has no weights of its own lacks it
            run.on.engine.sleep()
        metrics |= memory_now(run, "asleep_")
        yield
        run.on.engine.wake()


def memory_now(run: Run, when: str, *, peak: bool = False) -> dict[str, float]:
    """The memory that is in use, to be logged, and the most that ever was."""
    now = memory(run.on.dist.device)
    return {f"perf/memory_{when}mb": now.current_mb} | ({"perf/peak_memory_mb": now.peak_mb} if peak else {})


def update_metrics(
    dist: Dist, means: Mapping[str, torch.Tensor], results: Sequence[StepResult], lr: float
) -> dict[str, float]:
    """What to log of an update, as policy/NAME: the means over ranks of this rank's `means`, and the optimizer's steps.

    Raises:
        FloatingPointError: the loss is not finite; raised on every rank.
    """
    named = mean_metrics(dist, means, finite=("loss",)) | {
        "lr": lr,
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "skipped_updates": sum(result.skipped for result in results),
    }
    return {f"policy/{name}": value for name, value in named.items()}


def carry_out(
    args: Any, num_forwards: Mapping[str, int], train_step: Callable[[Run, int], dict[str, float]], **options: Any
) -> None:
    """A whole run: start, which gets the options, loop, end."""
    run = start(args, num_forwards, **options)
    if run is None:
        return
    dist = run.on.dist
    loop(run, train_step)
    del run  # sharded tensors must go before their process group does
    shutdown(dist)


def launch(main: Callable[[Any], None], args: Any) -> None:
    """Runs a trainer as a program: its messages, and exit code 0, 1 (something broke) or 2 (a mistake in settings)."""
    try:
        main(args)
        return
    except (ValueError, OSError, ImportError) as exc:
        code = 2
        say_mistake(exc)
    except Exception as exc:
        code = 1
        say_failure(exc if isinstance(exc, BrokenRunError) else BrokenRunError("start", exc))
    sys.stdout.flush()
    os._exit(code)  # a rank that failed must not wait, in some library's ending, for ranks that wait for it
