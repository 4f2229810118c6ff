"""Settings that trainers share, and the rules between them. Imports no torch.

A trainer adds its own fields in `class Args(MediaArgs)`, or in `class Args(ScoredArgs)` if a reward server grades its
samples. `omni_rl.settings.notes.field_notes` reads the help from comments.
"""

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar

from omni_train.prompts.files import PromptRecord, RecordCheck, load_prompts
from omni_train.prompts.sampler import PromptSampler
from omni_train.remote import check_url

from omni_rl.media.images import AllOrNone, reference_sizes
from omni_rl.run.engines import ENGINES
from omni_rl.run.sinks import check_tracker
from omni_rl.settings.eval_sets import Eval, MediaEval, check_gold, check_sets, check_urls
from omni_rl.settings.fields import (
    MAY_CHANGE,
    REQUIRED,
    SECRET,
    SHOWN,
    at_least,
    between,
    change,
    check_bounds,
    flag,
    flag_of,
    marked,
    old_names,
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
    name: Annotated[str, MAY_CHANGE] = "run"  # Name of the run in runs/NAME, which the same command continues
    seed: Annotated[int, between(0, 2**63 - 1)] = 0  # Seed of all random numbers
    train_steps: Annotated[int, at_least(0)] = 300  # Training steps; each is one rollout and its updates
    save_every: Annotated[int, at_least(1), MAY_CHANGE] = 10  # Training steps between two checkpoints
    keep_checkpoints: Annotated[int, at_least(1), MAY_CHANGE] = 2  # Number of newest checkpoints to keep
    checkpoint_url: Annotated[str, MAY_CHANGE] = ""  # URL for checkpoints of machines that share no disk
    async_save: Annotated[bool, MAY_CHANGE] = True  # Write checkpoints from a copy on the host while training goes on
    tracking: Tracking = Tracking()  # Trackers that get metrics and images too
    profile: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Step to trace, phase by phase, from 1; 0 is none
    hang_timeout_s: Annotated[float, between(1, 1e6), MAY_CHANGE] = 1800.0  # Longest wait for a rank in seconds
    verbose: Annotated[bool, MAY_CHANGE] = False  # Show the warnings and progress bars of other libraries too
    dry_run: Annotated[bool, MAY_CHANGE, SHOWN] = False  # Print the settings and the plan of a step, and stop

    # Model
    model: Annotated[str, REQUIRED] = ""  # Folder or hub id of a diffusers pipeline
    dtype: Dtype = "float32"  # Data type of the frozen weights; trained ones are float32
    init_weights: str = ""  # Folder with trained weights to start from, a LoRA adapter or full weights
    lora: Lora = Lora()  # Adapters
    attention: Annotated[Attention, MAY_CHANGE] = "auto"  # Kernels of attention, by torch's names
    deterministic: Annotated[bool, MAY_CHANGE] = True  # Backward passes by algorithms that repeat their bits
    sharding: Sharding = Sharding()  # Spread of the weights over ranks
    memory: Memory = Memory()  # What memory holds, and for how long

    # Data
    prompts: Annotated[str, REQUIRED] = ""  # File of training prompts, .txt, .jsonl or .parquet
    media_root: Annotated[str, MAY_CHANGE] = ""  # Folder below which prompts may name files, beside their own file's
    eval: Eval = Eval()  # Held-out prompts, and what is done with them
    prompts_per_step: Annotated[int, at_least(1)] = 32  # Prompts in a training step, over all ranks
    group_size: Annotated[int, between(1, 65_536)] = 16  # Samples of each prompt
    batch_size: Annotated[int, between(1, 65_536)] = 16  # Samples per forward of a rank, in rollout and update alike

    # Scorer
    scorer: Scorer = Scorer()  # The reward server

    # Optimizer
    num_minibatches: Annotated[int, at_least(1)] = 1  # Optimizer steps per rollout
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW (default: 3e-4 with LoRA, 1e-5 without)
    optim: Optim = Optim()  # AdamW and its learning rate
    ema_decay: Annotated[float, at_least(0)] = 0.0  # Share that an average of the weights keeps each step; 0 is off

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return True

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
    train_experts: Literal["both", "high", "low"] = "both"  # Experts to train, of a model with two by noise level
    memory: MediaMemory = MediaMemory()  # What memory holds, and for how long
    streams: Streams = Streams()  # Video and sound of one latent
    compile: Annotated[bool, MAY_CHANGE] = False  # Compile the blocks of the denoiser, for rollout and update alike

    # Sampling
    height: Annotated[int, between(1, 2**14)] = 512  # Height in pixels
    width: Annotated[int, between(1, 2**14)] = 512  # Width in pixels
    num_frames: Annotated[int, between(1, 2**14)] = 1  # Frames of a video; 1 for images
    frame_rate: Annotated[float, between(1e-3, 1e3)] = 24.0  # Frames of a video in a second
    num_inference_steps: Annotated[int, between(2, 10_000)] = 10  # Denoising steps of a rollout
    guidance_scale: Annotated[float, between(0, 1e3)] = 1.0  # Guidance of pipelines that call it so; for most 1 is off
    true_cfg_scale: Annotated[float, between(1, 1e3)] = 1.0  # Guidance of pipelines that call it so; 1 is off
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
    draw_ahead: Annotated[int, at_least(0)] = 0  # Updates for which a step's samples wait while they are scored


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
    reward_parts: str = ""  # Parts of the score to normalize one by one and add, as ocr=0.7,jpeg=0.3

    @property
    def has_streams(self) -> bool:
        """True if frames and sound have separate losses."""
        return bool(self.streams.reward_media) or self.streams.sound_weight is not None


@dataclass(frozen=True)
class WindowArgs(GroupArgs):
    """Settings of a run whose rollouts have a window of stochastic steps."""

    # Algorithm
    noise_level: Annotated[float, at_least(1e-6)] = 0.7  # Strength of the noise, as the step rule defines it
    window_size: int | None = None  # Number of stochastic steps in a rollout (default: all but the last)
    window_low: Annotated[int, at_least(0)] = 0  # First step that may be stochastic
    window_high: int | None = None  # One past the last step that may be stochastic (default: the last step)
    timestep_fraction: Annotated[float, between(1e-6, 1)] = 1.0  # Share of the stochastic steps that a sample trains on

    @property
    def window(self) -> tuple[int, int]:
        """The first step that may be stochastic, and one past the last."""
        return self.window_low, self.num_inference_steps - 1 if self.window_high is None else self.window_high


def check_run(args: RunArgs) -> None:
    """Check the settings that all trainers share, before torch is imported.

    Raises:
        ValueError: a setting is out of bounds, does not fit another one or the number of ranks, or names no such file.
    """
    check_bounds(args)
    check_tracker(args.tracking.to, args.tracking.project)
    check_notify(args.tracking.notify)
    if args.checkpoint_url:
        with flag("--checkpoint-url: "):
            check_url(args.checkpoint_url)
    lora, memory, shards = args.lora, args.memory, args.sharding
    world_size = num_trainers(args)
    name, mode = PurePath(args.name), sharding(args, world_size)
    values = values_of(args)
    for setting in ("scorer.url", "scorer.watch_url"):
        check_urls(values.get(setting, ""), flag_of(setting))
    check_gold(args.eval, [args.prompts, values.get("scorer.name", ""), values.get("scorer.url", "")])
    missing = next((flag_of(name) for name in marked(type(args), REQUIRED) if not values[name]), "")
    offload, plain = offloaded(args), type(lora)()
    unused = next((key for key, value in vars(lora).items() if key != "alpha" and value != vars(plain)[key]), "")
    require(
        (not missing, f"{missing} must be given, or come from --preset NAME or --config FILE.toml"),
        (name.parts and not name.is_absolute() and ".." not in name.parts and args.name.isprintable(),
         f"--name must name a folder below runs/, got {args.name!r}"),
        (world_size == 1 or mode != "none", f"--sharding.mode none does not fit {world_size} ranks"),
        (shards.mode != "fsdp2" or "RANK" in os.environ or memory.device_gb, "--sharding.mode fsdp2 needs ranks: "
         "omni-rl train NAME --nproc-per-node N, or torchrun; a plan without them WORLD_SIZE=N before the command and "
         "--memory.device-gb"),
        (not shards.size or (mode == "fsdp2" and world_size % shards.size == 0),
         f"--sharding.size must divide the {world_size} ranks of --sharding.mode fsdp2, got {shards.size}"),
        (shards.unshard in ("auto", "none") or mode == "fsdp2",
         f"--sharding.unshard {shards.unshard} needs --sharding.mode fsdp2"),
        (not shards.experts or (mode == "fsdp2" and shards.size in (0, world_size)),
         "--sharding.experts needs --sharding.mode fsdp2, and --sharding.size 0"),
        (lora.rank or args.dtype == "float32" or mode == "fsdp2",
         f"--dtype {args.dtype} needs --lora.rank > 0 or --sharding.mode fsdp2, which trains float32 weights"),
        (args.draw_ahead < min(args.save_every, args.eval.every),
         "--draw-ahead must be < --save-every and --eval.every, as no samples wait where a run is saved or evaluated, "
         f"got {args.draw_ahead}"),
        (args.dry_run or not memory.device_gb, "--memory.device-gb needs --dry-run"),
        (not args.eval.only or not memory.device_gb,
         "--memory.device-gb plans a training step, and --eval.only takes none"),
        (not args.eval.only or not args.profile, "--profile traces a training step, and --eval.only takes none"),
        (args.profile <= args.train_steps,
         f"--profile must be <= --train-steps ({args.train_steps}), got {args.profile}"),
        (lora.rank or not unused, f"--lora.{unused.replace('_', '-')} needs --lora.rank > 0"),
        (lora.init != "pissa" or (mode != "fsdp2" and not args.init_weights and not num_samplers(args)),
         "--lora.init pissa needs whole weights, not fsdp2's, and does not go with --init-weights or "
         "--sharding.rollout-ranks"),
        (lora.init != "pissa" or not lora.use_dora, "--lora.use-dora does not go with --lora.init pissa"),
        (mode != "fsdp2" or args.dtype == "float32" or not (lora.use_dora or lora.dtype == "float32"),
         "--lora.use-dora and --lora.dtype float32 need --dtype float32 or weights not fsdp2, which rounds adapters, "
         f"got --dtype {args.dtype}"),
        (lora.init != "pissa" or "blocks" not in offload or not memory.device_gb,
         "--memory.device-gb plans no --lora.init pissa with --memory.offload blocks, as a plan's host has no weights"),
        (memory.gradient_checkpointing or not memory.keep_products_gb,
         "--memory.keep-products-gb needs --memory.gradient-checkpointing"),
        (memory.base_dtype == "auto" or (lora.rank and memory.gradient_checkpointing and mode != "fsdp2"),
         f"--memory.base-dtype {memory.base_dtype} needs --lora.rank > 0, --memory.gradient-checkpointing, and "
         "weights not fsdp2"),
        (not memory.adam_8bit or find_spec("torchao"),
         "--memory.adam-8bit needs torchao: pip install 'omni-rl[torchao]'"),
        (not memory.adam_8bit or "optimizer" not in offload,
         "--memory.adam-8bit keeps its moments on the device: --memory.offload must not name optimizer"),
        (memory.gradient_checkpointing or "activations" not in offload,
         "--memory.offload activations needs --memory.gradient-checkpointing"),
        ("blocks" not in offload or (lora.rank and memory.gradient_checkpointing and mode != "fsdp2"),
         "--memory.offload blocks needs --lora.rank > 0, --memory.gradient-checkpointing, and weights not fsdp2"),
        (args.ema_decay < 1, f"--ema-decay must be < 1, got {args.ema_decay}"),
        (not args.init_weights or Path(args.init_weights).is_dir(),
         f"--init-weights must be a folder, got {args.init_weights}"),
        (not args.media_root or Path(args.media_root).is_dir(),
         f"--media-root must be a folder, got {args.media_root}"),
        (not args.scorer.token_file or Path(args.scorer.token_file).is_file(),
         f"--scorer.token-file must be a file, got {args.scorer.token_file}"),
    )  # fmt: skip


def check_media(args: MediaArgs, *, num_trained: int | None = 1) -> None:
    """Check what `check_run` does, the settings of trainers on media, and the files that they name.

    num_trained: as in `num_batches`; None leaves out its rules.

    Raises:
        ValueError: as `check_run` and `num_batches`.
    """
    memory, context, world_size = args.memory, args.sharding.context_parallel, num_trainers(args)
    check_samplers(args)
    check_run(args)
    engine = ENGINES.get(args.engine)
    beside = f"--sharding.context-parallel {context} does not go with"
    require(
        (world_size % context == 0,
         f"--sharding.context-parallel must divide the {world_size} ranks, got {context}"),
        (context == 1 or not (engine and engine.library), f"{beside} --engine {args.engine}"),
        (context == 1 or not args.compile, f"{beside} --compile"),
        (not args.sharding.experts or not args.compile, "--sharding.experts does not go with --compile"),
        (context == 1 or not values_of(args).get("scorer.sleep"), f"{beside} --scorer.sleep"),
        (not (args.compile and engine and engine.library), f"--compile needs --engine diffusers, got {args.engine}"),
        (engine, f"--engine must be one of {', '.join(ENGINES)}, got {args.engine!r}"),
        (args.dtype != "float16" or not (engine and engine.library),
         f"--dtype float16 needs --engine diffusers, got {args.engine}"),
        (engine and (not engine.library or memory.device_gb or find_spec(engine.library)),
         f"--engine {args.engine} must be installed: {engine and engine.install}"),
        (not (engine and engine.library and ({"encoder", "blocks"} & offloaded(args) or memory.base_dtype != "auto")),
         "--memory.offload encoder or blocks and --memory.base-dtype fit the embedded engine alone, got --engine "
         f"{args.engine}"),
        (memory.rollout_dtype == "auto" or (engine and engine.library and args.dtype == "bfloat16"),
         f"--memory.rollout-dtype {memory.rollout_dtype} needs --engine vllm-omni and --dtype bfloat16, got --engine "
         f"{args.engine} and --dtype {args.dtype}"),
        (not (args.compile and "blocks" in offloaded(args)), "--memory.offload blocks does not go with --compile"),
        (not memory.decode_tile or memory.decode_tile >= 64,
         f"--memory.decode-tile must be 0, or at least 64 pixels, got {memory.decode_tile}"),
        (not memory.text_cache or not Path(memory.text_cache).exists() or Path(memory.text_cache).is_dir(),
         f"--memory.text-cache must be a folder, got {memory.text_cache}"),
    )  # fmt: skip
    parse_numbers(args.guidance, "--guidance")
    read_prompts(args, check_shapes(args), AllOrNone())
    check_sets(args.eval.all_sets, AllOrNone, media_root=args.media_root)
    if num_trained is not None:
        num_batches(args, num_trained=num_trained)


def check_samplers(args: MediaArgs) -> None:
    """Raise ValueError unless the settings fit ranks that only sample, if there are any."""
    count, trainers, given = num_samplers(args), num_trainers(args), values_of(args)
    if not count:
        return
    beside = f"--sharding.rollout-ranks {count} does not go with"
    samples, per_round = args.prompts_per_step * args.group_size, max(args.batch_size, args.group_size) * count
    shares_noise = given.get("same_start_noise", False)
    others = {"sharding.context_parallel": 1, "sharding.size": 0, "engine": "diffusers", "memory.device_gb": 0}
    others |= {"scorer.sleep": False, "preferences": "", "sharding.experts": False}
    require(
        (trainers > 0, f"--sharding.rollout-ranks must be < the {num_ranks()} ranks, got {count}"),
        *((given.get(name, plain) == plain, f"{beside} {flag_of(name)} {given.get(name)}")
          for name, plain in others.items()),
        (samples % per_round == 0,
         f"all ranks that sample must sample whole groups and batches, {per_round} samples or a multiple: "
         f"--prompts-per-step and --group-size make {samples}"),
        (not shares_noise or args.prompts_per_step % trainers == 0,
         f"--prompts-per-step must be a multiple of the {trainers} ranks that train with --same-start-noise, "
         f"got {args.prompts_per_step}"),
    )  # fmt: skip


def read_prompts(
    args: RunArgs, check: RecordCheck | None = None, check_eval: RecordCheck | None = None
) -> tuple[PromptSampler, list[PromptRecord]]:
    """Return the prompts of training, and those of --eval.prompts that are evaluated; each of the files is checked."""
    per_step, root, count = args.prompts_per_step, args.media_root, args.eval.num_prompts
    with flag("--prompts: "):
        prompts = PromptSampler(args.prompts, prompts_per_step=per_step, seed=args.seed, check=check, media_root=root)
    with flag("--eval.prompts: "):
        found = load_prompts(args.eval.prompts, check=check_eval, media_root=root)
    require((count <= len(found), f"--eval.num-prompts must be at most the file's {len(found)}, got {count}"))
    return prompts, found[: count or None]


def check_shapes(args: MediaArgs) -> RecordCheck:
    """Return a check of training prompts in turn: the samples of a batch must have the same shapes.

    If --batch-size divides --group-size, a batch is of one prompt. Then prompts may have sizes and references of their
    own.
    """
    first: dict[str, object] = {}
    check_references = AllOrNone()

    def check(record: PromptRecord) -> None:
        check_references(record)
        shapes = {
            '"height" and "width"': record.size or (args.height, args.width),
            '(height, width) of "images"': reference_sizes(record),
        }
        for name, shape in shapes.items():
            rule = f"{name} must be those of the first prompt, {first.setdefault(name, shape)}, unless --batch-size"
            rule += f" ({args.batch_size}) divides --group-size ({args.group_size}), got {shape}"
            require((first[name] == shape or args.group_size % args.batch_size == 0, rule))

    return check


def check_scored(args: ScoredArgs, *, num_trained: int | None = 1, needs_scorer: bool = True) -> None:
    """Check what `check_media` does, and that there is a scorer.

    Raises:
        ValueError: as `check_media`, or for the URL.
    """
    check_media(args, num_trained=num_trained)
    scorer, rule = args.scorer, "--scorer must name a reward, as ocr, or --scorer.url a reward server"
    require(
        (scorer.given or args.dry_run or not needs_scorer, rule),
        (scorer.given or args.dry_run or not scorer.sleep, f"--scorer.sleep: {rule}"),
        (not (scorer.sleep and args.draw_ahead),
         f"--draw-ahead must be 0 with --scorer.sleep, which scores while no rank samples, got {args.draw_ahead}"),
        (not (scorer.sleep and scorer.url) or scorer.token_file,
         "--scorer.sleep needs --scorer.token-file beside --scorer.url, as only its clients with a token move weights"),
    )  # fmt: skip


def check_judged(args: JudgedArgs, *, num_trained: int = 1) -> None:
    """Check what `check_scored` does, and the settings of several rewards and several media.

    Raises:
        ValueError: as `check_scored`, or for these settings.
    """
    parse_judges(args.streams.reward_media, args.reward_parts)
    check_scored(args, num_trained=num_trained)


def check_window(args: WindowArgs) -> int:
    """Return the number of stochastic steps in a rollout.

    Raises:
        ValueError: the schedule has no such window.
    """
    low, high = args.window
    size = high - low if args.window_size is None else args.window_size
    require(
        (low < high < args.num_inference_steps,
         f"--window-low must be < --window-high, and that < --num-inference-steps ({args.num_inference_steps}), "
         f"got {low} and {high}"),
        (1 <= size <= high - low, f"--window-size must be from 1 to the window's {high - low} steps, got {size}"),
    )  # fmt: skip
    return size


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
    sizes = [n for n in range(1, samples + 1) if samples % (n * shares) == 0]
    counts = [n for n in range(1, rounds * num_trained + 1) if rounds * num_trained % n == 0]
    require(
        (sizes, f"the {who} ({shares}) must divide a step's samples ({samples}), prompts times --group-size"),
        (args.batch_size in sizes,
         f"--batch-size times {who} ({per_round}) must divide a step's samples ({samples}), got {args.batch_size}; "
         f"nearest: {_nearest(args.batch_size, sizes)}"),
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
    require((all(map(math.isfinite, numbers.values())), f"{name} must hold finite numbers, got {text!r}"))
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


def check_notify(command: str) -> None:
    """Check that the command can be started; an empty one is no command.

    Raises:
        ValueError: a quote is not closed, or the program does not exist; the command itself is not named.
    """
    rule = "--tracking.notify must be a program that exists and its arguments, as in a shell"
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ValueError(f"{rule}: {exc}") from None
    if command and not (words and shutil.which(words[0])):
        raise ValueError(f"{rule}, got the program {words[0] if words else ''!r}")


def secret_flags(args: RunArgs) -> list[str]:
    """Return the flags of secrets, under all their names."""
    secret = marked(type(args), SECRET)
    return [
        flag_of(name) for name in (*secret, *(old for old, name in old_names(type(args)).items() if name in secret))
    ]


def without_secrets(args: ArgsT) -> ArgsT:
    """Return the settings without secrets, for files that others may read."""
    hidden: dict[str, Any] = dict.fromkeys(marked(type(args), SECRET), "")
    sets = (replace(own, scorer_url=own.scorer_url and "...") for own in args.eval.sets)  # refused, not guessed
    return change(args, **hidden, eval_sets=tuple(sets))
