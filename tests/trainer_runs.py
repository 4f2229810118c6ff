"""What tests of several trainers share: runs in this process and on ranks, the program, a rank without the others."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing
from helpers import CHECKPOINT, REPO
from omni_rollout.diffusers_engine import DiffusersEngine
from omni_rollout.models import qwen_image
from omni_train.data import PromptSampler
from omni_train.dist import Dist
from omni_train.log import load_metrics

torch.set_num_threads(1)  # as on every rank: sums in another order would be other numbers

WORDS = ("AB", "CD", "EF")  # of the evaluation
PHASES = {"rollout", "reward_wait", "read", "update", "sync", "eval", "save", "step"}


def write_eval_prompts(folder):
    """The evaluation's prompts, few, as the file that `TINY` settings name."""
    (folder / "eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in WORDS))


def tiny(args, **changes):
    """The preset `args` with tiny rollouts and the shipped data, whatever the working folder."""
    prompts = str(REPO / "data" / "tiny-signs" / "train.txt")
    small = {"num_steps": 3, "eval_num_steps": 2, "steps": 2, "eval_every": 2, "ema_decay": 0.0, "shard": "auto"}
    return replace(args, model=str(CHECKPOINT), prompts=prompts, eval_prompts="eval.txt", **(small | changes))


def train(app, args):
    """Trains in this process; the lines of the log."""
    app.check_args(args)
    app.main(args)
    return load_metrics(Path("runs") / args.name / "metrics.jsonl")


def train_on_ranks(app, args, *, ranks=2):
    """Trains in forked processes, as torchrun would start them but with all imported already; the lines of the log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_rank, args=(app, args, ranks, port), nprocs=ranks, start_method="fork")
    return load_metrics(Path("runs") / args.name / "metrics.jsonl")


def _rank(rank, app, args, ranks, port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    app.check_args(args)
    app.main(args)
    os._exit(0)  # a forked process must not run pytest's endings, nor wait for gloo's threads


def cli(app, *flags):
    """The exit code of the program and all that it prints."""
    command = [sys.executable, str(REPO / "apps" / f"{app.__name__}.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    return result.returncode, result.stdout + result.stderr


def lone_rank(args, rollouts, *, rank=0, world_size=1):
    """A run that can sample and train, as one of `world_size` ranks, without the others and without a scorer."""
    model = qwen_image.load(CHECKPOINT)
    net = model.transformer.requires_grad_(True)
    dist = Dist(rank=rank, world_size=world_size, local_rank=0, device=torch.device("cpu"), mesh=None)
    client = SimpleNamespace(submit=lambda media, prompts, meta: None)
    sampler = PromptSampler(args.prompts, prompts_per_step=args.prompts_per_step, seed=args.seed)
    on = rollouts.Rollouts(dist, DiffusersEngine(qwen_image, model), client, args.batch_size)
    params = list(net.parameters())
    return SimpleNamespace(args=args, on=on, sampler=sampler, net=net, params=params, mode="none", optimizer=None)


def keep_gradients(app, monkeypatch):
    """Instead of an optimizer step, appends the gradients to the list that is returned, and clears them."""
    kept = []

    def step(optimizer, params, **options):
        kept.append([None if p.grad is None else p.grad.clone() for p in params])
        for p in params:
            p.grad = None
        return SimpleNamespace(grad_norm=1.0, skipped=False)

    monkeypatch.setattr(app, "optimizer_step", step)
    return kept


def assert_same_gradients(kept, params, *, rtol=1e-3, atol=1e-6):
    """What reached the optimizer equals what `params` hold now."""
    pairs = [(ours, p.grad) for ours, p in zip(kept, params, strict=True) if ours is not None]
    assert len(pairs) > 0.9 * len(params)  # the last block's text stream leads nowhere, and has no gradient
    assert any(whole.abs().max() > 100 * atol for _, whole in pairs)
    for ours, whole in pairs:
        torch.testing.assert_close(ours, whole, rtol=rtol, atol=atol)


def undocumented(lines):
    """The logged names that docs/metrics.md does not have."""
    documented = (REPO / "docs" / "metrics.md").read_text()
    documented += documented.replace("KIND", "denoising") + documented.replace("KIND", "inversion")
    names = {name for line in lines for name in line} - {"step"}
    times = {name for name in names if name.startswith("time/")}
    phases = {name.removeprefix("time/").removesuffix("_s").removesuffix("_ms_per_image") for name in times}
    return (phases - PHASES) | {name for name in names - times if f"`{name}`" not in documented}
