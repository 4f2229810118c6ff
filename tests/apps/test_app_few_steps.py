"""DMD2, TDM and TDM-R1 on pages of their own: exact steps, ranks, resuming, and what each must not move."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import REPO, in_turn, sampled
from omni_reward import Score
from omni_reward.serving import serving_in_thread
from omni_train.files import load_metrics
from trainer_runs import PROMPTS, exported, run_script, shallow, start_script

FOLDER = REPO / "apps" / "variants"
PAGES = {name: FOLDER / f"{name}.py" for name in ("dmd2", "tdm", "tdm_r1")}
STEPS = 3


@pytest.fixture
def url(tmp_path, monkeypatch, bright_url):
    """The URL of a scorer, in a working folder with an evaluation's prompts."""
    monkeypatch.chdir(tmp_path)
    Path("eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in ("AB", "CD", "EF", "GH")))
    return bright_url


def flags(page, url, **own):
    """The command line of a page for a small run."""
    small = {"model": shallow(), "prompts": PROMPTS / "train.txt", "eval_prompts": "eval.txt", "scorer_url": url}
    small |= {"name": page, "prompts_per_step": 4, "batch_size": 2, "num_inference_steps": 2, "fake_updates": 2}
    small |= {"lora_rank": 2, "train_steps": STEPS, "save_every": 2, "eval_every": STEPS, "lr": 1e-3, "fake_lr": 1e-3}
    small |= {"group_size": 2, "prompts_per_step": 2} if page == "tdm_r1" else {}
    return [word for name, value in (small | own).items() for word in (f"--{name.replace('_', '-')}", str(value))]


def lines_of(name):
    """The metrics of a run."""
    return load_metrics(Path("runs") / name / "metrics.jsonl")


def distance(first, second):
    """The largest difference of two runs' weights, and the largest weight."""
    one, other = exported(first), exported(second)
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one), max(float(one[n].abs().max()) for n in one)


@pytest.mark.parametrize("page", sampled(PAGES, 1))
def test_a_page_is_one_file_that_trains_alone(page, url):
    shutil.copy(PAGES[page], "page.py")
    for words in (["--help"], flags(page, url, teacher_true_cfg_scale=3.0, dtype="bfloat16")):
        found = subprocess.run([sys.executable, "-I", "page.py", *words], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
    lines = lines_of(page)
    assert [line["step"] for line in lines] == [*range(STEPS + 1)]
    assert {"eval/reward"} <= lines[0].keys() & lines[-1].keys()
    assert all(line["policy/grad_norm"] > 0 and line["policy/matching_error"] > 0 for line in lines[1:])
    assert all(torch.isfinite(tensor).all() for tensor in exported(page).values())


@pytest.mark.parametrize("page", sampled(PAGES, 1))
def test_a_page_that_was_killed_continues_to_the_same_bits(page, url):
    run_script(PAGES[page], flags(page, url, name="whole"), ranks=2)
    context = start_script(PAGES[page], flags(page, url, name="killed", train_steps=1000), ranks=2)
    while not Path("runs/killed/checkpoints/step-00000002").is_dir():
        assert all(process.is_alive() for process in context.processes)
        time.sleep(0.02)
    for process in context.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert len(lines_of("killed")) < 1000
    run_script(PAGES[page], flags(page, url, name="killed"), ranks=2)
    assert distance("whole", "killed")[0] == 0
    for name in ("step", "policy/matching_error", "eval/reward"):
        assert [line.get(name) for line in lines_of("whole")] == [line.get(name) for line in lines_of("killed")], name


CASES = [
    (page, how) for page in PAGES for how in ("LoRA, ddp", "all weights, ddp", "all weights, fsdp2", "LoRA, fsdp2")
]


@pytest.mark.parametrize("case", sampled(CASES, 2))
def test_ranks_change_a_run_only_by_the_order_of_sums(case, url):
    page, how = case
    kind, shard = how.split(", ")
    own = {"lora_rank": 2 if kind == "LoRA" else 0, "lr": 1e-4, "train_steps": 2}
    run_script(PAGES[page], flags(page, url, name="one", **own))
    run_script(PAGES[page], flags(page, url, name="two", shard=shard, **own), ranks=2)
    one, two = lines_of("one"), lines_of("two")
    assert one[0]["eval/reward"] == two[0]["eval/reward"]
    assert one[1]["policy/grad_norm"] == pytest.approx(two[1]["policy/grad_norm"], rel=1e-3)
    assert one[2]["policy/matching_error"] == pytest.approx(two[2]["policy/matching_error"], rel=1e-2)
    off, largest = distance("one", "two")
    assert off <= 2 * 2 * own["lr"]  # at most the steps themselves, where the sign of a gradient is that of rounding
    assert largest > off


@in_turn(0, 3)
@pytest.mark.parametrize("page", sampled(PAGES, 1))
def test_a_student_that_samples_as_the_teacher_does_stays(page, url):
    """The fake net is not trained, so that it stays the teacher; then the two agree on all samples, to the bit."""
    own = {"reward_weight": 0.0} if page == "tdm_r1" else {}
    run_script(PAGES[page], flags(page, url, fake_lr=0.0, **own))
    assert [line["policy/matching_error"] for line in lines_of(page)[1:]] == [0.0] * STEPS
    assert [line["policy/grad_norm"] for line in lines_of(page)[1:]] == [0.0] * STEPS
    assert not any(tensor.any() for name, tensor in exported(page).items() if "lora_B" in name)


@in_turn(1, 3)
def test_without_the_rewards_weight_the_student_of_tdm_r1_is_that_of_tdm(url):
    run_script(PAGES["tdm"], flags("tdm", url))
    run_script(
        PAGES["tdm_r1"], flags("tdm_r1", url, name="neutral", group_size=1, prompts_per_step=4, reward_weight=0.0)
    )
    assert distance("tdm", "neutral")[0] == 0


def corner(media, prompts, meta):
    """A score that rises with the level of one corner."""
    return [Score(float(image[:16, :48].mean()) / 255) for image in media["image"]]


@in_turn(2, 3)
def test_the_reward_moves_the_student_of_tdm_r1_to_better_samples(url):
    """From the same start, following the learned reward scores higher than fleeing it."""
    own = {"prompts_per_step": 4, "group_size": 4, "batch_size": 4, "train_steps": 8, "eval_every": 8, "lora_rank": 8}
    own |= {"surrogate_lr": 1e-2, "lr": 3e-3, "surrogate_beta": 1.0}
    with serving_in_thread(corner, name="corner") as scored:
        for name, weight in {"follow": 5.0, "without": 0.0}.items():
            run_script(PAGES["tdm_r1"], flags("tdm_r1", scored, name=name, reward_weight=weight, **own))
    follow, without = (lines_of(name)[-1]["eval/reward"] for name in ("follow", "without"))
    assert follow > without + 0.02, (follow, without)
    assert lines_of("follow")[1]["policy/reward_gap"] > 0


@pytest.mark.parametrize(
    ("page", "own", "said"),
    [
        ("dmd2", {"train_steps": 0}, "--train-steps must be >= 1, got 0"),
        ("dmd2", {"min_noise": 0.5, "max_noise": 0.5}, "0 < --min-noise < --max-noise < 1 must hold, got 0.5 and 0.5"),
        ("tdm", {"fake_updates": 0}, "--fake-updates must be >= 1, got 0"),
        ("tdm", {"name": "../x"}, "--name must name a folder below runs/, got '../x'"),
        ("tdm", {"prompts_per_step": 3}, "--prompts-per-step must be a multiple of 2, got 3"),
        ("tdm", {"batch_size": 8, "prompts_per_step": 8}, "lines of --eval-prompts must be a multiple of 8, got 4"),
        ("tdm_r1", {"group_size": 4}, "--batch-size must be a multiple of --group-size 4, got 2"),
        ("tdm_r1", {"prompts_per_step": 3, "group_size": 1}, "samples of a step must be a multiple of 2, got 3"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_sampled(page, own, said, url, monkeypatch):
    monkeypatch.setattr(sys, "argv", [page, *flags(page, url, **own)])
    with pytest.raises((SystemExit, ValueError), match=re.escape(said)):
        runpy.run_path(str(PAGES[page]), run_name="__main__")
    assert not Path("runs").exists()


def test_the_pages_are_short():
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in PAGES.items()}
    assert lengths["dmd2"] <= 300
    assert lengths["tdm"] <= 300
    assert lengths["tdm_r1"] <= 340
