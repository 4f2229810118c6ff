"""Seconds of rank 0's training thread between and after the model's work: log, alarms, pictures, report, evaluation.

python benchmarks/fixed_cost.py
python benchmarks/fixed_cost.py --start 20000 --steps 100

The loop, the log, the report and the evaluation are the trainer's; in place of a model, a sleep and pictures that are
there already. `--start` begins behind a log of so many steps. The state that is saved is tiny: see checkpoint.py.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import engines
import torch
from omni_reward import Score
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.sampling import evaluate_set, show
from omni_rl.flow.scorers import LocalScorer
from omni_rl.flow.scoring import Rollout
from omni_rl.run.loop import Loop
from omni_rl.run.media import export, params_of
from omni_rl.run.policy import Policy
from omni_rl.run.run import MediaRun
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.eval_sets import MediaEval
from omni_rollout import Params, Prompt, Samples
from omni_train.dist import init_distributed
from omni_train.optim import build_adamw
from omni_train.prompts.files import PromptRecord
from omni_train.weights.snapshot import Ema

NAMES = [f"policy/metric_{i}" for i in range(38)]  # with those of reward and time about as many as a FlowGRPO step's
PARTS = ("model", "show", "eval", "save", "rest")


@dataclass(frozen=True)
class Args:
    """Settings of the benchmark."""

    steps: int
    start: int
    side: int
    images: int
    work_s: float
    eval_every: int
    save_every: int


class Engine:
    """Samples whose pictures were drawn before the clock began; large, and blocks of color, as far as encoders care."""

    shares_weights, moved_bytes, is_exact, net = True, 0, True, None

    def __init__(self, side: int, device: torch.device) -> None:
        blocks = torch.randint(0, 256, (64, side // 16, side // 16, 3), dtype=torch.uint8)
        self.pictures = blocks.repeat_interleave(16, 1).repeat_interleave(16, 2).to(device)

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Samples:
        """As many as there are prompts, at most 64."""
        return Samples(tuple(prompts), {"image": self.pictures[: len(prompts)]}, {}, 0)

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Nothing to prepare."""

    def load_weights(self, tensors: object, *, version: int) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to free."""


def open_run(args: Args) -> MediaRun[MediaArgs]:
    """A run without a model, in a folder of its own, which has logged `start` steps."""
    settings = MediaArgs(
        name="fixed-cost",
        train_steps=args.start + args.steps,
        batch_size=args.images,
        save_every=args.save_every,
        eval=MediaEval(every=args.eval_every),
        ema_decay=0.9,
        height=args.side,
        width=args.side,
    )
    world = World(init_distributed())
    session = Session(settings, world.dist)
    session.folder.mkdir(parents=True)
    session.first_step = args.start + 1 if args.start else 0
    with (session.folder / "metrics.jsonl").open("w") as file:
        for step in range(session.first_step):
            file.write(json.dumps({"step": step} | metrics(step)) + "\n")
    session.open_report(settings, world)
    session.open_log(settings, world, [], [], [])
    net: Any = torch.nn.Linear(4, 4)
    net.to_json_string = lambda: "{}"
    policy = Policy(net, build_adamw(net, lr=1e-3), Ema([*net.parameters()], decay=0.9))
    model: Any = SimpleNamespace(nets={"": "transformer"}, boundary=0.0)
    engine: Any = Engine(args.side, world.dist.device)
    scorer = LocalScorer(lambda media, texts: [Score(0.1 * (i % 7)) for i in range(len(texts))])
    prompts: Any = None
    records = [PromptRecord(i, f"a sign that says {i}", "", {}) for i in range(64)]
    params = params_of(settings)
    held_out = [HeldOut("", records, params)]
    run: Any = MediaRun(
        settings,
        world,
        model,
        policy,
        engine,
        scorer,
        session,
        prompts,
        params,
        held_out,
        evaluate_set=evaluate_set,
        export=export,
        trained=model.nets,
        algorithm="flowgrpo",
        base="none",
        version=args.start,
    )
    engine.generate = lambda prompts, params: replace(
        Engine.generate(engine, prompts, params), weight_version=run.version
    )
    return run


def metrics(step: int) -> dict[str, float]:
    """Numbers under as many names as a step of FlowGRPO has."""
    return {name: (step * 37 % 1000 + i) / 1000 for i, name in enumerate(NAMES)} | {
        "reward/mean": step % 100 / 100, "reward/abstained_ratio": 0.0, "policy/clip_fraction": 0.1,
        "policy/skipped_updates": 0.0,
    }  # fmt: skip


def measure(args: Args) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, seconds of the training thread in that step: on the clock, and of its own work) without the model's."""
    run = open_run(args)
    prompts = [Prompt(f"a sign {i // 16}", group=i // 16, index=i, seed=i) for i in range(args.images)]
    scored = Future[list[Score]]()
    scored.set_result([Score(0.1 * (i % 7)) for i in range(args.images)])
    with Loop(run) as steps:
        wall, cpu = time.perf_counter(), time.thread_time()
        for step in steps:
            model, model_cpu = time.perf_counter(), time.thread_time()
            time.sleep(args.work_s)
            batches = [run.engine.generate(prompts, run.base_params)]
            step.metrics |= metrics(step.number)
            now, now_cpu = time.perf_counter(), time.thread_time()
            show(run, step, Rollout(prompts, batches, [scored]))
            yield (
                step.number,
                {
                    "wall": model - wall + time.perf_counter() - now,
                    "cpu": model_cpu - cpu + time.thread_time() - now_cpu,
                },
            )
            wall, cpu = time.perf_counter(), time.thread_time()


@contextmanager
def quiet() -> Iterator[None]:
    """Within the `with` block the working folder is a new one, and what is printed is not shown."""
    here, out = os.getcwd(), os.dup(1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        os.chdir(folder)
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(out, 1)
            os.chdir(here)


def table(found: Sequence[tuple[int, dict[str, float]]]) -> list[str]:
    """A row for the first hundred steps, one for the last, and one for all."""
    rows = ["| steps | seconds a step | seconds of its own work |", "| --- | --- | --- |"]
    for part in {(0, min(100, len(found))): 0, (max(0, len(found) - 100), len(found)): 0, (0, len(found)): 0}:
        some = found[slice(*part)]
        means = [sum(seconds[kind] for _, seconds in some) / len(some) for kind in ("wall", "cpu")]
        rows.append(f"| {some[0][0] + 1} to {some[-1][0] + 1} | {means[0]:.4f} | {means[1]:.4f} |")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="training steps")
    parser.add_argument("--start", type=int, default=0, help="steps that the log has before")
    parser.add_argument("--side", type=int, default=512, help="pixels of a picture's side")
    parser.add_argument("--images", type=int, default=64, help="pictures of a step on rank 0, at most 64")
    parser.add_argument("--work-s", type=float, default=0.05, help="sleep in place of the model, seconds")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between evaluations of 64 prompts")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    args = Args(**vars(parser.parse_args(argv)))
    with quiet():
        found = list(measure(args))
    print(engines.stamp(args))
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
