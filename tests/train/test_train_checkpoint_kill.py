"""SIGKILL at any moment costs at most the step that was under way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import load_newest
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.shard import shard
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

SCRIPT = Path(__file__).with_name("crash_training.py")


def metrics(folder):
    """Every line as it stands in the file, without what a clock has measured."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def test_twenty_kills_change_neither_the_weights_nor_the_metrics(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path, "0"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    lives = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lives) == 20
    newest = [life["newest"] for life in lives]
    assert newest == sorted(newest)  # nothing that was complete is ever lost
    inside = [life["event"] for life in lives if "step-" in life["event"] or "rank-" in life["event"]]
    assert len(inside) >= 5, lives  # every fourth life counts its way into a save, however busy the machine is
    peace, killed = tmp_path / "peace", tmp_path / "killed"
    assert [line["step"] for line in metrics(killed)] == list(range(151))
    assert metrics(killed) == metrics(peace)
    assert (killed / "final.safetensors").read_bytes() == (peace / "final.safetensors").read_bytes()
    assert sorted(os.listdir(killed / "checkpoints")) == ["step-00000149", "step-00000150"]


@pytest.mark.parametrize(
    ("victim", "call"),
    [
        (0, "omni_train.checkpoint.parts.write_file"),
        (1, "omni_train.checkpoint.parts.write_file"),
        (0, "os.rename"),
        (1, "os.fsync"),
    ],
)
def test_a_rank_that_is_killed_inside_a_save_leaves_what_was_complete(run_ranks, tmp_path, monkeypatch, victim, call):
    def net(dist, value):
        module = nn.Linear(4, 4)
        nn.init.constant_(module.weight, value)
        return shard(module, dist.mesh, mode="fsdp2")

    def work(dist):
        checkpoints = Checkpoint(tmp_path, dist)
        checkpoints.save(1, net(dist, 1.0), config={})
        if dist.rank == victim:
            monkeypatch.setattr(call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        checkpoints.save(2, net(dist, 2.0), config={})

    with pytest.raises((ProcessExitedException, ProcessRaisedException)):  # the one killed, or the one left alone
        run_ranks(work)
    module = nn.Linear(4, 4)
    assert load_newest(Checkpoint(tmp_path, init_distributed()), module).step == 1
    assert module.weight.eq(1.0).all()
