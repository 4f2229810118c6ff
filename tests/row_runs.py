"""Runs of the models of `model_rows`: settings of every algorithm, runs in their own processes, and checks."""

import json
import math
import os
import random
import sys
import wave
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from apps import app_lives
from helpers import REPO
from model_rows import ROWS, Row
from omni_rl.run.failures import launch
from omni_rl.settings.fields import change
from omni_rollout.models import open_model
from omni_train.files import load_metrics
from omni_train.weights.full import LORA_FILE, saved_files, weight_folders
from PIL import Image
from safetensors.torch import load_file, save_file
from trainer_runs import recipe, tiny

import train_distill
import train_dpo
import train_flowgrpo
import train_gspo
import train_nft
import train_sft
import train_srpo

SIZES = {"prompts_per_step": 2, "group_size": 2, "batch_size": 4, "num_inference_steps": 2, "lr": 1e-3}
EXACT = {
    "optim_lr_scheduler_type": "constant",
    "optim_weight_decay": 0.0,
}  # weights without a gradient stay as they are
WINDOW = {"window_size": 1, "window_low": 0, "window_high": None, "noise_level": 0.7}
READER = str(REPO / "checkpoints" / "tiny-signs-reader")
ALGORITHMS = {  # name -> its trainer and its settings besides SIZES
    **{algo: (train_flowgrpo, WINDOW | {"algo": algo}) for algo in train_flowgrpo.ALGOS},
    **{algo: (train_nft, {"algo": algo, "train_levels": 2}) for algo in train_nft.ALGOS},
    "dpo": (train_dpo, {"levels_per_pair": 2}),
    "dpo offline": (train_dpo, {"levels_per_pair": 2, "preferences": "pairs.jsonl"}),
    "srpo": (train_srpo, {"reward_model": READER, "group_size": 1, "batch_size": 2}),
    "sft": (train_sft, {"prompts": "pairs.jsonl"}),
    "distill": (train_distill, {"teacher_substeps": 2, "train_low": 0, "train_high": None}),
}
KINDS = {"LoRA": {"lora_rank": 2, "lora_alpha": 4, "sharding_mode": "none"}, "all weights": {"sharding_mode": "fsdp2"}}
ONE_STEP = {"name": "run", "train_steps": 1, "eval_every": 1, "eval_first": False, "eval_num_prompts": 1}


def write_inputs(folder: Path, row: Row, latents: tuple[int, ...] | None = None) -> None:
    """Write prompts with references of their own, and pairs of images or of latents of a given shape for them."""
    drawn = random.Random(0)
    records, ending = [], "safetensors" if latents else "png"
    for side in ("win", "lose"):
        if latents:
            save_file({"x0": torch.randn(latents)}, folder / f"{side}.safetensors")
        else:
            Image.frombytes("RGB", (96, 32), drawn.randbytes(96 * 32 * 3)).save(folder / f"{side}.png")
    for i, word in enumerate(("AB", "CDEF")):
        names = [f"{i}-{j}.png" for j in range(len(row.images))]
        for name, image in zip(names, row.references(i), strict=True):
            Image.fromarray(image.numpy()).save(folder / name)
        records.append({"prompt": f'a blue sign that says "{word}"', "images": names})
    pairs = [record | {side: f"{side}.{ending}" for side in ("win", "lose")} for record in records]
    for name, lines in (("prompts", records), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_chats(folder: Path) -> None:
    """Write prompts that a model with random weights sometimes answers well.

    Most prompts of *-seen.jsonl and *-silent.jsonl have media; those of the latter have no sound.
    """
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (32, 64, 3), np.uint8)).save(folder / "picture.png")
    frames = [Image.fromarray(frame) for frame in rng.integers(0, 255, (4, 32, 32, 3), np.uint8)]
    frames[0].save(folder / "film.webp", save_all=True, append_images=frames[1:], duration=500, lossless=True)
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((rng.normal(size=4000) * 3000).astype("<i2").tobytes())
    for name, count in (("train", 8), ("eval", 2)):
        lines = [{"prompt": f"say {i}", "pattern": "[a-zA-Z]"} for i in range(count)]
        picture, film = {"images": "picture.png"}, {"video": "film.webp", "images": "picture.png"}
        seen = {"": [{}], "-seen": [{}, picture, {"audio": "sound.wav"}, film], "-silent": [{}, picture, film]}
        for end, media in seen.items():
            own = [line | media[i % len(media)] for i, line in enumerate(lines * (2 if end else 1))]
            (folder / f"{name}{end}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))


def settings(model: str, algorithm: str, folder: Path, urls: Mapping[str, str], **changes: Any) -> Any:
    """Return small settings of an algorithm for a model, with its guidance, after writing its inputs to the folder."""
    row, (app, own) = ROWS[model], ALGORITHMS[algorithm]
    opened = open_model(row.checkpoint())
    sizes = {"height": 32, "width": 96, "num_frames": row.guided.num_frames}
    shape = opened.latent_shape(replace(row.guided, **sizes))
    write_inputs(folder, row, None if "image" in opened.MEDIA else shape)
    places = {"model": str(opened.folder), "prompts": "prompts.jsonl", "eval_prompts": "prompts.jsonl"}
    scorer = {} if app is train_srpo else {"scorer_url": urls[opened.MEDIA[0]]}
    knobs = ",".join(f"{knob}={value}" for knob, value in row.guided.guidance.items())
    guided = {"guidance_scale": row.guided.guidance_scale, "guidance": knobs}
    args = tiny(recipe(app, "tiny-signs"), **(SIZES | sizes | EXACT | places | scorer | guided | own))
    return change(args, **changes)


@cache
def import_parts(model: str) -> None:
    """Import the dependencies of a model's parts in this process, so that forks need not."""
    open_model(model).check_files()


def run_alone(
    app: str, args: Any, folder: Path, *, before: Callable[[], None] = lambda: None, counts_flops: bool = True
) -> tuple[list[dict[str, float]], str]:
    """Return the log and output of a run as the only rank in its own process, which calls `before` first."""

    def join(rank: int) -> None:
        os.chdir(folder)
        if args.sharding.mode == "fsdp2":
            os.environ |= {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
            }
        before()

    trainer = sys.modules[app]

    def work() -> None:
        trainer.check_args(args)
        launch(trainer.main, args)

    if trainer is not train_gspo:
        import_parts(args.policy.model)
    life = app_lives.start(folder, work, before=join, counts_flops=counts_flops)
    codes = life.wait(timeout_s=240)
    assert codes == [0], life.text()
    return load_metrics(folder / "runs" / args.run.name / "metrics.jsonl"), life.text()


def exported(weights: Path, nets: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the exported tensors, full weights or LoRA factors, by their names in the net with these experts."""
    found = {}
    for expert, home in weight_folders(weights, nets).items():
        [file] = saved_files(home) or [home / LORA_FILE]
        own = load_file(file)
        found |= {f"{expert}.{weight.removeprefix('transformer.')}".lstrip("."): own[weight] for weight in own}
    return found


def idle_experts(nets: Mapping[str, str], lines: list[dict[str, float]]) -> tuple[str, ...]:
    """Return prefixes of the names of weights that no update has reached: experts without a trained step."""
    return tuple(f"{expert}." for expert in nets if not any(line.get(f"policy/forwards_{expert}", 1) for line in lines))


def assert_clean(lines: list[dict[str, float]], text: str, *, counts_flops: bool = True) -> None:
    """Check that a step was taken, all logged values are finite, and no alarm was raised and no measurement failed."""
    assert len(lines) == 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[1]["policy/grad_norm"] > 0 == lines[1]["policy/skipped_updates"]
    assert lines[1].get("policy/first_ratio_max_dev", 0) == 0
    assert not [name for name in lines[1] if name.startswith("policy/gap_")]
    assert not [words for words in ("ALARM", "switched off", "failed: ") if words in text], text
    assert not counts_flops or lines[1]["perf/update_tflops"] > 0


def assert_trained(model: str, kind: str, folder: Path, lines: list[dict[str, float]]) -> None:
    """Check that the run exported weights or factors in float32, and that all of them with a gradient have changed."""
    row = ROWS[model]
    opened = open_model(row.checkpoint())
    after, idle = exported(folder / "runs" / "run" / "weights", opened.nets), idle_experts(opened.nets, lines[1:])
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    if kind == "LoRA":
        moved = {
            name.replace(".lora_B", ""): bool(tensor.any()) for name, tensor in after.items() if ".lora_B." in name
        }
        assert 2 * len(moved) == len(after) == 2 * row.lora_layers
    else:
        before = opened.load_net(device="cpu", dtype=torch.float32).named_parameters()
        moved = {name: not torch.equal(after[name], value) for name, value in before}
    left = {name for name, has_moved in moved.items() if not has_moved}
    assert left == {name for name in moved if name in row.without_gradient or (idle and name.startswith(idle))}
