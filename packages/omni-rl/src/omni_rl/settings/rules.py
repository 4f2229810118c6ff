"""Checks of the settings that trainers share, and of the files that they name. Imports no torch."""

import os
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path, PurePath

from omni_train.prompts.files import PromptRecord, RecordCheck
from omni_train.remote import check_url

from omni_rl.media.images import AllOrNone, reference_sizes
from omni_rl.run.engines import ENGINES
from omni_rl.run.sinks import check_tracker
from omni_rl.settings.args import (
    MediaArgs,
    RunArgs,
    load_records,
    num_batches,
    num_ranks,
    num_trainers,
    parse_numbers,
    parse_offload,
    parse_reward_media,
    read_prompts,
    sharding_mode,
    split_options,
)
from omni_rl.settings.eval_sets import check_gold, check_sets, check_urls
from omni_rl.settings.fields import REQUIRED, check_bounds, flag_of, marked_settings, prefix_errors, require, values_of
from omni_rl.settings.groups import Sampling, Window


def check_run(args: RunArgs) -> None:
    """Check the settings that all trainers share, before torch is imported.

    Raises:
        ValueError: a setting is out of bounds, conflicts with another or the number of ranks, or names a missing file.
    """
    check_bounds(args)
    check_tracker(args.run.tracking.to, args.run.tracking.project)
    check_notify(args.run.tracking.notify)
    if args.run.checkpoint_url:
        with prefix_errors("--checkpoint-url: "):
            check_url(args.run.checkpoint_url)
    lora, memory, shards = args.lora, args.memory, args.sharding
    world_size = num_trainers(args)
    name, mode = PurePath(args.run.name), sharding_mode(args, world_size)
    check_urls(args.scorer.url, "--scorer.url")
    check_urls(args.scorer.watch_url, "--scorer.watch-url")
    check_gold(args.eval, [args.data.prompts, args.scorer.name, args.scorer.url])
    values = values_of(args)
    missing = next((flag_of(name) for name in marked_settings(type(args), REQUIRED) if not values[name]), "")
    offload, plain = parse_offload(memory), type(lora)()
    unused_key = next((key for key, value in vars(lora).items() if key != "alpha" and value != vars(plain)[key]), "")
    require(
        (not missing, f"{missing} must be given, or come from --preset NAME or --config FILE.toml"),
        (name.parts and not name.is_absolute() and ".." not in name.parts and args.run.name.isprintable(),
         f"--name must name a folder below runs/, got {args.run.name!r:.100}"),
        (max(map(_num_bytes, ("", *name.parts))) <= 255 and _num_bytes(args.run.name) <= 1000,
         f"--name must have at most 255 bytes between slashes and 1,000 in all, got {_num_bytes(args.run.name)}"),
        (world_size == 1 or mode != "none", f"--sharding.mode none does not fit {world_size} ranks"),
        (shards.mode != "fsdp2" or "RANK" in os.environ or (args.run.dry_run and "WORLD_SIZE" in os.environ)
         or memory.device_gb, "--sharding.mode fsdp2 needs ranks: omni-rl train NAME --nproc-per-node N, or torchrun"),
        (not shards.size or (mode == "fsdp2" and world_size % shards.size == 0),
         f"--sharding.size must divide the {world_size} ranks of --sharding.mode fsdp2, got {shards.size}"),
        (shards.unshard in ("auto", "none") or mode == "fsdp2",
         f"--sharding.unshard {shards.unshard} needs --sharding.mode fsdp2"),
        (not shards.experts or (mode == "fsdp2" and shards.size in (0, world_size)),
         "--sharding.experts needs --sharding.mode fsdp2, and --sharding.size 0"),
        (lora.rank or args.policy.dtype == "float32" or mode == "fsdp2",
         f"--dtype {args.policy.dtype} needs --lora.rank > 0 or --sharding.mode fsdp2, which trains float32 weights"),
        (args.sampling.draw_ahead < min(args.run.save_every, args.eval.every),
         "--draw-ahead must be < --save-every and --eval.every, as no samples wait where a run is saved or evaluated, "
         f"got {args.sampling.draw_ahead}"),
        (args.run.dry_run or not memory.device_gb, "--memory.device-gb needs --dry-run"),
        (not args.eval.only or not memory.device_gb,
         "--memory.device-gb plans a training step, and --eval.only takes none"),
        (not args.eval.only or not args.run.profile, "--profile traces a training step, and --eval.only takes none"),
        (args.run.profile <= args.run.train_steps,
         f"--profile must be <= --train-steps ({args.run.train_steps}), got {args.run.profile}"),
        (lora.rank or not unused_key, f"--lora.{unused_key.replace('_', '-')} needs --lora.rank > 0"),
        (lora.init != "pissa" or (mode != "fsdp2" and not args.policy.init_weights and not args.sharding.rollout_ranks),
         "--lora.init pissa needs whole weights, not fsdp2's, and does not go with --init-weights or "
         "--sharding.rollout-ranks"),
        (lora.init != "pissa" or not lora.use_dora, "--lora.use-dora does not go with --lora.init pissa"),
        (mode != "fsdp2" or args.policy.dtype == "float32" or not (lora.use_dora or lora.dtype == "float32"),
         "--lora.use-dora and --lora.dtype float32 need --dtype float32 or weights not fsdp2, which rounds adapters, "
         f"got --dtype {args.policy.dtype}"),
        (lora.init != "pissa" or "blocks" not in offload or not memory.device_gb,
         "--memory.device-gb plans no --lora.init pissa with --memory.offload blocks, as a plan's host has no weights"),
        (memory.gradient_checkpointing or not memory.keep_products_gb,
         "--memory.keep-products-gb needs --memory.gradient-checkpointing"),
        (memory.base_dtype == "auto" or (lora.rank and memory.gradient_checkpointing and mode != "fsdp2"),
         f"--memory.base-dtype {memory.base_dtype} needs --lora.rank > 0, --memory.gradient-checkpointing, and "
         "weights not fsdp2"),
        (memory.gradient_checkpointing or "activations" not in offload,
         "--memory.offload activations needs --memory.gradient-checkpointing"),
        ("blocks" not in offload or (lora.rank and memory.gradient_checkpointing and mode != "fsdp2"),
         "--memory.offload blocks needs --lora.rank > 0, --memory.gradient-checkpointing, and weights not fsdp2"),
        (not args.policy.init_weights or Path(args.policy.init_weights).is_dir(),
         f"--init-weights must be a folder, got {args.policy.init_weights}"),
        (not args.data.media_root or Path(args.data.media_root).is_dir(),
         f"--media-root must be a folder, got {args.data.media_root}"),
        (not args.scorer.token_file or Path(args.scorer.token_file).is_file(),
         f"--scorer.token-file must be a file, got {args.scorer.token_file}"),
    )  # fmt: skip
    for flag, scorer in (("--scorer", args.scorer.name), ("--eval.gold-scorer", args.eval.gold_scorer)):
        if scorer:
            from omni_reward.scorers import check_scorer

            with prefix_errors(f"{flag}: "):
                check_scorer(split_options(scorer)[0])


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def check_media(args: MediaArgs, *, num_trained: int | None = 1, unit: int = 1) -> None:
    """Check all that `check_run` checks, the settings of trainers on media, and the files that they name.

    num_trained, unit: see `num_batches`; num_trained None skips its checks.

    Raises:
        ValueError: as in `check_run` and `num_batches`.
    """
    memory, context, world_size = args.memory, args.sharding.context_parallel, num_trainers(args)
    check_samplers(args)
    check_run(args)
    engine = ENGINES.get(args.sampling.engine)
    conflict = f"--sharding.context-parallel {context} does not go with"
    require(
        (world_size % context == 0,
         f"--sharding.context-parallel must divide the {world_size} ranks, got {context}"),
        (context == 1 or not (engine and engine.library), f"{conflict} --engine {args.sampling.engine}"),
        (context == 1 or not args.policy.compile, f"{conflict} --compile"),
        (not args.sharding.experts or not args.policy.compile, "--sharding.experts does not go with --compile"),
        (context == 1 or not args.scorer.sleep, f"{conflict} --scorer.sleep"),
        (not (args.policy.compile and engine and engine.library),
         f"--compile needs --engine diffusers, got {args.sampling.engine}"),
        (engine, f"--engine must be one of {', '.join(ENGINES)}, got {args.sampling.engine!r}"),
        (args.policy.dtype != "float16" or not (engine and engine.library),
         f"--dtype float16 needs --engine diffusers, got {args.sampling.engine}"),
        (engine and (not engine.library or memory.device_gb or find_spec(engine.library)),
         f"--engine {args.sampling.engine} must be installed: {engine and engine.install}"),
        (not (engine and engine.library and ("blocks" in parse_offload(memory) or memory.base_dtype != "auto")),
         f"--memory.offload blocks and --memory.base-dtype need --engine diffusers, got {args.sampling.engine}"),
        (memory.rollout_dtype == "auto" or (engine and engine.library and args.policy.dtype == "bfloat16"),
         f"--memory.rollout-dtype {memory.rollout_dtype} needs --engine vllm-omni and --dtype bfloat16, got --engine "
         f"{args.sampling.engine} and --dtype {args.policy.dtype}"),
        (not (args.policy.compile and "blocks" in parse_offload(memory)),
         "--memory.offload blocks does not go with --compile"),
        (not memory.decode_tile or memory.decode_tile >= 64,
         f"--memory.decode-tile must be 0, or at least 64 pixels, got {memory.decode_tile}"),
        (not memory.text_cache or not Path(memory.text_cache).exists() or Path(memory.text_cache).is_dir(),
         f"--memory.text-cache must be a folder, got {memory.text_cache}"),
    )  # fmt: skip
    parse_numbers(args.sampling.guidance, "--guidance")
    read_prompts(args, check_shapes(args), AllOrNone())
    check_sets(args.eval.all_sets, lambda place: load_records(args.data, place, AllOrNone()))
    if num_trained is not None:
        num_batches(args, num_trained=num_trained, unit=unit)


def check_samplers(args: MediaArgs) -> None:
    """Raise ValueError unless the settings fit ranks that only sample, if there are any."""
    count, trainers, values = args.sharding.rollout_ranks, num_trainers(args), values_of(args)
    if not count:
        return
    conflict = f"--sharding.rollout-ranks {count} does not go with"
    samples, per_round = (
        args.data.prompts_per_step * args.data.group_size,
        max(args.data.batch_size, args.data.group_size) * count,
    )
    shares_noise = values.get("same_start_noise", False)
    required = {"sharding.context_parallel": 1, "sharding.size": 0, "engine": "diffusers", "memory.device_gb": 0}
    required |= {"scorer.sleep": False, "preferences": "", "sharding.experts": False}
    require(
        (trainers > 0, f"--sharding.rollout-ranks must be < the {num_ranks()} ranks, got {count}"),
        *((values.get(name, wanted) == wanted, f"{conflict} {flag_of(name)} {values.get(name)}")
          for name, wanted in required.items()),
        (samples % per_round == 0,
         f"all ranks that sample must sample whole groups and batches, {per_round} samples or a multiple: "
         f"--prompts-per-step and --group-size make {samples}"),
        (not shares_noise or args.data.prompts_per_step % trainers == 0,
         f"--prompts-per-step must be a multiple of the {trainers} ranks that train with --same-start-noise, "
         f"got {args.data.prompts_per_step}"),
    )  # fmt: skip


def check_shapes(args: MediaArgs) -> RecordCheck:
    """Return a check of training prompts, one after another: the samples of a batch must have the same shapes.

    If --batch-size divides --group-size, each batch is from one prompt, so sizes and references may differ by prompt.
    """
    first: dict[str, object] = {}
    check_references = AllOrNone()

    def check(record: PromptRecord) -> None:
        check_references(record)
        shapes = {
            '"height" and "width"': record.size or (args.sampling.height, args.sampling.width),
            '(height, width) of "images"': reference_sizes(record),
        }
        for name, shape in shapes.items():
            rule = f"{name} must be those of the first prompt, {first.setdefault(name, shape)}, unless --batch-size"
            rule += f" ({args.data.batch_size}) divides --group-size ({args.data.group_size}), got {shape}"
            require((first[name] == shape or args.data.group_size % args.data.batch_size == 0, rule))

    return check


def check_scored(args: MediaArgs, *, num_trained: int | None = 1, unit: int = 1, needs_scorer: bool = True) -> None:
    """Check all that `check_media` checks, that there is a scorer, and the media that parts of its score judge.

    Raises:
        ValueError: as in `check_media`, or one of these checks fails.
    """
    parse_reward_media(args.streams.reward_media, values_of(args).get("reward_parts", ""))
    check_media(args, num_trained=num_trained, unit=unit)
    scorer, rule = args.scorer, "--scorer must name a reward, as ocr, or --scorer.url a reward server"
    require(
        (scorer.is_set or args.run.dry_run or not needs_scorer, rule),
        (scorer.is_set or args.run.dry_run or not scorer.sleep, f"--scorer.sleep: {rule}"),
        (not (scorer.sleep and args.sampling.draw_ahead),
         "--draw-ahead must be 0 with --scorer.sleep, which scores while no rank samples, got "
         f"{args.sampling.draw_ahead}"),
        (not (scorer.sleep and scorer.url) or scorer.token_file,
         "--scorer.sleep needs --scorer.token-file beside --scorer.url, as only its clients with a token move weights"),
    )  # fmt: skip


def check_window(window: Window, sampling: Sampling) -> int:
    """Return the number of stochastic steps in a rollout.

    Raises:
        ValueError: the window does not fit the schedule.
    """
    low, high = window.steps(sampling)
    size = high - low if window.window_size is None else window.window_size
    require(
        (low < high < sampling.num_inference_steps,
         f"--window-low must be < --window-high, and that < --num-inference-steps ({sampling.num_inference_steps}), "
         f"got {low} and {high}"),
        (1 <= size <= high - low, f"--window-size must be from 1 to the window's {high - low} steps, got {size}"),
    )  # fmt: skip
    return size


def check_notify(command: str) -> None:
    """Check that the command can be started; an empty command is fine.

    Raises:
        ValueError: a quote is not closed, or the program does not exist. The message does not contain the command.
    """
    rule = "--tracking.notify must be a program that exists and its arguments, as in a shell"
    try:
        argv = shlex.split(command)
    except ValueError as exc:
        raise ValueError(f"{rule}: {exc}") from None
    if command and not (argv and shutil.which(argv[0])):
        raise ValueError(f"{rule}, got the program {argv[0] if argv else ''!r}")
