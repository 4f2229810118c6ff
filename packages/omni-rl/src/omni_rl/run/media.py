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
from omni_rl.flow.scorers import Scorer, abstaining_scorer, check_gradable
from omni_rl.media.images import reference_sizes
from omni_rl.run.inputs import (
    Inputs,
    build_preparation,
    graded_by_run,
    model_place,
    open_set_scorers,
    read_sets,
    with_meshes,
    with_policies,
)
from omni_rl.run.run import MediaRun
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import STREAMS, MediaArgs, load_records, parse_numbers, parse_offload, read_prompts
from omni_rl.settings.fields import flag_of, flags_by_name, map_error_names, prefix_errors, require, values_of

MIN_NOISE = 1000  # least noise of a trained step, in float32 steps: rounding is at most 3e-4 of its gradient

ModelT = TypeVar("ModelT", bound=Model)
ParamsT = TypeVar("ParamsT", bound=Params)


def sampling_params(args: MediaArgs) -> Params:
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
    with same_error(world.all_ranks):
        with prefix_errors("--model: "):
            model = open_model(model_place(args))
        params = sampling_params(args)
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

    def check_scored_record(record: PromptRecord) -> None:
        check_graded(record)
        check_record(record)

    frozen_branches = set(model.BRANCHES["audio"]) if args.streams.freeze_audio else set()

    def is_frozen(name: str) -> bool:
        pieces = name.split(".")
        return not (trained.keys() & {"", pieces[0]}) or not frozen_branches.isdisjoint(pieces)

    preparation = replace(
        build_preparation(args, world.dist.device, model, is_frozen, compiles=args.policy.compile), share=model.share
    )
    prompts, records = read_prompts(args, check_scored_record, check_scored_record)
    sets = read_sets(args, records, eval_params, check_record, check_scored_record, model.check)
    files, adapters = read_init_weights(args, model, preparation)
    has_streams = args.streams.has_separate_losses
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
        choose_canary(args.sampling.frame_rate, [*records, *training]),
        preparation,
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
    choices = " or ".join(("both", *filter(None, model.nets)))
    model.context = args.sharding.context_parallel
    options = {name: f"--guidance {name}" for name in model.OPTIONS}
    context = {"context": "--sharding.context-parallel"}
    with map_error_names(context):
        model.check_context()
    require(
        (trained, f"--train-experts must be {choices} for this model, got {args.policy.train_experts}"),
        (args.optim.low_expert_lr is None or (len(trained) == 2 and args.lr),
         "--optim.low-expert-lr needs two experts that are trained, and --lr > 0"),
        (not args.memory.decode_tile or "audio" not in model.MEDIA,
         "--memory.decode-tile needs a model that samples images, or videos without sound"),
        (not args.streams.freeze_audio or "audio" in model.BRANCHES,
         "--streams.freeze-audio needs a model that generates video with sound"),
    )  # fmt: skip
    model.host_encoders = "encoder" in parse_offload(args.memory)
    kind = model.config["_class_name"]
    require((model.encoders or not model.host_encoders, f"--memory.offload encoder: a {kind} has no text encoder"))
    for sampling, group in ((params, ""), (eval_params, "eval")):
        with map_error_names(options | flags_by_name(type(args), group) | context):
            model.check(sampling)
    with prefix_errors("--model: "):
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
    with same_error(world.all_ranks):
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
    is_high = (model.sigmas(params)[:-1] >= model.boundary).tolist()
    first, end = 0 if "high" in trained else sum(is_high), len(is_high) if "low" in trained else sum(is_high)
    require(
        (values_of(args).get("timestep_fraction", 1) == 1,
         "--timestep-fraction must be 1 for a model with two experts, as a batch is of one")
    )  # fmt: skip
    choice, last = args.policy.train_experts, steps[1] - 1
    rule = f"--train-experts {choice} takes steps {first} to {end - 1} of {len(is_high)}, got trained steps"
    require((first <= steps[0] and last < end, f"{rule} {steps[0]} to {last}"))


def check_noise(args: MediaArgs, rule: Callable[..., Transition], sigmas: Tensor, steps: tuple[int, int]) -> None:
    """Raise ValueError if the noise of a step that may be trained is too close to the rounding of its latents.

    The latents are assumed to start at a standard deviation of 1, and to grow as in the stochastic steps of a window
    with zero velocity.

    rule: the step rule. sigmas: the schedule. steps: the first step that may be trained, and one past the last.
    """
    values, (first, end) = values_of(args), steps
    level, window = values["noise_level"], values.get("window_size") or end - first
    ones = torch.ones(end - first, 1)
    zeros = torch.zeros_like(ones)
    transition = rule(zeros, ones, sigmas[first:end], sigmas[first + 1 : end + 1], noise_level=level, noise=zeros)
    std, signal = transition.std.double(), transition.mean[:, 0].double()
    growth = (signal.square() + std.square()).sqrt().clamp(min=1).log().cumsum(dim=0)
    sizes = (growth - torch.cat([torch.zeros(window), growth])[: len(growth)]).exp()
    counts = std / (sizes * torch.finfo(torch.float32).eps)
    k = int(counts.argmin())
    direction = "higher" if sizes[k] < 10 else "lower"
    require(
        (counts[k] >= MIN_NOISE,
         f"--noise-level must be {direction}, as float32 must keep {MIN_NOISE} steps of each trained step's noise, got "
         f"{level:g}: it keeps {counts[k]:.2g} in step {first + k}, where the noise has a standard deviation of "
         f"{std[k]:.2g} and the latents one of {sizes[k]:.2g}")
    )  # fmt: skip


def read_init_weights(
    args: MediaArgs, model: Model, preparation: Preparation
) -> tuple[dict[str, Sequence[Path]], dict[str, Path]]:
    """Check and return the weights to start from, by expert: files of full weights, or folders of adapters."""
    if not args.policy.init_weights:
        return {}, {}
    with prefix_errors("--init-weights: "):
        net, folders = model.empty_net(), weight_folders(args.policy.init_weights, model.nets)
        for name, weights_folder in folders.items():
            check_weights(net.get_submodule(name), weights_folder)
        full: dict[str, Sequence[Path]] = {
            name: files for name, weights_folder in folders.items() if (files := saved_files(weights_folder))
        }
        if len(full) == len(folders):
            return full, {}
        require(
            (args.lora.rank, f"{args.policy.init_weights} holds a LoRA adapter, which needs --lora.rank > 0"),
            (not full, f"{args.policy.init_weights} must hold full weights or adapters, got both"),
        )
        trial = adapt(net, preparation)  # without weights, to check layers and rank
        for name, weights_folder in folders.items():
            check_adapter(trial.get_submodule(name), weights_folder)
        return {}, folders


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
    with same_error(world.all_ranks):
        teachers = find_teachers(args, inputs, folders)
        with map_error_names({name: flag_of(f"teacher_{name}") for name in ("guidance_scale", "true_cfg_scale")}):
            inputs.model.check(teaching(inputs.params))
        teacher_folders = [weights_folder for by_expert in teachers.values() for weights_folder in by_expert.values()]
        weights = [
            file
            for weights_folder in teacher_folders
            for file in saved_files(weights_folder) or filter(None, [find_adapter(weights_folder)])
        ]
        digests = {"teachers_digest": probe_digest(weights)} if teachers else {}
        return with_policies(replace(inputs, digests={**inputs.digests, **digests}), inputs.policies, teachers)


def find_teachers(
    args: MediaArgs, inputs: Inputs[Model, Params], folders: Mapping[str, str]
) -> dict[str, dict[str, Path]]:
    """Return the folders of the teachers' weights by name and expert."""
    model, trained, teachers = inputs.model, inputs.trained, dict[str, dict[str, Path]]()
    net = adapt(model.empty_net(), inputs.preparation) if folders else nn.Module()
    for name, folder in folders.items():
        with prefix_errors(f"--teachers: {name}: "):
            teachers[name] = by_expert = weight_folders(folder, model.nets)
            experts = " or ".join(trained)
            require((trained.keys() & by_expert, f"{folder} must have weights of {experts}, which is trained"))
            for expert, weights_folder in by_expert.items():
                is_usable = args.lora.rank or saved_files(weights_folder)
                require((is_usable, f"{weights_folder} holds a LoRA adapter, which needs --lora.rank > 0"))
                (check_adapter if args.lora.rank else check_weights)(net.get_submodule(expert), weights_folder)
    return teachers


def choose_canary(frame_rate: float, records: Sequence[PromptRecord]) -> PromptRecord:
    """Return the prompt used to test scorers, one with the fewest images."""
    simplest = min(records, key=lambda record: len(record.images))
    return replace(simplest, meta={**simplest.meta, "fps": frame_rate})


def open_scorers(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, ParamsT],
    session: Session,
    *,
    build_scorer: Callable[[Dist, Sequence[str]], Scorer] | None = None,
    scored: bool = True,
    meta: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Scorer, list[HeldOut[ParamsT, Scorer]]]:
    """Return the scorer of samples, and the evaluation sets with their scorers.

    build_scorer: opens a scorer of the given kinds of media, instead of --scorer.url. scored: see `read_media`. meta:
    added to the meta of all prompts.

    Raises:
        ValueError: a scorer does not answer, does not fit, or differs from the one that the run began with.
    """
    with same_error(world.all_ranks):
        scorer, version, held_out = connect_scorers(args, world, inputs, build_scorer, meta)
        sizes = {"--group-size": args.data.group_size} if scorer.takes_groups and scored else {}
        for i, eval_set in enumerate(held_out):
            name = f"eval.sets[{i}].samples_per_prompt" if i else "--eval.samples-per-prompt"
            scorers = [candidate for candidate in (eval_set.scorer or scorer, eval_set.watch) if candidate]
            sizes |= {name: eval_set.samples} if any(candidate.takes_groups for candidate in scorers) else {}
        check_groups(args, world.dist.dp_size, sizes)
        session.record_scorer(args, version)
    world.check_same_settings({"scorer": version})  # each machine may have its own server
    return scorer, held_out


def connect_scorers(
    args: MediaArgs,
    world: World,
    inputs: Inputs[Any, ParamsT],
    build_scorer: Callable[[Dist, Sequence[str]], Scorer] | None,
    meta: Mapping[str, object],
) -> tuple[Scorer, str, list[HeldOut[ParamsT, Scorer]]]:
    """Return the run's scorer, its name and version, and the evaluation sets with their scorers."""
    kinds = inputs.model.MEDIA
    image = np.full((1, *max(inputs.sizes, key=math.prod), 3), 127, np.uint8)
    grey_samples = {"image": image, "video": np.repeat(image[:, None], args.sampling.num_frames, axis=1)}
    connect_to = partial(world.connect, scorer_args=args.scorer, kinds=kinds, samples=grey_samples)
    canary = _add_meta(meta, inputs.canary)
    watch: Scorer | None = None
    if args.scorer.watch_url:
        watch, _ = connect_to(args.scorer.watch_url, canary=canary, name="--scorer.watch-url")
    scorer: Scorer = abstaining_scorer()
    version, url = "", args.scorer.url
    graded = parse_numbers(values_of(args).get("reward_parts", ""), "--reward-parts")
    if build_scorer:
        scorer = build_scorer(world.dist, kinds)
    elif url or args.run.dry_run:  # without a URL: a plan
        scorer, version = connect_to(url, canary=canary, parts=dict.fromkeys(graded, "--reward-parts"))

    def connect(url: str, name: str, records: Sequence[PromptRecord]) -> tuple[Scorer, str]:
        return connect_to(url, canary=_add_meta(meta, choose_canary(args.sampling.frame_rate, records)), name=name)

    held_out = open_set_scorers(args, inputs.held_out, connect)
    return scorer, version, [replace(eval_set, watch=watch) for eval_set in held_out]


def check_groups(args: MediaArgs, ranks: int, group_sizes: Mapping[str, int]) -> None:
    """Check the group sizes, by setting, for a scorer that compares the samples of a group on one rank.

    Raises:
        ValueError: a group has one sample, does not fit the batch size, or the ranks cannot sample whole groups.
    """
    samples, per_batch = args.data.prompts_per_step * args.data.group_size, args.data.batch_size
    for name, size in group_sizes.items():
        reason, block = f"where a scorer compares the {size} samples of a prompt", max(size, per_batch)
        require(
            (size > 1, f"{name} must be at least 2 where a scorer compares the samples of a prompt, got {size}"),
            (block % min(size, per_batch) == 0, f"{name} and --batch-size: one must divide the other {reason}, got "
             f"{size} and {per_batch}"),
            (name != "--group-size" or samples % (block * ranks) == 0,
             f"all ranks must sample whole groups and batches, {block * ranks} samples or a multiple, {reason}: "
             f"--prompts-per-step and --group-size make {samples}"),
        )  # fmt: skip


def _add_meta(meta: Mapping[str, object], record: PromptRecord) -> PromptRecord:
    return replace(record, meta={**record.meta, **meta})


def open_engine(
    args: MediaArgs, world: World, inputs: Inputs[Any, Any], net: nn.Module, *, routes: bool = False
) -> tuple[Model, Engine]:
    """Return the model, with the wrappers of the run, and the engine. routes: see `read_media`."""
    model = with_sliced_decoding(args, inputs, world.instrument(inputs.model))
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    options = inputs.preparation.dtype, args.memory.rollout_dtype, texts
    engine: Engine = world.open_engine(args.sampling.engine, model, net, world.dist, *options)
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
