"""Costs of a step: work of the nets and of the scorer, memory, CPU seconds."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from omni_train.dist import gather_json

from omni_rl.run.run import AnyRun, Step


class Work(TypedDict):
    """A rank's work in a step, as arguments of `RunLog.log`."""

    num_samples: float
    flops: dict[str, float]
    peak_tflops: float | None


@contextmanager
def measure_step(run: AnyRun, step: Step) -> Iterator[None]:
    """Measure the cost of the block, and add it to the metrics of the step."""
    busy_s, cpu_s = run.scorer.busy_s, time.process_time()
    run.counts.clear()
    run.calls.clear()
    if run.load:
        run.load.clear()
    yield
    step.metrics["reward/busy_s"] = run.scorer.busy_s - busy_s + run.counts["busy_ms"] / 1000
    step.metrics |= run.memory("", peak=True)
    step.metrics |= gather_costs(run, time.process_time() - cpu_s)
    if run.model.boundary and not run.breakers.calls.is_off:
        step.metrics |= {f"policy/forwards_{name}": float(run.counts[name]) for name in run.model.nets}
    step.metrics |= (run.breakers.load(run.load.metrics) or {}) if run.load else {}


def gather_costs(run: AnyRun, cpu_s: float) -> dict[str, float]:
    """Return the metrics of a step's cost that all ranks report, summed. cpu_s: CPU seconds of this rank."""
    names = ("perf/forwards", "perf/backwards", "perf/cpu_s")
    # other ranks wait in the gather
    rank_values = run.breakers.calls(rank_costs, run, cpu_s) or [math.nan] * len(names)
    sums = map(sum, zip(*gather_json(run.dist, rank_values), strict=True))
    return {name: total for name, total in zip(names, sums, strict=True) if not math.isnan(total)}


def rank_costs(run: AnyRun, cpu_s: float) -> list[float]:
    """Return this rank's forwards and backwards, in samples, and its CPU seconds."""
    with_gradients = sum(samples for (_, has_gradient, _), samples in run.calls.items() if has_gradient)
    samples = [count / run.dist.context for count in (sum(run.calls.values()), with_gradients)]
    samples[0] += run.counts["forwards"]  # of ranks that only sample
    return [*samples, cpu_s + run.counts["cpu_ms"] / 1000]


def step_work(run: AnyRun) -> Work:
    """Return the work of this rank since its counts were cleared."""
    flops_by_net = run.flops.total(run.calls) if run.flops and not run.breakers.calls.is_off else {}
    return Work(
        num_samples=run.counts["sampled"] / run.dist.context,
        flops={name: n / run.dist.context for name, n in flops_by_net.items()},
        peak_tflops=run.peak_tflops,
    )
