"""Settings that trainers share. Imports no torch.

A trainer adds its own fields in `class Args(MediaArgs)`, or in `class Args(ScoredArgs)` if a reward server grades its
samples. The comment beside a field is its help.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from omni_train.prompts.files import PromptRecord, RecordCheck, load_prompts
from omni_train.prompts.sampler import PromptSampler

from omni_rl.run.engines import ENGINES
from omni_rl.settings.eval_sets import Eval, MediaEval
from omni_rl.settings.fields import (
    MAY_CHANGE,
    REQUIRED,
    SECRET,
    at_least,
    between,
    change,
    flag,
    flag_of,
    marked,
    require,
    values_of,
)
from omni_rl.settings.groups import (
    JudgedStreams,
    Lora,
    MediaMemory,
    MediaOptim,
    MediaScorer,
    MediaSharding,
    Memory,
    Optim,
    RolloutSharding,
    ScoredScorer,
    Scorer,
    Sharding,
    Streams,
    Tracking,
)

STREAMS = ("video", "audio")  # the media of one latent, in its order
Mode = Literal["none", "ddp", "fsdp2"]
Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
Dtype = Literal["float32", "bfloat16", "float16"]
ArgsT = TypeVar("ArgsT", bound="RunArgs")


@dataclass(frozen=True)
class RunArgs:
    """Settings of a run. `model`, `prompts` and `eval.prompts` must be given; a preset may give them.

    OFFLOAD: the parts that --memory.offload may name, in ascending order of the time of their copies. RATES: the
    default learning rates, of all weights and of LoRA. draw_ahead: a setting of trainers whose samples are graded.
    """

    OFFLOAD = "encoder engine optimizer activations blocks"
    RATES = (1e-5, 3e-4)
    draw_ahead = 0

    # Run
    name: Annotated[str, MAY_CHANGE] = "run"  # Name of the run; the same command resumes runs/NAME
    seed: Annotated[int, between(0, 2**63 - 1)] = 0  # Seed of all random numbers
    train_steps: Annotated[int, at_least(0)] = 300  # Training steps; each is one rollout and its updates
    save_every: Annotated[int, at_least(1), MAY_CHANGE] = 10  # Training steps between two checkpoints
    keep_checkpoints: Annotated[int, at_least(1), MAY_CHANGE] = 2  # Number of newest checkpoints to keep
    checkpoint_url: Annotated[str, MAY_CHANGE] = ""  # URL for checkpoints, for machines without a shared disk
    async_save: Annotated[bool, MAY_CHANGE] = True  # Write checkpoints in the background, from a copy on the host
    tracking: Tracking = Tracking()  # Trackers that get metrics and images too
    profile: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Step to trace, phase by phase, from 1; 0 is none
    hang_timeout_s: Annotated[float, between(1, 1e6), MAY_CHANGE] = 1800.0  # Timeout for a silent rank in seconds
    verbose: Annotated[bool, MAY_CHANGE] = False  # Also show warnings and progress bars of other libraries
    dry_run: Annotated[bool, MAY_CHANGE] = False  # Print the settings and the plan of a step, and stop

    # Model
    model: Annotated[str, REQUIRED] = ""  # Folder or hub id of a diffusers pipeline
    dtype: Dtype = "float32"  # Data type of the frozen weights; trained ones are float32
    init_weights: str = ""  # Folder with trained weights to start from, a LoRA adapter or full weights
    lora: Lora = Lora()  # Adapters
    attention: Annotated[Attention, MAY_CHANGE] = "auto"  # Attention kernels, by torch's names
    deterministic: Annotated[bool, MAY_CHANGE] = True  # Use deterministic algorithms in backward passes
    sharding: Sharding = Sharding()  # Spread of the weights over ranks
    memory: Memory = Memory()  # What memory holds, and for how long

    # Data
    prompts: Annotated[str, REQUIRED] = ""  # Training prompts: a file, a folder or a data set on the hub
    prompt_key: str = ""  # Key or column of the prompt; empty: prompt or messages
    media_root: Annotated[str, MAY_CHANGE] = ""  # Additional folder for media files, besides that of the prompts
    eval: Eval = Eval()  # Held-out prompts, and what is done with them
    prompts_per_step: Annotated[int, at_least(1)] = 32  # Prompts in a training step, over all ranks
    group_size: Annotated[int, between(1, 65_536)] = 16  # Samples of each prompt
    batch_size: Annotated[int, between(1, 65_536)] = 16  # Samples per forward of a rank, in rollout and update

    # Scorer
    scorer: Scorer = Scorer()  # The reward server

    # Optimizer
    num_minibatches: Annotated[int, at_least(1)] = 1  # Optimizer steps per rollout
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-4 with LoRA, 1e-5 without
    optim: Optim = Optim()  # AdamW and its learning rate
    ema_decay: Annotated[float, between(0, 0.99999)] = 0.0  # Share that an average of the weights keeps; 0 is off

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return True

    @property
    def batch_unit(self) -> int:
        """The number of samples of which a batch has one or a multiple."""
        return 1

    def __post_init__(self) -> None:
        """Set the defaults that depend on other settings, so that printed and saved settings have them."""
        rank, alpha = self.lora.rank, self.lora.alpha
        lr = self.RATES[rank > 0] if self.lr is None else self.lr
        divisor = rank**0.5 if self.lora.use_rslora else rank
        vars(self).update(lr=lr, lora=replace(self.lora, alpha=alpha or round(2 * divisor)))


@dataclass(frozen=True)
class MediaArgs(RunArgs):
    """Settings of a run on images, videos or sound."""

    # Data
    eval: MediaEval = MediaEval()  # Held-out prompts, and what is done with them

    # Model
    sharding: MediaSharding = MediaSharding()  # Spread of weights and tokens over ranks
    train_experts: Literal["both", "high", "low"] = "both"  # Experts to train, if the model has two
    memory: MediaMemory = MediaMemory()  # What memory holds, and for how long
    streams: Streams = Streams()  # Video and sound of one latent
    compile: Annotated[bool, MAY_CHANGE] = False  # Compile the blocks of the denoiser, for rollout and update

    # Sampling
    height: Annotated[int, between(1, 2**14)] = 512  # Height in pixels
    width: Annotated[int, between(1, 2**14)] = 512  # Width in pixels
    num_frames: Annotated[int, between(1, 2**14)] = 1  # Frames of a video; 1 for images
    frame_rate: Annotated[float, between(1e-3, 1e3)] = 24.0  # Frames per second of a video
    num_inference_steps: Annotated[int, between(2, 10_000)] = 10  # Denoising steps of a rollout
    guidance_scale: Annotated[float, between(0, 1e3)] = 1.0  # Guidance scale, if the pipeline has it; for most 1 is off
    true_cfg_scale: Annotated[float, between(1, 1e3)] = 1.0  # True CFG scale, if the pipeline has it; 1 is off
    guidance: str = ""  # Other guidance settings of the model's pipeline, as name=value,name=value

    # Engine
    engine: str = "diffusers"  # Engine that samples, diffusers or vllm-omni, both in the trainer's process

    # Scorer
    scorer: MediaScorer = MediaScorer()  # The reward servers

    # Optimizer
    optim: MediaOptim = MediaOptim()  # AdamW and its learning rate

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return not ENGINES[self.engine].library


@dataclass(frozen=True)
class ScoredArgs(MediaArgs):
    """Settings of a run whose samples a reward server grades."""

    # Data
    group_size: Annotated[int, between(2, 65_536)] = 16  # Samples of each prompt

    # Scorer
    scorer: ScoredScorer = ScoredScorer()  # The reward servers


@dataclass(frozen=True)
class RolloutArgs(ScoredArgs):
    """Settings of a run that trains on its own samples, which a reward server grades."""

    # Model
    sharding: RolloutSharding = RolloutSharding()  # Spread of weights, tokens and sampling over ranks

    # Sampling
    draw_ahead: Annotated[int, at_least(0)] = 0  # Updates by which a step is sampled in advance


@dataclass(frozen=True)
class GroupArgs(RolloutArgs):
    """Settings of a run that compares the samples of a group."""

    # Algorithm
    adv_std: Literal["batch", "group", "none"] = "batch"  # Samples whose standard deviation divides the advantages
    adv_correction: Literal[0, 1] = 1  # Variance uses n - correction (0: population, 1: sample)


@dataclass(frozen=True)
class JudgedArgs(GroupArgs):
    """Settings of a run that compares the samples of a group by one reward or by several."""

    # Algorithm
    streams: JudgedStreams = JudgedStreams()  # Video and sound of one latent
    reward_parts: str = ""  # Parts of the score to normalize separately and add, as ocr=0.7,jpeg=0.3

    @property
    def has_streams(self) -> bool:
        """True if frames and sound have separate losses."""
        return bool(self.streams.reward_media) or self.streams.sound_weight is not None


@dataclass(frozen=True)
class WindowArgs(GroupArgs):
    """Settings of a run whose rollouts have a window of stochastic steps."""

    # Algorithm
    noise_level: Annotated[float, at_least(1e-6)] = 0.7  # Strength of the noise, as the step rule defines it
    window_size: int | None = None  # Number of stochastic steps in a rollout; none: all but the last
    window_low: Annotated[int, at_least(0)] = 0  # First step that may be stochastic
    window_high: int | None = None  # One past the last step that may be stochastic; none: the last step
    timestep_fraction: Annotated[float, between(1e-6, 1)] = 1.0  # Share of the stochastic steps that a sample trains on

    @property
    def window(self) -> tuple[int, int]:
        """The first step that may be stochastic, and one past the last."""
        return self.window_low, self.num_inference_steps - 1 if self.window_high is None else self.window_high


def read_prompts(
    args: RunArgs, check: RecordCheck | None = None, check_eval: RecordCheck | None = None
) -> tuple[PromptSampler, list[PromptRecord]]:
    """Return the prompts of training, and those of --eval.prompts that are evaluated; each of the files is checked."""
    per_step, root, key = args.prompts_per_step, args.media_root, args.prompt_key
    with flag("--prompts: "):
        prompts = PromptSampler(
            args.prompts, prompts_per_step=per_step, seed=args.seed, check=check, media_root=root, key=key
        )
    with flag("--eval.prompts: "):
        found = load_records(args, args.eval.prompts, check_eval)
    return prompts, found[: args.eval.num_prompts or None]


def load_records(args: RunArgs, place: str, check: RecordCheck | None = None) -> list[PromptRecord]:
    """Return the prompts of a file or what else `load_prompts` takes, by the settings of the run."""
    return load_prompts(place, check=check, media_root=args.media_root, key=args.prompt_key)


def num_ranks() -> int:
    """Return the number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_samplers(args: RunArgs) -> int:
    """Return the number of ranks that only sample."""
    return int(values_of(args).get("sharding.rollout_ranks", 0))


def num_trainers(args: RunArgs) -> int:
    """Return the number of ranks that torchrun started and that train."""
    return num_ranks() - num_samplers(args)


def num_shares(args: RunArgs, world_size: int = 0) -> int:
    """Return the number of shares of ranks, each of which samples and trains on batches of its own.

    world_size: number of ranks; 0 is those that torchrun started.
    """
    context: int = values_of(args).get("sharding.context_parallel", 1)
    return (world_size or num_trainers(args)) // context


def sharding(args: RunArgs, world_size: int) -> Mode:
    """Return the mode of --sharding.mode; auto is the simplest one with the least traffic."""
    auto: Mode = "none" if world_size == 1 else "ddp" if args.lora.rank else "fsdp2"
    return auto if args.sharding.mode == "auto" else args.sharding.mode


def num_batches(args: RunArgs, world_size: int = 0, *, num_trained: int = 1) -> int:
    """Return the number of batches that each rank samples in a training step; those of a share have the same.

    world_size: number of ranks; 0 is those that torchrun started. num_trained: parts of a batch that one minibatch
    after the other may take, such as its stochastic steps.

    Raises:
        ValueError: the step's samples cannot be split into them, or they into the step's minibatches. The message names
            the nearest number that fits.
    """
    shares = num_shares(args, world_size)
    who = "ranks" if shares == (world_size or num_trainers(args)) else "ranks by --sharding.context-parallel"
    samples, per_round = args.prompts_per_step * args.group_size, args.batch_size * shares
    rounds = samples // per_round
    sizes = [n for n in range(args.batch_unit, samples + 1, args.batch_unit) if samples % (n * shares) == 0]
    whole = f" and hold whole groups of --group-size ({args.group_size})" if args.batch_unit > 1 else ""
    counts = [n for n in range(1, rounds * num_trained + 1) if rounds * num_trained % n == 0]
    require(
        (sizes,
         f"the {who} ({shares}) must divide a step's samples ({samples}){whole}, prompts times --group-size"),
        (args.batch_size in sizes,
         f"--batch-size times {who} ({per_round}) must divide a step's samples ({samples}){whole}, "
         f"got {args.batch_size}; nearest: {_nearest(args.batch_size, sizes)}"),
        (args.num_minibatches in counts,
         f"--num-minibatches must divide a rank's batches times the steps trained of each ({rounds} x {num_trained}), "
         f"got {args.num_minibatches}; nearest: {_nearest(args.num_minibatches, counts)}"),
    )  # fmt: skip
    return rounds


def next_end(args: RunArgs, number: int) -> int:
    """Return the finished steps at the first save or evaluation, or the end, after the step of that number."""
    return min(args.train_steps, *((number // every + 1) * every for every in (args.save_every, args.eval.every)))


def _nearest(number: int, others: Sequence[int]) -> int | None:
    """Return the nearest of the other numbers, the lower of two; None if there is none."""
    return min(others, key=lambda other: abs(other - number), default=None)


def offloaded(args: RunArgs) -> set[str]:
    """Return the parts that are offloaded to the host while they are idle.

    Raises:
        ValueError: there is no such part.
    """
    parts, known = set(filter(None, args.memory.offload.split(","))), args.OFFLOAD.split()
    unknown = ", ".join(sorted(parts.difference(known)))
    require((not unknown, f"--memory.offload must be of {', '.join(known)}, with commas between, got {unknown}"))
    return parts


def parse_judges(text: str, parts: str) -> dict[str, str]:
    """Return the only medium that each part judges, by the part's name, from a text such as clap=audio,hpsv3=video.

    parts: the text of --reward-parts.

    Raises:
        ValueError: a piece is not PART=MEDIUM, or names another part or medium.
    """
    judges = parse_pairs(text, "--streams.reward-media", "PART=MEDIUM")
    others = min(set(judges.values()) - set(STREAMS), default="")
    require(
        (judges.keys() <= parse_numbers(parts, "--reward-parts").keys(),
         f"--streams.reward-media must name parts in --reward-parts, got {text}"),
        (not others, f"--streams.reward-media must name {' or '.join(STREAMS)}, got {others}"),
    )  # fmt: skip
    return judges


def parse_numbers(text: str, name: str) -> dict[str, float]:
    """Return the numbers in a text such as ocr=0.7,jpeg=0.3 by name.

    name: the flag that holds the text.

    Raises:
        ValueError: a piece is not NAME=NUMBER, or a name comes twice.
    """
    pairs = parse_pairs(text, name, "NAME=NUMBER")
    try:
        numbers = {key: float(value) for key, value in pairs.items()}
    except ValueError:
        numbers = {name: math.nan}
    fits = all(abs(number) <= 1e30 for number in numbers.values())  # of NaN too
    require((fits, f"{name} must hold finite numbers, of at most 1e+30, got {text!r}"))
    return numbers


def parse_pairs(text: str, name: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Return the values in a text such as clap=audio,hpsv3=video by name.

    name: the flag that holds the text. form: of a piece.

    Raises:
        ValueError: a piece is something else, or a name comes twice.
    """
    pieces = [piece.partition("=") for piece in text.split(",") if piece]
    pairs = {key: value for key, _, value in pieces if key and value}
    rule = f"{name} must be {form} with commas between, each name once, got {text!r}"
    require((len(pairs) == len(pieces), rule))
    return pairs


def scorer_flag(args: RunArgs) -> str:
    """Return the flag of the run's scorer: --scorer if the run starts its server, else --scorer.url."""
    return "--scorer" if values_of(args).get("scorer.name") else "--scorer.url"


def secret_flags(args: RunArgs) -> list[str]:
    """Return the flags of secrets."""
    return [flag_of(name) for name in marked(type(args), SECRET)]


def without_secrets(args: ArgsT) -> ArgsT:
    """Return the settings without secrets, for files that others may read."""
    hidden: dict[str, Any] = dict.fromkeys(marked(type(args), SECRET), "")
    sets = (replace(own, scorer_url=own.scorer_url and "...") for own in args.eval.sets)  # refused, not guessed
    return change(args, **hidden, eval_sets=tuple(sets))
