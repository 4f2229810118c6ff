"""A run before its first step: one writer, the first line, threads, the canary, early mistakes, warm starts."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from apps import app_lives as lives
from helpers import REPO, sampled
from omni_reward import RewardClient, RewardConnectError
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from omni_train.files import load_metrics
from trainer_runs import shallow, train, train_on_ranks


def settings(url, **changes):
    return change(lives.TINY, group_size=2, width=32, **({"train_steps": 1, "scorer_url": url} | changes))


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_a_second_trainer_in_a_run_folder_is_refused_with_the_pids_of_the_first(here, bright_url, ranks):
    args, update = settings(bright_url, train_steps=2), lives.app.update

    def wait_in_update(rank):
        def wait(run, step, *others):
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.01)
            return update(run, step, *others)

        lives.app.update = wait

    first = lives.train(here, args, ranks=ranks, before=wait_in_update)
    while not Path("waits").exists():
        assert not first.has_ended(0), first.text()
        time.sleep(0.002)
    (here / "tiny.toml").write_text(to_toml(args))
    (here / "second").mkdir()
    holders = ", ".join(f"pid {pid} on {re.escape(socket.gethostname())}" for pid in first.pids)
    try:
        message = rf"runs/run is in use by {holders}: end that run, or give this one another --name$"
        lives.assert_refused(here / "second", [], message)
    finally:
        Path("go").touch()
    assert first.wait() == [0] * ranks, first.text()
    assert [line["step"] for line in load_metrics("runs/run/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_a_run_starts_the_scorer_that_it_names_and_ends_it(here, ranks):
    (here / "mine.py").write_text("def level(media, prompts, meta):\n    return [1.0] * len(prompts)\n")
    args = settings("", scorer_name="python:mine.py:level")
    life = lives.train(here, args, ranks=ranks)
    assert life.wait() == [0] * ranks, life.text()
    assert load_metrics("runs/run/metrics.jsonl")[-1]["reward/mean"] == 1.0
    assert life.text().count("scorer ready at http://127.0.0.1:") == 1
    url = re.search(r"scorer ready at (\S+)", life.text())[1]
    with RewardClient(url) as client, pytest.raises(RewardConnectError):
        client.info()


FAILS = {  # what a function returns after the canary -> what the run ends with
    "math.nan": "RuntimeError: the scorer gave no score for any of 4 samples: the scorer returned nan",
    "os._exit(3)": "RewardError: scores of rank 0: POST http.* attempts\\)",
}


@pytest.mark.parametrize("value", FAILS)
def test_a_failing_scorer_of_the_run_s_own_is_told_in_lines_that_name_the_scorer_and_no_log(here, value):
    source = "import math, os\ncalls = []\n\ndef late(media, prompts, meta):\n    calls.append(1)\n"
    (here / "mine.py").write_text(f"{source}    return [{value} if len(calls) > 1 else 1.0] * len(prompts)\n")
    args = settings("", scorer_name="python:mine.py:late", scorer_timeout_s=2.0, eval_first=False)
    life = lives.train(here, args)
    assert life.wait() == [1], life.text()
    said = f"rank 0, phase reward.*: {FAILS[value]}\nThe run started this scorer: fix python:mine.py:late, as "
    assert re.search(said, life.text()), life.text()
    assert "Traceback" not in life.text()


def test_a_scorer_that_does_not_start_is_refused_before_weights_are_loaded(here):
    (here / "mine.py").write_text("raise OSError('no file of words')\ndef level(media, prompts, meta): ...\n")
    life = lives.train(here, settings("", scorer_name="python:mine.py:level"))
    assert life.wait() == [2], life.text()
    assert "no file of words" in life.text()
    assert "--scorer: 'python:mine.py:level' ended with exit code" in life.text()
    assert "loading" not in life.text()


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_the_first_line_says_where_the_run_is_and_where_it_begins(here, bright_url, ranks):
    spread = "1 rank on cpu, weights none" if ranks == 1 else "2 ranks on cpu, weights fsdp2"
    for steps, start in ((1, "begins"), (2, "continues after step 1")):
        life = lives.train(here, settings(bright_url, train_steps=steps), ranks=ranks, reports=True)
        assert life.wait() == [0] * ranks, life.text()
        first = life.text().splitlines()[0]
        assert first.startswith(f"runs/run {start}: {spread}; report in runs/run/report.html; loading ")
        assert Path("runs/run/report.html").is_file()


@pytest.mark.parametrize(("asked", "threads"), [(None, 1), pytest.param("2", 2, marks=pytest.mark.slow)])
def test_a_rank_on_a_cpu_computes_with_one_thread_unless_told_otherwise(here, bright_url, asked, threads):
    """In a process of its own: a forked one of a parent with threads of OpenMP may not start others."""
    (here / "tiny.toml").write_text(to_toml(settings(bright_url, train_steps=0)))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": asked} if asked else {}  # torch's own choice is the number of cores
    command = [sys.executable, str(REPO / "apps" / "train_flowgrpo.py"), "--config", "tiny.toml"]
    subprocess.run(command, cwd=here, env=env, check=True, capture_output=True)
    assert json.loads(Path("runs/run/versions.jsonl").read_text())["threads"] == threads


def test_a_scorer_may_read_the_meta_of_its_prompts(here):
    """Also at the start: what it is tried with is the first evaluation prompt and an image of the run's size."""
    seen = []

    def score(media, prompts, meta):
        seen.append((media["image"].shape, prompts, [m["target"] for m in meta]))
        return [float(image.mean()) for image in media["image"]]

    for name in ("train", "eval"):
        lines = [json.dumps({"prompt": f"{name} {word}", "target": word}) for word in ("AB", "CD", "EF")]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
    with serving_in_thread(score) as url:
        train(lives.app, settings(url, prompts="train.jsonl", eval_prompts="eval.jsonl"))
    assert seen[0] == ((2, 32, 32, 3), ["eval AB"] * 2, ["AB"] * 2)
    assert all(prompt.split()[1] == target for _, *rows in seen for prompt, target in zip(*rows, strict=True))
    assert len(seen) > 2


def test_the_first_line_is_printed_before_torch_is_imported_and_by_the_first_rank(here, bright_url):
    """A `torch` that ends the program stands in for the real one."""
    (here / "torch.py").write_text("raise SystemExit(7)")
    (here / "tiny.toml").write_text(to_toml(settings(bright_url, sharding_mode="ddp")))
    command = [sys.executable, str(REPO / "apps" / "train_flowgrpo.py"), "--config", "tiny.toml"]
    said = []
    for rank in "01":
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "PYTHONPATH": str(here)}
        result = subprocess.run(command, env=os.environ | ranks, capture_output=True, text=True)
        assert result.returncode == 7, result.stderr
        said.append(result.stdout)
    assert said == [f"train_flowgrpo.py: the settings are checked; loading torch, then {shallow()}\n", ""]


LORA = {"lora_rank": 2, "lora_alpha": 4, "lr": 1e-2}
WARM = {  # the first run, the run that starts from its weights, its ranks
    "an adapter": (LORA, LORA, 1),
    "full weights": ({}, {}, 1),
    "an adapter upon full weights": ({}, LORA, 1),
    "an average": ({"ema_decay": 0.5}, {"ema_decay": 0.5}, 1),
    "an adapter, on two ranks": (LORA, LORA, 2),
    "full weights, on two ranks": ({}, {}, 2),
}


@pytest.mark.parametrize("kind", sampled(WARM, 2, always=("an adapter upon full weights",)))
def test_a_warm_start_draws_first_what_the_other_run_drew_last(here, bright_url, kind):
    first, second, ranks = WARM[kind]
    before = train(lives.app, settings(bright_url, name="first", **first))
    args = settings(bright_url, name="second", init_weights="runs/first/weights", train_steps=1, **second)
    after = train(lives.app, args) if ranks == 1 else train_on_ranks(lives.app, args, ranks=ranks)
    assert before[0]["eval/reward"] != before[-1]["eval/reward"]
    assert after[0]["eval/reward"] == before[-1]["eval/reward"]
    assert after[-1]["eval/reward"] != after[0]["eval/reward"]


def test_an_adapter_is_no_start_for_full_weights_nor_for_another_rank(here, bright_url):
    train(lives.app, settings(bright_url, name="first", **LORA))
    (here / "tiny.toml").write_text(to_toml(settings(bright_url, init_weights="runs/first/weights")))
    (here / "second").mkdir()
    lives.assert_refused(here / "second", [], "--init-weights: .* holds a LoRA adapter, which needs --lora.rank > 0")
    message = r"--init-weights: .*safetensors must be an adapter of the same rank, .* is \(2, \d+\), not \(4, \d+\)$"
    lives.assert_refused(here / "second", ["--lora.rank", "4"], message)
    lives.assert_refused(
        here / "second",
        ["--lora.rank", "2", "--lora.targets", "to_q"],
        "--init-weights: .*safetensors must be an adapter on the same layers, differs in .*",
    )
