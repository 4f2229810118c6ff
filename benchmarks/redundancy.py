"""The floating-point operations that a training step computes, over those that it needs.

python benchmarks/redundancy.py
python benchmarks/redundancy.py --random 2 --random-heads 4 --height 256 --width 256

Both are counted on steps of the FlowGRPO trainer, of its transformer alone. A step needs each sample by itself, without
padding: once for each denoising step, or for a common start once for the group; forward and backward for each trained
step of a sample that is trained on; and once more where a KL is asked for. Nothing needs to be computed twice.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import engines
import torch
import trainer
from omni_rl.flow.scoring import TrainBatch
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.cli import parse_cli
from omni_rollout import Params, Prompt, Trajectory, replay
from omni_train.planned import Meter
from trainer import Args, app

CASES: dict[str, dict[str, Any]] = {  # what differs from trainer.GIVEN
    "LoRA, guidance": {},
    "the same, `--memory.gradient-checkpointing`": {"memory_gradient_checkpointing": True},
    "the same, `--memory.keep-products-gb 8`": {"memory_gradient_checkpointing": True, "memory_keep_products_gb": 8.0},
    "KL": {"kl_coef": 0.01},
    "two prompts in a batch": {"group_size": 2},
    "two updates": {"num_minibatches": 2},
    "common start noise, a group in two batches": {"same_start_noise": True, "batch_size": 2, "window_low": 2},
    "two updates, batches repacked": {"num_minibatches": 2, "best_worst_n": 4, "group_size": 8},
    "all weights, no guidance": {"lora_rank": 0, "true_cfg_scale": 1.0},
}


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a step's transformer."""

    computed: int
    needed: int


def measure(args: Args, path: str, **changes: Any) -> Work:
    """The operations of a training step with these settings."""
    found: list[Work] = []
    update = app.update

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        drawn, trained, meter = list[Trajectory](), list[TrainBatch](), Meter(run.dist.device)
        model, generate = run.model, run.engine.generate
        for name in ("encode", "decode"):
            setattr(model, name, aside(meter, getattr(model, name)))

        def kept(prompts: Sequence[Prompt], params: Params) -> Trajectory:
            drawn.append(generate(prompts, params))
            return drawn[-1]

        run.engine.generate = kept  # type: ignore[method-assign]

        def noted(run: MediaRun[app.Args], step: Step, batches: Sequence[TrainBatch]) -> dict[str, float]:
            trained.extend(batches)
            return update(run, step, batches)

        app.update = noted
        yield Step(0)  # in which blocks measure what they may keep
        drawn.clear()
        trained.clear()
        with meter:
            yield Step(0)
        found.append(Work(meter.flops[""], needed(run, drawn, trained)))

    try:
        trainer.train(trainer.settings(args, path, **changes), steps)
    finally:
        app.update = update
    return found[0]


def aside(meter: Meter, function: Any) -> Any:
    """The function, whose operations count for another phase."""

    def wrapped(*args: Any, **options: Any) -> Any:
        with meter.phase("aside"):
            return function(*args, **options)

    return wrapped


def needed(run: MediaRun[app.Args], drawn: Sequence[Trajectory], trained: Sequence[TrainBatch]) -> int:
    """The operations that samples need, each alone."""
    known: dict[object, int] = {}
    run.policy.net.disable_gradient_checkpointing()  # type: ignore[operator]

    def alone(batch: Trajectory, i: int, kind: Literal["sample", "train", "reference"]) -> int:
        one = batch.select([i]).trim()
        key = kind, *((name, tensor.shape) for name, tensor in one.cond.items())
        if key not in known:
            trains, policy = (
                kind == "train",
                run.policy.reference() if kind == "reference" else nullcontext(run.policy.net),
            )
            with policy as net, torch.set_grad_enabled(trains), Meter(run.dist.device) as meter:
                log_prob = replay(run.model, net, one, 0).log_prob
                if trains:
                    log_prob.sum().backward()
            run.policy.optimizer.zero_grad(set_to_none=True)
            known[key] = meter.flops.total()
        return known[key]

    total, starts = 0, set[object]()
    for batch in drawn:
        for i, prompt in enumerate(batch.prompts):
            start = prompt.index if prompt.initial_seed is None else (prompt.group, prompt.initial_seed)
            steps = len(batch.sigmas) - 1 - (batch.params.sde_steps[0] if start in starts else 0)
            starts.add(start)
            total += steps * alone(batch, i, "sample")
    for each in trained:
        for i in range(len(each.trajectory)):
            if each.weights is None or each.weights[i] > 0:
                asked = alone(each.trajectory, i, "reference") if run.args.kl_coef else 0
                total += each.trajectory.num_kept * (alone(each.trajectory, i, "train") + asked)
    return total


def rows(args: Args, names: Sequence[str] = ()) -> Iterator[tuple[str, Work]]:
    """Each case that the model can be trained in, or those of that name, and its operations."""
    with trainer.model(args) as path:
        for name in names or CASES:
            changes = CASES[name]
            if changes.get("lora_rank", 1) or not args.random:
                yield name, measure(args, path, **changes)


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print a table."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_cli(Args, lambda args: None, words, app="redundancy", description=__doc__)
    print(engines.stamp(args))
    print("| step | computed, GFLOP | needed, GFLOP | computed / needed |", "| --- | --- | --- | --- |", sep="\n")
    for name, work in rows(args):
        cells = f"{work.computed / 1e9:,.1f} | {work.needed / 1e9:,.1f} | {work.computed / work.needed:.4f}"
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
