"""Runs on media that sample a thought before each image."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from omni_reward.rules import check_meta, rules_version
from omni_rollout import Engine
from omni_rollout.conditioning import TextCache
from omni_rollout.engines.thinking import ThinkingEngine
from omni_rollout.models import open_thinking_model
from omni_rollout.thoughts import ThinkingModel, ThinkingParams
from omni_rollout.tokens import TokenParams
from omni_train import progress
from omni_train.dist import gather_json, same_error
from omni_train.prompts.files import PromptRecord
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import Scorer
from omni_rl.flow.thinking import FLAG, with_thoughts
from omni_rl.run import media
from omni_rl.run.inputs import Inputs, model_place, with_meshes, with_policies
from omni_rl.run.media import read_all, sampling_params, with_sliced_decoding
from omni_rl.run.run import first_input
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import sharding_mode
from omni_rl.settings.fields import prefix_errors, require
from omni_rl.settings.token_args import ThinkingArgs


def read_thoughts(
    args: ThinkingArgs, world: World, *, policies: Collection[str] = ()
) -> Inputs[ThinkingModel, ThinkingParams]:
    """Read the inputs of a run with thoughts. policies: policies besides the trained one, as in `Inputs`.

    Raises:
        ValueError: as in `omni_rl.run.media.read_media`.
    """
    progress.start_phase("reading the model and the prompts")
    with same_error(world.all_ranks):
        inputs = with_policies(read_thinking(args, world), policies)
    return with_meshes(args, world.dist, inputs)


def read_thinking(args: ThinkingArgs, world: World) -> Inputs[ThinkingModel, ThinkingParams]:
    """Read all that `read_thoughts` returns."""
    with prefix_errors("--model: "):
        model = open_thinking_model(model_place(args))

    def check(record: PromptRecord) -> None:
        rule = 'must not have the key "thought", under which scorers get the model\'s own'
        require(("thought" not in record.meta, rule))

    rules, thought = args.rules, TokenParams(args.sampling.max_thought_tokens, args.sampling.temperature)
    params = ThinkingParams(**vars(sampling_params(args)), thought=thought)
    eval_thought = replace(thought, temperature=args.eval.temperature, top_p=args.eval.top_p)
    eval_params = replace(params, num_inference_steps=args.eval.num_inference_steps, thought=eval_thought)

    def check_graded(record: PromptRecord) -> None:
        if rules:
            check_meta(rules, record.meta, flag=FLAG)

    inputs = read_all(args, world, model, params, eval_params, check, check_graded)
    return replace(
        inputs,
        digests={**inputs.digests, "rules": rules_version(rules) if rules else ""},
        count_samples=count_samples,
        score_parts=("image", "thought") if rules else (),
    )


def open_scorers(
    args: ThinkingArgs, world: World, inputs: Inputs[Any, ThinkingParams], session: Session
) -> tuple[Scorer, list[HeldOut[ThinkingParams, Scorer]]]:
    """Return the scorer of images and thoughts, and the evaluation sets; see `omni_rl.run.media.open_scorers`."""
    scorer, held_out = media.open_scorers(args, world, inputs, session, meta={"thought": ""})  # in every sample's meta
    return with_thoughts(scorer, args.rules) if args.rules else scorer, held_out


def open_engine(
    args: ThinkingArgs, world: World, inputs: Inputs[ThinkingModel, ThinkingParams], net: nn.Module
) -> tuple[ThinkingModel, Engine]:
    """Return the model, with the wrappers of the run, and the engine."""
    dist, model = world.dist, with_sliced_decoding(args, inputs, inputs.model)
    parts = model.load(device=dist.device, dtype=inputs.preparation.dtype, net=net)
    is_sharded = sharding_mode(args, dist.world_size) == "fsdp2"
    all_ended = (lambda ended: all(gather_json(dist, ended))) if is_sharded else bool
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    return model, ThinkingEngine(model, parts, texts=texts, together=all_ended)


def count_samples(kwargs: Mapping[str, Tensor], args: tuple[Tensor, ...]) -> tuple[int, torch.Size] | None:
    """Count the samples in forwards of images; forwards of text, whose lengths differ, return None."""
    first = next(iter((*args, *kwargs.values())))
    return first_input(kwargs, args) if torch.is_floating_point(first) else None
