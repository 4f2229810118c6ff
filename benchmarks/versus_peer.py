"""A trainer's step compared with that of another project's trainer: CPU time, rollout and update, and memory.

git clone https://github.com/yifan123/flow_grpo && git -C flow_grpo checkout ac4c86e
python benchmarks/versus_peer.py --peer flow_grpo
git clone https://github.com/NVlabs/DiffusionNFT && git -C DiffusionNFT checkout 24af555
python benchmarks/versus_peer.py --peer DiffusionNFT
python benchmarks/versus_peer.py --peer flow_grpo --device-rows

All train the same random net of SD3.5's shape by a recipe with the peer's settings: the same number of images,
denoising steps, trained noise levels, forward passes of each policy, adapters and optimizer steps. flow_grpo's FlowGRPO
runs without its KL and moving average; DiffusionNFT is complete. The first step of a process does not count. The peer's
files run unchanged: absl, ml_collections, wandb and its rewards have stand-ins here, and its log shows where rollout
and update end. On a CPU, DiffusionNFT's CUDA calls are replaced when its file is read, as it supports no other device.

On a CPU, both compute in float32, each in a process with one thread, at the same time, so that other load on the
machine affects both. With `--device-rows` they run one after the other on the accelerator, ours eager and compiled, by
default with SD3.5-medium's 24 blocks, 512 x 512 pixels, and the device's dtype.
"""

import contextlib
import io
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from multiprocessing import get_context, set_start_method
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, NamedTuple

import runner
import torch
import trainer
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.fields import at_least, change, require
from omni_rl.settings.toml import from_toml, load_recipes
from omni_train.dist import default_compute_dtype, local_device, memory
from runner import quiet

sys.path += [str(runner.REPO / "scripts"), str(runner.REPO / "apps")]
import build_tiny_models

import train_flowgrpo
import train_nft

NUM_UPDATES = 2  # optimizer steps per training step
HEAD_SIZE = 64  # SD3.5's


class Peer(NamedTuple):
    """Another project, and our settings that match its own.

    program: its trainer, which needs `files`. sampled: a metric that it logs after sampling. prepare: changes its
    config: values missing from the defaults, and those needed for a short run. on_cpu: text replacements in the program
    on a CPU. app, recipe, changes: our trainer, and changes to the recipe's settings.
    """

    name: str
    program: str
    sampled: str
    prepare: Callable[[Any], None]
    on_cpu: Mapping[str, str]
    app: ModuleType
    recipe: str
    changes: Mapping[str, Any]
    files: tuple[str, ...] = ("config/base.py", "flow_grpo/stat_tracking.py")


def prepare_grpo(config: Any) -> None:
    """Set the values that flow_grpo's recipes add to its defaults."""
    config.sample.eval_num_steps, config.sample.guidance_scale = 2, 4.5
    config.train.timestep_fraction = 1 - 0.5 / config.sample.num_steps


def prepare_nft(config: Any) -> None:
    """Set the values that DiffusionNFT's sd3_ocr adds to its defaults; no evaluation and no files."""
    config.debug, config.beta, config.decay_type, config.train.adv_mode = True, 0.1, 2, "all"
    config.sample.guidance_scale, config.sample.noise_level = 1.0, 0.7
    config.sample.deterministic, config.sample.solver = True, "dpm2"
    config.train.timestep_fraction = 1 - 0.5 / config.sample.num_steps


PEERS = (
    Peer(
        "flow_grpo",
        "scripts/train_sd3.py",
        "actual_batch_size",
        prepare_grpo,
        {},
        train_flowgrpo,
        "sd35-medium-flowgrpo-ocr-1gpu",
        {"kl_coef": 0.0, "ema_decay": 0.0, "lora.rank": 32, "lora.alpha": 64},
    ),
    Peer(
        "DiffusionNFT",
        "scripts/train_nft_sd3.py",
        "group_size",
        prepare_nft,
        {
            '"nccl"': '"gloo"',
            "torch.cuda.set_device(lock_rank)": "pass",
            'f"cuda:{local_rank}"': '"cpu"',
            "device_ids=[local_rank], output_device=local_rank, ": "",
        },
        train_nft,
        "sd35-medium-nft-ocr",
        {},
    ),
)
SMALL = {"side": 128, "num_inference_steps": 6, "batch_size": 4, "blocks": 4, "heads": 6}
REAL = {"side": 512, "num_inference_steps": 10, "batch_size": 8, "blocks": 24, "heads": 24}  # SD3.5-medium's


@dataclass(frozen=True)
class Args:
    """Settings of the benchmark. A size of 0 means that of SMALL, or of REAL with device_rows."""

    peer: str = ""  # Folder with the files of flow_grpo or of DiffusionNFT
    device_rows: bool = False  # Run one after the other on the accelerator, ours eager and compiled, with memory
    rounds: Annotated[int, at_least(1)] = 2  # Runs of each
    steps: Annotated[int, at_least(1)] = 2  # Counted steps of each process
    side: Annotated[int, at_least(0)] = 0  # Side of an image in pixels
    num_inference_steps: Annotated[int, at_least(0)] = 0  # Denoising steps; all except the last are trained
    batch_size: Annotated[int, at_least(0)] = 0  # Images per prompt and per forward pass; a step has two prompts
    blocks: Annotated[int, at_least(0)] = 0  # Blocks of the net; the first half have SD3.5-medium's second attention
    heads: Annotated[int, at_least(0)] = 0  # Heads of the net, of 64 channels each
    compile: bool = False  # Pass --compile to our trainer

    def check(self) -> None:
        """Raise ValueError unless the peer's files exist."""
        peer_in(self.peer)

    def sized(self) -> "Args":
        """Return the arguments with all sizes set."""
        sizes = REAL if self.device_rows else SMALL
        return replace(self, **{name: getattr(self, name) or size for name, size in sizes.items()})


def peer_in(folder: str) -> Peer:
    """Return the project whose files are in the folder.

    Raises:
        ValueError: the folder has no project's complete files.
    """
    for peer in PEERS:
        if all((Path(folder) / name).is_file() for name in (peer.program, *peer.files)):
            return peer
    needed = " or ".join(f"{peer.name}'s {', '.join((peer.program, *peer.files))}" for peer in PEERS)
    raise ValueError(f"--peer must be a folder with {needed}, got {folder!r}")


class Seconds(NamedTuple):
    """Seconds of a training step: CPU time, or wall time on an accelerator. rollout: all except the update."""

    rollout: float
    update: float


class Result(NamedTuple):
    """The steps of a process, and its peak memory on the device, or on the host for a CPU, in MB."""

    steps: list[Seconds]
    peak_mb: float


def build(args: Args, folder: Path) -> int:
    """Write a random checkpoint of SD3.5's shape with tiny encoders and VAE; return the number of the net's weights."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    pipeline = build_tiny_models.build_sd35()
    shape = pipeline.transformer.config | {
        "num_layers": args.blocks,
        "attention_head_dim": HEAD_SIZE,
        "num_attention_heads": args.heads,
        "caption_projection_dim": HEAD_SIZE * args.heads,
        "dual_attention_layers": tuple(range(args.blocks // 2)),
    }
    pipeline.transformer = SD3Transformer2DModel.from_config(shape)
    pipeline.save_pretrained(folder)
    return int(pipeline.transformer.num_parameters())


def ours(args: Args, model: str) -> Result:
    """Run the trainer and return its steps."""
    peer, found, spent, device = peer_in(args.peer), list[Seconds](), Counter[str](), local_device()

    def steps(run: MediaRun[Any]) -> Iterator[Step]:
        trainer.clock(run, spent)
        for number in range(1 + args.steps):
            start, before = runner.now(device), spent["update"]
            yield Step(number)
            update = spent["update"] - before
            found.append(Seconds(runner.now(device) - start - update, update))

    settings = from_toml(load_recipes(peer.app.__name__)[peer.recipe], peer.app.Args, peer.recipe) | {
        "name": "run",
        "model": model,
        "prompts": "prompts.txt",
        "eval.prompts": "prompts.txt",
        "scorer.url": "http://127.0.0.1:1",
        "dtype": dtype_of(args),
        "height": args.side,
        "width": args.side,
        "num_inference_steps": args.num_inference_steps,
        "prompts_per_step": 2,
        "group_size": args.batch_size,
        "batch_size": args.batch_size,
        "num_minibatches": NUM_UPDATES,
        "compile": args.compile,
        **peer.changes,
        **({"train_levels": args.num_inference_steps - 1} if peer.app is train_nft else {}),
    }
    trainer.train(change(peer.app.Args(), **settings), steps, app=peer.app)
    return Result(found[1:], memory(device).peak_mb)


def ours_compiled(args: Args, model: str) -> Result:
    """Run the trainer with --compile and return its steps."""
    return ours(replace(args, compile=True), model)


def dtype_of(args: Args) -> str:
    """Return the dtype of both: float32 if CPUs are compared, otherwise the device's default."""
    return str(default_compute_dtype(local_device())).removeprefix("torch.") if args.device_rows else "float32"


class Enough(Exception):  # noqa: N818 - as StopIteration
    """The peer has trained for long enough; it would not stop by itself."""


def theirs(args: Args, model: str) -> Result:
    """Run the peer and return its steps."""
    peer, folder, found, device = peer_in(args.peer), Path(args.peer).resolve(), list[Seconds](), local_device()
    marks = [runner.now(device)]

    def log(values: Mapping[str, object], step: int = 0) -> None:
        if values.keys() & {peer.sampled, "inner_epoch"}:  # after sampling, and after an optimizer step
            marks.append(runner.now(device))
        if len(marks) == 2 + NUM_UPDATES:
            start, sampled, *_, end = marks
            found.append(Seconds(sampled - start, end - sampled))
            marks[:] = [end]
        if len(found) > args.steps:
            raise Enough

    sys.path.insert(0, str(folder))
    set_start_method("fork", force=True)  # for its data loaders, as in a program that was not spawned
    stand_in("ml_collections", ConfigDict=Config, config_flags=SimpleNamespace(DEFINE_config_file=ignore))
    config = peer_config(args, model, runpy.run_path(f"{folder}/config/base.py")["get_config"]())
    peer.prepare(config)
    flags = SimpleNamespace(FLAGS=SimpleNamespace(config=config))
    stand_in("absl", app=SimpleNamespace(run=lambda main: main([])), flags=flags)
    stand_in("wandb", init=ignore, log=log, Image=ignore)
    stand_in("flow_grpo.rewards", multi_score=lambda device, wanted: scores)
    program = (folder / peer.program).read_text("utf-8")
    program = for_cpu(program, peer) if device.type == "cpu" else program
    alone = trainer.lone_rank() if peer.on_cpu else contextlib.nullcontext()  # provides the variables of torchrun
    with quiet(), contextlib.redirect_stderr(io.StringIO()), alone, contextlib.suppress(Enough):
        for name in ("train.txt", "test.txt"):
            Path(name).write_text("\n".join(trainer.TEXTS[:2]) + "\n")
        exec(compile(program, folder / peer.program, "exec"), {"__name__": "__main__"})
    return Result(found[1:], memory(device).peak_mb)


def for_cpu(program: str, peer: Peer) -> str:
    """Return the peer's program with its CUDA calls replaced.

    Raises:
        ValueError: it does not contain each of them exactly once.
    """
    for old, new in peer.on_cpu.items():
        require((program.count(old) == 1, f"{peer.program} must have {old} once, got {program.count(old)}"))
        program = program.replace(old, new)
    return program


class Config(SimpleNamespace):
    """A stand-in for ml_collections' ConfigDict."""

    def to_dict(self) -> dict[str, object]:
        """Return the values."""
        return vars(self)


def peer_config(args: Args, model: str, config: Any) -> Any:
    """Return the peer's defaults with the sizes of the benchmark."""
    config.mixed_precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[dtype_of(args)]
    config.pretrained.model = model
    config.dataset, config.prompt_fn, config.resolution = ".", "general_ocr", args.side
    sample, train, size = config.sample, config.train, args.batch_size
    sample.num_steps, sample.num_batches_per_epoch = args.num_inference_steps, NUM_UPDATES
    sample.train_batch_size = sample.num_image_per_prompt = train.batch_size = size
    train.gradient_accumulation_steps = 1
    return config


def scores(images: Sequence[object], prompts: object, metadata: object, *, only_strict: bool) -> tuple[Any, Any]:
    """Return the scores of `trainer.in_order` in the peer's format."""
    return {"avg": [score.value for score in trainer.in_order({}, [""] * len(images))]}, {}


def ignore(*args: object, **kwargs: object) -> None:
    """Do nothing; stands in for a library function that the benchmark does not need."""


def stand_in(name: str, **attributes: object) -> None:
    """Make `import name` find a module with only these attributes."""
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(__import__(parent), own, module)


def on_one_core() -> None:
    """Restrict this process to the CPU, with one thread."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)


Side = Callable[[Args, str], Result]


def at_once(sides: Mapping[str, Side], args: Args, model: str) -> dict[str, Result]:
    """Return the results of all sides, run at the same time, each in its own process on one core."""
    with ProcessPoolExecutor(len(sides), mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        waiting = {name: pool.submit(side, args, model) for name, side in sides.items()}
        return {name: each.result() for name, each in waiting.items()}


def in_turn(sides: Mapping[str, Side], args: Args, model: str) -> dict[str, Result]:
    """Return the results of all sides, run one after another, each in its own process with the device to itself."""
    found = {}
    for name, side in sides.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[name] = pool.submit(side, args, model).result()
    return found


def measure(args: Args) -> tuple[int, dict[str, list[Result]]]:
    """Return the number of the net's weights, and the results of each side in each round."""
    args = args.sized()
    sides: dict[str, Side] = {peer_in(args.peer).name: theirs, "trainer": ours}
    sides |= {"trainer, compiled": ours_compiled} if args.device_rows else {}
    with TemporaryDirectory() as folder:
        num_weights = build(args, Path(folder))
        run = in_turn if args.device_rows else at_once
        rounds = [run(sides, args, folder) for _ in range(args.rounds)]
    return num_weights, {name: [each[name] for each in rounds] for name in sides}


def rows_of(found: Mapping[str, Sequence[Result]]) -> list[tuple[str, ...]]:
    """Return one row per phase and side, and per memory peak: its median and range, and the ratio to the peer.

    found: the results of each round by side, starting with the peer.
    """
    steps = {name: [one for result in results for one in result.steps] for name, results in found.items()}
    peer, rows = next(iter(found)), []
    for phase in (*Seconds._fields, "step"):
        seconds = {n: [sum(s) if phase == "step" else getattr(s, phase) for s in all_] for n, all_ in steps.items()}
        for name, own in seconds.items():
            rows.append((phase, name, runner.spread(own, 2), runner.ratio(own, seconds[peer])))
    for name, results in found.items():
        peaks = [[result.peak_mb / 1e3 for result in each] for each in (results, found[peer])]
        rows.append(("most memory, GB", name, runner.spread(peaks[0], 2), runner.ratio(*peaks)))
    return rows


def versus_peer(args: Args) -> None:
    """Measure and print a table."""
    num_weights, found = measure(args)
    print(runner.stamp(f"{num_weights / 1e6:.1f} M weights", args.sized()))
    unit = "s" if args.device_rows else "s of CPU"
    print(runner.table(("phase", "of", unit, f"over {next(iter(found))}"), rows_of(found)))


if __name__ == "__main__":
    runner.run(__doc__, versus_peer)
