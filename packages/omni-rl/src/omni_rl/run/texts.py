"""Runs that generate text: inputs, scorers, engine, teacher and export."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omni_reward.media import TEXT as TEXT_KIND
from omni_reward.rules import SCORER, check_meta, open_rules, rules_version
from omni_reward.scorers.user import load_user
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenEngine, TokenModel, TokenParams
from omni_rollout.tool import Tool
from omni_train import progress
from omni_train.dist import same_error
from omni_train.files import file_digest, new_folder, probe_digest
from omni_train.prepare import adapt, prepare
from omni_train.prompts.chats import answer_text
from omni_train.prompts.files import PromptRecord
from omni_train.weights.adapters import check_adapter, find_adapter
from omni_train.weights.card import CARD_FILE, model_card
from omni_train.weights.full import named_weights, save_peft
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import TextScorer, check_gradable
from omni_rl.flow.tokens import RuleScorer, expand_prompts
from omni_rl.media.prompts import media_files
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
from omni_rl.run.run import TokenRun
from omni_rl.run.session import Session
from omni_rl.run.start import open_empty_net, report_reading
from omni_rl.run.world import World
from omni_rl.settings.args import load_records, read_prompts, sharding_mode
from omni_rl.settings.fields import prefix_errors, require
from omni_rl.settings.saved import weights_digest
from omni_rl.settings.token_args import TokenArgs


def read_texts(
    args: TokenArgs, world: World, *, policies: Collection[str] = (), scored: bool = True, answers: Collection[str] = ()
) -> Inputs[TokenModel, TokenParams]:
    """Read the inputs of a run on text. policies: policies besides the trained one, as in `Inputs`.

    scored: True if the rules grade the answers in training. answers: keys of answers in the lines of --prompts.

    Raises:
        ValueError: a file is missing, incomplete or malformed. The message begins with the flag and is the same on
            every rank.
    """
    progress.start_phase("reading the model and the prompts")
    with same_error(world.all_ranks):
        inputs = with_policies(read_all(args, world, scored=scored, answers=answers), policies)
    return with_meshes(args, world.dist, inputs)


def read_all(
    args: TokenArgs, world: World, *, scored: bool, answers: Collection[str]
) -> Inputs[TokenModel, TokenParams]:
    """Read all that `read_texts` returns."""
    dist = world.dist
    with prefix_errors("--model: "):
        model = open_token_model(model_place(args))
        model.dtype = getattr(torch, args.policy.dtype)
        world.check_files(model)

    def check(record: PromptRecord) -> None:
        if record.index % dist.world_size == dist.rank:  # each rank checks its share, because this reads media
            check_record(args, model, record)

    def check_graded(record: PromptRecord) -> None:
        if record.index % dist.world_size == dist.rank:
            check_meta(args.rules, record.meta)
        check(record)

    def check_answered(record: PromptRecord) -> None:
        if record.index % dist.world_size == dist.rank:
            check_lengths(args, model, record, answers)
        check(record)

    frozen = () if args.lora.rank else model.FROZEN
    preparation = build_preparation(
        args,
        dist.device,
        model,
        lambda name: f"{name}.".startswith(tuple(f"{layer_prefix}." for layer_prefix in frozen)),
    )
    # Ranks run a tower only for media. Full weights are exported with their towers, so these keep the released dtype.
    dtype = preparation.dtype if args.lora.rank else torch.promote_types(model.weight_dtype, preparation.dtype)
    preparation = replace(preparation, whole=dict.fromkeys(model.FROZEN, dtype))
    prompts, records = read_prompts(args, check_graded if scored else check_answered, check_graded)
    params = TokenParams(args.sampling.max_new_tokens, args.sampling.temperature)
    eval_params = TokenParams(args.sampling.max_new_tokens, args.eval.temperature, args.eval.top_p)
    prefix = model.prefix.rstrip(".")
    adapters = {"": Path(args.policy.init_weights)} if args.policy.init_weights else {}
    with prefix_errors("--init-weights: "):
        for folder in adapters.values():
            rule = "must be the folder of an adapter, with --lora.rank > 0; full weights are a --model"
            require((args.lora.rank and find_adapter(folder), f"{rule}, got {folder}"))
            check_adapter(adapt(model.empty_net(), preparation), folder, part=prefix)
    training = load_records(args.data, args.data.prompts)
    sets = read_sets(args, records, eval_params, check, check_graded)
    check_gradable(args.scorer, graded_by_run(args, training if scored else [], sets), prints=dist.is_main)
    media = sorted({file for record in training for file in media_files(record)})
    digests = {"media_digest": probe_digest(media, num_blocks=1)} if media else {}
    digests |= {"tool.function_digest": file_digest(args.tool.file)} if args.tool.function else {}
    return Inputs(
        model,
        params,
        prompts,
        sets,
        choose_canary([*records, *training]),
        preparation,
        model.nets,
        digests | {"rules": rules_version(args.rules)},
        adapters=adapters,
        adapter_prefix=prefix,
        count_samples=count_samples,
    )


def check_record(args: TokenArgs, model: TokenModel, record: PromptRecord) -> None:
    """Raise ValueError for a prompt with media that are missing, or too long."""
    max_tokens = args.sampling.max_prompt_tokens
    if max_tokens or model.MEDIA or media_files(record) or "messages" in record.meta:
        (prompt,) = expand_prompts([record], 1, seed=0, step=0)
        encoded = model.encode(prompt)
        if args.sampling.engine == "vllm":
            from omni_rollout.engines.vllm import media_inputs

            media_inputs(encoded, model.config)  # raises if vLLM would not answer
        length = len(encoded["input_ids"])
        require(
            (
                not max_tokens or length <= max_tokens,
                f"must have at most --max-prompt-tokens {max_tokens} tokens, got {length}",
            )
        )


def check_lengths(args: TokenArgs, model: TokenModel, record: PromptRecord, answers: Collection[str]) -> None:
    """Raise ValueError if an answer under one of these keys is too long."""
    max_tokens = args.sampling.max_new_tokens
    for key in answers:
        length = len(model.tokenize(answer_text(record.meta[key], key, record.text))) + 1
        rule = f'"{key}" must have at most --max-new-tokens {max_tokens} tokens with its end'
        require((length <= max_tokens, f"{rule}, got {length}"))


def choose_canary(records: Sequence[PromptRecord]) -> PromptRecord:
    """Return the prompt used to test scorers, one with the most images."""
    return max(records, key=lambda record: len(record.images))


def open_scorers(
    args: TokenArgs, world: World, inputs: Inputs[Any, TokenParams], session: Session
) -> tuple[TextScorer, list[HeldOut[TokenParams, TextScorer]]]:
    """Return the scorer with the rules and their server, and the evaluation sets with their scorers.

    Raises:
        ValueError: a scorer does not answer, does not fit, or differs from the one that the run began with.
    """
    with same_error(world.all_ranks):
        connect_to, version, client = partial(world.connect, scorer_args=args.scorer, kinds=(TEXT_KIND,)), "", None
        if args.scorer.url:
            client, version = connect_to(args.scorer.url, canary=inputs.canary)
        scorer_only = open_rules(SCORER, remote=True)

        def connect(url: str, name: str, records: Sequence[PromptRecord]) -> tuple[TextScorer, str]:
            set_client, version = connect_to(url, canary=choose_canary(records), name=name)
            return RuleScorer(scorer_only, set_client, args.scorer.batch_size), version

        held_out = open_set_scorers(args, inputs.held_out, connect)
        session.record_scorer(args, version)
    world.check_same_settings({"scorer": version})  # each machine may have its own server
    return RuleScorer(args.rules, client, args.scorer.batch_size), held_out


def open_engine(
    args: TokenArgs, world: World, inputs: Inputs[TokenModel, TokenParams], net: nn.Module
) -> tuple[TokenModel, TokenEngine]:
    """Return the model, with the wrappers of the run, and the engine."""
    model, dist = world.instrument(inputs.model), world.dist
    if args.sampling.engine == "vllm":
        from omni_rollout.engines.vllm import VllmEngine

        max_answer = max([args.sampling.max_new_tokens, *(eval_set.max_new_tokens or 0 for eval_set in args.eval.sets)])
        max_tokens = args.sampling.max_prompt_tokens and args.sampling.max_prompt_tokens + max_answer
        dtype, share = getattr(torch, args.policy.dtype), args.sampling.gpu_memory_utilization
        return model, VllmEngine(model, device=dist.device, dtype=dtype, memory_share=share, max_tokens=max_tokens)
    tool = None
    if args.tool.function and not args.run.dry_run:
        tool = Tool(load_user(args.tool.function, "text"), args.tool.texts)
    return model, TransformersEngine(model, net, synced=sharding_mode(args, dist.world_size) == "fsdp2", tool=tool)


@dataclass(frozen=True)
class Teacher:
    """A frozen teacher model, and the number of tokens for which both it and the run's model have logits."""

    model: TokenModel
    net: nn.Module
    vocab_size: int


def read_teacher(
    args: TokenArgs, world: World, inputs: Inputs[TokenModel, TokenParams], place: str
) -> tuple[Inputs[TokenModel, TokenParams], TokenModel]:
    """Read a teacher's configuration and vocabulary, and add a digest of its weights to the inputs.

    Raises:
        ValueError: its vocabulary differs from that of the run's model, or it supports fewer media.
    """
    with same_error(world.all_ranks), prefix_errors("--teacher: "):
        teacher = open_token_model(place)
        teacher.dtype, teacher.reading = inputs.model.dtype, report_reading
        world.check_files(teacher)
        missing = [kind for kind in inputs.model.MEDIA if kind not in teacher.MEDIA]
        rule = "must have the vocabulary of --model"
        require(
            (teacher.vocabulary == inputs.model.vocabulary, f"{rule}, got another one in {place}"),
            (not missing, f"must support the media of --model, got {place} without {', '.join(missing)}"),
        )
        digests = {**inputs.digests, "teacher_digest": weights_digest(place, teacher.folder)}
        count = sum(p.numel() for p in teacher.empty_net().parameters())
    return replace(inputs, digests=digests, num_extra_params=count), teacher


def open_teacher(world: World, inputs: Inputs[TokenModel, TokenParams], teacher: TokenModel) -> Teacher:
    """Load a teacher's net, sharded like the run's net.

    Raises:
        ValueError, OSError: the weights could not be read.
    """
    preparation = inputs.preparation.frozen()
    whole = dict.fromkeys(teacher.FROZEN, preparation.dtype)
    preparation = replace(preparation, block_names=teacher.BLOCK_NAMES, whole=whole)
    with same_error(world.all_ranks):
        net, files = open_empty_net(replace(inputs, model=teacher), preparation, {})
        sizes = [num_logits(model.empty_net()) for model in (inputs.model, teacher)]
        return Teacher(world.instrument(teacher), prepare(net, preparation, files), min(sizes))


def num_logits(net: nn.Module) -> int:
    """Return the number of tokens for which a net has logits; the last ones may be padding of the vocabulary."""
    head = net.get_output_embeddings()  # type: ignore[operator]  # a method of all models in transformers
    return int(head.out_features)


def export(run: TokenRun[TokenArgs], card: Mapping[str, object] | None) -> None:
    """Write an adapter in peft's layout, or full weights in transformers' layout."""
    folder, net = run.session.folder / "weights", run.policy.net
    if run.args.lora.rank:
        save_peft(net, folder, run.dist, prefix=run.model.prefix, base=run.base, card=card)
        return
    full = {name: tensor.cpu() for name, tensor in named_weights(net) if run.dist.is_main}
    with same_error(run.dist):
        if run.dist.is_main:
            with new_folder(folder) as place:
                run.model.save(net, full, place)
                if card is not None:
                    (place / CARD_FILE).write_text(model_card(card, is_lora=False, library="transformers"), "utf-8")


def count_samples(kwargs: Mapping[str, Tensor], args: tuple[Tensor, ...]) -> tuple[int, torch.Size]:
    """Return the number of sequences in a forward, with an empty shape, because their lengths do not matter."""
    return len(kwargs["input_ids"]), torch.Size()
