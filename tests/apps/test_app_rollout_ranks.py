"""Ranks that only sample, beside those that train: `--sharding.rollout-ranks`."""

import os
import re
import signal
import time
from concurrent.futures import Future
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from apps import app_lives as lives
from helpers import sampled
from model_rows import ROWS
from omni_reward import RewardClient, RewardError
from omni_rl.run import start
from omni_rl.settings.fields import change
from omni_rollout.models.qwen_image import QwenImage
from omni_train.files import load_metrics
from PIL import Image
from trainer_runs import SOUND, VIDEO, exported, recipe, tiny, train_on_ranks, unclocked

import train_dpo
import train_flowgrpo
import train_nft

SIZES = {
    "group_size": 2, "prompts_per_step": 4, "batch_size": 2, "lr": 1e-3, "width": 64, "train_steps": 3,
    "save_every": 3, "eval_every": 3, "eval_first": False,
}  # fmt: skip
WINDOW = {"algo": "flowgrpo", "noise_level": 0.7, "window_low": 0, "window_high": 2, "correction_level": "step"}
RUNS = {
    "flowgrpo": (train_flowgrpo, WINDOW),
    "flowgrpo, all weights": (train_flowgrpo, WINDOW | {"lora_rank": 0, "sharding_mode": "fsdp2"}),
    "nft": (train_nft, {"train_levels": 2}),
    "nft, all weights": (train_nft, {"train_levels": 2, "lora_rank": 0, "sharding_mode": "fsdp2"}),
    "dpo": (train_dpo, {}),
    "flowgrpo of video by two experts": (train_flowgrpo, WINDOW | VIDEO),
    "nft of video with sound": (train_nft, SOUND),
}


CASES = [*product(RUNS, (0, 1), (1, 2))]  # trainer, steps ahead, ranks that only sample


@pytest.mark.parametrize("case", sampled(CASES, 1))
def test_a_run_is_that_of_ranks_that_all_train_to_the_bit(case, here, bright_urls):
    name, ahead, samplers = case
    app, own = RUNS[name]
    own = own | {"scorer_url": bright_urls["video" if "video" in name else "image"], "draw_ahead": ahead}
    own |= {"model": str(ROWS[own["model"]].checkpoint())} if "model" in own else {}
    args = tiny(recipe(app, "tiny-signs"), **(SIZES | own))
    wanted, weights = train_on_ranks(app, change(args, name="all")), exported("all")
    lines = train_on_ranks(app, change(args, name="apart", sharding_rollout_ranks=samplers), ranks=2 + samplers)
    assert unclocked(lines) == unclocked(wanted)
    assert len({sum(line.get("perf/forwards", 0) for line in each) for each in (lines, wanted)}) == 1
    assert all(line["reward/busy_s"] > 0 for line in lines[1:])
    found = exported("apart")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def kill(victim):
    """Before a life: a rank kills itself, in the update of step 2, or as it samples that step."""

    def before(rank):
        name = "roll_out" if rank == 2 else "update"
        plain = getattr(train_flowgrpo, name)

        def killed(run, step, *others):
            if step.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(run, step, *others)

        if rank == victim:
            setattr(train_flowgrpo, name, killed)

    return before


def fail_to_score(rank, error=RewardError):
    """Before a life: the scorer of the rank that samples fails in step 2."""
    plain = RewardClient.submit

    def submit(client, *given):
        future = plain(client, *given)
        if rank == 2:
            seen.append(future)
        if len(seen) > 4:
            future = Future()
            future.set_exception(error("the server has burnt down"))
        return future

    seen = []
    RewardClient.submit = submit


BREAKS = {  # what each rank does before, and what is said
    "a rank that samples is killed": (kill(2), "rank 2 was killed or hangs; rank 0 waited for it in phase rollout"),
    "the first rank is killed": (kill(0), "rank 0 was killed or hangs; rank 1 waited for it in phase update"),
    "a rank that trains is killed": (kill(1), "one of the ranks 1, 2 was killed or hangs; rank 0 waited for it in"),
    "the scorer fails": (fail_to_score, "RewardError: scores of rank 0: rank 2: the server has burnt down"),
    "sending scores fails": (partial(fail_to_score, error=TypeError), "rank 2, phase rollout: TypeError: the server"),
}


@pytest.mark.parametrize("name", sampled(BREAKS, 1))
def test_a_broken_run_says_what_broke_and_ends_as_one_that_did_not(name, here, bright_url):
    args = change(
        lives.TINY, scorer_url=bright_url, group_size=2, width=32, save_every=1, eval_every=1,
        sharding_rollout_ranks=1,
    )  # fmt: skip
    before, message = BREAKS[name]
    wanted = unclocked(train_on_ranks(train_flowgrpo, change(args, name="peace"), ranks=3))
    life = lives.train(here, args, ranks=3, before=before)
    codes = life.wait()
    assert 0 not in codes
    assert message in life.text(), life.text()
    life = lives.train(here, args, ranks=3)
    assert life.wait() == [0] * 3, life.text()
    lines = unclocked(load_metrics("runs/run/metrics.jsonl"))
    assert lines == wanted
    assert {k: v.tolist() for k, v in exported().items()} == {k: v.tolist() for k, v in exported("peace").items()}


@pytest.mark.slow
def test_a_rank_that_hangs_as_it_samples_ends_the_others(here, bright_url):
    args = change(lives.TINY, scorer_url=bright_url, eval_first=False, sharding_rollout_ranks=1, hang_timeout_s=10.0)

    def before(rank):
        if rank == 2:
            train_flowgrpo.roll_out = lambda run, step: os.kill(os.getpid(), signal.SIGSTOP)

    life, since = lives.train(here, args, ranks=3, before=before), time.monotonic()
    while not (life.has_ended(0) and life.has_ended(1)) and time.monotonic() < since + 60:
        time.sleep(0.05)
    life.kill()
    assert life.codes == {0: 1, 1: 1, 2: -signal.SIGKILL}
    assert "rank 2 was killed or hangs; rank 0 waited for it in phase rollout" in life.text(), life.text()


@pytest.mark.parametrize("name", ["", "another card"])
def test_cards_that_round_in_another_way_train_on_where_they_are_of_another_kind(name, here, bright_url):
    args = change(
        lives.TINY, scorer_url=bright_url, width=32, train_steps=1, eval_first=False, sharding_rollout_ranks=1
    )  # fmt: skip

    def before(rank):
        plain = QwenImage.predict_velocity
        if rank == 2:
            QwenImage.predict_velocity = lambda *inputs: plain(*inputs) * (1 + 1e-6)
            start.device_name = lambda device: name

    life = lives.train(here, args, ranks=3, before=before)
    codes = life.wait()
    assert codes == [0 if name else 1] * 3, life.text()
    if name:
        line = load_metrics("runs/run/metrics.jsonl")[1]
        assert 0 < line["policy/first_ratio_max_dev"] < 1e-4
    else:
        assert "the ratio must be 1 within 0" in life.text()


REFUSED = {
    "--sharding.rollout-ranks must be < the 4 ranks, got 4": {"sharding_rollout_ranks": 4},
    "--sharding.rollout-ranks 2 does not go with --sharding.context-parallel 2": {"sharding_context_parallel": 2},
    "--sharding.rollout-ranks 2 does not go with --sharding.size 2": {"sharding_size": 2},
    "--sharding.rollout-ranks 2 does not go with --engine vllm-omni": {"engine": "vllm-omni"},
    "--sharding.rollout-ranks 2 does not go with --scorer.sleep True": {"scorer_sleep": True},
    "--sharding.rollout-ranks 2 does not go with --memory.device-gb 80.0": {"memory_device_gb": 80.0},
    "all ranks that sample must sample whole groups and batches, 6 samples or a multiple: --prompts-per-step and --g": {
        "sharding_rollout_ranks": 3, "prompts_per_step": 5,
    },
    "--prompts-per-step must be a multiple of the 3 ranks that train with --same-start-noise, got 4": {
        "same_start_noise": True, "batch_size": 1, "prompts_per_step": 4, "sharding_rollout_ranks": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_with_it_is_refused_by_name(message, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    own = {"scorer_url": "http://nowhere", "sharding_rollout_ranks": 2} | REFUSED[message]
    args = tiny(recipe(train_flowgrpo, "tiny-signs"), **(SIZES | WINDOW | own))
    with pytest.raises(ValueError, match=re.escape(message)):
        train_flowgrpo.check_args(args)


def test_offline_pairs_and_thoughts_are_refused_by_name(here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    Image.new("RGB", (64, 32)).save("a.png")
    Path("p.jsonl").write_text('{"prompt": "A", "win": "a.png", "lose": "a.png"}\n' * 4)
    args = tiny(recipe(train_dpo, "tiny-signs"), **(SIZES | {"preferences": "p.jsonl", "sharding_rollout_ranks": 2}))
    with pytest.raises(ValueError, match=re.escape("does not go with --preferences p.jsonl")):
        train_dpo.check_args(args)
