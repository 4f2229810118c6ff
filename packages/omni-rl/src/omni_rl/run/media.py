"""Runs that draw images, videos or sound: what they read, and what scores, samples, evaluates and exports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from omni_rollout import Engine, Model, Params
from omni_rollout.conditioning import TextCache
from omni_rollout.decoding import in_slices, in_tiles, num_decoded
from omni_rollout.model import wrap
from omni_rollout.models import open_model
from omni_rollout.models.routing import replay_routes, routing_of
from omni_rollout.sampler import check_images
from omni_train.dist import divide
from omni_train.files import probe_digest
from omni_train.prepare import Preparation, adapt
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.weights.full import LORA_FILE, check_adapter, check_weights, homes, save_weights, saved_files
from torch import nn

from omni_rl.flow.sampling import evaluate_set
from omni_rl.flow.scorers import Scorer, abstaining
from omni_rl.media.images import reference_sizes
from omni_rl.run.run import MediaRun, first_input
from omni_rl.run.start import (
    Inputs,
    Kind,
    Needs,
    beside,
    model_place,
    open_set_scorers,
    preparation,
    read_sets,
)
from omni_rl.run.world import World
from omni_rl.settings.args import (
    STREAMS,
    JudgedArgs,
    MediaArgs,
    ScoredArgs,
    WindowArgs,
    offloaded,
    parse_numbers,
    read_prompts,
)
from omni_rl.settings.fields import flag, require

ModelT = TypeVar("ModelT", bound=Model)
ParamsT = TypeVar("ParamsT", bound=Params)


def params_of(args: MediaArgs) -> Params:
    """Return what training samples with, without any stochastic step."""
    true_cfg = {"true_cfg_scale": args.true_cfg_scale} if args.true_cfg_scale != 1 else {}
    return Params(
        num_inference_steps=args.num_inference_steps,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        frame_rate=args.frame_rate,
        guidance_scale=args.guidance_scale,
        guidance=parse_numbers(args.guidance, "--guidance") | true_cfg,
    )


def read(args: MediaArgs, world: World, needs: Needs) -> Inputs[Model, Params]:
    """Read what a run of media starts from.

    Raises:
        ValueError: some file is missing, incomplete or malformed, or the model does not fit the settings; the message
            begins with the flag.
    """
    with flag("--model: "):
        model = open_model(model_place(args))
    params = params_of(args)
    eval_params = replace(params, num_inference_steps=args.eval.num_inference_steps)
    return read_all(args, world, needs, model, params, eval_params)


def read_all(
    args: MediaArgs,
    world: World,
    needs: Needs,
    model: ModelT,
    params: ParamsT,
    eval_params: ParamsT,
    check: Callable[[PromptRecord], None] = lambda record: None,
    check_graded: Callable[[PromptRecord], None] = lambda record: None,
) -> Inputs[ModelT, ParamsT]:
    """Read all but the model itself.

    check: called with each prompt, too. check_graded: with each that the run's own scorer grades.
    """
    trained = {name: part for name, part in model.nets.items() if args.train_experts in ("both", name)}
    check_model(args, world, model, trained, params, eval_params)
    sizes = set[tuple[int, int]]()

    def check_record(record: PromptRecord) -> None:
        check_images(model, reference_sizes(record))
        size = record.size or (args.height, args.width)
        if size not in sizes:
            model.check(params.of_size(size))
            sizes.add(size)
        check(record)

    def check_whole(record: PromptRecord) -> None:
        check_graded(record)
        check_record(record)

    still = set(model.BRANCHES["audio"]) if args.streams.freeze_audio else set()

    def is_frozen(name: str) -> bool:
        pieces = name.split(".")
        return not (trained.keys() & {"", pieces[0]}) or not still.isdisjoint(pieces)

    how = replace(preparation(args, world.dist.device, model, is_frozen, compiles=args.compile), share=model.share)
    prompts, records = read_prompts(args, check_whole, check_whole)
    sets = read_sets(args, records, eval_params, check_record, check_whole, model.check)
    files, adapters = read_start(args, model, how)
    teachers = read_teachers(args, needs, model, how, trained)
    if needs.teaching:
        with flag("--teacher-guidance-scale and --teacher-true-cfg-scale: "):
            model.check(needs.teaching(params))
    check_steps(args, model, params, needs.steps, trained)
    has_streams = isinstance(args, JudgedArgs) and args.has_streams
    streams = model.streams(params) if has_streams else {}
    require(
        (not has_streams or streams,
         "--streams.sound-weight and --streams.reward-media need a model that draws video with sound"),
        (not has_streams or len(sizes) == 1,
         "--streams.sound-weight and --streams.reward-media need prompts of one size"),
        (not needs.routes or routing_of(model.empty_net()),
         "--route-replay needs a model that is a mixture of experts"),
    )  # fmt: skip
    training = load_prompts(args.prompts, media_root=args.media_root)
    images = sorted({image for record in training for image in record.images})
    homes_of = [home for found in teachers.values() for home in found.values()]
    weights = [file for home in homes_of for file in ([home / LORA_FILE] if args.lora.rank else saved_files(home))]
    config: dict[str, object] = {"images_digest": probe_digest(images, num_blocks=1)} if images else {}
    config |= {"teachers_digest": probe_digest(weights)} if teachers else {}
    latents = [model.latent_shape(params.of_size(size)) for size in sorted(sizes)]
    low_lr = args.optim.low_expert_lr
    return Inputs(
        model,
        params,
        prompts,
        sets,
        canary_of(args.frame_rate, [*records, *training]),
        beside(how, needs, adapters),
        f"{model.__class__.__name__}, latents {' and '.join(map(str, latents))}",
        trained,
        config,
        files,
        adapters,
        teachers=teachers,
        lr_scales={} if low_lr is None else {"low": low_lr / (args.lr or 1.0)},
        streams={medium: streams[medium] for medium in STREAMS} if streams else {},
        sizes=sizes,
    )


def check_model(
    args: MediaArgs, world: World, model: Model, trained: Mapping[str, str], params: Params, eval_params: Params
) -> None:
    """Raise ValueError unless the model is whole and fits the settings. params, eval_params: what it samples with."""
    only = " or ".join(("both", *filter(None, model.nets)))
    model.context = args.sharding.context_parallel
    with flag("--sharding.context-parallel: "):
        model.check_context()
    require(
        (trained, f"--train-experts must be {only} for this model, got {args.train_experts}"),
        (args.optim.low_expert_lr is None or (len(trained) == 2 and args.lr),
         "--optim.low-expert-lr needs two experts that are trained, and --lr > 0"),
        (not args.memory.decode_tile or "audio" not in model.MEDIA,
         "--memory.decode-tile needs a model that samples images, or videos without sound"),
        (not args.streams.freeze_audio or "audio" in model.BRANCHES,
         "--streams.freeze-audio needs a model that draws video with sound"),
    )  # fmt: skip
    model.host_encoders = "encoder" in offloaded(args)
    kind = model.config["_class_name"]
    require((model.encoders or not model.host_encoders, f"--memory.offload encoder: a {kind} has no text encoder"))
    with flag("--"):  # the message itself begins with height, width or another setting
        for each in (params, eval_params):
            model.check(each)
    with flag("--model: "):
        model.sigmas(params)
        world.check_files(model)  # last, as it imports the libraries that make the parts


def check_steps(
    args: MediaArgs, model: Model, params: Params, steps: tuple[int, int] | None, trained: Mapping[str, str]
) -> None:
    """Raise ValueError for steps of the schedule at which only an expert runs that is not trained."""
    if not model.boundary or steps is None:
        return
    high = (model.sigmas(params)[:-1] >= model.boundary).tolist()
    least, most = 0 if "high" in trained else sum(high), len(high) if "low" in trained else sum(high)
    require(
        (not isinstance(args, WindowArgs) or args.timestep_fraction == 1,
         "--timestep-fraction must be 1 for a model with two experts, as a batch is of one")
    )  # fmt: skip
    which, last = args.train_experts, steps[1] - 1
    rule = f"--train-experts {which} takes steps {least} to {most - 1} of {len(high)}, got trained steps"
    require((least <= steps[0] and last < most, f"{rule} {steps[0]} to {last}"))


def read_start(args: MediaArgs, model: Model, how: Preparation) -> tuple[dict[str, Sequence[Path]], dict[str, Path]]:
    """Check the weights to start from: full ones by expert, or folders of adapters; of either expert, or of both."""
    if not args.init_weights:
        return {}, {}
    with flag("--init-weights: "):
        net, found = model.empty_net(), homes(args.init_weights, model.nets)
        for name, home in found.items():
            check_weights(net.get_submodule(name), home)
        full: dict[str, Sequence[Path]] = {name: files for name, home in found.items() if (files := saved_files(home))}
        if len(full) == len(found):
            return full, {}
        require(
            (args.lora.rank, f"{args.init_weights} holds a LoRA adapter, which needs --lora.rank > 0"),
            (not full, f"{args.init_weights} must hold full weights or adapters, got both"),
        )
        trial = adapt(net, how)  # without weights: layers and rank must fit
        for name, home in found.items():
            check_adapter(trial.get_submodule(name), home)
        return {}, found


def read_teachers(
    args: MediaArgs, needs: Needs, model: Model, how: Preparation, trained: Mapping[str, str]
) -> dict[str, dict[str, Path]]:
    """Check the weights of the teachers, which have the form of what is trained; their folders by name and expert."""
    teachers = dict[str, dict[str, Path]]()
    net = adapt(model.empty_net(), how) if needs.teachers else nn.Module()
    for name, folder in needs.teachers.items():
        with flag(f"--teachers: {name}: "):
            teachers[name] = found = homes(folder, model.nets)
            which = " or ".join(trained)
            require((trained.keys() & found, f"{folder} must have weights of {which}, which is trained"))
            for expert, home in found.items():
                is_whole = args.lora.rank or saved_files(home)
                require((is_whole, f"{home} holds a LoRA adapter, which needs --lora.rank > 0"))
                (check_adapter if args.lora.rank else check_weights)(net.get_submodule(expert), home)
    return teachers


def canary_of(frame_rate: float, records: Sequence[PromptRecord]) -> PromptRecord:
    """Return the one of these prompts with which what scores them is tried."""
    least = min(records, key=lambda record: len(record.images))
    return replace(least, meta={**least.meta, "fps": frame_rate})


def open_scorer(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, Any],
    needs: Needs,
    meta: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Scorer, str, Scorer | None]:
    """Open what scores samples, and what else evaluations ask; with the name and version of the first.

    meta: that all samples have beside their prompts'.
    """
    kinds = inputs.model.MEDIA
    image = np.full((1, *max(inputs.sizes, key=math.prod), 3), 127, np.uint8)
    grey = {"image": image, "video": np.repeat(image[:, None], args.num_frames, axis=1)}
    ask = partial(world.connect, args=args, kinds=kinds, samples=grey)
    canary = _with(meta, inputs.canary)
    watch: Scorer | None = None
    if args.scorer.watch_url:
        watch, _ = ask(args.scorer.watch_url, canary=canary, name="--scorer.watch-url")
    scorer: Scorer = abstaining()
    version, url = "", args.scorer.url if isinstance(args, ScoredArgs) else ""
    parts = dict.fromkeys(needs.gate_parts.split(",") if needs.gate_parts else (), "--gate-parts")
    if isinstance(args, JudgedArgs):
        parts |= dict.fromkeys(parse_numbers(args.reward_parts, "--reward-parts"), "--reward-parts")
    if needs.scorer:
        scorer = needs.scorer(world.dist, kinds)
    elif url or args.dry_run:  # of a plan
        scorer, version = ask(url, canary=canary, parts=parts)

    def connect(url: str, name: str, records: Sequence[PromptRecord]) -> Scorer:
        return ask(url, canary=_with(meta, canary_of(args.frame_rate, records)), name=name)[0]

    open_set_scorers(args, inputs.held_out, connect)
    whole = {"--group-size": args.group_size} if scorer.takes_groups and needs.scored else {}
    for number, held in enumerate(inputs.held_out):
        name = f"eval.sets[{number}].samples_per_prompt" if number else "--eval.samples-per-prompt"
        asked = held.scorer or scorer, *([watch] if watch else [])
        whole |= {name: held.samples} if any(one.takes_groups for one in asked) else {}
    check_groups(args, world.dist.num_shares, whole)
    return scorer, version, watch


def check_groups(args: MediaArgs, ranks: int, whole: Mapping[str, int]) -> None:
    """Check the sizes of groups, by the settings' names, whose samples a scorer compares: each is of one rank.

    Raises:
        ValueError: they do not divide the samples of a step, or are divided by its batches.
    """
    samples, per_batch = args.prompts_per_step * args.group_size, args.batch_size
    for name, size in whole.items():
        what, unit = f"where a scorer compares the {size} samples of a prompt", max(size, per_batch)
        require(
            (size > 1, f"{name} must be at least 2 where a scorer compares the samples of a prompt, got {size}"),
            (unit % min(size, per_batch) == 0, f"{name} and --batch-size: one must divide the other {what}, got "
             f"{size} and {per_batch}"),
            (name != "--group-size" or samples % (unit * ranks) == 0,
             f"all ranks must sample whole groups and batches, {unit * ranks} samples or a multiple, {what}: "
             f"--prompts-per-step and --group-size make {samples}"),
        )  # fmt: skip


def _with(meta: Mapping[str, object], record: PromptRecord) -> PromptRecord:
    return replace(record, meta={**record.meta, **meta})


def source(
    inputs: Inputs[Any, Any], how: Preparation, files: Mapping[str, Sequence[Path]]
) -> tuple[nn.Module, dict[str, Sequence[Path]] | None]:
    """Return the net on the meta device, and the files with its weights: these, or the checkpoint's own."""
    model: Model = inputs.model
    net = model.empty_net(buffers=True)
    if not model.reads_weights:
        return net, None
    return net, {name: files.get(name) or model.weight_files(part) for name, part in model.nets.items()}


def open_engine(
    args: MediaArgs, world: World, inputs: Inputs[Any, Any], net: nn.Module, needs: Needs
) -> tuple[Model, Engine]:
    """Return the engine, and the model as updates call it."""
    model = decoding(args, inputs, world.watched(inputs.model))
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    how = inputs.how.dtype, args.memory.rollout_dtype, texts
    engine: Engine = world.open_engine(args.engine, model, net, world.dist, *how)
    if needs.routes and (routing := routing_of(engine.net)):
        return replay_routes(model, engine, routing)
    return model, engine


def decoding(args: MediaArgs, inputs: Inputs[Any, Any], model: ModelT) -> ModelT:
    """Return the model, which decodes as many samples at a time as the settings say, of the largest size."""
    tile, mesh = args.memory.decode_tile, inputs.how.context_mesh
    if tile:
        model = wrap(model, decode=in_tiles(model.decode, tile, partial(divide, mesh["ulysses"]) if mesh else map))
    at_once = min(num_decoded(args.memory.decode_batch_size, *size, tile) for size in inputs.sizes)
    return wrap(model, decode=in_slices(model.decode, at_once)) if args.batch_size > at_once else model


def export(run: MediaRun[MediaArgs], card: Mapping[str, object] | None) -> None:
    """Write a folder for each expert that is trained."""
    for name, part in run.trained.items():
        net, folder = run.policy.net.get_submodule(name), run.session.folder / "weights" / name
        save_weights(net, folder, run.dist, into=part, card=card)


MEDIA: Kind[Model, Engine, Params, Scorer] = Kind(
    read=read,
    open_scorer=open_scorer,
    source=source,
    open_engine=open_engine,
    evaluate_set=evaluate_set,
    export=export,
    seen=first_input,
)
