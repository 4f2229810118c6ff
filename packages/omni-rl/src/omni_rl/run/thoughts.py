"""Runs that write a thought before each sample: a kind of run of media."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omni_reward.rules import check_meta, version_of
from omni_rollout import Engine
from omni_rollout.conditioning import TextCache
from omni_rollout.engines.thinking import ThinkingEngine
from omni_rollout.models import open_thinking_model
from omni_rollout.thoughts import ThinkingModel, ThinkingParams
from omni_rollout.tokens import TokenParams
from omni_train.dist import gather_json
from omni_train.prompts.files import PromptRecord
from torch import Tensor, nn

from omni_rl.flow.scorers import Scorer
from omni_rl.flow.thinking import FLAG, with_thoughts
from omni_rl.run import media
from omni_rl.run.media import decoding, params_of, read_all
from omni_rl.run.run import first_input
from omni_rl.run.start import Inputs, Kind, Needs, model_place
from omni_rl.run.texts import check_gathered
from omni_rl.run.world import World
from omni_rl.settings.args import sharding
from omni_rl.settings.fields import flag, require
from omni_rl.settings.token_args import ThinkingArgs


def read(args: ThinkingArgs, world: World, needs: Needs) -> Inputs[ThinkingModel, ThinkingParams]:
    """Read what a run that thinks starts from.

    Raises:
        ValueError: as `omni_rl.run.media.read`.
    """
    with flag("--model: "):
        model = open_thinking_model(model_place(args))

    def check(record: PromptRecord) -> None:
        rule = 'must not have the key "thought", under which scorers get the model\'s own'
        require(("thought" not in record.meta, rule))

    rules, thought = args.rules, TokenParams(args.max_thought_tokens, args.temperature)
    params = ThinkingParams(**vars(params_of(args)), thought=thought)
    eval_thought = replace(thought, temperature=args.eval.temperature, top_p=args.eval.top_p)
    eval_params = replace(params, num_inference_steps=args.eval.num_inference_steps, thought=eval_thought)

    def check_graded(record: PromptRecord) -> None:
        if rules:
            check_meta(rules, record.meta, flag=FLAG)

    inputs = read_all(args, world, needs, model, params, eval_params, check, check_graded)
    about = f"{inputs.about}, thoughts of at most {thought.max_new_tokens} tokens"
    config = inputs.config | {"rules": version_of(rules) if rules else ""}
    return replace(inputs, about=about, config=config, parts=("image", "thought") if rules else ())


def open_scorer(
    args: ThinkingArgs, world: World, inputs: Inputs[Any, Any], needs: Needs
) -> tuple[Scorer, str, Scorer | None]:
    """Open what scores images and thoughts."""
    scorer, version, watch = media.open_scorer(args, world, inputs, needs, meta={"thought": ""})  # as every sample's
    return with_thoughts(scorer, args.rules) if args.rules else scorer, version, watch


def open_engine(
    args: ThinkingArgs, world: World, inputs: Inputs[ThinkingModel, ThinkingParams], net: nn.Module, needs: Needs
) -> tuple[ThinkingModel, Engine]:
    """Return the engine, and the model as updates call it."""
    dist, model = world.dist, decoding(args, inputs, inputs.model)
    parts = model.load(device=dist.device, dtype=inputs.how.dtype, net=net)
    is_sharded = sharding(args, dist.world_size) == "fsdp2"
    together = (lambda ended: all(gather_json(dist, ended))) if is_sharded else bool
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    return model, ThinkingEngine(model, parts, texts=texts, together=together)


def seen(kwargs: Mapping[str, Tensor], args: tuple[Tensor, ...]) -> tuple[int, torch.Size] | None:
    """Count the samples that pass the net to be drawn, and not what is written, whose lengths differ."""
    first = next(iter((*args, *kwargs.values())))
    return first_input(kwargs, args) if torch.is_floating_point(first) else None


THOUGHTS: Kind[ThinkingModel, Engine, ThinkingParams, Scorer] = Kind(
    read=read,
    open_scorer=open_scorer,
    source=media.source,
    open_engine=open_engine,
    evaluate_set=media.evaluate_set,
    export=media.export,
    seen=seen,
    check_gathered=partial(check_gathered, engine="diffusers"),
)
