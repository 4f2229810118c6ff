"""Recipes on the configuration of the released model that they name: what they ask of it, what `--dry-run` plans."""

import importlib
import json
import math
import re
from dataclasses import replace

import plan_recipes
import pytest
from helpers import TEXT_TRAINERS, in_turn, sampled
from omni_rl.run.media import sampling_params
from omni_rl.run.world import World
from omni_rl.settings.fields import change
from omni_rl.settings.toml import load_recipes
from omni_rollout.models import open_model
from omni_rollout.models.hub import released_models
from omni_rollout.models.tokens import open_token_model
from omni_train.lora import add_lora
from omni_train.memory.quantized import BYTES
from PIL import Image
from released_models import RELEASES, TOKENS
from trainer_runs import place, recipe

APPS = ("train_flowgrpo", "train_nft", "train_dpo", "train_srpo", "train_distill", "train_sft")
ALL = [f"{app} {name}" for app in APPS for name in load_recipes(app) if not name.startswith("tiny-")]
TEXTS = [f"{app} {name}" for app in TEXT_TRAINERS for name in load_recipes(app) if not name.startswith("tiny-")]
PLANNED = sampled(ALL, 1)
ONE_CARD = sampled([case for case in ALL if "-1x" in case], 1)


def recipe_of(case):
    """The trainer of a case, and its settings."""
    app, name = case.split()
    module = importlib.import_module(app)
    return module, recipe(module, name)


@pytest.mark.parametrize("name", sampled(RELEASES, 2))
def test_a_released_model_has_the_size_that_is_said_and_its_adapters_their_layers(name):
    model, release = open_model(released_models()[name]), RELEASES[name]
    net = model.empty_net()
    assert sum(p.numel() for p in net.parameters()) / 1e9 == pytest.approx(release.billions, rel=0.11)
    add_lora(net, model.LORA_TARGETS, rank=2, alpha=2, seed=0)
    assert sum(hasattr(module, "lora_A") for module in net.modules()) == release.lora_layers


@pytest.mark.parametrize("name", TOKENS)
def test_a_released_language_model_has_the_size_that_is_said(name):
    model = open_token_model(released_models()[name])
    model.check_files()
    assert sum(p.numel() for p in model.empty_net().parameters()) / 1e9 == pytest.approx(TOKENS[name], rel=0.01)


@pytest.mark.parametrize("case", ALL)
def test_a_recipe_asks_of_its_model_what_it_has(case):
    """Sizes, knobs, references, and a schedule, of training and evaluation."""
    _, args = recipe_of(case)
    model, release = open_model(released_models()[args.policy.model]), RELEASES[args.policy.model]
    base = sampling_params(args)
    for params in (base, replace(base, num_inference_steps=args.eval.num_inference_steps)):
        model.check(params)
        sigmas = model.sigmas(params)
        assert len(sigmas) == params.num_inference_steps + 1
        assert sigmas[0] == 1
        assert sigmas[-1] == 0
    size = args.sampling.height // release.stride, args.sampling.width // release.stride
    frames = [(args.sampling.num_frames - 1) // release.frames + 1] * ("video" in model.MEDIA)
    shape = (release.channels, *frames, *size)
    if model.MEDIA == ("audio",):
        shape = release.channels, math.ceil(base.guidance["duration"] * 44_100 / release.stride)
    streams = model.streams(base)
    assert streams.get("video", math.prod(shape)) == math.prod(shape)
    assert model.latent_shape(base) == ((sum(streams.values()),) if streams else shape)
    assert args.data.prompts.endswith(".jsonl") or not model.IMAGES.start, "references are columns of a .jsonl file"


def test_every_model_of_a_recipe_has_its_configuration_in_the_package():
    assert {recipe_of(case)[1].policy.model for case in ALL} <= set(RELEASES)
    assert {recipe_of(case)[1].policy.model for case in TEXTS} == set(TOKENS)
    assert released_models().keys() == RELEASES.keys() | TOKENS.keys()


@pytest.mark.parametrize("case", PLANNED)
def test_a_dry_run_plans_the_released_model(case, tmp_path, monkeypatch, capsys):
    module, args = recipe_of(case)
    model, release = open_model(released_models()[args.policy.model]), RELEASES[args.policy.model]
    Image.new("RGB", (64, 64)).save(tmp_path / "reference.png")
    references = ["reference.png"] * model.IMAGES.start
    count = max(args.data.prompts_per_step, args.eval.num_prompts)
    lines = [json.dumps({"prompt": f"a sign, {i}", "images": references}) for i in range(count)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = change(args, prompts="prompts.jsonl", eval_prompts="prompts.jsonl", dry_run=True)
    module.check_args(args)
    module.main(args, World.join(args))
    plan = dict(re.findall(r"^plan: (.+?): (.+)$", capsys.readouterr().out, re.MULTILINE))
    assert plan["configuration"].endswith(f"as {args.policy.model} cannot be fetched: HF_HUB_OFFLINE is set")
    assert plan["samples per step"].startswith(f"{args.data.prompts_per_step * args.data.group_size}, ")
    assert re.fullmatch(rf"[\d.]+ TFLOP in {args.policy.dtype}", plan["a forward of one sample"])
    assert plan["a step"].startswith("--memory.device-gb GB plans its memory, and the host's")
    weights, trained = map(float, re.findall(r"[\d.]+", plan["weights of the net"]))
    frozen_mb = float(plan["memory per rank"].partition(" MB frozen weights")[0])
    assert float(plan["learning rate"].partition(",")[0]) == args.lr
    assert ("LoRA" in plan["learning rate"]) == bool(args.lora.rank)
    if args.lora.rank:
        assert plan["learning rate"].endswith(f"LoRA of rank {args.lora.rank} with alpha {args.lora.alpha}")
        assert (weights - trained) / 1e3 == pytest.approx(release.billions, rel=0.11)
        assert 0 < trained < weights / 20
        each = BYTES.get(args.memory.base_dtype, 2)  # bfloat16
        assert frozen_mb == pytest.approx((weights - trained) * 1e6 * each / 2**20, rel=1e-3)
    else:
        assert weights == trained
        assert weights / 1e3 == pytest.approx(release.billions, rel=0.11)


def test_a_run_that_is_no_dry_run_takes_no_configuration_of_the_package():
    module, args = recipe_of(ALL[0])
    with pytest.raises(
        ValueError, match=f"--model must be .* can be fetched, got {args.policy.model}: HF_HUB_OFFLINE is set"
    ):
        module.main(change(args, dry_run=False, sharding_mode="none"), World(place()))


@in_turn(3, 4)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ONE_CARD)
def test_a_recipe_for_one_card_takes_what_its_head_says(case, monkeypatch):
    """Its card, and within 2 % its gigabytes, its scorer's, the host's and its operations, as the plan has them."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    app, name = case.split()
    line = plan_recipes.planned_line(plan_recipes.plan_of(app, name, 1), 1)
    said = plan_recipes.read_line(load_recipes(app)[name])
    assert line[:2] == said[:2]
    assert line[2:] == pytest.approx(said[2:], rel=0.02)
