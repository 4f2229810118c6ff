"""The page that wires the five packages by hand ends with the bits of train_flowgrpo.py, on ranks, and after a kill.

A variant is a copy of it.
"""

import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import REPO, in_turn, sampled
from model_rows import ROWS
from omni_reward import Score
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from omni_train.files import load_metrics
from torch.multiprocessing import ProcessRaisedException
from trainer_runs import PROMPTS, exported, run_script, shallow, start_script, train, train_on_ranks

import train_flowgrpo as app

PAGE = REPO / "apps" / "flowgrpo_by_hand.py"
GARDO = REPO / "apps" / "variants" / "gardo.py"
SCOUTING = REPO / "apps" / "variants" / "scouting.py"
FULL = {"lr": 1e-4}
LORA = {"lora_rank": 4, "lora_alpha": 8, "num_minibatches": 2, "dtype": "bfloat16", "lr": 1e-3}
STEPS, SAVE_EVERY = 3, 2


@pytest.fixture
def url(tmp_path, monkeypatch, bright_url):
    """The URL of a scorer, in a working folder with an evaluation's prompts."""
    monkeypatch.chdir(tmp_path)
    Path("eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in ("AB", "CD", "EF", "GH")))
    return bright_url


def flags(url, own):
    """The page's command line."""
    small = {"model": shallow(), "prompts": PROMPTS / "train.txt", "eval_prompts": "eval.txt", "scorer_url": url}
    small |= {"prompts_per_step": 2, "group_size": 4, "batch_size": 2, "num_inference_steps": 4, "window_high": 3}
    small |= {"train_steps": STEPS, "save_every": SAVE_EVERY, "eval_every": STEPS} | own
    return [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def settings(url, own):
    """The same for train_flowgrpo.py."""
    named = {"shard": "sharding_mode"}
    own = {named.get(name, name): value for name, value in own.items()}
    return change(
        app.Args(), name="trainer", model=str(shallow()), prompts=str(PROMPTS / "train.txt"), eval_prompts="eval.txt",
        scorer_url=url, prompts_per_step=2, group_size=4, batch_size=2, height=32, width=96, num_inference_steps=4,
        noise_level=0.4, window_size=2, window_low=1, window_high=3, clip_range=1e-3, optim_weight_decay=0.0,
        train_steps=STEPS, save_every=SAVE_EVERY, eval_every=STEPS, eval_num_inference_steps=4, **own,
    )  # fmt: skip


def assert_same(lines):
    """The page's run has the trainer's weights, and its rewards."""
    page, trainer = exported("by-hand"), exported("trainer")
    assert page.keys() == trainer.keys()
    assert all(torch.equal(page[name], trainer[name]) for name in page)
    own = load_metrics(Path("runs/by-hand/metrics.jsonl"))
    for name in ("step", "reward/mean", "eval/reward"):
        assert [line.get(name) for line in own] == [line.get(name) for line in lines], name
    assert own[-1]["policy/grad_norm"] > 0


CASES = {
    "alone": (1, FULL),
    "all weights on two": (2, FULL | {"shard": "fsdp2"}),
    "LoRA on two": (2, LORA | {"shard": "fsdp2"}),
}


@in_turn(0, 2)
@pytest.mark.parametrize("case", sampled(CASES, 1))
def test_the_page_ends_with_the_bits_of_the_trainer(case, url):
    ranks, own = CASES[case]
    run_script(PAGE, flags(url, own), ranks=ranks)
    args = settings(url, own)
    assert_same(train(app, args) if ranks == 1 else train_on_ranks(app, args))


@in_turn(1, 2)
def test_a_page_that_was_killed_continues_to_the_same_bits(url):
    own = LORA | {"shard": "ddp"}
    context = start_script(PAGE, flags(url, own | {"train_steps": 1000}), ranks=2)
    while not Path("runs/by-hand/checkpoints/step-00000002").is_dir():
        assert all(process.is_alive() for process in context.processes)
        time.sleep(0.02)
    for process in context.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    lines = load_metrics(Path("runs/by-hand/metrics.jsonl"))
    assert len(lines) < 1000
    run_script(PAGE, flags(url, own), ranks=2)
    assert_same(train_on_ranks(app, settings(url, own)))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        *(
            ({name: 0}, f"--{name.replace('_', '-')} must be >= 1, got 0")
            for name in ("train_steps", "window_size", "width")
        ),
        ({"lora_rank": -1}, "--lora-rank must be >= 0, got -1"),
        ({"name": "../../x"}, "--name must name a folder below runs/, got '../../x'"),
        ({"name": "/tmp/x"}, "--name must name a folder below runs/, got '/tmp/x'"),
        ({"name": ""}, "--name must name a folder below runs/, got ''"),
        ({"model": "wan21"}, "--model must make images, "),
        ({"model": "flux-kontext"}, "must have 1 images, got 0"),
    ],
)
def test_what_the_page_cannot_do_is_refused_before_anything_is_sampled(own, said, url, monkeypatch, capsys):
    own = own | ({"model": ROWS[own["model"]].checkpoint()} if "model" in own else {})
    monkeypatch.setattr(sys, "argv", [str(PAGE), *flags(url, own)])
    with pytest.raises((SystemExit, ValueError), match=re.escape(said)):
        runpy.run_path(str(PAGE), run_name="__main__")
    assert not Path("runs").exists()


def test_the_page_is_short():
    assert len(PAGE.read_text("utf-8").splitlines()) <= 250


def darkest(media, prompts, meta):
    """A score that rises with the level of one corner, whose part is the mean level of the image."""
    return [Score(float(i[0, 0].mean()), parts={"mean": float(i.mean())}) for i in media["image"]]


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_the_gate_of_gardo_adds_a_kl_of_the_samples_that_the_score_overrates(ranks, url):
    own = {"lora_rank": 4, "lr": 1e-2, "prompts_per_step": 4, "num_inference_steps": 3, "window_size": 1}
    own |= {"window_high": 2}
    with serving_in_thread(darkest, name="corner") as url:
        run_script(PAGE, flags(url, own | {"name": "page"}), ranks=ranks)
        for name, kl_coef in {"neutral": 0.0, "gated": 0.5}.items():
            gate = {"gate_parts": "mean", "gate_share": 0.25, "kl_coef": kl_coef, "name": name}
            run_script(GARDO, flags(url, own | gate), ranks=ranks)
        with pytest.raises(ProcessRaisedException, match=r"--gate-parts must name .*, got other; this scorer has mean"):
            run_script(GARDO, flags(url, own | {"gate_parts": "other", "name": "unknown"}))
    assert len(load_metrics(Path("runs/unknown/metrics.jsonl"))) == 0  # before any evaluation ended
    page, neutral, gated = (exported(name) for name in ("page", "neutral", "gated"))
    assert all(torch.equal(page[name], neutral[name]) for name in page)
    assert not all(torch.equal(page[name], gated[name]) for name in page)
    gated, neutral = (load_metrics(Path("runs") / name / "metrics.jsonl")[1:] for name in ("gated", "neutral"))
    assert all(0 < line["reward/overrated_ratio"] <= 0.25 for line in gated)
    assert gated[0]["policy/kl"] == 0.0  # the policy is the reference still
    assert 0 < gated[2]["policy/kl"] < neutral[2]["policy/kl"]  # which it is held to


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_scouts_choose_the_seeds_that_are_sampled_in_full(ranks, url, tmp_path):
    seen = []

    def graded(media, prompts, meta):
        seen.extend(float(image.mean()) for image in media["image"])
        return [Score(float(image.mean())) for image in media["image"]]

    own = {"lr": 1e-2, "num_inference_steps": 3, "window_size": 1, "window_high": 2}
    scouting = own | {"num_scouts": 8, "scout_steps": 2}
    with serving_in_thread(graded, name="mean") as url:
        run_script(PAGE, flags(url, own | {"name": "page"}), ranks=ranks)
        run_script(SCOUTING, flags(url, scouting | {"num_scouts": 4, "name": "all"}), ranks=ranks)  # each is chosen
        seen.clear()
        run_script(SCOUTING, flags(url, scouting | {"name": "chosen", "train_steps": 1}), ranks=1)
        _, *scores = seen  # the first one is of the connection's check
        run_script(SCOUTING, flags(url, scouting | {"name": "whole"}), ranks=ranks)
        run_script(SCOUTING, flags(url, scouting | {"name": "resumed", "train_steps": 2}), ranks=ranks)
        run_script(SCOUTING, flags(url, scouting | {"name": "resumed"}), ranks=ranks)
    page, everyone, whole, resumed = (exported(name) for name in ("page", "all", "whole", "resumed"))
    assert all(torch.equal(page[name], everyone[name]) for name in page)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not all(torch.equal(page[name], whole[name]) for name in page)
    assert len(scores) == 4 + 2 * 8 + 2 * 4 + 4  # of the first evaluation, scouts, samples, and the last evaluation
    (line,) = load_metrics(Path("runs/chosen/metrics.jsonl"))[1:]
    assert line["reward/scouts_mean"] == pytest.approx(sum(scores[4:20]) / 16)
    assert line["reward/mean"] == pytest.approx(sum(scores[20:28]) / 8)


def test_the_best_and_the_worst_scouts_are_chosen(url, monkeypatch):
    """Scores of scouts are given: the samples have the seeds of those that they rank first and last."""
    asked = []

    def graded(media, prompts, meta):
        asked.append([float(image.mean()) for image in media["image"]])
        return [Score(float(sum(map(len, asked[:-1])) + i)) for i in range(len(prompts))]

    own = {"num_inference_steps": 2, "window_size": 1, "window_high": 1, "window_low": 0, "train_steps": 1}
    own |= {"num_scouts": 8, "scout_steps": 2, "noise_level": 1e-6, "prompts_per_step": 1, "batch_size": 4}
    with serving_in_thread(graded, name="later is better") as url:
        run_script(SCOUTING, flags(url, own))
    levels = [level for batch in asked[1:] for level in batch]  # the first one is of the connection's check
    scouts, samples = levels[4:12], levels[12:16]
    assert samples == pytest.approx([*scouts[:2], *scouts[-2:]], abs=1.0)  # of 255, as their noise is too small to see
    assert samples != pytest.approx(scouts[2:6], abs=1.0)
