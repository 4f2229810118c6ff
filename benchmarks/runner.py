"""Shared code of benchmarks: command line, rounds in turn, ratios with their spread, tables, a random model.

The default is the repository's small model. `--random` makes a transformer of Qwen-Image's shape with random weights,
and takes the other parts from the small model: its text input is only as wide as the small text encoder.
"""

import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Union, get_type_hints

import torch
import tyro
from omni_rl.settings.fields import at_least, check_bounds
from omni_train.checkpoint.state import local_rows
from omni_train.dist import local_device, synchronize
from torch import nn

REPO = Path(__file__).resolve().parents[1]
TEXT = 'a pink sign that says "K7QX"'
HEAD_SIZE, ROPE_AXES = 128, (16, 56, 56)  # Qwen-Image's


# The command line


def run(description: str | None, *subjects: Callable[[Any], None], argv: Sequence[str] | None = None) -> None:
    """Call a subject with the arguments of the command line. If there are several subjects, the first word names one.

    Invalid arguments end the program with exit code 2. subjects: functions of one argument, each a different dataclass;
    its method `check`, if any, raises ValueError for invalid values.
    """
    calls = {get_type_hints(each)["args"]: each for each in subjects}
    named = [
        Annotated[shape, tyro.conf.subcommand(each.__name__, description=inspect.cleandoc(each.__doc__ or ""))]
        for shape, each in calls.items()
    ]
    shape: Any = Union[tuple(named)] if len(named) > 1 else next(iter(calls))  # noqa: UP007 - their number varies
    args = tyro.cli(shape, args=argv, description=inspect.cleandoc(description or ""))
    try:
        check_bounds(args)
        getattr(args, "check", lambda: None)()
    except ValueError as fault:
        print(f"{Path(sys.argv[0]).name}: {fault}", file=sys.stderr)
        sys.exit(2)
    calls[type(args)](args)


# The clock


def now(device: torch.device) -> float:
    """Return seconds: of this process's CPU time on a CPU, which others may share; of the clock on an accelerator."""
    synchronize()
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call, including the work that it queues on the device."""
    synchronize()
    start = clock()
    call()
    synchronize()
    return clock() - start


def take_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round. All take turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            seconds = seconds_of(call, clock)
            times[name] += [seconds] * (i > 0)
    return times


@contextmanager
def quiet() -> Iterator[None]:
    """Run the `with` block in a new working folder, without output on stdout."""
    here, out = os.getcwd(), os.dup(1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        os.chdir(folder)
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(out, 1)
            os.chdir(here)


# What is printed


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median and the range of values, such as those of rounds."""
    numbers = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return "{} ({} to {})".format(*numbers) if len(values) > 1 else numbers[0]


def ratio(values: Sequence[float], over: Sequence[float]) -> str:
    """Return the median and the range of the ratio over the rounds."""
    return spread([value / other for value, other in zip(values, over, strict=True)])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [header, ["---"] * len(header), *rows])


def stamp(*about: object) -> str:
    """Return the line above a table: date, commit, device, torch, and the subject."""
    where = (str(date.today()), f"commit {commit()}", machine(local_device()), f"torch {torch.__version__}")
    return ", ".join([*where, *map(str, about)])


def machine(device: torch.device) -> str:
    """Return the name of an accelerator, or that of a CPU with its cores and those used by torch."""
    name = device_name(device)
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores" if device.type == "cpu" else name


def device_name(device: torch.device) -> str:
    """Return the name of the device."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else f"{device.type} {platform.machine()}"


def commit() -> str:
    """Return the commit of the tree, and whether its code was changed; without git, the value of COMMIT."""
    ask = partial(subprocess.run, cwd=REPO, capture_output=True, text=True)
    name = str(ask(["git", "rev-parse", "--short", "HEAD"]).stdout).strip() or os.environ.get("COMMIT", "unknown")
    code = ["apps", "benchmarks", "packages", "scripts"]
    return f"{name}, changed" if ask(["git", "diff", "--quiet", "HEAD", "--", *code]).returncode == 1 else name


# The model


@dataclass(frozen=True)
class ModelArgs:
    """The model, and the samples of a forward pass."""

    model: str = str(REPO / "checkpoints" / "tiny-signs-qwen-image")  # Folder of a pipeline
    height: Annotated[int, at_least(16)] = 32  # Pixels
    width: Annotated[int, at_least(16)] = 96  # Pixels
    num_inference_steps: Annotated[int, at_least(2)] = 10  # Denoising steps
    batch_size: Annotated[int, at_least(1)] = 8  # Samples of one prompt, in one forward pass
    lora_rank: Annotated[int, at_least(1)] = 16  # Rank of the adapters
    random: Annotated[int, at_least(0)] = 0  # Blocks of a random transformer in place of the model's; 0 is none
    random_heads: Annotated[int, at_least(1)] = 24  # Its heads, of 128 channels each; Qwen-Image has 24


def config(path: str, part: str) -> dict[str, Any]:
    """Return the configuration of one part of a pipeline's folder."""
    found: dict[str, Any] = json.loads((Path(path) / part / "config.json").read_text())
    return found


def random_transformer(
    num_blocks: int, num_heads: int, text_width: int, *, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return a transformer of Qwen-Image's shape with random weights."""
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        net = QwenImageTransformer2DModel(
            num_layers=num_blocks,
            num_attention_heads=num_heads,
            attention_head_dim=HEAD_SIZE,
            axes_dims_rope=ROPE_AXES,
            joint_attention_dim=text_width,
        )
    net = net.to(dtype).to_empty(device=device)
    fill(net)
    return net


@torch.no_grad()
def fill(net: nn.Module) -> None:
    """Sample weights and biases with standard deviation 0.02; norms are 1, as in a new model.

    Weights are never zero: matrix products of zeros use less power and run faster than real ones.
    """
    torch.manual_seed(0)
    for module in net.modules():
        for param in module.parameters(recurse=False):
            rows, _ = local_rows(param)
            rows.normal_(std=0.02) if isinstance(module, nn.Linear) else rows.fill_(1)
