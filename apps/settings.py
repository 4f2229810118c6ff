"""What all trainers demand of their settings, checked before torch is imported."""

import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

from omni_rl.cli import check_least

LEAST = {  # setting -> least value
    "steps": 0, "save_every": 1, "keep_checkpoints": 1, "hang_timeout_s": 1.0, "scorer_timeout_s": 1e-3,
    "eval_every": 1, "eval_num_steps": 2, "prompts_per_step": 1, "group_size": 2, "batch_size": 1, "num_steps": 2,
    "height": 16, "width": 16, "guidance_scale": 1.0, "ema_decay": 0.0, "lr": 0.0, "updates_per_step": 1,
    "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1e-12, "lora_rank": 0, "lora_alpha": 1,
}  # fmt: skip


def check(args: Any, least: Mapping[str, float]) -> None:
    """Raises ValueError when a setting is too small, or does not fit another one or the number of ranks.

    least: least values of the settings that are the trainer's own.
    """
    check_least(args, {**LEAST, **least})
    world, name = int(os.environ.get("WORLD_SIZE", "1")), PurePath(args.name)
    wrong_shard = "none" if world > 1 else "" if "RANK" in os.environ else "fsdp2"
    is_sharded = args.shard == "fsdp2" or (args.shard == "auto" and world > 1)  # as runs.sharding without LoRA
    require(
        (name.parts and not name.is_absolute() and ".." not in name.parts,
         f"--name must name a folder below runs/, got {args.name!r}"),
        (args.shard != wrong_shard, f"--shard {args.shard} does not fit {world} ranks"),
        (args.lora_rank or args.dtype == "float32" or is_sharded,
         f"--dtype {args.dtype} needs --lora-rank > 0 or --shard fsdp2, which trains float32 weights"),
        (args.ema_decay < 1, f"--ema-decay must be < 1, got {args.ema_decay}"),
        (args.engine == "diffusers" or find_spec("vllm_omni"),
         f"--engine {args.engine} must be installed: run make install-vllm-omni, then the python in .venv-vllm-omni"),
    )  # fmt: skip


def require(*rules: tuple[object, str]) -> None:
    """Raises ValueError with the words of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


def num_batches(args: Any) -> int:
    """Batches that each rank draws in a training step.

    Raises:
        ValueError: the step's samples cannot be split into them, or they into the step's updates.
    """
    samples, per_round = args.prompts_per_step * args.group_size, args.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    rounds = samples // per_round
    require(
        (samples % per_round == 0, f"--batch-size times ranks ({per_round}) must divide a step's samples ({samples})"),
        (rounds % args.updates_per_step == 0, f"--updates-per-step must divide a rank's batches ({rounds})"),
    )
    return rounds


def parse_weights(text: str) -> dict[str, float]:
    """The weights in words such as ocr=0.7,jpeg=0.3, by name.

    Raises:
        ValueError: a piece is not NAME=NUMBER, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for piece in filter(None, text.split(",")):
        name, _, number = piece.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight) or name in weights:
            raise ValueError(f"--reward-parts must be NAME=NUMBER with commas between, each name once, got {text!r}")
        weights[name] = weight
    return weights
