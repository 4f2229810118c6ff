"""Every trainer with a model that it does not know: SD3.5 on one rank and two, stopped and continued, exported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from build_tiny_models import tiny_checkpoint
from helpers import REPO
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.weights import load_weights
from trainer_runs import recipe, tiny, train, train_on_ranks, write_eval_prompts

import train_dpo
import train_flowgrpo
import train_nft
import train_srpo

SIZES = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4, "lr": 1e-3, "lr_decay": False}
LORA = {"lora_rank": 4, "lora_alpha": 8}
CHANGES = {
    train_flowgrpo: {"algo": "flowgrpo", "noise_level": 0.7, "window_low": 0, "window_high": None},
    train_nft: {"train_levels": 2},
    train_dpo: {"levels_per_pair": 2},
    train_srpo: {"reward_model": str(REPO / "checkpoints" / "tiny-signs-reader"), "prompts_per_step": 8},
}
SCORED = (train_flowgrpo, train_nft, train_dpo)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder of its own, with few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def sd35(tmp_path_factory):
    """A small SD3.5 medium with random weights."""
    return tiny_checkpoint("sd35-medium", tmp_path_factory.getbasetemp().parent / "models")


def settings(app, model, url, **changes):
    """Small settings of the trainer for that model, with guidance, which SD3.5 calls guidance_scale."""
    scorer = {"scorer_url": url} if app in SCORED else {"group_size": 1}
    args = tiny(recipe(app, "tiny-signs"), **(SIZES | CHANGES[app] | scorer))
    return replace(args, model=str(model), guidance_scale=2.0, **changes)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("app", CHANGES, ids=lambda app: app.__name__)
def test_every_trainer_trains_it_on_one_rank_and_two(here, sd35, bright_url, app):
    """All weights sharded, and LoRA copied to both ranks; the rewards are the same on any number of them."""
    for name, changes, mode in (("full", {}, "fsdp2"), ("lora", LORA, "ddp")):
        args = settings(app, sd35, bright_url, **changes)
        one = train(app, replace(args, name=f"{name}-one"))
        two = train_on_ranks(app, replace(args, name=f"{name}-two", shard=mode, batch_size=2))
        assert all(line["policy/grad_norm"] > 0 for line in one[1:])
        assert one[1]["reward/mean"] == pytest.approx(two[1]["reward/mean"], rel=1e-3)
        assert one[1]["policy/grad_norm"] == pytest.approx(two[1]["policy/grad_norm"], rel=2e-2)
        if app is train_flowgrpo:
            assert {line["policy/first_ratio_max_dev"] for line in (*one[1:], *two[1:])} == {0.0}


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_run_that_was_stopped_ends_bit_for_bit_where_one_that_was_not_does(here, sd35, bright_url, changes):
    args = settings(train_flowgrpo, sd35, bright_url, save_every=1, **changes)
    unbroken = train(train_flowgrpo, replace(args, name="unbroken"))
    train(train_flowgrpo, replace(args, name="broken", train_steps=1))
    for line, other in zip(unbroken, train(train_flowgrpo, replace(args, name="broken")), strict=True):
        for key in ("reward/mean", "policy/loss", "policy/grad_norm"):
            assert line.get(key) == other.get(key), (line["step"], key)
    files = [sorted((here / "runs" / name / "weights").rglob("*.safetensors")) for name in ("unbroken", "broken")]
    assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in files[1]] != []


def our_image(checkpoint, weights, noise):
    """The image that we draw with trained weights, float [H, W, 3]."""
    model = open_model(checkpoint)
    parts = model.load(device="cpu", dtype=torch.float32)
    load_weights(parts.net, weights)
    prompts = [Prompt('a blue sign that says "AB"', group=0, index=0, seed=5)]
    drawn = DiffusersEngine(model, parts).generate(prompts, Params(3, height=32, width=96))
    assert torch.equal(noise, step_noise([5], INITIAL_NOISE, model.latent_shape(drawn.params)))
    return drawn.media["image"][0].numpy() / 255


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_the_stock_pipeline_opens_the_export_and_draws_our_image(here, sd35, bright_url, changes):
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    args = settings(train_flowgrpo, sd35, bright_url, lr=1e-2, **changes)
    train(train_flowgrpo, args)
    weights, noise = here / "runs" / args.name / "weights", step_noise([5], INITIAL_NOISE, (16, 4, 12))
    if changes:
        pipe = StableDiffusion3Pipeline.from_pretrained(sd35)
        pipe.load_lora_weights(str(weights))
    else:
        net = SD3Transformer2DModel.from_pretrained(weights, subfolder="transformer")
        pipe = StableDiffusion3Pipeline.from_pretrained(sd35, transformer=net)
    pipe.set_progress_bar_config(disable=True)

    def stock(pipe):
        options = {"num_inference_steps": 3, "guidance_scale": 1.0, "height": 32, "width": 96, "output_type": "np"}
        return pipe('a blue sign that says "AB"', latents=noise.clone(), **options).images[0]

    untrained = stock(StableDiffusion3Pipeline.from_pretrained(sd35))
    trained = stock(pipe)
    assert np.abs(trained - untrained).max() > 0.02  # there is something to see
    assert np.abs(trained - our_image(sd35, weights, noise)).max() < 0.5 / 255 + 1e-3  # ours is rounded to 8 bits


def test_a_knob_that_the_model_lacks_is_refused_by_its_name(here, sd35, bright_url):
    with pytest.raises(ValueError, match="true_cfg_scale"):
        train(train_flowgrpo, settings(train_flowgrpo, sd35, bright_url, true_cfg_scale=2.0))
