"""Frames and sound in the trainers: each with its own advantages and share, or the sound left as it is."""

from dataclasses import replace

import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_reward import Score, Scorer
from omni_reward.serving import serving_in_thread
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.weights.full import load_weights
from safetensors.torch import load_file
from trainer_runs import recipe, tiny, train

import train_flowgrpo
import train_nft

ROW = ROWS["ltx23"]
SIZES = {
    "prompts_per_step": 2,
    "group_size": 4,
    "batch_size": 4,
    "lr": 1e-2,
    "optim_lr_scheduler_type": "constant",
    "num_frames": 9,
}
SIZES |= {"train_steps": 1, "eval_every": 1}
APART = {"reward_parts": "bright=1,loud=1", "streams_reward_media": "bright=video,loud=audio"}


@pytest.fixture(scope="module")
def url():
    """URL of a server that tells how bright a video and how loud its sound is."""

    def score(media, prompts, meta):
        pairs = zip(media["video"], media["audio"], strict=True)
        parts = [{"bright": float(video.mean()), "loud": float((sound**2).mean())} for video, sound in pairs]
        return [Score(sum(own.values()), parts=own) for own in parts]

    with serving_in_thread(Scorer(score, media=("audio", "video"))) as address:
        yield address


def settings(app, url, **changes):
    """Small settings of the trainer for a model with sound."""
    own = {train_flowgrpo: {"window_low": 0, "window_high": None, "noise_level": 0.7}, train_nft: {"train_levels": 1}}
    places = {"model": str(ROW.checkpoint()), "scorer_url": url, "optim_weight_decay": 0.0}
    return tiny(recipe(app, "tiny-signs"), **(SIZES | own[app] | places | changes))


@pytest.mark.parametrize("name", sampled(["flowgrpo", "nft"], 1))
def test_trainers_take_frames_and_sound_apart_and_nothing_of_a_frozen_sound_moves(here, url, name):
    app, lora = (train_flowgrpo, {}) if name == "flowgrpo" else (train_nft, {"lora_rank": 4, "lora_alpha": 8})
    model, args = (
        open_model(ROW.checkpoint()),
        settings(app, url, **APART, streams_sound_weight=0.5, streams_freeze_audio=True, **lora),
    )
    line = train(app, args)[1]
    assert line["policy/grad_norm"] > 0
    assert line["eval/reward"] == pytest.approx(line["eval/bright"] + line["eval/loud"])
    if app is train_flowgrpo:
        assert line["policy/first_ratio_max_dev"] == 0
    net, weights = model.load_net(device="cpu", dtype=torch.float32), here / "runs" / args.run.name / "weights"
    if lora:
        found = {n: t for file in weights.glob("*.safetensors") for n, t in load_file(file).items() if "lora_B" in n}
        moved = {name for name, factor in found.items() if factor.any()}
    else:
        before = {name: p.clone() for name, p in net.named_parameters()}
        load_weights(net, weights)
        moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert not {name for name in moved if not set(model.BRANCHES["audio"]).isdisjoint(name.split("."))}


def test_the_names_of_the_audio_are_those_that_the_sound_alone_needs():
    """Without attention between the two, its gradient reaches them and nothing else."""
    model = open_model(ROW.checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    net = engine.net.requires_grad_(True)
    seen = {}
    net.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    engine.generate([Prompt("a horn", 0, 0, seed=0)], replace(ROW.unguided, num_inference_steps=2))
    video, sound = net(**dict(seen), isolate_modalities=True)
    reached = []
    for out in (video, sound):
        net.zero_grad()
        out.square().sum().backward(retain_graph=True)
        reached.append({name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()})
    audio = {n for n, _ in net.named_parameters() if not set(model.BRANCHES["audio"]).isdisjoint(n.split("."))}
    assert not reached[0] & audio
    assert reached[1] <= audio
    between = {name for name in audio if any(word in name for word in ("a2v", "v2a", "to_audio", "av_cross_attn"))}
    assert audio - reached[1] == between
    parts = {part for name in audio for part in name.split(".")}
    assert set(model.BRANCHES["audio"]) - parts == {"audio_caption_projection"}  # of LTX-2


def test_a_model_without_sound_refuses_its_settings(here, bright_urls):
    silent = {"model": str(ROWS["wan21"].checkpoint()), "num_frames": 9, "scorer_url": bright_urls["video"]}
    with pytest.raises(ValueError, match=r"--streams.freeze-audio needs a model that generates video with sound"):
        train(train_flowgrpo, settings(train_flowgrpo, "", streams_freeze_audio=True, **silent))
    with pytest.raises(
        ValueError,
        match=r"--streams.sound-weight and --streams.reward-media need a model that generates video with sound",
    ):
        train(train_nft, settings(train_nft, "", streams_sound_weight=0.5, **silent))
