"""The settings that trainers list, and values derived from them. Imports no torch.

A trainer lists groups of settings in its `class Args(MediaArgs)`, such as `run: Flat[Run] = Run()`, followed by its own
settings. It changes a default with an argument of the group: `data: Flat[Data] = Data(group_size=1)`.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from omni_train.prompts.files import PromptRecord, RecordCheck, load_prompts
from omni_train.prompts.sampler import PromptSampler

from omni_rl.settings.eval_sets import Eval, MediaEval
from omni_rl.settings.fields import SECRET, Flat, change, flag_of, marked_settings, prefix_errors, require
from omni_rl.settings.groups import (
    Data,
    Lora,
    MediaMemory,
    MediaOptim,
    MediaPolicy,
    MediaScorer,
    MediaSharding,
    Memory,
    Optim,
    Policy,
    Run,
    Sampling,
    Scorer,
    Sharding,
    Streams,
    TokenSampling,
)

STREAMS = ("video", "audio")  # the media in one latent, in this order
Mode = Literal["none", "ddp", "fsdp2"]
ArgsT = TypeVar("ArgsT", bound="RunArgs")


@dataclass(frozen=True)
class RunArgs:
    """The groups that every trainer lists, as this class or a subclass that adds settings.

    RATES: the default learning rates for full fine-tuning and for LoRA.
    """

    RATES = (1e-5, 3e-4)

    run: Flat[Run]
    policy: Flat[Policy]
    lora: Lora
    sharding: Sharding
    memory: Memory
    data: Flat[Data]
    eval: Eval
    sampling: Flat[Sampling | TokenSampling]
    scorer: Scorer
    optim: Optim
    lr: float | None

    def __post_init__(self) -> None:
        """Set the defaults that depend on other settings, so that printed and saved settings include them."""
        rank, alpha = self.lora.rank, self.lora.alpha
        lr = self.RATES[rank > 0] if self.lr is None else self.lr
        divisor = max(rank, 0) ** 0.5 if self.lora.use_rslora else rank
        vars(self).update(lr=lr, lora=replace(self.lora, alpha=alpha or round(2 * divisor)))


@dataclass(frozen=True)
class MediaArgs(RunArgs):
    """The groups that every trainer on images, videos or sound lists."""

    policy: Flat[MediaPolicy]
    sharding: MediaSharding
    memory: MediaMemory
    eval: MediaEval
    sampling: Flat[Sampling]
    scorer: MediaScorer
    optim: MediaOptim
    streams: Streams


def read_prompts(
    args: RunArgs, check: RecordCheck | None = None, check_eval: RecordCheck | None = None
) -> tuple[PromptSampler, list[PromptRecord]]:
    """Return the training prompts, and the prompts of --eval.prompts that are evaluated, after checking both files."""
    data, seed = args.data, args.run.seed
    per_step, root, key = data.prompts_per_step, data.media_root, data.prompt_key
    with prefix_errors("--prompts: "):
        prompts = PromptSampler(
            data.prompts, prompts_per_step=per_step, seed=seed, check=check, media_root=root, key=key
        )
    with prefix_errors("--eval.prompts: "):
        records = load_records(data, args.eval.prompts, check_eval)
    return prompts, records[: args.eval.num_prompts or None]


def load_records(data: Data, place: str | Path, check: RecordCheck | None = None) -> list[PromptRecord]:
    """Return the prompts of a file or another source that `load_prompts` accepts."""
    return load_prompts(place, check=check, media_root=data.media_root, key=data.prompt_key)


def num_ranks() -> int:
    """Return the number of ranks that torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_trainers(args: RunArgs) -> int:
    """Return the number of ranks that train: all that torchrun started, minus those that only sample."""
    return num_ranks() - args.sharding.rollout_ranks


def dp_size(args: RunArgs, world_size: int = 0) -> int:
    """Return the data-parallel size: the number of ranks, or context-parallel groups, with their own batches.

    world_size: number of ranks; 0 is the number of ranks that train.
    """
    return (world_size or num_trainers(args)) // args.sharding.context_parallel


def sharding_mode(args: RunArgs, world_size: int) -> Mode:
    """Return the mode of --sharding.mode; auto is the simplest mode with the least traffic."""
    auto: Mode = "none" if world_size == 1 else "ddp" if args.lora.rank else "fsdp2"
    return auto if args.sharding.mode == "auto" else args.sharding.mode


def num_batches(args: RunArgs, world_size: int = 0, *, num_trained: int = 1, unit: int = 1) -> int:
    """Return the number of batches that each rank samples in a training step. Ranks of a group share their batches.

    world_size: number of ranks; 0 is the number of ranks that train. num_trained: number of parts of a batch, such as
    stochastic steps, that different minibatches may train on. unit: the size of a batch is a multiple of it.

    Raises:
        ValueError: the step's samples cannot be split into equal batches, or the batches into the step's minibatches.
            The message names the nearest number that fits.
    """
    size = dp_size(args, world_size)
    rank_kind = "ranks" if size == (world_size or num_trainers(args)) else "ranks by --sharding.context-parallel"
    samples, per_round = args.data.prompts_per_step * args.data.group_size, args.data.batch_size * size
    rounds = samples // per_round
    sizes = [n for n in range(unit, samples + 1, unit) if samples % (n * size) == 0]
    group_rule = f" and hold whole groups of --group-size ({args.data.group_size})" if unit > 1 else ""
    counts = [n for n in range(1, rounds * num_trained + 1) if rounds * num_trained % n == 0]
    require(
        (sizes,
         f"the {rank_kind} ({size}) must divide a step's samples ({samples}){group_rule}, prompts times --group-size"),
        (args.data.batch_size in sizes,
         f"--batch-size times {rank_kind} ({per_round}) must divide a step's samples ({samples}){group_rule}, "
         f"got {args.data.batch_size}; nearest: {_nearest(args.data.batch_size, sizes)}"),
        (args.data.num_minibatches in counts,
         f"--num-minibatches must divide a rank's batches times the steps trained of each ({rounds} x {num_trained}), "
         f"got {args.data.num_minibatches}; nearest: {_nearest(args.data.num_minibatches, counts)}"),
    )  # fmt: skip
    return rounds


def next_milestone(args: RunArgs, number: int) -> int:
    """Return the number of finished steps at the first save, evaluation or end of the run after step `number`."""
    return min(
        args.run.train_steps, *((number // every + 1) * every for every in (args.run.save_every, args.eval.every))
    )


def _nearest(number: int, others: Sequence[int]) -> int | None:
    """Return the nearest of the other numbers, the first of two that are equally near, or None if there are none."""
    return min(others, key=lambda other: abs(other - number), default=None)


def parse_offload(memory: Memory) -> set[str]:
    """Return the parts that are offloaded to the host while they are idle.

    Raises:
        ValueError: a part does not exist.
    """
    parts, allowed = set(filter(None, memory.offload.split(","))), memory.OFFLOAD.split()
    unknown = ", ".join(sorted(parts.difference(allowed)))
    require((not unknown, f"--memory.offload must be of {', '.join(allowed)}, with commas between, got {unknown}"))
    return parts


def parse_reward_media(text: str, parts: str) -> dict[str, str]:
    """Parse a text such as clap=audio,hpsv3=video into a dict from each part to the only medium that it judges.

    parts: the text of --reward-parts.

    Raises:
        ValueError: a piece is not PART=MEDIUM, or names an unknown part or medium.
    """
    media = parse_pairs(text, "--streams.reward-media", "PART=MEDIUM")
    other_medium = min(set(media.values()) - set(STREAMS), default="")
    require(
        (media.keys() <= parse_numbers(parts, "--reward-parts").keys(),
         f"--streams.reward-media must name parts in --reward-parts, got {text}"),
        (not other_medium, f"--streams.reward-media must name {' or '.join(STREAMS)}, got {other_medium}"),
    )  # fmt: skip
    return media


def parse_numbers(text: str, name: str) -> dict[str, float]:
    """Parse a text such as ocr=0.7,jpeg=0.3 into a dict from names to numbers.

    name: the flag that holds the text.

    Raises:
        ValueError: a piece is not NAME=NUMBER with a finite number, or a name appears twice.
    """
    pairs = parse_pairs(text, name, "NAME=NUMBER")
    try:
        numbers = {key: float(value) for key, value in pairs.items()}
    except ValueError:
        numbers = {name: math.nan}
    are_finite = all(abs(number) <= 1e30 for number in numbers.values())  # False for NaN too
    require((are_finite, f"{name} must hold finite numbers, of at most 1e+30, got {text!r}"))
    return numbers


def parse_pairs(text: str, name: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Parse a text such as clap=audio,hpsv3=video into a dict from names to values.

    name: the flag that holds the text. form: the form of a piece, for the error message.

    Raises:
        ValueError: a piece has another form, or a name appears twice.
    """
    pieces = [piece.partition("=") for piece in text.split(",") if piece]
    pairs = {key: value for key, _, value in pieces if key and value}
    rule = f"{name} must be {form} with commas between, each name once, got {text!r}"
    require((len(pairs) == len(pieces), rule))
    return pairs


def split_options(text: str) -> tuple[str, list[str]]:
    """Split a text such as "jpeg --option mode=incompressibility" into the scorer's name and its options."""
    name, *options = re.split(r"\s+--option[\s=]+", text)
    return name, options


def secret_flags(cls: type[RunArgs]) -> list[str]:
    """Return the flags of secret settings."""
    return [flag_of(name) for name in marked_settings(cls, SECRET)]


def without_secrets(args: ArgsT) -> ArgsT:
    """Return the settings without secrets, for files that others may read."""
    hidden: dict[str, Any] = dict.fromkeys(marked_settings(type(args), SECRET), "")
    # "..." fails check_urls
    sets = (replace(eval_set, scorer_url=eval_set.scorer_url and "...") for eval_set in args.eval.sets)
    return change(args, **hidden, eval_sets=tuple(sets))
