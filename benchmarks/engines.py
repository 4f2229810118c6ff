"""Shared parts of benchmarks: the model, the prompts, the clock and the table.

Without a checkpoint of a realistic size, `--random` creates a transformer of Qwen-Image's shape with random weights,
and takes the other parts from the small checkpoint. Only its text input is narrower, as wide as the small text encoder.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from omni_rl.settings.fields import at_least
from omni_rollout import Model, Prompt
from omni_train.checkpoint.state import local_rows
from omni_train.dist import local_device, synchronize
from torch import nn

REPO = Path(__file__).resolve().parents[1]
TEXT = 'a pink sign that says "K7QX"'
HEAD_SIZE, ROPE_AXES = 128, (16, 56, 56)  # Qwen-Image's
MB = 2**20


@dataclass(frozen=True)
class Args:
    """Settings of the benchmark."""

    model: str = str(Path(__file__).parents[1] / "checkpoints" / "tiny-signs-qwen-image")  # Folder of a pipeline
    height: Annotated[int, at_least(16)] = 32  # Pixels
    width: Annotated[int, at_least(16)] = 96  # Pixels
    num_inference_steps: Annotated[int, at_least(2)] = 10  # Denoising steps
    batch_size: Annotated[int, at_least(1)] = 8  # Samples of one prompt, in one forward
    lora_rank: Annotated[int, at_least(1)] = 16  # Of the adapters that are merged
    random: Annotated[int, at_least(0)] = 0  # Blocks of a random transformer in the model's place; 0 is none
    random_heads: Annotated[int, at_least(1)] = 24  # Its heads, of 128 channels each; Qwen-Image has 24


def prompts(args: Args) -> list[Prompt]:
    """One group."""
    return [Prompt(TEXT, group=0, index=i, seed=i) for i in range(args.batch_size)]


@contextmanager
def checkpoint(args: Args, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """The folder of the pipeline, with a random transformer in it if one is asked for."""
    if not args.random:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(args.model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("transformer"))
        text_width = config(folder, "text_encoder")["text_config"]["hidden_size"]
        net = random_transformer(args.random, args.random_heads, text_width, device=device, dtype=dtype)
        net.save_pretrained(Path(folder) / "transformer")
        del net
        yield folder


def random_transformer(
    num_blocks: int, num_heads: int, text_width: int, *, device: torch.device, dtype: torch.dtype
) -> Any:
    """A transformer of Qwen-Image's shape, filled."""
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
    """Weights and biases normal with standard deviation 0.02; norms as they are in a fresh model, 1.

    Never zeros: matrix products of zeros draw less power, and run faster than any real ones.
    """
    torch.manual_seed(0)
    for module in net.modules():
        for param in module.parameters(recurse=False):
            rows, _ = local_rows(param)
            rows.normal_(std=0.02) if isinstance(module, nn.Linear) else rows.fill_(1)


def config(path: str, part: str) -> dict[str, Any]:
    """The configuration of one part of a pipeline's folder."""
    found: dict[str, Any] = json.loads((Path(path) / part / "config.json").read_text())
    return found


def open_engine(model: Model, device: torch.device, dtype: torch.dtype) -> Any:
    """The vLLM-Omni engine. Imported here, so that what it takes in memory can be told from the rest."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    return VllmOmniEngine(model, device=device, dtype=dtype)


def now(device: torch.device) -> float:
    """Seconds: of this process's work on a CPU, which others may share, and of the wall clock on an accelerator."""
    synchronize()
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def device_name(device: torch.device) -> str:
    """Return the name of the device."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else f"{device.type} {platform.machine()}"


def commit() -> str:
    """The commit of the tree, and whether the code in it was changed; without git, what COMMIT names."""
    ask = partial(subprocess.run, cwd=REPO, capture_output=True, text=True)
    name = str(ask(["git", "rev-parse", "--short", "HEAD"]).stdout).strip() or os.environ.get("COMMIT", "unknown")
    code = ["apps", "benchmarks", "packages", "scripts"]
    return f"{name}, changed" if ask(["git", "diff", "--quiet", "HEAD", "--", *code]).returncode == 1 else name


def stamp(*about: object) -> str:
    """The line above a table: date, commit, device, torch, and what it is about."""
    where = (str(date.today()), f"commit {commit()}", device_name(local_device()), f"torch {torch.__version__}")
    return ", ".join([*where, *map(str, about)])


def setting(args: Args, path: str, device: torch.device) -> str:
    """One line that says what was measured, where and when."""
    from diffusers import QwenImageTransformer2DModel

    shape = config(path, "transformer")
    with torch.device("meta"):
        num_params = QwenImageTransformer2DModel.from_config(shape).num_parameters()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers", "vllm-omni"))
    name = f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} of them used"
    if device.type != "cpu":
        name = device_name(device)
    return (
        f"{date.today()}; commit {commit()}; {name}; {versions}; "
        f"{shape['num_layers']} blocks, {shape['num_attention_heads']} heads of "
        f"{shape['attention_head_dim']}, {num_params / 1e6:.1f} M parameters{', random' if args.random else ''}; "
        f"{args.width} x {args.height} pixels, {args.num_inference_steps} steps, batch of {args.batch_size}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])
