"""The cost of a training step besides the transformer, on the trainer's own loop.

python benchmarks/step_cost.py framework
python benchmarks/step_cost.py framework --random 6 --random-heads 4 --height 256 --width 256 --group-size 2 \
    --batch-size 2
python benchmarks/step_cost.py sampling --random 4 --random-heads 4 --height 256 --width 256 --batch-size 4
python benchmarks/step_cost.py redundancy
python benchmarks/step_cost.py beside
python benchmarks/step_cost.py checkpoint --gb 5
python benchmarks/step_cost.py noise
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import runner
import torch
import trainer
from omni_reward import Score
from omni_rl.flow.batches import TrainBatch
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.sampling import evaluate_set, show, step_prompts
from omni_rl.flow.scorers import LocalScorer
from omni_rl.flow.scoring import Rollout
from omni_rl.run.loop import Loop
from omni_rl.run.media import export, sampling_params
from omni_rl.run.policy import Policy
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.fields import at_least, change, require
from omni_rl.settings.toml import from_toml, load_recipes
from omni_rollout import Params, Prompt, Samples, Trajectory, replay
from omni_sched import step_noise
from omni_train.checkpoint.parts import host_memory
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import Dist, default_compute_dtype, init_distributed, local_device, synchronize
from omni_train.log import RunLog
from omni_train.optim import build_adamw
from omni_train.planned import Meter
from omni_train.prompts.files import PromptRecord
from omni_train.weights.snapshot import Ema
from runner import REPO, quiet
from torch import Tensor, nn
from trainer import app

# A step over the transformer's forward and backward passes in it


LORA = {"lora_rank": 16, "lora_alpha": 32, "true_cfg_scale": 4.0, "algo": "flowgrpo", "noise_level": 1.2,
        "window_size": 2, "window_low": 0, "window_high": 5}  # fmt: skip


@dataclass(frozen=True)
class Framework(runner.ModelArgs):
    """Settings of the steps."""

    group_size: Annotated[int, at_least(2)] = 8  # Samples per prompt
    prompts_per_step: Annotated[int, at_least(1)] = 2  # Prompts per step
    steps: Annotated[int, at_least(1)] = 2  # Counted steps, after one that does not count
    compile: bool = False  # Compile the transformer's blocks, in the step that does not count

    def check(self) -> None:
        """Raise ValueError for batches that would compile during a counted step."""
        given = f"got {self.batch_size} and {self.group_size}"
        rule = "--batch-size must divide --group-size with --compile: padded batches are another graph"
        require((not self.compile or self.group_size % self.batch_size == 0, f"{rule}, {given}"))


def framework(args: Framework) -> None:
    """Divide a FlowGRPO step by the transformer's forward and backward passes in it.

    The trainer is unchanged; the scorer runs in its process and reads a few pixels. On a CPU, seconds are CPU time of
    this process, as others may share the machine; on an accelerator, they are wall time, with the device synchronized
    before and after each forward and backward pass. `--random` trains LoRA on a random transformer with guidance
    instead of the recipe's weights.
    """
    steps = steps_of(args)
    inside = [step["forward"] + step["backward"] for step in steps]
    whole = [step["step"] for step in steps]
    without = [step["step"] - step["decode"] for step in steps]
    names = ("step", "forward", "backward", "decode")
    times = [runner.spread([step[name] for step in steps]) for name in names]
    head = (*(f"{name}, s" for name in names), "step / (forward + backward)", "without decode")
    print(runner.stamp(args))
    print(runner.table(head, [[*times, runner.ratio(whole, inside), runner.ratio(without, inside)]]))


def grade(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
    """Return scores that differ, at negligible cost."""
    return [Score(float(image[::8, ::8].mean()) / 255) for image in media["image"]]


def steps_of(args: Framework) -> list[dict[str, float]]:
    """Return the seconds of each step, and of forward passes, backward passes and decoding in it, by name."""
    device = local_device()
    spent, marks, started = Counter[str](), list[dict[str, float]](), list[float]()

    def log(self: RunLog, *arguments: Any, **options: Any) -> None:
        logged(self, *arguments, **options)
        marks.append({"step": runner.now(device), **spent})

    def part(module: nn.Module) -> str | None:
        return None if torch.compiler.is_compiling() else watched.get(type(module).__name__.removeprefix("FSDP"))

    def before(module: nn.Module, inputs: object) -> None:
        if part(module):
            started.append(runner.now(device))

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if name := part(module):
            spent[name] += runner.now(device) - started.pop()

    def backward(self: Tensor, *arguments: Any, **options: Any) -> None:
        start = runner.now(device)
        went_back(self, *arguments, **options)
        spent["backward"] += runner.now(device) - start

    with trainer.model(args) as model:
        settings = from_toml(load_recipes("train_flowgrpo")["tiny-signs"], app.Args, "tiny-signs") | {
            "model": str(Path(model).resolve()),
            "scorer_url": "http://127.0.0.1:1",
            "prompts": str(REPO / "data/tiny-signs/train.txt"),
            "eval_prompts": "eval.txt",
            "train_steps": args.steps + 2,
            "eval_every": 1000,
            "save_every": 1000,
            "height": args.height,
            "width": args.width,
            "prompts_per_step": args.prompts_per_step,
            "group_size": args.group_size,
            "batch_size": args.batch_size,
            "num_inference_steps": args.num_inference_steps,
            "sharding_mode": "auto",
            "compile": args.compile,
        }
        dtype = str(default_compute_dtype(device)).removeprefix("torch.")
        settings |= LORA | {"dtype": dtype} if args.random else {}
        watched = {runner.config(model, "transformer")["_class_name"]: "forward", "QwenImageDecoder3d": "decode"}
        logged, went_back, connect = RunLog.log, Tensor.backward, World.connect
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(before),
            nn.modules.module.register_module_forward_hook(after),
        ]
        RunLog.log, Tensor.backward = log, backward  # type: ignore[method-assign, assignment]
        World.connect = lambda *_, **__: (LocalScorer(grade), "none")  # type: ignore[assignment, return-value]
        try:
            with quiet():
                Path("eval.txt").write_text(f"{runner.TEXT}\n")
                own = change(app.Args(), **settings)
                app.main(own, World.join(own))
        finally:
            RunLog.log, Tensor.backward = logged, went_back  # type: ignore[method-assign]
            World.connect = connect  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()
    counted = marks[1 : 2 + args.steps]  # line 0 evaluates, as does the last step
    return [
        {name: value - before.get(name, 0.0) for name, value in after.items()} for before, after in pairwise(counted)
    ]


# A rollout of compiled blocks with the graphs used in training, over one with graphs without gradients

WITHOUT = "graphs without gradients"


@dataclass(frozen=True)
class Sampling(runner.ModelArgs):
    """Settings of the rollouts."""

    rounds: Annotated[int, at_least(1)] = 5  # Rollouts of each kind


def sampling(args: Sampling) -> None:
    """Compare time and memory of a rollout with the graphs used in training, as in the trainer, and with others.

    The others are compiled graphs without gradients, whose ratio need not be 1, and blocks that are not compiled. The
    memory is the peak during the rollout above what is allocated before it.
    """
    device, found = local_device(), dict[str, tuple[list[float], int]]()

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        prompts, params = step_prompts(run, Step(0))[: args.batch_size], app.step_params(run, Step(0))
        net = run.policy.net
        forwards: dict[str, Any] = {"not compiled": net.forward}
        if run.args.policy.compile:
            forwards = {"graphs that are trained": net.forward, WITHOUT: net.forward.args[0]}  # type: ignore[attr-defined]

        def draw(forward: Any) -> None:
            net.forward = forward
            run.engine.generate(prompts, params)

        calls = {name: partial(draw, forward) for name, forward in forwards.items()}
        times = runner.take_turns(calls, args.rounds, lambda: runner.now(device))
        found.update({name: (times[name], peak_of(call)) for name, call in calls.items()})
        yield from ()

    with trainer.model(args) as path:
        given = {key: value for key, value in asdict(args).items() if key != "rounds"}
        own = trainer.Args(group_size=args.batch_size, prompts_per_step=1, **given)
        for compiles in (True, False):
            trainer.train(trainer.settings(own, path, compile=compiles), steps, texts=trainer.TEXTS[:1])
    times, peak = found[WITHOUT]
    rows = [
        (name, runner.spread(each), runner.ratio(each, times), f"{most / 1e6:.4g}", f"{most / peak:.3f}")
        for name, (each, most) in found.items()
    ]
    print(runner.stamp(args))
    print(runner.table(("rollout by", "s", "ratio", "memory, MB", "ratio"), rows))


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak device memory allocated by a call, in bytes, above what is allocated before it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    kineto = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(each.start_ns(), each.nbytes()) for each in kineto.events() if each.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes)))


# The operations that a step computes, over those that it needs


CASES: dict[str, dict[str, Any]] = {  # differences from trainer.GIVEN
    "LoRA, guidance": {},
    "the same, `--memory.gradient-checkpointing`": {"memory_gradient_checkpointing": True},
    "the same, `--memory.keep-products-gb 8`": {"memory_gradient_checkpointing": True, "memory_keep_products_gb": 8.0},
    "KL": {"kl_coef": 0.01},
    "two prompts in a batch": {"group_size": 2},
    "two updates": {"num_minibatches": 2},
    "common start noise, a group in two batches": {"same_start_noise": True, "batch_size": 2, "window_low": 2},
    "two updates, batches repacked": {"num_minibatches": 2, "best_worst_n": 4, "group_size": 8},
    "all weights, no guidance": {"lora_rank": 0, "true_cfg_scale": 1.0},
}


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a step's transformer."""

    computed: int
    needed: int


def redundancy(args: trainer.Args) -> None:
    """Divide the floating-point operations that a FlowGRPO step computes by those that it needs.

    Both are counted in the trainer's steps, for its transformer only. A step needs each sample by itself, without
    padding: once per denoising step, or once per group for a common start; forward and backward for each trained step
    of a trained sample; and once more for a KL. Nothing needs to be computed twice.
    """
    rows = [
        (name, f"{work.computed / 1e9:,.1f}", f"{work.needed / 1e9:,.1f}", f"{work.computed / work.needed:.4f}")
        for name, work in cases(args)
    ]
    print(runner.stamp(args))
    print(runner.table(("step", "computed, GFLOP", "needed, GFLOP", "computed / needed"), rows))


def work_of(args: trainer.Args, path: str, **changes: Any) -> Work:
    """Return the operations of a training step with these settings."""
    found: list[Work] = []
    update = app.update

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        drawn, trained, meter = list[Trajectory](), list[TrainBatch](), Meter(run.dist.device)
        model, generate = run.model, run.engine.generate
        for name in ("encode", "decode"):
            setattr(model, name, aside(meter, getattr(model, name)))

        def kept(prompts: Sequence[Prompt], params: Params) -> Trajectory:
            drawn.append(generate(prompts, params))
            return drawn[-1]

        run.engine.generate = kept  # type: ignore[method-assign]

        def noted(run: MediaRun[app.Args], step: Step, batches: Sequence[TrainBatch]) -> dict[str, float]:
            trained.extend(batches)
            return update(run, step, batches)

        app.update = noted
        yield Step(0)  # in which blocks measure what they may keep
        drawn.clear()
        trained.clear()
        with meter:
            yield Step(0)
        found.append(Work(meter.flops[""], needed(run, drawn, trained)))

    try:
        trainer.train(trainer.settings(args, path, **changes), steps)
    finally:
        app.update = update
    return found[0]


def aside(meter: Meter, function: Any) -> Any:
    """Return the function with its operations counted in another phase."""

    def wrapped(*args: Any, **options: Any) -> Any:
        with meter.phase("aside"):
            return function(*args, **options)

    return wrapped


def needed(run: MediaRun[app.Args], drawn: Sequence[Trajectory], trained: Sequence[TrainBatch]) -> int:
    """Return the operations needed by the samples, each computed separately."""
    known: dict[object, int] = {}
    run.policy.net.disable_gradient_checkpointing()  # type: ignore[operator]

    def alone(batch: Trajectory, i: int, kind: Literal["sample", "train", "reference"]) -> int:
        one = batch.select([i]).trim()
        key = kind, *((name, tensor.shape) for name, tensor in one.cond.items())
        if key not in known:
            trains, policy = (
                kind == "train",
                run.policy.reference() if kind == "reference" else nullcontext(run.policy.net),
            )
            with policy as net, torch.set_grad_enabled(trains), Meter(run.dist.device) as meter:
                log_prob = replay(run.model, net, one, 0).log_prob
                if trains:
                    log_prob.sum().backward()
            run.policy.optimizer.zero_grad(set_to_none=True)
            known[key] = meter.flops.total()
        return known[key]

    total, starts = 0, set[object]()
    for batch in drawn:
        for i, prompt in enumerate(batch.prompts):
            start = prompt.index if prompt.initial_seed is None else (prompt.group, prompt.initial_seed)
            steps = len(batch.sigmas) - 1 - (batch.params.sde_steps[0] if start in starts else 0)
            starts.add(start)
            total += steps * alone(batch, i, "sample")
    for each in trained:
        for i in range(len(each.trajectory)):
            if each.weights is None or each.weights[i] > 0:
                asked = alone(each.trajectory, i, "reference") if run.args.kl_coef else 0
                total += each.trajectory.num_kept * (alone(each.trajectory, i, "train") + asked)
    return total


def cases(args: trainer.Args, names: Sequence[str] = ()) -> Iterator[tuple[str, Work]]:
    """Yield each case supported by the model, or those with the given names, with its operations."""
    with trainer.model(args) as path:
        for name in names or CASES:
            changes = CASES[name]
            if changes.get("lora_rank", 1) or not args.random:
                yield name, work_of(args, path, **changes)


# The training thread between and after the model's work


NAMES = [f"policy/metric_{i}" for i in range(38)]  # with those of reward and time, about as many as in a FlowGRPO step


@dataclass(frozen=True)
class Beside:
    """Settings of a run without a model."""

    steps: Annotated[int, at_least(1)] = 5000  # Training steps
    start: Annotated[int, at_least(0)] = 0  # Steps already in the log
    side: Annotated[int, at_least(16)] = 512  # Side of an image in pixels
    images: Annotated[int, at_least(1)] = 64  # Images per step on rank 0, at most 64
    work_s: Annotated[float, at_least(0)] = 0.05  # Seconds of sleep instead of a model
    eval_every: Annotated[int, at_least(1)] = 50  # Steps between evaluations of 64 prompts
    save_every: Annotated[int, at_least(1)] = 10  # Steps between checkpoints


def beside(args: Beside) -> None:
    """Time rank 0's training thread between and after the model's work: log, alarms, images, report, evaluation.

    The loop, the log, the report and the evaluation are the trainer's; a sleep and existing images replace the model.
    `--start` begins after a log of that many steps. The saved state is tiny: see checkpoint.
    """
    with quiet():
        found = list(beside_s(args))
    rows = []
    for part in {(0, min(100, len(found))): 0, (max(0, len(found) - 100), len(found)): 0, (0, len(found)): 0}:
        some = found[slice(*part)]
        means = [sum(seconds[kind] for _, seconds in some) / len(some) for kind in ("wall", "cpu")]
        rows.append((f"{some[0][0] + 1} to {some[-1][0] + 1}", *(f"{mean:.4f}" for mean in means)))
    print(runner.stamp(args))
    print(runner.table(("steps", "seconds a step", "seconds of its own work"), rows))


class Engine:
    """An engine whose images exist before the clock starts: large, and blocks of color, which suffices for encoders."""

    shares_weights, moved_bytes, is_exact, net = True, 0, True, None

    def __init__(self, side: int, device: torch.device) -> None:
        blocks = torch.randint(0, 256, (64, side // 16, side // 16, 3), dtype=torch.uint8)
        self.pictures = blocks.repeat_interleave(16, 1).repeat_interleave(16, 2).to(device)

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Samples:
        """Return one sample per prompt, at most 64."""
        return Samples(tuple(prompts), {"image": self.pictures[: len(prompts)]}, {}, 0)

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Do nothing."""

    def load_weights(self, tensors: object, *, version: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_run(args: Beside) -> MediaRun[app.Args]:
    """Return a run without a model, in its own folder, with `start` logged steps."""
    settings = change(
        app.Args(),
        name="fixed-cost",
        train_steps=args.start + args.steps,
        batch_size=args.images,
        save_every=args.save_every,
        eval_every=args.eval_every,
        ema_decay=0.9,
        height=args.side,
        width=args.side,
    )
    world = World(init_distributed())
    session = Session(settings, world.dist)
    session.folder.mkdir(parents=True)
    session.num_done = args.start or -1
    with (session.folder / "metrics.jsonl").open("w") as file:
        for step in range(session.num_done + 1):
            file.write(json.dumps({"step": step} | metrics(step)) + "\n")
    session.open_report(settings, world)
    session.open_log(settings, world, [], [], [])
    net: Any = torch.nn.Linear(4, 4)
    net.to_json_string = lambda: "{}"
    policy = Policy(net, build_adamw(net, lr=1e-3), Ema([*net.parameters()], decay=0.9))
    model: Any = SimpleNamespace(nets={"": "transformer"}, boundary=0.0)
    engine: Any = Engine(args.side, world.dist.device)
    scorer = LocalScorer(lambda media, texts: [Score(0.1 * (i % 7)) for i in range(len(texts))])
    prompts: Any = None
    records = [PromptRecord(i, f"a sign that says {i}", "", {}) for i in range(64)]
    params = sampling_params(settings)
    held_out = [HeldOut("", records, params)]
    run: Any = MediaRun(
        settings,
        world,
        model,
        policy,
        engine,
        scorer,
        session,
        prompts,
        params,
        held_out,
        trained=model.nets,
        algorithm="flowgrpo",
        base="none",
        version=args.start,
    )
    engine.generate = lambda prompts, params: replace(
        Engine.generate(engine, prompts, params), weight_version=run.version
    )
    return run


def metrics(step: int) -> dict[str, float]:
    """Return as many named numbers as a FlowGRPO step has."""
    return {name: (step * 37 % 1000 + i) / 1000 for i, name in enumerate(NAMES)} | {
        "reward/mean": step % 100 / 100,
        "reward/abstained_ratio": 0.0,
        "policy/clip_fraction": 0.1,
        "policy/skipped_updates": 0.0,
    }


def beside_s(args: Beside) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step with the seconds of its training thread besides the model: wall time and CPU time."""
    run = open_run(args)
    prompts = [Prompt(f"a sign {i // 16}", group=i // 16, index=i, seed=i) for i in range(args.images)]
    scored = Future[list[Score]]()
    scored.set_result([Score(0.1 * (i % 7)) for i in range(args.images)])
    with Loop(run, evaluate_set, export) as steps:
        wall, cpu = time.perf_counter(), time.thread_time()
        for step in steps:
            model, model_cpu = time.perf_counter(), time.thread_time()
            time.sleep(args.work_s)
            batches = [run.engine.generate(prompts, run.base_params)]
            step.metrics |= metrics(step.number)
            now, now_cpu = time.perf_counter(), time.thread_time()
            show(run, step, Rollout(prompts, batches, [scored]))
            yield (
                step.number,
                {
                    "wall": model - wall + time.perf_counter() - now,
                    "cpu": model_cpu - cpu + time.thread_time() - now_cpu,
                },
            )
            wall, cpu = time.perf_counter(), time.thread_time()


# A checkpoint


ROWS = 1024  # rows of each weight


@dataclass(frozen=True)
class Saves:
    """Settings of the state and where to save it."""

    gb: Annotated[float, at_least(0)] = 1.0  # Size of the state in 10^9 bytes
    saves: Annotated[int, at_least(1)] = 3  # Checkpoints of each kind
    folder: str = ""  # Where to write; by default the system's folder for temporary files


def checkpoint(args: Saves) -> None:
    """Time a checkpoint written during training, compared with waiting for the disk.

    The state is weights and AdamW's two moments, on the accelerator if there is one. Copy: the time that `async_save`
    adds to the step, including allocation of memory the first time. Until complete: from then until the checkpoint is
    on the disk. Work: matrix products on the training device, alone and while a checkpoint is written.
    """
    found = checkpoint_s(args.gb, args.saves, args.folder or None, init_distributed())
    print(runner.stamp(f"{args.gb:g} GB"))
    print(runner.table(("what", "value"), [(name, f"{value:.3g}") for name, value in found.items()]))


def make_state(gb: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return square weights and an optimizer with its moments, with a total size of `gb`."""
    count = max(1, round(gb * 1e9 / (12 * ROWS * ROWS)))
    net = nn.ParameterList([torch.randn(ROWS, ROWS, device=device) for _ in range(count)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for p in net:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def work(device: torch.device, seconds: float) -> float:
    """Return matrix products per second, measured for `seconds`."""
    a, count, start = torch.randn(512, 512, device=device), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        synchronize()
        count += 10
    return count / (time.perf_counter() - start)


def checkpoint_s(gb: float, saves: int, place: str | None, dist: Dist) -> dict[str, float]:
    """Return seconds and ratios by name; the fastest of several saves counts."""
    net, optimizer = make_state(gb, dist.device)
    with tempfile.TemporaryDirectory(dir=place) as name:
        home = Path(name)
        waited, beside = Checkpoint(home / "waited", dist, keep=1), Checkpoint(home / "beside", dist, keep=1)
        blocking = [runner.seconds_of(lambda n=n: waited.save(n, net, optimizer, config={})) for n in range(saves)]
        copies, bare, complete, alone, while_written = [], [], [], 0.0, 0.0
        flat = torch.ones(sum(3 * p.nbytes for p in net.parameters()), dtype=torch.uint8, device=dist.device)
        memory = host_memory(len(flat), dist.device).fill_(0)
        for n in range(saves + 1):
            bare.append(runner.seconds_of(lambda: memory.copy_(flat, non_blocking=True)))
            copies.append(runner.seconds_of(lambda n=n: beside.async_save(n, net, optimizer, config={})))
            complete.append(runner.seconds_of(beside.wait))
        alone = work(dist.device, 1.0)
        beside.async_save(saves + 1, net, optimizer, config={})
        while_written = work(dist.device, min(1.0, min(complete)))
        beside.wait()
    return {
        "save that training waits for, s": min(blocking),
        "copy, first time, s": copies[0],
        "copy, s": min(copies[1:]),
        "copy / bare copy": min(copies[1:]) / min(bare[1:]),
        "copy / save that training waits for": min(copies[1:]) / min(blocking),
        "until complete, s": min(complete),
        "work while it is written / alone": while_written / alone,
    }


# Noise


SHAPE, BATCH = (16, 64, 64), 4


@dataclass(frozen=True)
class Noise:
    """Settings of the noise samples."""

    rounds: Annotated[int, at_least(1)] = 7  # Samples of each kind


def noise(args: Noise) -> None:
    """Time `step_noise` against `torch.randn`, for a batch of 512 x 512 pixel Qwen-Image latents, on one thread."""
    torch.set_num_threads(1)
    ours, plain = noise_s(args.rounds).values()
    row = (*(runner.spread([1000 * s for s in each]) for each in (ours, plain)), runner.ratio(ours, plain))
    print(runner.stamp())
    print(runner.table(("step_noise, ms", "torch.randn, ms", "ratio"), [row]))


def noise_s(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both kinds of noise in each round."""
    draws = {"step_noise": lambda: step_noise(range(BATCH), 0, SHAPE), "randn": lambda: torch.randn(BATCH, *SHAPE)}
    return runner.take_turns(draws, rounds)


if __name__ == "__main__":
    runner.run(__doc__, framework, sampling, redundancy, beside, checkpoint, noise)
