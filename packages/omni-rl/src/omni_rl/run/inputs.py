"""The inputs of a run, read before any weights, and functions to read them shared by media, text and thoughts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from omni_rollout import Params
from omni_rollout.models.hub import local_folder, released_models
from omni_rollout.tokens import TokenParams
from omni_train import lora
from omni_train.dist import Dist, context_mesh, shard_mesh
from omni_train.experts import find_experts
from omni_train.kernels import check_attention, check_compiler, check_float8, check_float16
from omni_train.memory.recompute import Recompute
from omni_train.prepare import Lora, Preparation
from omni_train.prompts.files import PromptRecord, RecordCheck
from omni_train.prompts.sampler import PromptSampler

from omni_rl.flow.evals import HeldOut, eval_set_params
from omni_rl.run.run import CountSamples, ModelT, ParamsT, first_input
from omni_rl.settings.args import RunArgs, load_records, num_ranks, parse_offload, sharding_mode
from omni_rl.settings.eval_sets import GOLD, setting_name
from omni_rl.settings.fields import flags_by_name, map_error_names, prefix_errors, require

InputsT = TypeVar("InputsT", bound="Inputs[Any, Any]")
AnyParamsT = TypeVar("AnyParamsT", bound=Params | TokenParams)


@dataclass(frozen=True)
class Inputs(Generic[ModelT, ParamsT]):
    """The inputs of a run, read before any weights: the result of `read_media`, `read_texts` or `read_thoughts`.

    model: without weights. params: sampling parameters of training, without stochastic steps. held_out: the evaluation
    sets, without their scorers. canary: the prompt used to test scorers. sizes: (height, width) of all prompts.
    streams: see `Run`. preparation: how the net is prepared. trained: the trained experts, as in `Model.nets`.
    policies: policies besides the trained one: "old", for `Policy.use_old`, and "reference". teachers: folders of
    weights, by name and expert. files: full weights to start from, by expert; adapters: folders of adapters to start
    from instead, with names that begin with `adapter_prefix`. digests: digests of files and versions, which must be the
    same when the run resumes. num_extra_params: number of weights of a teacher that is another model. count_samples:
    returns the number of samples in a forward's inputs and the shape of one, or None. score_parts: parts of scores to
    log.
    """

    model: ModelT
    params: ParamsT
    prompts: PromptSampler
    held_out: Sequence[HeldOut[ParamsT, Any]]
    canary: PromptRecord
    preparation: Preparation
    trained: Mapping[str, str]
    digests: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapter_prefix: str = "transformer"
    policies: Collection[str] = ()
    teachers: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    sizes: Collection[tuple[int, int]] = ()
    streams: Mapping[str, int] = field(default_factory=dict)
    num_extra_params: int = 0
    count_samples: CountSamples = first_input
    score_parts: Sequence[str] = ()


def model_place(args: RunArgs) -> str | Path:
    """Return --model, or its configuration folder in omni-rollout, if any, for a dry run that cannot download it."""
    folder = released_models().get(args.policy.model)
    if folder and args.run.dry_run:
        try:
            local_folder(args.policy.model)
        except ValueError:
            return folder
    return args.policy.model


def build_preparation(
    args: RunArgs, device: torch.device, model: Any, is_frozen: Callable[[str], bool], *, compiles: bool = False
) -> Preparation:
    """Return how the settings prepare the net of a model.

    Raises:
        ValueError: the device lacks the attention kernels, float8, or a compiler.
    """
    settings = args.lora
    adapters = Lora(
        settings.targets.split(",") if settings.targets else model.LORA_TARGETS,
        settings.rank,
        settings.alpha,
        settings.init,
        args.run.seed,
        exclude=settings.exclude.split(",") if settings.exclude else (),
        parameters=settings.target_parameters.split(",") if settings.target_parameters else (),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        in_float32=settings.dtype == "float32",
    )
    on_host = "activations" in parse_offload(args.memory)
    recompute = Recompute(args.memory.keep_products_gb * 1e9, compiled=compiles, on_host=on_host)
    dtype: torch.dtype = getattr(torch, args.policy.dtype)
    with map_error_names(flags_by_name(type(args))):
        check_attention(args.policy.attention, device, dtype)
        if args.policy.dtype == "float16" and not args.run.dry_run:
            check_float16(device)
        if args.memory.base_dtype == "fp8":
            check_float8(device)
        if compiles and not args.run.dry_run:
            check_compiler(device)
    with map_error_names(flags_by_name(type(args), "lora") | {"parameters": "--lora.target-parameters"}):
        if settings.rank:
            options = {"exclude": adapters.exclude, "parameters": adapters.parameters}
            lora.find_layers(model.empty_net(), adapters.targets, **options, rank=settings.rank, init=settings.init)
    experts = model.EXPERT_NAMES if args.sharding.experts else ()
    if args.sharding.experts:
        with prefix_errors("--sharding.experts: "):
            find_experts(model.empty_net(), experts, num_ranks())
    return Preparation(
        device,
        model.BLOCK_NAMES,
        dtype,
        lora=adapters if settings.rank else None,
        is_frozen=is_frozen,
        base_dtype=args.memory.base_dtype,
        attention=args.policy.attention,
        compile=compiles,
        recompute=recompute if args.memory.gradient_checkpointing else None,
        expert_names=experts,
    )


def with_policies(
    inputs: InputsT, policies: Collection[str], teachers: Mapping[str, Mapping[str, Path]] = MappingProxyType({})
) -> InputsT:
    """Return the inputs with policies besides the trained one. With LoRA they are adapters too.

    With LoRA and no adapter to start from, the reference is the net with its adapters disabled.
    """
    preparation, adapters = inputs.preparation, inputs.adapters
    if preparation.lora:
        require((not teachers or preparation.lora.init != "pissa", "--lora.init pissa does not go with teachers"))
        adapter_names = [name for name in ("old", "reference") if name in policies and (name == "old" or adapters)]
        other_adapters = (*adapter_names, *(f"teacher_{name}" for name in teachers))
        preparation = replace(preparation, lora=replace(preparation.lora, others=other_adapters))
    return replace(inputs, preparation=preparation, policies=policies, teachers=teachers)


def with_meshes(args: RunArgs, dist: Dist, inputs: InputsT) -> InputsT:
    """Return the inputs with the meshes for sharded weights and context parallelism. Every rank calls it."""
    mesh = shard_mesh(dist, args.sharding.size) if sharding_mode(args, dist.world_size) == "fsdp2" else None
    split = context_mesh(dist) if dist.mesh and dist.context > 1 else None
    return replace(inputs, preparation=replace(inputs.preparation, mesh=mesh, context_mesh=split))


def read_sets(
    args: RunArgs,
    records: Sequence[PromptRecord],
    params: AnyParamsT,
    check: RecordCheck,
    check_graded: RecordCheck,
    check_params: Callable[[AnyParamsT], None] = lambda params: None,
) -> list[HeldOut[AnyParamsT, Any]]:
    """Return the evaluation sets; the first has the records of --eval.prompts.

    check: called with each prompt of a set with its own scorer. check_graded: called with the prompts of the gold set
    and of all other sets.
    """
    samples, threshold = args.eval.samples_per_prompt, args.eval.pass_threshold
    sets: list[HeldOut[AnyParamsT, Any]] = [HeldOut("", records, params, samples=samples, threshold=threshold)]
    for number, eval_set in enumerate(args.eval.all_sets, start=1):
        is_graded = eval_set.name == GOLD or not eval_set.scorer_url
        with prefix_errors(f"{setting_name(eval_set, number, 'prompts')}: "):
            set_records = load_records(args.data, eval_set.prompts, check_graded if is_graded else check)
        is_too_small = eval_set.name == GOLD and len(set_records) < 2  # two for a standard error
        require((not is_too_small, f"--eval.gold-prompts must have at least 2 prompts, got {len(set_records)}"))
        with prefix_errors(f"eval.sets[{number}]: "):
            check_params(set_params := eval_set_params(eval_set, params))
        limit = threshold if eval_set.pass_threshold is None else eval_set.pass_threshold
        set_samples = eval_set.samples_per_prompt or samples
        sets.append(
            HeldOut(
                eval_set.name,
                set_records[: eval_set.num_prompts or None],
                set_params,
                eval_set.seed,
                set_samples,
                limit,
            )
        )
    return sets


def graded_by_run(
    args: RunArgs, training: Sequence[PromptRecord], sets: Sequence[HeldOut[Any, Any]]
) -> dict[str, Sequence[PromptRecord]]:
    """Return the prompts graded by the run's own scorer, by the settings that name them."""
    names = [
        (setting_name(eval_set, i, "prompts"), eval_set.name == GOLD or not eval_set.scorer_url)
        for i, eval_set in enumerate(args.eval.all_sets, start=1)
    ]
    graded = {name: eval_set.records for (name, is_graded), eval_set in zip(names, sets[1:], strict=True) if is_graded}
    return {**({"--prompts": training} if training else {}), "--eval.prompts": sets[0].records, **graded}


def open_set_scorers(
    args: RunArgs, sets: Sequence[HeldOut[AnyParamsT, Any]], connect: Callable[[str, str, Any], Any]
) -> list[HeldOut[AnyParamsT, Any]]:
    """Return the evaluation sets with their scorers.

    connect: takes a URL, the setting's name and the set's prompts; returns a scorer, and its name with its version.
    """
    opened = [*sets]
    for number, eval_set in enumerate(args.eval.all_sets, start=1):
        if eval_set.scorer_url:
            is_started = eval_set.name == GOLD and args.eval.gold_scorer
            name = "--eval.gold-scorer" if is_started else setting_name(eval_set, number, "scorer_url")
            scorer, version = connect(eval_set.scorer_url, name, sets[number].records)
            opened[number] = replace(sets[number], scorer=scorer, version=version)
    return opened
