"""Runs that think before they draw: a run of media with a thought before each sample."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omni_reward.rules import Rules, check_meta, version_of
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
from omni_rl.flow.thinking import FLAG, ThoughtScorer
from omni_rl.run.engines import ENGINES
from omni_rl.run.media import MEDIA, decoding, open_scorer, params_of, read_all
from omni_rl.run.run import first_input
from omni_rl.run.start import Inputs, Kind, Needs
from omni_rl.run.texts import check_gathered
from omni_rl.run.world import World
from omni_rl.settings.args import MediaArgs, sharding
from omni_rl.settings.fields import flag, require

ThinkingKind = Kind[ThinkingModel, Engine, ThinkingParams, Scorer]


def thoughts(thought: TokenParams, eval_thought: TokenParams, rules: Rules | None) -> ThinkingKind:
    """Return what a run that thinks and draws does.

    thought, eval_thought: how training and evaluations write. rules: that grade thoughts.
    """
    return Kind(
        read=partial(_read, thought=thought, eval_thought=eval_thought, rules=rules),
        open_scorer=partial(_open_scorer, rules=rules),
        source=MEDIA.source,
        is_apart=MEDIA.is_apart,
        open_engine=_open_engine,
        evaluate=MEDIA.evaluate,
        export=MEDIA.export,
        seen=_seen,
        check_gathered=partial(check_gathered, engine="diffusers"),
    )


def _read(
    args: MediaArgs,
    world: World,
    needs: Needs,
    *,
    thought: TokenParams,
    eval_thought: TokenParams,
    rules: Rules | None,
) -> Inputs[ThinkingModel, ThinkingParams]:
    rule = f"--engine must be diffusers, which alone writes thoughts, got {args.engine}"
    require((not ENGINES[args.engine].library, rule))
    with flag("--model: "):
        model = open_thinking_model(args.model)

    def check(record: PromptRecord) -> None:
        said = 'must not have the key "thought", under which scorers get the model\'s own'
        require(("thought" not in record.meta, said))

    plain = params_of(args)
    params = ThinkingParams(**vars(plain), thought=thought)
    eval_plain = replace(plain, num_inference_steps=args.eval.num_inference_steps)
    eval_params = ThinkingParams(**vars(eval_plain), thought=eval_thought)

    def check_graded(record: PromptRecord) -> None:
        if rules:
            check_meta(rules, record.meta, flag=FLAG)

    inputs = read_all(args, world, needs, model, params, eval_params, check, check_graded)
    about = f"{inputs.about}, thoughts of at most {thought.max_new_tokens} tokens"
    config = inputs.config | {"rules": version_of(rules) if rules else ""}
    return replace(inputs, about=about, config=config, parts=("image", "thought") if rules else ())


def _open_scorer(
    args: MediaArgs, world: World, inputs: Inputs[Any, Any], needs: Needs, *, rules: Rules | None
) -> tuple[Scorer, str, Scorer | None]:
    scorer, version, watch = open_scorer(args, world, inputs, needs, meta={"thought": ""})  # as every sample's
    return ThoughtScorer(scorer, rules) if rules else scorer, version, watch


def _open_engine(
    args: MediaArgs, world: World, inputs: Inputs[ThinkingModel, ThinkingParams], net: nn.Module, needs: Needs
) -> tuple[ThinkingModel, Engine]:
    dist, model = world.dist, decoding(args, inputs.model)
    parts = model.load(device=dist.device, dtype=inputs.how.dtype, net=net)
    is_sharded = sharding(args, dist.world_size) == "fsdp2"
    together = (lambda ended: all(gather_json(dist, ended))) if is_sharded else bool
    texts = TextCache(args.memory.text_cache_mb, args.memory.text_cache)
    return model, ThinkingEngine(model, parts, texts=texts, together=together)


def _seen(kwargs: Mapping[str, Tensor], args: tuple[Tensor, ...]) -> tuple[int, torch.Size] | None:
    """Count the samples that pass the net to be drawn, and not what is written, whose lengths differ."""
    first = next(iter((*args, *kwargs.values())))
    return first_input(kwargs, args) if torch.is_floating_point(first) else None
