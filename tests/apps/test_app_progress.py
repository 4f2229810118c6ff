"""What a run shows between its steps: every phase with what is done of what, from the first second on."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import build_tiny_models
import pytest
from helpers import CHECKPOINT, REPO, in_turn
from omni_rl.report import data
from omni_rl.run import start
from omni_rl.run.run import Run
from omni_rl.settings.fields import change
from omni_train import display, progress
from omni_train.files import load_metrics
from trainer_runs import PROMPTS, recipe, shallow, tiny, train, train_on_ranks

import train_flowgrpo
import train_gspo
import train_sft

TINY = tiny(
    recipe(train_flowgrpo, "tiny-signs"), prompts_per_step=3, group_size=2, batch_size=2, num_minibatches=1,
    num_inner_epochs=2, train_steps=1, eval_every=1, num_inference_steps=2, window_size=1, window_low=0,
    window_high=None, lora_rank=4, algo="flowgrpo", noise_level=0.7, optim_lr_scheduler_type="constant", width=32,
)  # fmt: skip
SFT = tiny(recipe(train_sft, "tiny-signs"), prompts="samples.jsonl", prompts_per_step=2, group_size=2, batch_size=2)
TEXT = change(
    train_gspo.Args(), prompts="train.jsonl", eval_prompts="train.jsonl", eval_every=1, prompts_per_step=2,
    group_size=4, batch_size=4,
    max_new_tokens=3, train_steps=1, lr=1e-3, reward="regex", num_minibatches=1,
)  # fmt: skip


@pytest.fixture
def said(monkeypatch):
    """What the process says whenever some work is done, without times."""
    texts = []

    class Recorded(progress.Work):
        @property
        def done(self):
            return self._done

        @done.setter
        def done(self, value):
            self._done = value
            texts.append(re.sub(r", (forward|for|[\d:]+ left).*", "", progress.describe()))

    monkeypatch.setattr(progress, "Work", Recorded)
    return texts


def test_every_phase_of_a_run_counts_its_work(here, bright_url, said):
    train(train_flowgrpo, change(TINY, scorer_url=bright_url))
    size = f"{sum(file.stat().st_size for file in shallow().rglob('*.safetensors')) / 1e6:.1f}"
    wanted = {
        "reading the model and the prompts", "opening the scorer", f"loading {size} of {size} MB",
        "evaluating: encoding 2 of 3 prompts", "evaluating 2 of 4 samples", "evaluating: scores 4 of 4 samples",
        "step 1: rollout: encoding 2 of 3 prompts", "step 1: rollout 4 of 6 samples", "step 1: update 5 of 6 batches",
    }  # fmt: skip
    assert wanted - {*said} == set()
    assert any(re.fullmatch(r"step 1(: update)?: scores 6 of 6 samples", text) for text in said)


def test_full_weights_are_counted_as_they_are_read(here, bright_url, said):
    train(train_flowgrpo, change(TINY, scorer_url=bright_url, lora_rank=0, train_steps=0))
    done = [float(text.split()[1]) for text in said if re.fullmatch(r"loading [\d.]+ of [\d.]+ MB", text)]
    assert done == sorted(done)
    assert len({*done}) > 10


def test_a_text_run_counts_its_work(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}", "pattern": "[a-z]"}) + "\n" for i in "ab"))
    model = str(build_tiny_models.tiny_checkpoint("qwen3", REPO / ".pytest_cache" / "tiny-models"))
    train(train_gspo, change(TEXT, model=model))
    assert {"step 1: rollout 4 of 8 samples", "step 1: scores 8 of 8 samples", "loading 0.2 of 0.2 MB"} <= {*said}
    assert any(re.fullmatch(r"step 1: update 1 of \d batches", text) for text in said)
    assert "evaluating 2 of 2 samples" in said


def test_reading_samples_is_counted(here, said):
    from PIL import Image

    Image.new("RGB", (96, 32)).save("image.png")
    line = {"prompt": 'a blue sign that says "A"', "sample": "image.png"}
    Path("samples.jsonl").write_text((json.dumps(line) + "\n") * 2)
    train(train_sft, change(SFT, train_steps=1))
    assert "step 1: reading 2 of 4 samples" in said


def test_the_report_is_there_before_anything_is_loaded(here, bright_url, monkeypatch):
    seen = []
    load_net = start.load_net

    def looked(*args):
        seen.append((Path("runs/run/report.html").read_text(), data.run_data(Path("runs/run"))["now"]["text"]))
        return load_net(*args)

    monkeypatch.setattr(start, "load_net", looked)
    train(train_flowgrpo, change(TINY, scorer_url=bright_url, name="run"), report=True)
    ((page, text),) = seen
    assert re.fullmatch(r"loading 0 of [\d.]+ MB, for 0:00", text)
    assert text in page
    assert data.run_data(Path("runs/run"))["now"] is None  # it has ended


def test_the_report_says_what_the_run_does(here, bright_url, monkeypatch):
    """A display that looks often tells the report's process, which writes it."""
    monkeypatch.setattr(display._Lines, "pause_s", 0.01)
    seen = set()
    optimizer_step = Run.optimizer_step

    def waited(run, step, **how):
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
            seen.update(re.findall("step 1: update .*", data.read_now(Path("runs/run"))["text"]))
        return optimizer_step(run, step, **how)

    monkeypatch.setattr(Run, "optimizer_step", waited)
    train(train_flowgrpo, change(TINY, scorer_url=bright_url, name="run"), report=True)
    assert seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_terminal_the_first_rank_prints_lines_and_no_other(here, bright_url, monkeypatch, capfd, ranks):
    monkeypatch.setattr(display, "LINE_S", 0.0)
    monkeypatch.setattr(display._Lines, "pause_s", 0.001)
    args = change(TINY, scorer_url=bright_url, prompts_per_step=4)
    (train_on_ranks if ranks > 1 else train)(train_flowgrpo, args, **({"ranks": 2} if ranks > 1 else {}))
    lines = capfd.readouterr().out.splitlines()
    texts = [line for line in lines if re.match("(step 1: rollout|evaluating|step 1: update) ", line)]
    assert texts
    per_rank = 8 // ranks
    assert {
        text.split(" of ")[1].split()[0] for text in texts if text.startswith("step 1: rollout ") and " of " in text
    } <= {str(per_rank)}
    assert sum(line.startswith("step=1/1 ") for line in lines) == 1


def test_a_short_run_prints_what_it_printed_before(here, bright_url, capfd):
    train(train_flowgrpo, change(TINY, scorer_url=bright_url))
    begins, first, last, end = capfd.readouterr().out.splitlines()
    assert "begins: 1 rank" in begins
    assert first.startswith("step=0/1 ")
    assert last.startswith("step=1/1 ")
    assert "held-out score" in end


@in_turn(1, 2)
def test_a_run_goes_on_where_nobody_reads_what_it_prints(here, bright_url):
    flags = ["--preset", "tiny-signs", "--model", str(CHECKPOINT), "--prompts", str(PROMPTS / "train.txt")]
    flags += ["--eval.prompts", "eval.txt", "--scorer.url", bright_url, "--train-steps", "2", "--name", "run"]
    flags += ["--prompts-per-step", "2", "--group-size", "2", "--batch-size", "2", "--num-inference-steps", "3"]
    flags += ["--window-low", "0", "--window-high", "2", "--window-size", "1", "--num-minibatches", "1"]
    run = subprocess.Popen(
        [sys.executable, str(REPO / "apps" / "train_flowgrpo.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    run.stdout.readline()
    run.stdout.close()
    told = run.stderr.read()
    run.stderr.close()
    assert run.wait() == 0, told
    assert [line["step"] for line in load_metrics(Path("runs/run/metrics.jsonl"))] == [0, 1, 2]
    assert told.count("the progress on the terminal failed and is switched off: BrokenPipeError") == 1
