"""Trainers on ranks that compute each forward together: the run of as many ranks as they have shares."""

import json
import math
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import REPO, in_turn, sampled
from model_rows import ROWS
from omni_reward import Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from omni_rl.tools import plan
from PIL import Image
from trainer_runs import SOUND, VIDEO, exported, lose_step, recipe, tiny, train_on_ranks, unclocked

import train_distill
import train_dpo
import train_flowgrpo
import train_nft
import train_sft
import train_srpo

SIZES = {"prompts_per_step": 2, "group_size": 4, "batch_size": 2, "num_inference_steps": 3, "lr": 1e-3}
WINDOW = {"window_size": 2, "window_low": 0, "window_high": None}
READER = str(REPO / "checkpoints" / "tiny-signs-reader")
PAIRS = {"prompts": "pairs.jsonl", "group_size": 2}
RUNS = {  # name -> trainer, and what its settings have beyond SIZES
    "flowgrpo": (train_flowgrpo, WINDOW | {"lora_rank": 2, "save_every": 1}),
    "flowgrpo ahead": (train_flowgrpo, WINDOW | {"algo": "flowgrpo", "lora_rank": 2, "draw_ahead": 1}),
    "flowgrpo of all weights": (train_flowgrpo, WINDOW | {"best_worst_n": 2, "sharding_size": 2}),
    "flowgrpo in tiles": (train_flowgrpo, WINDOW | {"lora_rank": 2, "memory_decode_tile": 64}),
    "nft": (train_nft, {"train_levels": 2, "lora_rank": 2}),
    "dpo": (train_dpo, {"sharding_mode": "fsdp2", "lora_rank": 2}),
    "dpo offline": (train_dpo, PAIRS | {"preferences": "pairs.jsonl"}),
    "srpo": (train_srpo, {"reward_model": READER, "group_size": 2}),
    "sft": (train_sft, PAIRS),
    "flowgrpo of video": (train_flowgrpo, WINDOW | VIDEO),
    "nft of video with sound": (train_nft, SOUND),
    "distill": (train_distill, {"teacher_substeps": 2, "train_low": 0, "train_high": None}),
}


@contextmanager
def scoring(seen, kind):
    """URL of a server of brightness, which adds the prompts of what it scores to a list."""

    def score(media, prompts, meta):
        seen.extend(prompts)
        return [float(sample.mean()) / 255 for sample in media[kind]]

    with serving_in_thread(Scorer(score, media=(kind,)), name="brightness") as url:
        yield url


def write_pairs(folder):
    """Pairs of pictures, and prompts with a picture to train on."""
    for name, level in (("win", 200), ("lose", 60)):
        Image.new("RGB", (96, 32), (level, level // 2, 90)).save(folder / f"{name}.png")
    lines = [
        {"prompt": f'a red sign that says "{word}"', "win": "win.png", "lose": "lose.png", "sample": "win.png"}
        for word in ("AB", "CDEFGH", "K", "XYZ")
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def alike(line, other):
    """Whether two lines of logs have the same metrics, but for what rounding makes of them in two steps."""
    same = [name for name in ("reward/mean", "policy/grad_norm", "eval/reward") if name in line]
    assert [line[name] for name in same] == pytest.approx([other[name] for name in same], rel=3e-4, abs=5e-5)
    return line == pytest.approx(other, rel=1e-3, abs=5e-5, nan_ok=True)


@pytest.mark.parametrize("name", sampled(RUNS, 1))
def test_four_ranks_that_share_samples_by_two_train_as_two_ranks(name, here):
    write_pairs(here)
    (app, own), seen = RUNS[name], list[str]()
    with scoring(seen, "video" if "video" in name else "image") as url:
        grades = {} if app is train_srpo else {"scorer_url": url}
        model = {"model": str(ROWS[own["model"]].checkpoint())} if "model" in own else {}
        args = tiny(recipe(app, "tiny-signs"), **(SIZES | grades | own | model))
        wanted = train_on_ranks(app, change(args, name="two"))
        count = len(seen)
        seen.clear()
        args = change(args, name="shared", sharding_context_parallel=2)
        found = train_on_ranks(app, args, ranks=4)
        assert len(seen) == count  # each sample once
        for line, other in zip(unclocked(found), unclocked(wanted), strict=True):
            assert alike(line, other)
        if "save_every" in own:
            lose_step("shared", 2)
            alone = train_on_ranks(app, replace(args, sharding=replace(args.sharding, context_parallel=1)))
            assert alike(unclocked(alone)[-1], unclocked(wanted)[-1])


@pytest.mark.parametrize("lora_rank", sampled([0, 2], 0))
def test_a_run_continues_on_more_ranks_and_on_fewer(lora_rank, here):
    """Two ranks share all samples; then two pairs share half of them each, and each pair has a copy of the weights."""
    with scoring([], "image") as url:
        sizes = SIZES | WINDOW | {"save_every": 1, "eval_every": 1, "lora_rank": lora_rank, "scorer_url": url}
        shared = {"sharding_mode": "fsdp2", "sharding_context_parallel": 2, "optim_lr_scheduler_type": "constant"}
        args = tiny(recipe(train_flowgrpo, "tiny-signs"), **sizes | shared)
        wanted = train_on_ranks(train_flowgrpo, change(args, name="stays", train_steps=3))
        for steps, ranks, size in ((1, 2, 0), (2, 4, 2), (3, 2, 0)):
            life = change(args, name="moves", train_steps=steps, sharding_size=size)
            found = train_on_ranks(train_flowgrpo, life, ranks=ranks)
    for line, other in zip(unclocked(found), unclocked(wanted), strict=True):
        assert alike(line, other)
    moved, stayed = exported("moves"), exported("stays")
    assert moved.keys() == stayed.keys()
    for name, tensor in stayed.items():
        torch.testing.assert_close(moved[name], tensor, atol=1e-4, rtol=1e-3)


@in_turn(1, 3)
def test_a_plan_holds_the_activations_of_a_ranks_tokens_and_decodes_its_tiles(here):
    """Of four ranks each decodes a batch of its own in twelve tiles, or three tiles of each batch."""
    sizes = SIZES | WINDOW | {"width": 384, "height": 256, "lora_rank": 2, "dry_run": True, "memory_device_gb": 1.0}
    sizes |= {"memory_decode_tile": 128}
    args = tiny(recipe(train_flowgrpo, "tiny-signs"), **sizes)
    whole, parts = (
        plan.measure(train_flowgrpo.main, replace(args, sharding=replace(args.sharding, context_parallel=number)), 4)
        for number in (1, 4)
    )
    tokens = [each.tokens["update"] / each.forwards["update"] for each in (whole, parts)]
    held = [each.peaks["update"] - each.peaks["sync"] for each in (whole, parts)]  # beside weights and their moments
    assert tokens[1] == math.ceil(tokens[0] / 4)
    assert held[1] < held[0] / 2
    assert whole.flops["decode"] == parts.flops["decode"] > 0


REFUSED = {
    "--sharding.context-parallel must divide the 4 ranks, got 3": {"sharding_context_parallel": 3},
    "--sharding.context-parallel 2 does not go with --engine vllm-omni": {"engine": "vllm-omni"},
    "--sharding.context-parallel 2 does not go with --compile": {"compile": True},
    "--sharding.context-parallel 2 does not go with --scorer.sleep": {"scorer_sleep": True, "scorer_name": "ocr"},
    "--batch-size times ranks by --sharding.context-parallel (6) must divide a step's samples (8), got 3": {
        "batch_size": 3
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_with_it_is_refused_by_name(message, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    changes = SIZES | WINDOW | {"scorer_url": "http://nowhere", "sharding_context_parallel": 2} | REFUSED[message]
    args = tiny(recipe(train_flowgrpo, "tiny-signs"), **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        train_flowgrpo.check_args(args)
