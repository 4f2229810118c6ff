"""A trainer's own step for benchmarks, by default FlowGRPO's: with the shipped model, or with random weights in memory.

    with model(args) as path:
        train(settings(args, path, memory_gradient_checkpointing=True), steps)

`steps(run)` yields each Step that the trainer takes, and can run code before and after it.
"""

import gc
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import omni_rl.run.session
import omni_train.prepare
import runner
import torch
from omni_reward import Score
from omni_rl.flow.scorers import Grade, LocalScorer
from omni_rl.run.loop import Loop
from omni_rl.run.run import MediaRun, Step
from omni_rl.run.world import World
from omni_rl.settings.fields import change
from omni_rollout.models.qwen_image import OneFrameConv, QwenImage, cut_to_one_frame
from omni_train.checkpoint.state import local_rows
from omni_train.dist import default_compute_dtype, local_device, shutdown
from runner import ModelArgs, quiet
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "apps"))
import train_flowgrpo as app

PLACES = (
    "a street at night after rain",
    "a market in the morning",
    "an old harbor under heavy clouds",
    "a quiet desert",
)
TEXTS = [  # about 60 tokens of Qwen-Image's tokenizer each, all of different lengths
    f'{place}, with a neon sign above a door that says "K{i}QX" in pink letters, a bicycle that leans on the wall, and '
    f"{'far ' * i}behind them hills, a tower with a clock, and people who wait for a bus and read the newspaper"
    for i, place in enumerate(PLACES)
]
GIVEN: dict[str, Any] = {  # settings of a published recipe for Qwen-Image, qwen-image-ocr-lora
    "algo": "flowgrpo", "noise_level": 1.2, "window_size": 2, "window_low": 0, "window_high": 5, "clip_range": 1e-5,
    "lora_rank": 16, "lora_alpha": 32, "true_cfg_scale": 4.0,
}  # fmt: skip


class Variant(NamedTuple):
    """Settings of memory and speed. smaller, blocks: to fit 80 GB, the batch size divisor and the number of blocks."""

    settings: Mapping[str, Any]
    smaller: int = 1
    blocks: int = 60


VARIANTS = {  # all but the last three compute the same
    "as it is": Variant({}, 16),
    "recomputed": Variant({"memory_gradient_checkpointing": True}),
    "compiled": Variant({"memory_gradient_checkpointing": True, "compile": True}),
    "products kept": Variant({"memory_gradient_checkpointing": True, "memory_keep_products_gb": 16.0}, 2),
    "offloaded": Variant(
        {"memory_gradient_checkpointing": True, "memory_offload": "encoder,engine,optimizer,activations"}
    ),
    "blocks offloaded": Variant({"memory_gradient_checkpointing": True, "memory_offload": "blocks"}),
    "gathered": Variant(
        {"memory_gradient_checkpointing": True, "sharding_mode": "fsdp2", "sharding_unshard": "all"}, 1, 20
    ),  # held twice
    "nf4": Variant({"memory_gradient_checkpointing": True, "memory_base_dtype": "nf4"}),
    "all weights": Variant(
        {"memory_gradient_checkpointing": True, "lora_rank": 0, "lora_alpha": 0, "sharding_mode": "fsdp2"}, 1, 4
    ),
    "compiled, all weights": Variant(
        {"memory_gradient_checkpointing": True, "compile": True, "lora_rank": 0, "lora_alpha": 0, "dtype": "float32"},
        1,
        4,
    ),
}

CONVOLUTIONS = ("Conv2d, channels last", "Conv2d", "conv3d")  # of the VAE; the first is used in the project


@dataclass(frozen=True)
class Args(ModelArgs):
    """Settings of the step."""

    batch_size: int = 4  # Samples in one forward pass
    group_size: int = 4  # Samples per prompt
    prompts_per_step: int = 2  # Prompts per step


@contextmanager
def model(args: ModelArgs) -> Iterator[str]:
    """Yield the folder of the model; with `--random`, loading it in the `with` block makes weights on the device."""
    if not args.random:
        yield str(Path(args.model).resolve())
        return
    kept = QwenImage.check_files, QwenImage.load_net, QwenImage.weight_files, omni_train.prepare.load_sharded

    def load_net(self: QwenImage, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        is_plan, self.reads_weights = not self.reads_weights, False
        net = kept[1](self, device=device, dtype=dtype)
        if not is_plan:
            runner.fill(net)
            self.reads_weights = True
        return net.requires_grad_(False)

    def weight_files(self: QwenImage, part: str = "transformer") -> list[Path]:
        return [] if part == "transformer" else kept[2](self, part)

    @torch.no_grad()
    def load_sharded(net: nn.Module, files: Any, mesh: Any, **options: Any) -> nn.Module:
        net = kept[3](net, None, mesh, **options)
        if files is not None:  # None in a plan
            runner.fill(net)
        return net

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            args.model,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.safetensors", "vae", "text_encoder"),
        )
        for part in ("vae", "text_encoder"):
            (Path(folder) / part).symlink_to(Path(args.model).resolve() / part)
        shape = {
            "num_layers": args.random,
            "num_attention_heads": args.random_heads,
            "attention_head_dim": runner.HEAD_SIZE,
            "axes_dims_rope": runner.ROPE_AXES,
        }
        config = runner.config(folder, "transformer") | shape
        (Path(folder) / "transformer" / "config.json").write_text(json.dumps(config))
        QwenImage.check_files, QwenImage.load_net = lambda self: None, load_net  # type: ignore[method-assign, assignment]
        QwenImage.weight_files, omni_train.prepare.load_sharded = weight_files, load_sharded  # type: ignore
        try:
            yield folder
        finally:
            QwenImage.check_files, QwenImage.load_net, QwenImage.weight_files, omni_train.prepare.load_sharded = kept  # type: ignore


def settings(args: Args, path: str, **changes: Any) -> app.Args:
    """Return the trainer's settings for a model's folder."""
    own = {
        name: getattr(args, name)
        for name in ("height", "width", "num_inference_steps", "batch_size", "group_size", "prompts_per_step")
    }
    dtype = str(default_compute_dtype(local_device())).removeprefix("torch.")
    files = {"model": path, "prompts": "prompts.txt", "eval_prompts": "prompts.txt", "scorer_url": "http://127.0.0.1:1"}
    return change(
        app.Args(), **{"name": "run", "sharding_mode": "auto", "dtype": dtype, **files, **GIVEN, **own, **changes}
    )


def in_order(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
    """Return scores that depend only on a sample's position in its batch: a changed bit of an image has no effect."""
    return [Score(0.61803 * i % 1) for i in range(len(texts))]


def train(
    args: Any,
    steps: Callable[[MediaRun[Any]], Iterator[Step]],
    grade: Grade = in_order,
    texts: Sequence[str] = TEXTS,
    app: ModuleType = app,
) -> None:
    """Run a trainer's `main` on the given steps, without its report, in a temporary folder.

    app: the trainer's module. args: its settings.
    """

    class Steps(Loop):
        def __iter__(self) -> Iterator[Step]:
            with torch.no_grad():
                for name, param in self.run.policy.net.named_parameters():
                    if ".lora_B." in name:  # as after training: with zeros, A would get no gradient
                        local_rows(param)[0].normal_(std=0.02)
            if "old" in self.run.policy.adapters:
                self.run.policy.move_old(0.0)
            yield from steps(self.run)

    kept = app.Loop, World.connect, omni_rl.run.session.ReportProcess
    app.Loop, World.connect = Steps, lambda *_, **__: (LocalScorer(grade), "none")  # type: ignore
    omni_rl.run.session.ReportProcess = lambda *_: None  # type: ignore
    try:
        with quiet(), lone_rank() if args.sharding.mode == "fsdp2" else nullcontext():
            Path("prompts.txt").write_text("\n".join(texts) + "\n")
            app.check_args(args)
            app.main(args, World.join(args))
    finally:
        app.Loop, World.connect, omni_rl.run.session.ReportProcess = kept  # type: ignore
        gc.collect()  # the next run needs the memory


@contextmanager
def lone_rank() -> Iterator[None]:
    """Make this process the only rank, as started by torchrun, in the `with` block; then end the process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= place
    try:
        yield
        shutdown()
    finally:
        for name in place:
            del os.environ[name]


def brightness(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
    """Return the mean brightness of each image, in [0, 1]."""
    return [Score(float(image.mean()) / 255) for image in media["image"]]


def clock(run: MediaRun[Any], spent: Counter[str]) -> None:
    """Add up the seconds of the run's phases and of decoding in them, with the device synchronized at both ends."""
    phase, decode = run.phase, run.model.decode

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = runner.now(run.dist.device)
        with phase(name):
            yield
        spent[name] += runner.now(run.dist.device) - start

    def timed_decode(*args: Any) -> Any:
        start = runner.now(run.dist.device)
        found = decode(*args)
        spent["decode"] += runner.now(run.dist.device) - start
        return found

    run.phase, run.model.decode = timed, timed_decode  # type: ignore


@torch.no_grad()
def decoding_s(side: int, form: str, *, batch: int, base_dim: int, rounds: int) -> float:
    """Return the seconds of decoding with a VAE of Qwen-Image's shape in one of CONVOLUTIONS. base_dim: 96 in it."""
    from diffusers import AutoencoderKLQwenImage

    device = local_device()
    vae = AutoencoderKLQwenImage(base_dim=base_dim).to(device, default_compute_dtype(device))
    if form != "conv3d":
        cut_to_one_frame(vae.decoder)
    for conv in vae.decoder.modules():
        if isinstance(conv, OneFrameConv):
            order = torch.channels_last if "channels last" in form else torch.contiguous_format
            conv.weight.data = conv.weight.contiguous(memory_format=order)
    latents = torch.randn(batch, 16, 1, side // 8, side // 8).to(vae.device, vae.dtype)
    return min(runner.seconds_of(lambda: vae.decode(latents)) for _ in range(1 + rounds))
