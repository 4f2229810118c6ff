"""The trainer's FlowGRPO step beside that of flow_grpo's own trainer: seconds of CPU, of rollout and update.

git clone https://github.com/yifan123/flow_grpo && git -C flow_grpo checkout ac4c86e
python benchmarks/versus_peer.py --peer flow_grpo

Both train the same random net of SD3.5's shape in float32, by the recipe sd35-medium-flowgrpo-ocr-1gpu without its KL
and moving average: as many images, guided and trained denoising steps, adapters and optimizer steps. Each has a process
with one thread, and both run at once, so that what else the machine does meets both. The first step of a process does
not count. flow_grpo's files run as they are, on a CPU: absl, ml_collections, wandb and its rewards have stand-ins here,
and what it logs tells where rollout and update end.
"""

import contextlib
import io
import os
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
from runner import quiet
from trainer import app

sys.path.append(str(runner.REPO / "scripts"))
import build_tiny_models

RECIPE = "sd35-medium-flowgrpo-ocr-1gpu"  # after the peer's settings of that name
PEER_FILES = ("scripts/train_sd3.py", "config/base.py", "flow_grpo/stat_tracking.py")
NUM_UPDATES = 2  # optimizer steps of a step
HEAD_SIZE = 64  # SD3.5's


@dataclass(frozen=True)
class Args:
    """Settings of the benchmark."""

    peer: str = ""  # Folder with flow_grpo's files
    rounds: Annotated[int, at_least(1)] = 2  # Pairs of processes, one after the other
    steps: Annotated[int, at_least(1)] = 2  # Steps of each process that count
    height: Annotated[int, at_least(16)] = 128  # Pixels
    width: Annotated[int, at_least(16)] = 128  # Pixels
    num_inference_steps: Annotated[int, at_least(2)] = 6  # Denoising steps, all but the last of which are trained
    batch_size: Annotated[int, at_least(2)] = 4  # Images of a prompt and of a forward; a step has two prompts
    blocks: Annotated[int, at_least(2)] = 4  # Of the net; the first half have SD3.5-medium's second attention
    heads: Annotated[int, at_least(1)] = 6  # Of the net, of 64 channels each
    compile: bool = False  # Give the trainer --compile, a setting of its own

    def check(self) -> None:
        """Raise ValueError unless the peer's files are there."""
        missing = [name for name in PEER_FILES if not (Path(self.peer) / name).is_file()]
        require((not missing, f"--peer must be a folder with flow_grpo's files, got {self.peer!r} without {missing}"))


class Seconds(NamedTuple):
    """Seconds of CPU of a training step. rollout: all but the update."""

    rollout: float
    update: float


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


def ours(args: Args, model: str) -> list[Seconds]:
    """The seconds of the trainer's steps."""
    found, spent = list[Seconds](), Counter[str]()

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        trainer.clock(run, spent)
        for number in range(1 + args.steps):
            start, before = time.process_time(), spent["update"]
            yield Step(number)
            update = spent["update"] - before
            found.append(Seconds(time.process_time() - start - update, update))

    settings = from_toml(recipes("train_flowgrpo")[RECIPE], app.Args, RECIPE) | {
        "name": "run", "model": model, "prompts": "prompts.txt", "eval.prompts": "prompts.txt",
        "scorer.url": "http://127.0.0.1:1", "dtype": "float32", "kl_coef": 0.0, "ema_decay": 0.0,
        "height": args.height, "width": args.width, "num_inference_steps": args.num_inference_steps,
        "prompts_per_step": 2, "group_size": args.batch_size, "batch_size": args.batch_size,
        "num_minibatches": NUM_UPDATES, "lora.rank": 32, "lora.alpha": 64,
        "compile": args.compile,
    }  # fmt: skip
    trainer.train(change(app.Args(), **settings), steps)
    return found[1:]


class Enough(Exception):  # noqa: N818 - as StopIteration
    """The peer has trained for long enough, which it does not end by itself."""


def theirs(args: Args, model: str) -> list[Seconds]:
    """The seconds of the peer's steps."""
    found, marks = list[Seconds](), [time.process_time()]

    def log(values: Mapping[str, object], step: int = 0) -> None:
        if values.keys() & {"actual_batch_size", "inner_epoch"}:  # after sampling, and after an optimizer step
            marks.append(time.process_time())
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
    return found[1:]


def peer_config(args: Args, model: str, config: Any) -> Any:
    """The peer's own defaults, with what RECIPE, or else a run of a few minutes, changes."""
    config.mixed_precision, config.pretrained.model = "no", model
    config.dataset, config.prompt_fn, config.resolution = ".", "general_ocr", args.height
    sample, train, size = config.sample, config.train, args.batch_size
    sample.num_steps, sample.eval_num_steps, sample.guidance_scale = args.num_inference_steps, 2, 4.5
    sample.train_batch_size = sample.num_image_per_prompt = train.batch_size = size
    sample.num_batches_per_epoch, train.gradient_accumulation_steps = NUM_UPDATES, 1
    train.timestep_fraction = 1 - 0.5 / args.num_inference_steps
    return config


def scores(images: Sequence[object], prompts: object, metadata: object, *, only_strict: bool) -> tuple[Any, Any]:
    """The scores of `trainer.in_order`, as the peer wants them."""
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


def at_once(*sides: Callable[[Args, str], list[Seconds]], args: Args, model: str) -> list[list[Seconds]]:
    """Return the results of each side, each in its own process."""
    with ProcessPoolExecutor(len(sides), mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        return [each.result() for each in [pool.submit(side, args, model) for side in sides]]


def table(peer: Sequence[Seconds], own: Sequence[Seconds]) -> str:
    """Markdown: medians and ranges of each side, and the ratio of the medians."""
    phases = {name: [[getattr(s, name) for s in side] for side in (peer, own)] for name in Seconds._fields}
    phases["step"] = [[sum(s) for s in side] for side in (peer, own)]
    told = "{0:.2f} ({1:.2f} to {2:.2f})".format
    rows = []
    for name, sides in phases.items():
        middle = [statistics.median(side) for side in sides]
        cells = [told(m, min(side), max(side)) for m, side in zip(middle, sides, strict=True)]
        rows.append((name, *cells, f"{middle[1] / middle[0]:.3f}"))
    return runner.table(("phase", "flow_grpo, s of CPU", "trainer, s of CPU", "trainer / flow_grpo"), rows)


def versus_peer(args: Args) -> None:
    """Measure and print a table."""
    with TemporaryDirectory() as folder:
        num_weights = build(args, Path(folder))
        rounds = [at_once(theirs, ours, args=args, model=folder) for _ in range(args.rounds)]
    peer, own = ([seconds for found in rounds for seconds in found[side]] for side in (0, 1))
    print(runner.stamp(f"{num_weights / 1e6:.1f} M weights", args))
    print(table(peer, own))


if __name__ == "__main__":
    runner.run(__doc__, versus_peer)
