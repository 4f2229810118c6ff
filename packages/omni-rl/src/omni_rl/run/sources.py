"""Sources of the samples of a run's steps.

    for step, rollout in sampled(run, steps, roll_out):

A step is sampled when it begins. With `--draw-ahead K` it is sampled K updates earlier, and scored during these
updates. With `--sharding.rollout-ranks` other ranks sample it, and a training rank receives the samples when the step
begins.

The queue is empty when a run is saved or evaluated, so checkpoints contain no samples, and the number of a step
determines the age of its samples.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from omni_rl.run.loop import Loop
from omni_rl.run.run import AnyRun, Step
from omni_rl.settings.args import next_milestone

RunT = TypeVar("RunT", bound=AnyRun)
T = TypeVar("T")


def sample_steps(run: RunT, steps: Loop, roll_out: Callable[[RunT, Step], T]) -> Iterator[tuple[Step, T]]:
    """Yield each remaining step with its samples.

    roll_out: `(run, step) -> samples`, from weights of `step.version`.

    Raises:
        RuntimeError: samples of a step are too old, because the engine did not get new weights.
    """
    if samplers := run.samplers:
        for step, _ in prefetch_steps(
            run, steps, lambda future_step: samplers.request(future_step.number, future_step.version)
        ):
            yield step, roll_out(run, step)
        return

    def sample(step: Step) -> T:
        rollout = roll_out(run, step)
        step.version = run.version
        return rollout

    yield from prefetch_steps(run, steps, sample)


def prefetch_steps(run: AnyRun, steps: Loop, fetch: Callable[[Step], T]) -> Iterator[tuple[Step, T]]:
    """Yield each remaining step with the result of `fetch`, called at most `--draw-ahead` updates earlier.

    Raises:
        RuntimeError: the weights of `step.version` are older.
    """
    queue = deque[tuple[Step, T]]()
    for step in steps:
        max_ahead, end = run.args.sampling.draw_ahead, next_milestone(run.args, step.number)
        while not queue or (len(queue) <= max_ahead and steps.next_to_sample < end and not steps.is_stop_requested):
            next_step = Step(steps.next_to_sample, version=step.number) if queue else step
            queue.append((next_step, fetch(next_step)))
            steps.next_to_sample = next_step.number + 1
        sampled_as, samples = queue.popleft()
        step.version, step.metrics = sampled_as.version, sampled_as.metrics
        if step.staleness > max_ahead:
            rule = f"samples must be at most {max_ahead} updates old, as --draw-ahead says"
            raise RuntimeError(f"step {step.number + 1}: {rule}, got {step.staleness}: a sync is missing")
        step.metrics |= {"policy/staleness": float(step.staleness)} if max_ahead else {}
        yield step, samples
