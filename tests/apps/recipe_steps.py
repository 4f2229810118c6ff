"""One training step of any recipe, through the program itself, on a folder cut from the released configuration.

Only the folder, the prompts, the scorer, sizes and numbers of samples are replaced. Algorithm, LoRA, memory, offload,
dtype, optimizer, window, streams and sharding are the recipe's.
"""

import importlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import build_tiny_models
import build_tiny_scorers
import numpy as np
import released_folder
from apps import app_lives
from helpers import REPO, TEXT_TRAINERS
from omni_reward import Score, Scorer
from omni_rl.settings.args import parse_numbers
from omni_rl.settings.fields import leaves, values_of
from omni_rl.settings.toml import load_recipes
from omni_rollout.models import open_model
from omni_rollout.models.hub import released_models
from omni_rollout.models.qwen_image_edit import QwenImageEdit
from omni_rollout.models.tokens import open_token_model
from PIL import Image
from released_models import TOKENS
from trainer_runs import recipe

MEDIA_APPS = ("train_flowgrpo", "train_nft", "train_dpo", "train_srpo", "train_distill", "train_sft", "train_unigrpo")
REAL = [
    (app, name) for app in (*MEDIA_APPS, *TEXT_TRAINERS) for name in load_recipes(app) if not name.startswith("tiny-")
]
FEW, FEW_TRAINED = 4, 1  # denoising steps, and trained ones
SPANS = {"window_low": 0, "window_high": 1, "train_low": 0, "train_high": 1}  # bounds in steps -> lowest value
SIDE, FRAMES = 32, 9  # of samples, in pixels; 4k + 1 and 8k + 1
SIDES = {"tencent/HunyuanImage-3.0": 64, "diffusers/LTX-2.3-Diffusers": 64}  # the smallest that these models support
OPTIONS = {"image_area": SIDE**2, "vae_max_size": SIDE, "vit_max_size": 56, "max_sequence_length": 64}  # of models


@dataclass(frozen=True)
class Case:
    """A recipe of a real model."""

    app: str
    name: str

    @property
    def trainer(self) -> Any:
        """Module of the trainer."""
        return importlib.import_module(self.app)

    @property
    def args(self) -> Any:
        """Settings of the recipe."""
        return recipe(self.trainer, self.name)

    @property
    def ranks(self) -> int:
        """Number of ranks: two if the recipe shards its weights."""
        return 2 if self.args.sharding.mode == "fsdp2" else 1

    @property
    def family(self) -> tuple[str, str, str, str]:
        """What distinguishes recipes: trainer, model family, dtype and sharding."""
        args = self.args
        return self.app, family_of(args.policy.model), args.policy.dtype, args.sharding.mode

    def __lt__(self, other: "Case") -> bool:
        return str(self) < str(other)

    def __str__(self) -> str:
        return f"{self.app.removeprefix('train_')}-{self.name}"


@cache
def family_of(model: str) -> str:
    """Return the omni-rollout module of a model."""
    folder = released_models()[model]
    is_text = model in TOKENS
    return type((open_token_model if is_text else open_model)(folder)).__module__.rpartition(".")[2]


CASES = [Case(app, name) for app, name in REAL]


def families() -> dict[tuple[str, str, str, str], list[Case]]:
    """Return the recipes of each family."""
    found: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in CASES:
        found.setdefault(case.family, []).append(case)
    return found


def folder_of(model: str) -> Path:
    """Return the cut folder of a released model, built once for these sources and libraries."""
    sources = map(Path, (build_tiny_models.__file__, released_folder.__file__))
    cache = REPO / ".pytest_cache" / "released-models"
    return build_tiny_models.kept(
        model.replace("/", "--"), cache, lambda folder: released_folder.build(model, folder), *sources
    )


def small(case: Case) -> dict[str, object]:
    """Return the settings of a recipe that are replaced, by name."""
    args, known = case.args, values_of(case.args)
    minibatches = min(args.data.num_minibatches, 2)
    group = 4 if getattr(args, "best_worst_n", 0) or case.app == "train_gspo" else min(2, args.data.group_size)
    numbers: dict[str, object] = {
        "model": str(folder_of(args.policy.model)),
        "prompts": "prompts.jsonl",
        "eval.prompts": "prompts.jsonl",
        "eval.num_prompts": 1,
        "eval.num_inference_steps": 2,
        "eval.samples_per_prompt": 1,
        "eval.first": False,
        "train_steps": 1,
        "save_every": 1,
        "group_size": group,
        "prompts_per_step": max(minibatches, case.ranks) * 2 // min(2, group),
        "batch_size": 2 // case.ranks,
        "num_minibatches": minibatches,
        "best_worst_n": 2 if getattr(args, "best_worst_n", 0) else 0,
        "height": SIDES.get(args.policy.model, SIDE),
        "width": SIDES.get(args.policy.model, SIDE),
        "num_frames": min(known.get("num_frames", 1), FRAMES),
        "scorer.name": "",
        "max_new_tokens": 4,
        **({"reward": "regex"} if case.app in TEXT_TRAINERS else {}),  # random texts sometimes match
        "max_thought_tokens": 4,
        "hang_timeout_s": 400.0,  # a CPU without 16-bit kernels is slow
        **few_steps(args),
    }
    if "guidance" in known:
        options = {
            name: size for name, size in OPTIONS.items() if name in open_model(folder_of(args.policy.model)).OPTIONS
        }
        numbers["guidance"] = ",".join(
            f"{n}={v:g}" for n, v in (parse_numbers(args.sampling.guidance, "") | options).items()
        )
    return {name: value for name, value in numbers.items() if name in known}


def few_steps(args: Any) -> dict[str, object]:
    """Return FEW denoising steps, and proportional numbers of stochastic or trained steps."""
    known = values_of(args)
    given = {
        name: known.get(name) for name in (*SPANS, "window_size", "window_stride", "train_levels", "levels_per_pair")
    }
    few = {name: min(value, FEW_TRAINED) for name, value in given.items() if value is not None}
    if steps := known.get("num_inference_steps", 0):
        few |= {"num_inference_steps": FEW}
        few |= {name: max(least, given[name] * FEW // steps) for name, least in SPANS.items() if name in few}
    return few


def edits(case: Case) -> bool:
    """True if the prompts of a recipe have references."""
    return any(word in case.args.data.prompts for word in ("edit", "sharegpt4o", "frames"))


def write_prompts(case: Case, folder: Path) -> None:
    """Write the prompts of a run, with references if the recipe edits images."""
    images = ["reference.png"] if edits(case) else []
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)  # FLUX.2 accepts no smaller ones
    Image.fromarray(pixels).save(folder / "reference.png")
    more: dict[str, object] = {"images": images} if images else {}
    more |= {"completion": "ab", "chosen": "ab", "rejected": "b"} if case.app in TEXT_TRAINERS else {}
    lines = [{"prompt": f'a sign that says "{i}"', "pattern": "[a-zA-Z]"} | more for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


PARTS = ("hpsv2", "imagereward", "pickscore", "unifiedreward", "vlm", "clip", "VQ")  # used in recipes
KINDS = ("image", "video", "audio")


def scorer_of(kind: str) -> Scorer:
    """Return a scorer of one kind of media whose scores differ if any bit differs, with the parts of any recipe."""

    def score(media: Any, prompts: Any, meta: Any) -> list[Score]:
        values = [zlib.crc32(np.ascontiguousarray(sample).tobytes()) / 2**32 for sample in media[kind]]
        return [Score(value, parts=dict.fromkeys(PARTS, value)) for value in values]

    return Scorer(score, media=(kind,))


def kind_of(case: Case) -> str:
    """Return the kind of media that the recipe's scorer grades; for frames with sound, the sound, as CLAP does."""
    return [*open_model(folder_of(case.args.policy.model)).MEDIA][-1]


def further(case: Case, folder: Path, urls: Mapping[str, str]) -> dict[str, object]:
    """Write what a recipe needs besides prompts and a scorer into a folder; return the settings that name it."""
    if case.name == "sd35-medium-dpo-offline":
        pair = {"prompt": "a sign", "win": "win.png", "lose": "lose.png"}
        for image in (pair["win"], pair["lose"]):
            Image.effect_noise((SIDE, SIDE), 64).convert("RGB").save(folder / image)
        (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
        return {"preferences": "pairs.jsonl"}
    if getattr(case.args, "preferences", ""):
        return {"preferences": "prompts.jsonl"}
    if case.app == "train_srpo":
        build_tiny_scorers.write_clip(folder / "clip")
        return {"reward_model": "clip"}
    if case.app == "train_distill":  # the recipe's head names the recipe that trains the teacher
        teacher = Case("train_flowgrpo", "sd35-medium-cps-ocr")
        life = take_step(teacher, folder, urls)
        assert life.wait(300) == [0], life.text()
        return {"teachers": f"ocr=runs/{teacher.args.run.name}/weights"}
    return {}


def take_step(case: Case, folder: Path, urls: Mapping[str, str]) -> app_lives.Life:
    """Run the program with `--preset NAME` for one step in forked processes; `folder` is the working folder."""
    write_prompts(case, folder)
    scored = case.app not in (*TEXT_TRAINERS, "train_srpo")
    settings = small(case) | further(case, folder, urls)
    settings |= {"scorer.url": urls[kind_of(case)]} if scored else {}
    assert settings.keys() <= set(leaves(case.trainer.Args))
    (folder / "small.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    flags = ["--preset", case.name, "--config", "small.toml"]
    how = {"ranks": case.ranks, "before": see_little, "counts_flops": True, "reports": True}
    return app_lives.command(folder, flags, trainer=case.trainer, **how)


def see_little(rank: int) -> None:
    """Make text encoders that read references see few of their pixels."""
    QwenImageEdit.SEEN_AREA = SIDE**2
