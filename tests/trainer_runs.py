"""Helpers of several trainers' tests: runs in this process and on ranks, the program, a rank without the others."""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import omni_rl.report.folder
import omni_rl.run.session
import torch
import torch.multiprocessing
from build_tiny_models import kept
from helpers import CHECKPOINT, REPO, recipe_texts
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.sampling import sample, step_prompts
from omni_rl.flow.scoring import Rollout
from omni_rl.run.media import sampling_params
from omni_rl.run.policy import Policy
from omni_rl.run.run import Run, Step
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.fields import build, change, leaves
from omni_rl.settings.toml import from_toml
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.models.tokens import open_token_model
from omni_train.dist import Dist
from omni_train.files import load_metrics
from omni_train.flops import FlopTable
from omni_train.optim import StepResult, build_adamw
from omni_train.prompts.files import load_prompts
from omni_train.prompts.sampler import PromptSampler
from omni_train.weights.snapshot import Ema
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)  # as on every rank, because sums depend on the order

WORDS = ("AB", "CD", "EF")  # words of the evaluation prompts
PHASES = {"rollout", "reward_wait", "read", "update", "sync", "eval", "save", "step"}
PROMPTS = REPO / "data" / "tiny-signs"
WEIGHTS, LATER = "diffusion_pytorch_model.safetensors", ("transformer_blocks.2.", "transformer_blocks.3.")
VIDEO = {"model": "wan22", "num_frames": 5, "guidance_scale": 3.0, "window_size": 1, "window_high": 1}  # two experts
SOUND = {"model": "ltx23", "num_frames": 9, "width": 64, "train_levels": 2, "streams_sound_weight": 0.5}


@cache
def shallow():
    """Return the shipped model with only its first two blocks, which halves the time of a run; written once."""

    def write(folder):
        shutil.copytree(CHECKPOINT, folder)
        config, file = folder / "transformer" / "config.json", folder / "transformer" / WEIGHTS
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 2}))
        save_file({name: tensor for name, tensor in load_file(file).items() if not name.startswith(LATER)}, file)

    return kept("shallow", REPO / ".pytest_cache" / "tiny-models", write, Path(__file__))


def write_eval_prompts(folder):
    """Write a few evaluation prompts to the file that `tiny` settings name."""
    (folder / "eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in WORDS))


def recipe(app, name):
    """Return the settings of a trainer's recipe."""
    return build(app.Args, from_toml(recipe_texts(app.__name__)[name], app.Args, name))


def tiny(args, **changes):
    """Return the settings with tiny rollouts, a shallow model and the shipped data, whatever the working folder is."""
    small = {"num_inference_steps": 3, "eval_num_inference_steps": 2, "train_steps": 2, "eval_every": 2}
    small |= {"ema_decay": 0.0, "sharding_mode": "auto", "height": 32, "width": 96}
    places = {"model": str(shallow()), "prompts": str(PROMPTS / "train.txt"), "eval_prompts": "eval.txt"}
    scorer = {"scorer_name": ""} if "scorer.name" in leaves(type(args)) else {}  # a server takes long to start
    return change(args, **(places | small | scorer | changes))


@contextmanager
def spared(*, report, flops):
    """Run with or without a report and a count of operations, each of which takes a third of a small run's time."""
    with ExitStack() as patches:
        if not report:
            patches.enter_context(patch.object(omni_rl.run.session, "ReportProcess", lambda *folder_and_tracker: None))
        if not flops:
            patches.enter_context(patch.object(FlopTable, "_record_call", lambda *call: None))
        yield


def train(app, args, *, report=False, flops=False):
    """Train in this process, and return the lines of the log."""
    app.check_args(args)
    world = World.join(args)
    with spared(report=report, flops=flops), closing(world.display) if world.display else nullcontext():
        app.main(args, world)
    return load_metrics(Path("runs") / args.run.name / "metrics.jsonl")


def evaluate(app, args):
    """Evaluates alone in this process; the line of the newest folder."""
    app.check_args(args := change(args, eval_only=True))
    with spared(report=False, flops=False):
        app.main(args, World.join(args))
    [line] = load_metrics(max(Path("runs", args.run.name).glob("eval-*")) / "metrics.jsonl")
    return line


@cache
def import_all():
    """Import what loading a model imports, and read what a run records of all packages, once for all forks."""
    open_model(CHECKPOINT).load(device="cpu", dtype=torch.float32)
    omni_rl.report.folder._packages()


def train_on_ranks(app, args, *, ranks=2, report=False, flops=False):
    """Train in forked processes, like torchrun but with all imports done, and return the lines of the log."""
    import_all()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with spared(report=report, flops=flops):
        torch.multiprocessing.start_processes(_rank, args=(app, args, ranks, port), nprocs=ranks, start_method="fork")
    return load_metrics(Path("runs") / args.run.name / "metrics.jsonl")


def _rank(rank, app, args, ranks, port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    app.check_args(args)
    app.main(args, World.join(args))
    os._exit(0)  # a forked process must not run pytest's teardown, nor wait for gloo's threads


def start_script(path, words, *, ranks):
    """Start the ranks of a program in forked processes, like torchrun but with all imports done."""
    import_all()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = {"nprocs": ranks, "start_method": "fork", "join": False}
    return torch.multiprocessing.start_processes(_script, args=(str(path), words, ranks, port), **how)


def _script(rank, path, words, ranks, port):
    if ranks > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
    os._exit(0)  # a forked process must not run pytest's teardown


def run_script(path, words, *, ranks=1):
    """Run a program to its end."""
    context = start_script(path, words, ranks=ranks)
    while not context.join():
        pass


def cli(app, *flags):
    """Return the exit code and the output of the program."""
    command = [sys.executable, str(REPO / "apps" / f"{app.__name__}.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    return result.returncode, result.stdout + result.stderr


def place(rank=0, world_size=1):
    """Return a Dist for a rank among others that do not exist."""
    return Dist(rank=rank, world_size=world_size, local_rank=0, device=torch.device("cpu"), mesh=None)


def unclocked(lines):
    """Return the log without times and memory."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "reward/busy"))} for line in lines]


def exported(name="run"):
    """Return the tensors of a run's exported weights."""
    return {k: v for file in Path(f"runs/{name}/weights").rglob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_weights(one, other):
    """Check that the exported weights of two runs agree, except for sums in another order.

    AdamW divides a gradient near 0 by its own size, so a few single weights may move in another direction.
    """
    first, second = exported(one), exported(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-3, rtol=1e-3)
        is_far = ~torch.isclose(second[name], tensor, atol=1e-4, rtol=1e-3)
        assert is_far.double().mean() < 1e-4, f"{name}: {is_far.sum()} of {is_far.numel()} weights"


def lose_step(name, step):
    """Take a run back to the step before its last, as if it was killed before the last save."""
    shutil.rmtree(f"runs/{name}/checkpoints/step-{step:08}")
    shutil.rmtree(f"runs/{name}/weights")


class NobodyScores:
    """Scorer whose scores never arrive."""

    busy_s = 0.0
    kinds, takes_references, takes_groups = ("image",), False, False

    def submit(self, media, prompts, meta=None, references=None, groups=None):
        return Future()

    def close(self):
        pass


def lone_run(args, *, rank=0, world_size=1):
    """Return a run that can sample and train as one of `world_size` ranks, without the others, a scorer or a folder."""
    world, model, params = World(place(rank, world_size)), open_model(args.policy.model), sampling_params(args)
    parts = model.load(device="cpu", dtype=torch.float32)
    policy = Policy(parts.net.requires_grad_(True), build_adamw(parts.net, lr=1e-3), Ema([], decay=0.0))
    prompts = PromptSampler(args.data.prompts, prompts_per_step=args.data.prompts_per_step, seed=args.run.seed)
    parts = DiffusersEngine(model, parts), NobodyScores(), Session(args, world.dist), prompts, params
    return Run(args, world, model, policy, *parts, [HeldOut("", load_prompts(args.data.prompts)[:3], params)])


def scored(prompts, batches, scores):
    """Return a rollout with these scores."""
    future = Future()
    future.set_result(scores)
    return Rollout(prompts, batches, [future])


def rollout(run, params, *, number=0, consecutive=1, **options):
    """Return this rank's batches of a training step, and the prompts of all ranks."""
    prompts = step_prompts(run, Step(number), **options)
    return sample(run, prompts, params, consecutive=consecutive).batches, prompts


def keep_gradients(run):
    """Replace the optimizer step by one that appends the gradients to the returned list and clears them."""
    kept = []

    def step(training_step, *, has_signal=True):
        kept.append([None if p.grad is None else p.grad.clone() for p in run.policy.params])
        for p in run.policy.params:
            p.grad = None
        return StepResult(grad_norm=1.0, skipped=False)

    run.optimizer_step = step
    return kept


def assert_same_gradients(kept, params, *, rtol=1e-3, atol=1e-6):
    """Check that the gradients that reached the optimizer equal those of `params`."""
    pairs = [(ours, p.grad) for ours, p in zip(kept, params, strict=True) if ours is not None]
    assert len(pairs) > 0.9 * len(params)  # the last block's text stream leads nowhere, and has no gradient
    assert any(whole.abs().max() > 100 * atol for _, whole in pairs)
    for ours, whole in pairs:
        torch.testing.assert_close(ours, whole, rtol=rtol, atol=atol)


def undocumented(lines):
    """Return the logged names that are missing in docs/metrics.md."""
    documented = (REPO / "docs" / "metrics.md").read_text()
    documented += documented.replace("KIND", "denoising") + documented.replace("KIND", "inversion")
    names = {name for line in lines for name in line} - {"step"}
    times = {name for name in names if name.startswith("time/")}
    phases = {name.removeprefix("time/").removesuffix("_s").removesuffix("_ms_per_sample") for name in times}
    return (phases - PHASES) | {name for name in names - times if f"`{name}`" not in documented}


def write_teacher(model):
    """Return the folder of a language model like this one with other weights."""
    opened = open_token_model(model)
    net = opened.load_net(device="cpu", dtype=torch.float32)
    torch.manual_seed(0)
    weights = {name: p + 0.03 * torch.randn_like(p) for name, p in net.named_parameters()}
    opened.save(net, weights, Path("teacher"))
    return "teacher"
