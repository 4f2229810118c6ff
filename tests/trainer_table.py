"""The table of trainers: a small run of each, and the properties that every trainer must have.

TRAINERS has a row for each trainer and each kind of data that it reads. HELD has the cases of each property: a row, the
weights to train, and a place. `cases` returns the cases of a property as test parameters. `make test` runs at least one
case of each property, trainer, kind of weights, and place where a CPU's ranks train; `make test-all` runs all.
"""

import importlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from build_tiny_models import tiny_checkpoint
from diffusers import QwenImageTransformer2DModel
from helpers import REPO, TEST_SEED
from omni_rl.settings.fields import change
from omni_train.dist import init_distributed
from omni_train.weights.full import save_weights
from PIL import Image
from row_runs import write_chats
from safetensors.torch import save_file
from trainer_runs import recipe, shallow, tiny, write_eval_prompts, write_teacher

SIZE = {
    "name": "run",
    "prompts_per_step": 2,
    "group_size": 4,
    "batch_size": 2,
    "train_steps": 2,
    "hang_timeout_s": 120.0,
}
ADAM = {"optim_lr_scheduler_type": "cosine", "optim_adam_beta1": 0.8, "optim_adam_beta2": 0.99}
GRPO = {"algo": "flowgrpo", "noise_level": 0.7, "window_low": 0, "window_high": None}
OLD = {"lr": 1e-2, "old_schedule": "linear", "num_minibatches": 2, "ema_decay": 0.9, "kl_coef": 0.1}
OLD |= {"train_levels": 2}
READER = {"reward_model": str(REPO / "checkpoints" / "tiny-signs-reader"), "group_size": 1, "prompts_per_step": 8}
ANSWERS = {"max_new_tokens": 5, "reward": "regex", "lr": 1e-3, "num_minibatches": 2}
THOUGHTS = {"height": 32, "width": 48, "num_inference_steps": 3, "max_thought_tokens": 4, "thought_reward": "0.5*regex"}
THOUGHTS |= {
    "batch_size": 1,
    "eval_num_inference_steps": 2,
    "eval_num_prompts": 2,
    "group_size": 2,
    "lr": 1e-3,
    "kl_coef": 0.1,
    "num_minibatches": 2,
}


@dataclass(frozen=True)
class Trainer:
    """A row: the trainer's module, settings besides SIZE, its small checkpoint, and the kind of files that it reads.

    model: "" for the shipped model with two blocks. reads: "" for only prompts.
    """

    app: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    reads: str = ""


TRAINERS = {
    "flowgrpo": Trainer(
        "train_flowgrpo",
        GRPO | ADAM | {"true_cfg_scale": 3.0, "num_minibatches": 2, "kl_coef": 0.1, "num_inner_epochs": 2,
                       "timestep_fraction": 0.7, "memory_gradient_checkpointing": True, "lr": 1e-3},
    ),
    "nft": Trainer("train_nft", OLD),
    "awm": Trainer("train_nft", OLD | {"algo": "awm", "old_every": 2, "old_kl_coef": 0.1, "num_inner_epochs": 2}),
    "dgpo": Trainer("train_nft", OLD | {"algo": "dgpo", "clip_range": 0.01, "num_inner_epochs": 2, "group_size": 2,
                                       "prompts_per_step": 4}),
    "dpo": Trainer("train_dpo", {"levels_per_pair": 2, "lr": 1e-3, "prompts_per_step": 4, "num_minibatches": 2}),
    "dpo of pairs": Trainer("train_dpo", {"levels_per_pair": 2, "lr": 3e-4, "dpo_beta": 100.0, "group_size": 2},
                            reads="pairs"),
    "srpo": Trainer("train_srpo", READER | {"num_minibatches": 2, "ema_decay": 0.9, "lr": 1e-3}),
    "sft": Trainer("train_sft", {"ema_decay": 0.9, "num_minibatches": 2, "lr": 1e-3, "group_size": 2,
                                 "batch_size": 1}, reads="samples"),
    "distill": Trainer("train_distill", {"algo": "opd", "teacher_true_cfg_scale": 3.0, "num_minibatches": 2,
                                         "train_high": None, "lr": 1e-3, "group_size": 2, "batch_size": 1}),
    "distill of a teacher": Trainer("train_distill", {"algo": "opd", "train_high": None, "lr": 1e-3, "group_size": 2},
                                    reads="teacher"),
    "gspo": Trainer("train_gspo", ANSWERS | {"algo": "dapo", "ema_decay": 0.5, "num_iterations": 2, "rounds": 2},
                    "qwen3-omni", reads="media"),
    "sft of texts": Trainer("train_sft_tokens", ANSWERS | {"group_size": 1, "prompts_per_step": 4, "ema_decay": 0.9},
                            "qwen3"),
    "dpo of texts": Trainer("train_dpo_tokens", ANSWERS | {"batch_size": 4, "prompts_per_step": 4}, "qwen3"),
    "dpo of pairs of texts": Trainer("train_dpo_tokens", ANSWERS | {"group_size": 2, "prompts_per_step": 4}, "qwen3",
                                     reads="pairs"),
    "distill of texts": Trainer("train_distill_tokens", ANSWERS | {"group_size": 2, "prompts_per_step": 4,
                                "divergence": "jsd"}, "qwen3", reads="teacher"),
    "distill of given texts": Trainer(
        "train_distill_tokens",
        ANSWERS | {"group_size": 1, "prompts_per_step": 4, "completion_key": "completion", "divergence": "forward"},
        "qwen3", reads="teacher",
    ),
    "unigrpo": Trainer("train_unigrpo", THOUGHTS | {"ema_decay": 0.5, "memory_gradient_checkpointing": True}, "bagel"),
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora_rank": 4, "lora_alpha": 8},
    "PiSSA": {"lora_rank": 4, "lora_init": "pissa"},
    "DoRA": {"lora_rank": 4, "lora_use_dora": True, "lora_dtype": "float32"},
}
PLACES: dict[str, dict[str, Any]] = {  # one rank, two, or four that share samples and weights
    "one rank": {},
    "ddp": {"sharding_mode": "ddp"},
    "fsdp2": {"sharding_mode": "fsdp2"},
    "fsdp2, in pieces": {"sharding_mode": "fsdp2", "sharding_unshard": "none"},
    "experts": {"sharding_mode": "fsdp2", "sharding_experts": True},
    "a rank that samples": {"sharding_rollout_ranks": 1},
    "two by two": {"sharding_mode": "fsdp2", "sharding_size": 2, "sharding_context_parallel": 2},
}


def ranks(place: str) -> int:
    """Return the number of ranks of a place."""
    return {"one rank": 1, "two by two": 4}.get(place, 2)


def settings(name: str, url: str, weights: str = "all weights", place: str = "one rank", /, **changes: Any) -> tuple:
    """Return the module of a row and its settings, after writing the files that they name to the working folder."""
    row = TRAINERS[name]
    app = importlib.import_module(row.app)
    given = SIZE | row.settings | WEIGHTS[weights] | PLACES[place]
    is_text = row.model.startswith("qwen")
    if row.app == "train_srpo":
        given["scorer_watch_url"] = url
    elif not is_text:
        given["scorer_url"] = url
    if row.model:
        write_texts()
        model = str(tiny_checkpoint(row.model, REPO / ".pytest_cache" / "tiny-models"))
        given |= {"model": model, "prompts": "train.jsonl", "eval_prompts": "eval.jsonl"}
        if row.reads == "media":
            write_chats(Path())
            given |= {"prompts": "train-seen.jsonl", "eval_prompts": "eval-seen.jsonl"}
        if row.reads == "teacher":
            given["teacher"] = write_teacher(model)
        if row.reads == "pairs":
            given |= {"preferences": given.pop("prompts")}
        return app, change(app.Args(), **(given | changes))
    write_eval_prompts(Path())
    if row.reads in ("pairs", "samples"):
        write_pairs()
        given["preferences" if row.reads == "pairs" else "prompts"] = "pairs.jsonl"
    if row.reads == "teacher":
        write_net("teacher")
        given["teachers"] = "one=teacher"
    return app, tiny(recipe(app, "tiny-signs"), **(given | changes))


def write_texts() -> None:
    """Write prompts, some of which a net with random weights answers well, with answers and pairs to train on."""
    answers = {"completion": "ab", "chosen": "abc", "rejected": "z"}
    lines = [{"prompt": f"say {i}" + " again" * i, "pattern": "[a-mA-M]", **answers} for i in range(8)]
    for name in ("train", "eval"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_pairs() -> None:
    """Write prompts with an image to train on, and two latents of which one is preferred."""
    Image.new("RGB", (96, 32), "white").save("white.png")
    generator = torch.Generator().manual_seed(1)
    lines = []
    for i, word in enumerate(("AB", "CD", "EF", "GH", "K", "ABCD", "BA", "DC")):
        for side in ("win", "lose"):
            save_file({"x0": torch.randn(16, 4, 12, generator=generator)}, f"{i}-{side}.safetensors")
        files = {"sample": "white.png", "win": f"{i}-win.safetensors", "lose": f"{i}-lose.safetensors"}
        lines.append({"prompt": f'a blue sign that says "{word}"'} | files)
    Path("pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_net(folder: str) -> None:
    """Write weights that differ from the shallow model's."""
    net = QwenImageTransformer2DModel.from_pretrained(shallow() / "transformer")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.03 * torch.randn_like(p))
    save_weights(net, Path(folder), init_distributed())


Case = tuple[str, str, str]  # a row of TRAINERS, of WEIGHTS and of PLACES
ADAPTED = [name for name in TRAINERS if name != "distill of a teacher"]  # its teacher has all weights
AHEAD = ("flowgrpo", "nft", "dpo", "gspo", "unigrpo")
ONE_EACH = [
    next(name for name, row in TRAINERS.items() if row.app == app)
    for app in dict.fromkeys(row.app for row in TRAINERS.values())
]
HELD: dict[str, list[Case]] = {
    "trains on two ranks as on one": [
        *((name, "all weights", "fsdp2") for name in TRAINERS),
        *((name, "LoRA", "ddp") for name in ADAPTED),
        *((name, "LoRA", "fsdp2") for name in ("nft", "dpo")),
        ("flowgrpo", "PiSSA", "ddp"), ("flowgrpo", "DoRA", "ddp"),
        ("gspo", "all weights", "ddp"), ("gspo", "all weights", "experts"),
        ("gspo", "LoRA", "fsdp2, in pieces"), ("gspo", "LoRA", "experts"),
        ("unigrpo", "all weights", "ddp"), ("unigrpo", "LoRA", "fsdp2, in pieces"),
    ],
    "continues to the bit from what it saved": [
        *((name, "all weights", "one rank") for name in TRAINERS),
        *((name, "LoRA", "one rank") for name in ADAPTED),
    ],
    "continues after a kill in its first save": [
        *((name, "all weights", "one rank") for name in ONE_EACH),
        ("flowgrpo", "all weights", "fsdp2"), ("gspo", "all weights", "fsdp2"),
    ],
    "samples a step ahead": [(name, "all weights", "one rank") for name in AHEAD],
    "trains on an accelerator to the bit as on the CPU": [
        *((name, "all weights", "one rank") for name in TRAINERS),
        *((name, "LoRA", "one rank") for name in ADAPTED),
        *((name, "all weights", "fsdp2") for name in ONE_EACH),
        *((name, "LoRA", "ddp") for name in ONE_EACH),
        ("flowgrpo", "all weights", "two by two"), ("nft", "LoRA", "a rank that samples"),
    ],
}  # fmt: skip


def cover(held: dict[str, list[Case]]) -> set[tuple[str, Case]]:
    """Select cases until each property, trainer, kind of weights, and place where a CPU's ranks train is covered.

    Cases on the accelerator take longest, and are selected only where no others cover as much.
    """
    order = [(shows, case) for shows, cases in held.items() for case in cases]
    random.Random(f"{TEST_SEED} trainers").shuffle(order)
    order.sort(key=lambda each: "accelerator" in each[0])
    values = {
        (shows, (name, weights, place)): {shows, TRAINERS[name].app, weights, "accelerator" in shows or place}
        for shows, (name, weights, place) in order
    }
    missing, drawn = set[object]().union(*values.values()), set[tuple[str, Case]]()
    while missing:
        best = max(order, key=lambda each: len(missing & values[each]))
        missing -= values[best]
        drawn.add(best)
    return drawn


DRAWN = cover(HELD)


def cases(shows: str) -> list[Any]:
    """Return the cases of a property as test parameters, marked slow unless selected."""
    return [
        pytest.param(case, id=", ".join(case), marks=() if (shows, case) in DRAWN else pytest.mark.slow)
        for case in HELD[shows]
    ]
