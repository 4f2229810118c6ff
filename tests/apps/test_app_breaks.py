"""What breaks while a run goes on: every rank ends, one message says what and where, and the same command continues."""

import math
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import omni_rl.run.engines
import omni_rl.run.media
import omni_rl.run.run
import omni_train.prepare
import pytest
import torch
from apps import app_lives as lives
from forked_torchrun import torchrun
from helpers import sampled
from omni_losses import LossOutput
from omni_rl.run.engines import EngineRow
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from omni_train.files import load_metrics
from trainer_runs import write_eval_prompts

import train_flowgrpo as app

STEPS, BROKEN = 3, 2  # training steps of the run, and the one that breaks, counted from 1
SCRIPT = Path(__file__).with_name("breaking_trainer.py")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the evaluation's prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path


def settings(url, **changes):
    return change(lives.TINY, train_steps=STEPS, group_size=2, width=32, scorer_url=url, **changes)


def in_update(victim, act):
    """Before a life: rank `victim` does `act` in place of the update that breaks."""

    update = app.update

    def broken(run, step, *others):
        if step.number == BROKEN - 1:
            act()
        return update(run, step, *others)

    def before(rank):
        if rank == victim:
            app.update = broken

    return before


def run_out_of_memory():
    raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")


def kill():
    """Kill this rank once the checkpoint of the step before, which is saved meanwhile, is complete."""
    while not Path(f"runs/run/checkpoints/step-{BROKEN - 1:08}").exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_loss(rank):
    """Before a life: rank 1 has a loss that is no number."""
    nan = torch.tensor(math.nan, requires_grad=True)
    if rank == 1:
        app.grpo_loss = lambda log_prob, *others, **options: LossOutput(nan * log_prob.sum(), {})
    else:
        grpo_loss = app.grpo_loss
        app.grpo_loss = lambda *others, **options: LossOutput(grpo_loss(*others, **options).loss, {})


def fill_the_disk(rank, step=BROKEN):
    """Before a life: rank 1 cannot write its part of the checkpoint after that step."""
    import omni_train.checkpoint.parts

    write_file = omni_train.checkpoint.parts.write_file

    def write(path, *data):
        if rank == 1 and path.parent.name == f"step-{step:08}.tmp":
            raise OSError(28, "No space left on device")
        return write_file(path, *data)

    omni_train.checkpoint.parts.write_file = write


def fail_to_load(rank):
    """Before a life: rank 1 has no memory for the model's other parts."""
    if rank == 1:
        omni_rl.run.engines.ENGINES["diffusers"] = EngineRow(lambda *args: run_out_of_memory())


def fail_to_fill(rank):
    """Before a life: rank 1 has no memory for its weights, as torch tells of an accelerator."""

    def fill(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    if rank == 1:
        omni_train.prepare.load_sharded = fill


BREAKS = {  # what each rank does before, exit codes, what is said and advised, the newest checkpoint afterwards
    "out of memory": (
        in_update(1, run_out_of_memory), [1, 1],
        "rank 1, phase update: OutOfMemoryError: tried to allocate 20.00 GiB\nOut of memory: turn on --memory", 1
    ),
    "a loss that is no number": (
        lose_the_loss, [1, 1],
        "rank 0, 1, phase update: FloatingPointError: loss must be finite, but is nan on rank 1\nIn a run of anoth", 0
    ),
    "a killed rank": (
        in_update(1, kill), [1, -9],
        "rank 1 was killed or hangs; rank 0 waited for it in phase update\nIf the machine killed it for its memory", 1
    ),
    "a killed first rank": (
        in_update(0, kill), [-9, 1],
        "rank 0 was killed or hangs; rank 1 waited for it in phase update\nIf the machine killed it for its memory", 1
    ),
    "a full disk": (
        fill_the_disk, [1, 1],
        "rank 0, 1, phase save: OSError: rank 1: [Errno 28] No space left on device\nThe machine refused: check", 1
    ),
    "a disk that is full from the start": (
        partial(fill_the_disk, step=0), [1, 1],
        "rank 0, 1, phase save: OSError: rank 1: [Errno 28] No space left on device\nThe machine refused: check", -1
    ),
    "no memory for the model": (
        fail_to_load, [1, 1],
        "rank 1, phase start: OutOfMemoryError: tried to allocate 20.00 GiB\nOut of memory: turn on --memory", -1
    ),
    "no memory for the weights": (
        fail_to_fill, [1, 1],
        "rank 0, 1, phase start: RuntimeError: rank 1: CUDA out of memory. Tried to allocate 20.00 GiB\nOut of ",
        -1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(BREAKS, 1))
def test_what_breaks_is_told_once_and_the_same_command_continues(folder, bright_url, name):
    before, codes, message, newest = BREAKS[name]
    args = settings(bright_url, tracking_notify="tee -a told.txt")
    life = lives.train(folder, args, ranks=2, before=before)
    assert life.wait(60) == codes, life.text()
    text = life.text()
    assert f": {message}" in text
    assert text.count("this continues from the newest:\ntorchrun --nproc-per-node 2 ") == 1
    assert text.count("Traceback (most recent call last)") == ("disk" not in name)
    told = (folder / "told.txt").read_text()
    assert told.count(f": {message}") == 1
    assert told.startswith("run: ")
    left = sorted(path.name for path in folder.glob("runs/run/checkpoints/*"))
    assert left == [f"step-{step:08}" for step in range(max(0, newest - 1), newest + 1)]
    life = lives.train(folder, args, ranks=2)
    assert life.wait(60) == [0, 0], life.text()
    assert [line["step"] for line in load_metrics("runs/run/metrics.jsonl")] == list(range(STEPS + 1))


def test_a_dry_run_that_breaks_or_is_interrupted_tells_no_checkpoint_to_continue_from(folder, bright_url):
    for error, code in ((OverflowError("too big"), 1), (KeyboardInterrupt(), 130)):

        def before(rank, error=error):
            def fail(*given):
                raise error

            omni_rl.run.media.open_model = fail

        life = lives.train(folder, settings(bright_url, dry_run=True), before=before)
        assert life.wait() == [code], life.text()
        assert ("phase start: OverflowError: too big" in life.text()) == (code == 1)
        assert "continues" not in life.text()


@pytest.mark.timeout(200)
def test_under_torchrun_a_rank_that_hangs_ends_the_run_and_nothing_is_left_of_it(folder, bright_url):
    (folder / "tiny.toml").write_text(to_toml(settings(bright_url, hang_timeout_s=5.0)))
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2"]
    words = [*meet, "--shutdown-timeout", "1", str(SCRIPT), "--config", "tiny.toml"]
    run = torchrun(words, folder, folder / "said.txt")
    assert run.wait() == 1
    text = run.output.read_text()
    said = r"^breaking_trainer.py: rank 1 was killed or hangs; rank 0 waited for it in phase update$"
    assert len(re.findall(said, text, re.MULTILINE)) == 1, text
    assert "raise --hang-timeout-s" in text
    assert (folder / "runs/run/checkpoints/step-00000001").is_dir()
    for rank in range(2):
        pid = int((folder / f"pid-{rank}").read_text())
        assert not Path(f"/proc/{pid}").exists()
