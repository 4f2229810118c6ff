"""Runs that generate images, videos or sound: inputs, scorers, sampling, evaluation and export."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from omni_rollout import Engine, Model, Params, Prompt
from omni_rollout.conditioning import TextCache
from omni_rollout.decoding import num_decoded, sliced_decode, tiled_decode
from omni_rollout.model import wrap
from omni_rollout.models import open_model
from omni_rollout.models.routing import find_routing, replay_routes
from omni_rollout.sampler import check_images
from omni_rollout.types import Cond, Parts
from omni_sched import Transition
from omni_train import progress
from omni_train.dist import Dist, divide_work, same_error
from omni_train.files import probe_digest
from omni_train.prepare import Preparation, adapt
from omni_train.progress import advance, phase
from omni_train.prompts.files import PromptRecord
from omni_train.weights.adapters import check_adapter, find_adapter
from omni_train.weights.full import check_weights, save_weights, saved_files, weight_folders
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import Scorer, abstaining, check_gradable
from omni_rl.media.images import reference_sizes
from omni_rl.run.inputs import (
    Inputs,
    graded_by_run,
    model_place,
    open_set_scorers,
    preparation,
    read_sets,
    with_meshes,
    with_policies,
)
from omni_rl.run.run import MediaRun
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import STREAMS, MediaArgs, load_records, offloaded, parse_numbers, read_prompts
from omni_rl.settings.fields import as_flags, flag, flag_of, flags_by_name, require, values_of

MIN_NOISE = 1000  # least noise of a trained step, in float32 steps: rounding is at most 3e-4 of its gradient

ModelT = TypeVar("ModelT", bound=Model)
ParamsT = TypeVar("ParamsT", bound=Params)


def params_of(args: MediaArgs) -> Params:
    """Return the sampling parameters of training, without stochastic steps."""
    true_cfg = {"true_cfg_scale": args.sampling.true_cfg_scale} if args.sampling.true_cfg_scale != 1 else {}
    return Params(
        num_inference_steps=args.sampling.num_inference_steps,
        height=args.sampling.height,
        width=args.sampling.width,
        num_frames=args.sampling.num_frames,
        frame_rate=args.sampling.frame_rate,
        guidance_scale=args.sampling.guidance_scale,
        guidance=parse_numbers(args.sampling.guidance, "--guidance") | true_cfg,
    )


def read_media(
    args: MediaArgs, world: World, *, policies: Collection[str] = (), routes: bool = False, scored: bool = True
) -> Inputs[Model, Params]:
    """Read and check the model's configuration, the prompts and the weights to start from, without loading weights.

    policies: policies besides the trained one, as in `Inputs`. routes: True if the routing of a mixture of experts is
    replayed. scored: False if only evaluations use the scorer.

    Raises:
        ValueError: a file is missing, incomplete or malformed, or the model does not fit the settings. The message
            begins with the flag and is the same on every rank.
    """
    progress.start_phase("reading the model and the prompts")
    with same_error(world.whole):
        with flag("--model: "):
            model = open_model(model_place(args))
        params = params_of(args)
        eval_params = replace(params, num_inference_steps=args.eval.num_inference_steps)
        inputs = read_all(args, world, model, params, eval_params, scored=scored)
        require(
            (not routes or find_routing(model.empty_net()), "--route-replay needs a model that is a mixture of experts")
        )
        inputs = with_policies(inputs, policies)
    return with_meshes(args, world.dist, inputs)


def read_all(
    args: MediaArgs,
    world: World,
    model: ModelT,
    params: ParamsT,
    eval_params: ParamsT,
    check: Callable[[PromptRecord], None] = lambda record: None,
    check_graded: Callable[[PromptRecord], None] = lambda record: None,
    scored: bool = True,
) -> Inputs[ModelT, ParamsT]:
    """Read all inputs except the model.

    check: called with each prompt. check_graded: called with each prompt that the run's own scorer grades. scored: see
    `read_media`.
    """
    trained = {name: part for name, part in model.nets.items() if args.policy.train_experts in ("both", name)}
    check_model(args, world, model, trained, params, eval_params)
    sizes = set[tuple[int, int]]()

    def check_record(record: PromptRecord) -> None:
        check_images(model, reference_sizes(record))
        size = record.size or (args.sampling.height, args.sampling.width)
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

    how = replace(
        preparation(args, world.dist.device, model, is_frozen, compiles=args.policy.compile), share=model.share
    )
    prompts, records = read_prompts(args, check_whole, check_whole)
    sets = read_sets(args, records, eval_params, check_record, check_whole, model.check)
    files, adapters = read_start(args, model, how)
    has_streams = args.streams.are_judged
    streams = model.streams(params) if has_streams else {}
    require(
        (not has_streams or streams,
         "--streams.sound-weight and --streams.reward-media need a model that generates video with sound"),
        (not has_streams or len(sizes) == 1,
         "--streams.sound-weight and --streams.reward-media need prompts of one size"),
    )  # fmt: skip
    training = load_records(args.data, args.data.prompts)
    check_gradable(args.scorer, graded_by_run(args, training if scored else (), sets), prints=world.dist.is_main)
    images = sorted({image for record in training for image in record.images})
    digests = {"images_digest": probe_digest(images, num_blocks=1)} if images else {}
    return Inputs(
        model,
        params,
        prompts,
        sets,
        canary_of(args.sampling.frame_rate, [*records, *training]),
        how,
        trained,
        digests,
        files,
        adapters,
        sizes=sizes,
        streams={medium: streams[medium] for medium in STREAMS} if streams else {},
    )


def check_model(
    args: MediaArgs, world: World, model: Model, trained: Mapping[str, str], params: Params, eval_params: Params
) -> None:
    """Raise ValueError unless the model is complete and fits the settings and the sampling parameters."""
    only = " or ".join(("both", *filter(None, model.nets)))
    model.context = args.sharding.context_parallel
    options = {name: f"--guidance {name}" for name in model.OPTIONS}
    context = {"context": "--sharding.context-parallel"}
    with as_flags(context):
        model.check_context()
    require(
        (trained, f"--train-experts must be {only} for this model, got {args.policy.train_experts}"),
        (args.optim.low_expert_lr is None or (len(trained) == 2 and args.lr),
         "--optim.low-expert-lr needs two experts that are trained, and --lr > 0"),
        (not args.memory.decode_tile or "audio" not in model.MEDIA,
         "--memory.decode-tile needs a model that samples images, or videos without sound"),
        (not args.streams.freeze_audio or "audio" in model.BRANCHES,
         "--streams.freeze-audio needs a model that generates video with sound"),
    )  # fmt: skip
    model.host_encoders = "encoder" in offloaded(args.memory)
    kind = model.config["_class_name"]
    require((model.encoders or not model.host_encoders, f"--memory.offload encoder: a {kind} has no text encoder"))
    for each, group in ((params, ""), (eval_params, "eval")):
        with as_flags(options | flags_by_name(type(args), group) | context):
            model.check(each)
    with flag("--model: "):
        model.sigmas(params)
        world.check_files(model)  # last, because it imports the libraries of the parts


def check_trained_steps(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, Any],
    steps: tuple[int, int],
    rule: Callable[..., Transition] | None = None,
) -> None:
    """Raise ValueError on every rank for trained steps that use an untrained expert, or whose noise rounding hides.

    steps: the first trained step of the schedule, and one past the last. rule: the rule of stochastic steps, if any.
    """
    model, params = inputs.model, inputs.params
    with same_error(world.whole):
        check_experts(args, model, params, steps, inputs.trained)
        if rule:
            for size in sorted(inputs.sizes):
                check_noise(args, rule, model.sigmas(params.of_size(size)), steps)


def check_experts(
    args: MediaArgs, model: Model, params: Params, steps: tuple[int, int], trained: Mapping[str, str]
) -> None:
    """Raise ValueError for steps of the schedule that use an untrained expert."""
    if not model.boundary:
        return
    high = (model.sigmas(params)[:-1] >= model.boundary).tolist()
    least, most = 0 if "high" in trained else sum(high), len(high) if "low" in trained else sum(high)
    require(
        (values_of(args).get("timestep_fraction", 1) == 1,
         "--timestep-fraction must be 1 for a model with two experts, as a batch is of one")
    )  # fmt: skip
    which, last = args.policy.train_experts, steps[1] - 1
    rule = f"--train-experts {which} takes steps {least} to {most - 1} of {len(high)}, got trained steps"
    require((least <= steps[0] and last < most, f"{rule} {steps[0]} to {last}"))


def check_noise(args: MediaArgs, rule: Callable[..., Transition], sigmas: Tensor, steps: tuple[int, int]) -> None:
    """Raise ValueError if the noise of a step that may be trained is too close to the rounding of its latents.

    The latents are assumed to start at a standard deviation of 1, and to grow as in the stochastic steps of a window
    with zero velocity.

    rule: the step rule. sigmas: the schedule. steps: the first step that may be trained, and one past the last.
    """
    given, (first, end) = values_of(args), steps
    level, window = given["noise_level"], given.get("window_size") or end - first
    ones = torch.ones(end - first, 1)
    nothing = torch.zeros_like(ones)
    taken = rule(nothing, ones, sigmas[first:end], sigmas[first + 1 : end + 1], noise_level=level, noise=nothing)
    std, kept = taken.std.double(), taken.mean[:, 0].double()
    growth = (kept.square() + std.square()).sqrt().clamp(min=1).log().cumsum(dim=0)
    sizes = (growth - torch.cat([torch.zeros(window), growth])[: len(growth)]).exp()
    counts = std / (sizes * torch.finfo(torch.float32).eps)
    k = int(counts.argmin())
    way = "higher" if sizes[k] < 10 else "lower"
    require(
        (counts[k] >= MIN_NOISE,
         f"--noise-level must be {way}, as float32 must keep {MIN_NOISE} steps of each trained step's noise, got "
         f"{level:g}: it keeps {counts[k]:.2g} in step {first + k}, where the noise has a standard deviation of "
         f"{std[k]:.2g} and the latents one of {sizes[k]:.2g}")
    )  # fmt: skip


def read_start(args: MediaArgs, model: Model, how: Preparation) -> tuple[dict[str, Sequence[Path]], dict[str, Path]]:
    """Check and return the weights to start from, by expert: files of full weights, or folders of adapters."""
    if not args.policy.init_weights:
        return {}, {}
    with flag("--init-weights: "):
        net, found = model.empty_net(), weight_folders(args.policy.init_weights, model.nets)
        for name, home in found.items():
            check_weights(net.get_submodule(name), home)
        full: dict[str, Sequence[Path]] = {name: files for name, home in found.items() if (files := saved_files(home))}
        if len(full) == len(found):
            return full, {}
        require(
            (args.lora.rank, f"{args.policy.init_weights} holds a LoRA adapter, which needs --lora.rank > 0"),
            (not full, f"{args.policy.init_weights} must hold full weights or adapters, got both"),
        )
        trial = adapt(net, how)  # without weights, to check layers and rank
        for name, home in found.items():
            check_adapter(trial.get_submodule(name), home)
        return {}, found


def read_teachers(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Model, Params],
    folders: Mapping[str, str],
    teaching: Callable[[Params], Params],
) -> Inputs[Model, Params]:
    """Return the inputs with the teachers, whose weights have the same form as the trained ones.

    folders: folders of weights by name, for `Policy.teacher`. teaching: maps the run's sampling parameters to those of
    the teachers.

    Raises:
        ValueError: weights are missing or do not fit; the same on every rank.
    """
    with same_error(world.whole):
        teachers = teachers_of(args, inputs, folders)
        with as_flags({name: flag_of(f"teacher_{name}") for name in ("guidance_scale", "true_cfg_scale")}):
            inputs.model.check(teaching(inputs.params))
        homes_of = [home for found in teachers.values() for home in found.values()]
        weights = [file for home in homes_of for file in saved_files(home) or filter(None, [find_adapter(home)])]
        digests = {"teachers_digest": probe_digest(weights)} if teachers else {}
        return with_policies(replace(inputs, digests={**inputs.digests, **digests}), inputs.policies, teachers)


def teachers_of(
    args: MediaArgs, inputs: Inputs[Model, Params], folders: Mapping[str, str]
) -> dict[str, dict[str, Path]]:
    """Return the folders of the teachers' weights by name and expert."""
    model, trained, teachers = inputs.model, inputs.trained, dict[str, dict[str, Path]]()
    net = adapt(model.empty_net(), inputs.preparation) if folders else nn.Module()
    for name, folder in folders.items():
        with flag(f"--teachers: {name}: "):
            teachers[name] = found = weight_folders(folder, model.nets)
            which = " or ".join(trained)
            require((trained.keys() & found, f"{folder} must have weights of {which}, which is trained"))
            for expert, home in found.items():
                is_whole = args.lora.rank or saved_files(home)
                require((is_whole, f"{home} holds a LoRA adapter, which needs --lora.rank > 0"))
                (check_adapter if args.lora.rank else check_weights)(net.get_submodule(expert), home)
    return teachers


def canary_of(frame_rate: float, records: Sequence[PromptRecord]) -> PromptRecord:
    """Return the prompt used to test scorers, one with the fewest images."""
    least = min(records, key=lambda record: len(record.images))
    return replace(least, meta={**least.meta, "fps": frame_rate})


def open_scorers(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, ParamsT],
    session: Session,
    *,
    own: Callable[[Dist, Sequence[str]], Scorer] | None = None,
    scored: bool = True,
    meta: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Scorer, list[HeldOut[ParamsT, Scorer]]]:
    """Return the scorer of samples, and the evaluation sets with their scorers.

    own: opens a scorer of the given kinds of media, instead of --scorer.url. scored: see `read_media`. meta: added to
    the meta of all prompts.

    Raises:
        ValueError: a scorer does not answer, does not fit, or differs from the one that the run began with.
    """
    with same_error(world.whole):
        scorer, version, held_out = connect_scorers(args, world, inputs, own, meta)
        sizes = {"--group-size": args.data.group_size} if scorer.takes_groups and scored else {}
        for number, held in enumerate(held_out):
            name = f"eval.sets[{number}].samples_per_prompt" if number else "--eval.samples-per-prompt"
            scorers = [each for each in (held.scorer or scorer, held.watch) if each]
            sizes |= {name: held.samples} if any(each.takes_groups for each in scorers) else {}
        check_groups(args, world.dist.dp_size, sizes)
        session.name_scorer(args, version)
    world.check_alike({"scorer": version})  # each machine may have its own server
    return scorer, held_out


def connect_scorers(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, ParamsT],
    own: Callable[[Dist, Sequence[str]], Scorer] | None,
    meta: Mapping[str, object],
) -> tuple[Scorer, str, list[HeldOut[ParamsT, Scorer]]]:
    """Return the run's scorer, its name and version, and the evaluation sets with their scorers."""
    kinds = inputs.model.MEDIA
    image = np.full((1, *max(inputs.sizes, key=math.prod), 3), 127, np.uint8)
    grey = {"image": image, "video": np.repeat(image[:, None], args.sampling.num_frames, axis=1)}
    ask = partial(world.connect, asks=args.scorer, kinds=kinds, samples=grey)
    canary = _with(meta, inputs.canary)
    watch: Scorer | None = None
    if args.scorer.watch_url:
        watch, _ = ask(args.scorer.watch_url, canary=canary, name="--scorer.watch-url")
    scorer: Scorer = abstaining()
    version, url = "", args.scorer.url
    graded = parse_numbers(values_of(args).get("reward_parts", ""), "--reward-parts")
    if own:
        scorer = own(world.dist, kinds)
    elif url or args.run.dry_run:  # without a URL: a plan
        scorer, version = ask(url, canary=canary, parts=dict.fromkeys(graded, "--reward-parts"))

    def connect(url: str, name: str, records: Sequence[PromptRecord]) -> tuple[Scorer, str]:
        return ask(url, canary=_with(meta, canary_of(args.sampling.frame_rate, records)), name=name)

    held_out = open_set_scorers(args, inputs.held_out, connect)
    return scorer, version, [replace(held, watch=watch) for held in held_out]


def check_groups(args: MediaArgs, ranks: int, whole: Mapping[str, int]) -> None:
    """Check the group sizes, by setting, for a scorer that compares the samples of a group on one rank.

    Raises:
        ValueError: a group has one sample, does not fit the batch size, or the ranks cannot sample whole groups.
    """
    samples, per_batch = args.data.prompts_per_step * args.data.group_size, args.data.batch_size
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


def open_engine(
    args: MediaArgs, world: World, inputs: Inputs[Any, Any], net: nn.Module, *, routes: bool = False
) -> tuple[Model, Engine]:
    """Return the model, with the wrappers of the run, and the engine. routes: see `read_media`."""
    model = with_sliced_decoding(args, inputs, world.instrumented(inputs.model))
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    how = inputs.preparation.dtype, args.memory.rollout_dtype, texts
    engine: Engine = world.open_engine(args.sampling.engine, model, net, world.dist, *how)
    if routes and (routing := find_routing(engine.net)):
        return replay_routes(model, engine, routing)
    return model, engine


def with_sliced_decoding(args: MediaArgs, inputs: Inputs[Any, Any], model: ModelT) -> ModelT:
    """Return the model with `decode` in slices or tiles, per the settings, and with progress in `encode`."""
    model = wrap(model, encode=partial(encode_one, model.encode))
    tile, mesh = args.memory.decode_tile, inputs.preparation.context_mesh
    if tile:
        model = wrap(
            model, decode=tiled_decode(model.decode, tile, partial(divide_work, mesh["ulysses"]) if mesh else map)
        )
    at_once = min(num_decoded(args.memory.decode_batch_size, *size, tile) for size in inputs.sizes)
    return wrap(model, decode=sliced_decode(model.decode, at_once)) if args.data.batch_size > at_once else model


def encode_one(
    encode: Callable[..., Cond], parts: Parts, prompt: Prompt, *, negative: bool = False, **options: float
) -> Cond:
    """Encode the text of a prompt, or its negative text, as `Model.encode` does, and report progress."""
    with phase("encoding", unit="prompts"):
        cond = encode(parts, prompt, negative=negative, **options)
        advance(not negative)
    return cond


def export(run: MediaRun[MediaArgs], card: Mapping[str, object] | None) -> None:
    """Write a folder of weights for each trained expert."""
    for name, part in run.trained.items():
        net, folder = run.policy.net.get_submodule(name), run.session.folder / "weights" / name
        save_weights(net, folder, run.dist, into=part, card=card)
