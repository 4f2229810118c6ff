"""A dry run: one process for any number of ranks, and a forward of the net in its data types."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from diffusers import QwenImageTransformer2DModel
from helpers import REPO, in_turn
from omni_rl.run.failures import launch
from omni_rl.run.world import World
from omni_rl.settings.fields import change
from omni_rl.tools import command, plan
from omni_train.dist import init_distributed
from row_runs import settings
from trainer_runs import recipe, tiny, train

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"),
    window_low=0,
    window_high=None,
    dry_run=True,
    lora_rank=4,
    prompts_per_step=32,
    group_size=4,
    batch_size=4,
)


def planned(out):
    """The lines of a plan."""
    return [line for line in out.splitlines() if line.startswith("plan: ")]


def test_the_command_plans_many_ranks_in_its_own_process(monkeypatch, capfd):
    started = []
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("OMNI_RL_COMMAND", "")
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    words = ["--preset", "tiny-signs", "--prompts-per-step", "128", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["omni-rl", "train", "flowgrpo", "--nproc-per-node", "32", *words])
    command.main()
    assert started == [[sys.executable, str(REPO / "apps" / "train_flowgrpo.py"), *words]]
    assert os.environ["WORLD_SIZE"] == "32"
    assert capfd.readouterr().out == ""


def test_a_plan_of_ranks_starts_no_process(here, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("it joins ranks"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it starts a process"))
    app.main(TINY, World.join(TINY))
    lines = planned(capsys.readouterr().out)
    assert "plan: ranks: 32, weights ddp" in lines
    assert "plan: samples per step: 128, 4 per rank, 4 per forward" in lines


def _rank(rank, args, port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= place | {"LOCAL_RANK": str(rank)}
    try:
        app.main(args, World(init_distributed()))
    finally:
        os._exit(0)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 0, "sharding_mode": "fsdp2"}], ids=["ddp", "fsdp2"])
def test_the_plan_is_that_of_the_first_of_real_ranks(here, monkeypatch, capfd, changes):
    args = change(TINY, **changes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_rank, args=(args, port), nprocs=2, start_method="fork")
    real = planned(capfd.readouterr().out)
    monkeypatch.setenv("WORLD_SIZE", "2")
    app.main(args, World.join(args))
    assert planned(capfd.readouterr().out) == real
    assert any(line.startswith("plan: ranks: 2, weights ") for line in real)


def test_other_ranks_of_torchrun_leave_before_torch_is_imported():
    flags = ["--preset", "tiny-signs", "--dry-run"]
    program = f"""
import atexit, runpy, sys
atexit.register(lambda: print(sorted({{"torch", "diffusers"}} & sys.modules.keys())))
sys.argv = [{str(REPO / "apps" / "train_flowgrpo.py")!r}, *{flags}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    env = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    other = subprocess.run([sys.executable, "-c", program], env=env, cwd=REPO, capture_output=True, text=True)
    assert (other.returncode, other.stdout, other.stderr) == (0, "[]\n", "")


def test_data_types_that_do_not_fit_are_one_line_of_the_plan(here, monkeypatch, capfd):
    forward, ends = QwenImageTransformer2DModel.forward, []

    def broken(net, hidden_states, **others):
        return forward(net, hidden_states=hidden_states.float(), **others)

    args = change(TINY, dtype="bfloat16")
    app.main(args, World.join(args))
    (line,) = [line for line in planned(capfd.readouterr().out) if "a forward of one sample" in line]
    assert re.fullmatch(r"plan: a forward of one sample: [\de.-]+ TFLOP in bfloat16", line)
    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", broken)
    monkeypatch.setattr(os, "_exit", ends.append)
    launch(app.main, args)
    told = capfd.readouterr()
    assert ends == [2]
    why = "TypeError: addmm must have one data type, got bfloat16 and float32"
    assert told.err.count("\n") == 1
    assert told.err.endswith(f"error: --dtype bfloat16: a forward of the net fails: {why}\n")


@pytest.mark.parametrize("model", ["wan22", "hunyuan-image", "ltx23", "bagel", "qwen-image-edit-plus", "sd35-medium"])
def test_a_forward_of_each_kind_of_model_is_counted(here, bright_urls, model, capfd):
    """Two experts, routes, sound, a net that is a language model, references, and a convolution with a bias."""
    args = settings(model, "flowgrpo", here, bright_urls, dry_run=True, lora_rank=2, dtype="bfloat16", scorer_url="")
    app.main(args, World.join(args))
    assert "plan: a forward of one sample: " in capfd.readouterr().out


@in_turn(2, 3)
def test_a_plan_names_all_of_the_host_s_memory(here, bright_url, monkeypatch, capsys):
    """The copy of a checkpoint has the bytes of the tensors in its file."""
    args = change(TINY, prompts_per_step=2, train_steps=1, eval_every=1, name="real")
    plan.fit(app.main, change(args, memory_device_gb=1.0))
    (line,) = re.findall(r"plan: host memory per rank in all, GB: (.*);", capsys.readouterr().out)
    numbers = [float(number) for number in re.findall(r"[\d.]+", line)]
    assert re.fullmatch(r"\S+ \(libraries \S+, tensors \S+, a checkpoint's copy \S+\)", line)
    assert numbers[0] == pytest.approx(sum(numbers[1:]), abs=0.02)
    assert 0.2 < numbers[1] < 4
    figures = plan.measure(app.main, args, 1)
    train(app, change(args, dry_run=False, scorer_url=bright_url))
    saved = sum(file.stat().st_size for file in Path("runs/real/checkpoints/step-00000001").glob("*.safetensors"))
    assert figures.checkpoint == pytest.approx(saved, rel=0.1)
