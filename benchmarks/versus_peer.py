"""The trainer's FlowGRPO step beside that of flow_grpo's own trainer: seconds of CPU, of rollout and update.

git clone https://github.com/yifan123/flow_grpo && git -C flow_grpo checkout ac4c86e
python benchmarks/versus_peer.py --peer flow_grpo
python benchmarks/versus_peer.py --peer flow_grpo --device-rows

All train the same random net of SD3.5's shape, by the recipe sd35-medium-flowgrpo-ocr-1gpu without its KL and moving
average: as many images, guided and trained denoising steps, adapters and optimizer steps. The first step of a process
does not count. flow_grpo's files run as they are: absl, ml_collections, wandb and its rewards have stand-ins here, and
what it logs tells where rollout and update end.

On a CPU both compute in float32, each in a process with one thread, at once, so that what else the machine does meets
both. With `--device-rows` they run one after the other on the accelerator, ours eager and compiled, by default with
SD3.5-medium's 24 blocks, 512 x 512 pixels, and the data type of the device; the most memory of each is told too.
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
from omni_rl.settings.toml import from_toml, recipes
from omni_train.dist import default_compute_dtype, local_device, memory
from runner import quiet
from trainer import app

sys.path.append(str(runner.REPO / "scripts"))
import build_tiny_models

RECIPE = "sd35-medium-flowgrpo-ocr-1gpu"  # after the peer's settings of that name
PEER_FILES = ("scripts/train_sd3.py", "config/base.py", "flow_grpo/stat_tracking.py")
PEER = "flow_grpo"
NUM_UPDATES = 2  # optimizer steps of a step
HEAD_SIZE = 64  # SD3.5's


SMALL = {"side": 128, "num_inference_steps": 6, "batch_size": 4, "blocks": 4, "heads": 6}
REAL = {"side": 512, "num_inference_steps": 10, "batch_size": 8, "blocks": 24, "heads": 24}  # SD3.5-medium's


@dataclass(frozen=True)
class Args:
    """Settings of the benchmark. A size of 0 is that of SMALL, or of REAL with device_rows."""

    peer: str = ""  # Folder with flow_grpo's files
    device_rows: bool = False  # One after the other on the accelerator, ours eager and compiled, with their memory
    rounds: Annotated[int, at_least(1)] = 2  # Times that each runs
    steps: Annotated[int, at_least(1)] = 2  # Steps of each process that count
    side: Annotated[int, at_least(0)] = 0  # Pixels of an image's side
    num_inference_steps: Annotated[int, at_least(0)] = 0  # Denoising steps, all but the last of which are trained
    batch_size: Annotated[int, at_least(0)] = 0  # Images of a prompt and of a forward; a step has two prompts
    blocks: Annotated[int, at_least(0)] = 0  # Of the net; the first half have SD3.5-medium's second attention
    heads: Annotated[int, at_least(0)] = 0  # Of the net, of 64 channels each
    compile: bool = False  # Give the trainer --compile, a setting of its own

    def check(self) -> None:
        """Raise ValueError unless the peer's files are there."""
        missing = [name for name in PEER_FILES if not (Path(self.peer) / name).is_file()]
        require((not missing, f"--peer must be a folder with flow_grpo's files, got {self.peer!r} without {missing}"))

    def sized(self) -> "Args":
        """Return the arguments with all sizes."""
        sizes = REAL if self.device_rows else SMALL
        return replace(self, **{name: getattr(self, name) or size for name, size in sizes.items()})


class Seconds(NamedTuple):
    """Seconds of a training step, of the CPU or on an accelerator. rollout: all but the update."""

    rollout: float
    update: float


class Result(NamedTuple):
    """The steps of a process, and the most memory that it took of the device, in MB."""

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
    """Return the trainer's steps."""
    found, spent, device = list[Seconds](), Counter[str](), local_device()

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        trainer.clock(run, spent)
        for number in range(1 + args.steps):
            start, before = runner.now(device), spent["update"]
            yield Step(number)
            update = spent["update"] - before
            found.append(Seconds(runner.now(device) - start - update, update))

    settings = from_toml(recipes("train_flowgrpo")[RECIPE], app.Args, RECIPE) | {
        "name": "run",
        "model": model,
        "prompts": "prompts.txt",
        "eval.prompts": "prompts.txt",
        "scorer.url": "http://127.0.0.1:1",
        "dtype": dtype_of(args),
        "kl_coef": 0.0,
        "ema_decay": 0.0,
        "height": args.side,
        "width": args.side,
        "num_inference_steps": args.num_inference_steps,
        "prompts_per_step": 2,
        "group_size": args.batch_size,
        "batch_size": args.batch_size,
        "num_minibatches": NUM_UPDATES,
        "lora.rank": 32,
        "lora.alpha": 64,
        "compile": args.compile,
    }
    trainer.train(change(app.Args(), **settings), steps)
    return Result(found[1:], memory(device).peak_mb)


def ours_compiled(args: Args, model: str) -> Result:
    """Return the trainer's steps with --compile."""
    return ours(replace(args, compile=True), model)


def dtype_of(args: Args) -> str:
    """Return the data type of both: float32 on CPUs that are compared, else the device's own."""
    return str(default_compute_dtype(local_device())).removeprefix("torch.") if args.device_rows else "float32"


class Enough(Exception):  # noqa: N818 - as StopIteration
    """The peer has trained for long enough, which it does not end by itself."""


def theirs(args: Args, model: str) -> Result:
    """Return the peer's steps."""
    found, device = list[Seconds](), local_device()
    marks = [runner.now(device)]

    def log(values: Mapping[str, object], step: int = 0) -> None:
        if values.keys() & {"actual_batch_size", "inner_epoch"}:  # after sampling, and after an optimizer step
            marks.append(runner.now(device))
        if len(marks) == 2 + NUM_UPDATES:
            start, sampled, *_, end = marks
            found.append(Seconds(sampled - start, end - sampled))
            marks[:] = [end]
        if len(found) > args.steps:
            raise Enough

    peer = str(Path(args.peer).resolve())
    sys.path.insert(0, peer)
    set_start_method("fork", force=True)  # for its loaders, as in a program that was not spawned
    stand_in("ml_collections", ConfigDict=SimpleNamespace, config_flags=SimpleNamespace(DEFINE_config_file=ignore))
    config = peer_config(args, model, runpy.run_path(f"{peer}/config/base.py")["get_config"]())
    flags = SimpleNamespace(FLAGS=SimpleNamespace(config=config))
    stand_in("absl", app=SimpleNamespace(run=lambda main: main([])), flags=flags)
    stand_in("wandb", init=ignore, log=log, Image=ignore)
    stand_in("flow_grpo.rewards", multi_score=lambda device, wanted: scores)
    with quiet(), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Enough):
        for name in ("train.txt", "test.txt"):
            Path(name).write_text("\n".join(trainer.TEXTS[:2]) + "\n")
        runpy.run_path(f"{peer}/scripts/train_sd3.py", run_name="__main__")
    return Result(found[1:], memory(device).peak_mb)


def peer_config(args: Args, model: str, config: Any) -> Any:
    """Return the peer's own defaults, with what RECIPE, or else a run of a few minutes, changes."""
    config.mixed_precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[dtype_of(args)]
    config.pretrained.model = model
    config.dataset, config.prompt_fn, config.resolution = ".", "general_ocr", args.side
    sample, train, size = config.sample, config.train, args.batch_size
    sample.num_steps, sample.eval_num_steps, sample.guidance_scale = args.num_inference_steps, 2, 4.5
    sample.train_batch_size = sample.num_image_per_prompt = train.batch_size = size
    sample.num_batches_per_epoch, train.gradient_accumulation_steps = NUM_UPDATES, 1
    train.timestep_fraction = 1 - 0.5 / args.num_inference_steps
    return config


def scores(images: Sequence[object], prompts: object, metadata: object, *, only_strict: bool) -> tuple[Any, Any]:
    """Return the scores of `trainer.in_order`, as the peer wants them."""
    return {"avg": [score.value for score in trainer.in_order({}, [""] * len(images))]}, {}


def ignore(*args: object, **kwargs: object) -> None:
    """Do nothing, as a part of a library that the benchmark has no use for."""


def stand_in(name: str, **attributes: object) -> None:
    """Have `import name` find a module with these attributes only."""
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(__import__(parent), own, module)


def on_one_core() -> None:
    """Have this process compute on a CPU, with one thread."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)


Side = Callable[[Args, str], Result]


def at_once(sides: Mapping[str, Side], args: Args, model: str) -> dict[str, Result]:
    """Return the results of each side, each in its own process with a core."""
    with ProcessPoolExecutor(len(sides), mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        waiting = {name: pool.submit(side, args, model) for name, side in sides.items()}
        return {name: each.result() for name, each in waiting.items()}


def in_turn(sides: Mapping[str, Side], args: Args, model: str) -> dict[str, Result]:
    """Return the results of each side, each in its own process that has the device alone."""
    found = {}
    for name, side in sides.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[name] = pool.submit(side, args, model).result()
    return found


def measure(args: Args) -> tuple[int, dict[str, list[Result]]]:
    """Return the number of the net's weights, and the results of each side in each round."""
    args = args.sized()
    sides: dict[str, Side] = {PEER: theirs, "trainer": ours}
    sides |= {"trainer, compiled": ours_compiled} if args.device_rows else {}
    with TemporaryDirectory() as folder:
        num_weights = build(args, Path(folder))
        run = in_turn if args.device_rows else at_once
        rounds = [run(sides, args, folder) for _ in range(args.rounds)]
    return num_weights, {name: [each[name] for each in rounds] for name in sides}


def rows_of(found: Mapping[str, Sequence[Result]], *, memory: bool) -> list[tuple[str, ...]]:
    """Return a row for each phase of each side: its median and range, and that of the ratio to the peer's steps.

    memory: True for rows of the most memory of the device.
    """
    steps = {name: [one for result in results for one in result.steps] for name, results in found.items()}
    rows = []
    for phase in (*Seconds._fields, "step"):
        seconds = {n: [sum(s) if phase == "step" else getattr(s, phase) for s in all_] for n, all_ in steps.items()}
        for name, own in seconds.items():
            rows.append((phase, name, runner.spread(own, 2), runner.ratio(own, seconds[PEER])))
    for name, results in found.items() if memory else ():
        peaks = [[result.peak_mb / 1e3 for result in each] for each in (results, found[PEER])]
        rows.append(("most memory, GB", name, runner.spread(peaks[0], 2), runner.ratio(*peaks)))
    return rows


def versus_peer(args: Args) -> None:
    """Measure and print a table."""
    num_weights, found = measure(args)
    print(runner.stamp(f"{num_weights / 1e6:.1f} M weights", args.sized()))
    unit = "s" if args.device_rows else "s of CPU"
    head = ("phase", "of", unit, f"over {PEER}")
    print(runner.table(head, rows_of(found, memory=args.device_rows and local_device().type != "cpu")))


if __name__ == "__main__":
    runner.run(__doc__, versus_peer)
