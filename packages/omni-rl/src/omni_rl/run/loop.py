"""The loop of a run: what happens around and between its training steps.

    with Loop(run) as steps:
        for step, rollout in steps.sampled_by(roll_out):
            ...

Between steps it evaluates, logs, raises alarms, saves, and stops where the program is asked to. When a step breaks, it
saves what there is and says what broke.

With `--draw-ahead K` a step is sampled K updates before its own, so that its scores come meanwhile. No samples wait
where a run is saved or evaluated: a checkpoint holds none, and a step's number says how old its samples are.
"""

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from omni_reward import RewardError
from omni_train.breaker import Breaker
from omni_train.dist import gather_json, same_error
from omni_train.files import load_metrics, read_jsonl, write_folder_atomically
from omni_train.flops import peak_tflops
from omni_train.progress import begin
from omni_train.signals import catch_stop, resume_command
from omni_train.weights.card import model_card

from omni_rl.flow.evals import HeldOut, Shown, date_evaluations, evaluate, mixed, starts_of
from omni_rl.media.write import readable
from omni_rl.report.folder import command_line
from omni_rl.run.alarms import Alarm, Watch
from omni_rl.run.failures import BrokenRunError
from omni_rl.run.metrics import GOLD_REWARD, SETTINGS_SINCE, error_of, falls, one_evaluation
from omni_rl.run.notify import announce, say
from omni_rl.run.run import AnyRun, Step
from omni_rl.run.serve import serve
from omni_rl.settings.args import next_end, secret_flags, without_secrets
from omni_rl.settings.early import EVALS, LOSS_SCALE
from omni_rl.settings.fields import change, flat

RunT = TypeVar("RunT", bound=AnyRun)
T = TypeVar("T")


class Gold(NamedTuple):
    """A step's gold score, and its standard error."""

    score: float
    error: float
    step: int


class Loop(Generic[RunT]):
    """The remaining training steps of a run; the `with` block closes its log, and after success the run."""

    def __init__(self, run: RunT) -> None:
        self.run = run
        self._done = run.session.first_step - 1  # finished steps; line n of the log speaks of n of them
        self._saved = self._done  # finished steps of the newest checkpoint, which may be under way
        self._in_step = False  # whether the trainer's own lines run
        self._ahead = deque[Step]()  # steps whose samples wait
        self._asked = False  # whether to stop, once no samples wait
        self._watch, self._alarms = Watch(), Breaker("the alarms")
        self._evals: list[Mapping[str, float]] = []  # lines with a held-out score, in step order
        self._golds: list[Gold] = []  # in step order, the same on every rank
        self._unjudged: dict[str, float] = {}  # the last line, if its evaluation is due still
        self._peak_tflops = Breaker("the peak of the device")(peak_tflops, run.dist.device)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        lines = load_metrics(self.run.session.folder / "metrics.jsonl") if self.run.dist.is_main else []
        if (
            lines
            and self._done == lines[-1]["step"] > 0
            and self._is_evaluated(self._done)
            and not is_judged(lines[-1])
        ):
            self._unjudged = lines.pop()
        self._unjudged = gather_json(self.run.dist, self._unjudged)[0]
        for line in one_evaluation(lines, self._date_evaluations()):
            self._alarms(self._watch, line)
            self._evals += [line] if "eval/reward" in line else []
            self._golds += gold_of(line)
        self._golds = [Gold(*gold) for gold in gather_json(self.run.dist, self._golds)[0]]
        begin("")
        self.run.session.checkpoints.pinned = best = best_of(self._golds)
        with same_error(self.run.dist):
            if best and self.run.dist.is_main:
                self.run.session.fetch_best(best)
        self._stop = self._open.enter_context(catch_stop(self.run.world.signals))
        self._open.enter_context(self.run.session.log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        checkpoints = self.run.session.checkpoints
        with self._open:
            if isinstance(error, RewardError) and self._in_step:  # of all ranks, before the weights were touched
                self.run.policy.optimizer.zero_grad(
                    set_to_none=True
                )  # of an update that began before all scores were there
                self._save()
                checkpoints.wait()
            elif isinstance(error, Exception):
                checkpoints.wait_alone()
        if isinstance(error, Exception):
            raise BrokenRunError(self.run.session.log.last_phase, error) from error
        if error is None:
            self.run.close()

    def __iter__(self) -> Iterator[Step]:
        return iter(self.run.world.steps(self.run, self._left()))

    def _date_evaluations(self) -> dict[str, float]:
        """Note in the checkpoints from which step on each set is evaluated as now; return it as `sinces` does."""
        config, now = self.run.session.config, max(0, self._done + (not self._unjudged))
        then: Mapping[str, object] = config.get(EVALS, {})  # type: ignore[assignment]  # as an earlier start wrote it
        config[EVALS] = found = date_evaluations(self.run.held_out, then, now)
        return starts_of(found)

    def sampled_by(self, roll_out: Callable[[RunT, Step], T]) -> Iterator[tuple[Step, T]]:
        """Yield each remaining step with its samples, sampled at most `--draw-ahead` updates before.

        roll_out: `(run, step) -> samples`, by weights of `step.version`.

        Raises:
            RuntimeError: samples of a step are older, as the engine lacks weights.
        """
        roles, samplers = self.run.world.roles, self.run.samplers
        if roles and not samplers:
            serve(self.run, roles, roll_out)  # type: ignore[arg-type]  # of media, as the settings say
            return
        waiting = deque[T]()
        for now in self:
            ahead = self.run.args.draw_ahead
            while len(self._ahead) <= ahead:
                number = now.number + len(self._ahead)
                if self._ahead and (self._asked or number >= next_end(self.run.args, now.number)):
                    break
                step = Step(number, version=now.number) if self._ahead else now
                if samplers:
                    samplers.order(number, step.version)
                else:
                    waiting.append(roll_out(self.run, step))
                    step.version = self.run.version
                self._ahead.append(step)
            step = self._ahead.popleft()
            if step.staleness > ahead:
                rule = f"samples must be at most {ahead} updates old, as --draw-ahead says"
                raise RuntimeError(f"step {step.number + 1}: {rule}, got {step.staleness}: a sync is missing")
            step.metrics |= {"policy/staleness": float(step.staleness)} if ahead else {}
            yield step, roll_out(self.run, step) if samplers else waiting.popleft()

    def _left(self) -> Iterator[Step]:
        """Yield the steps that are left, and do what happens before, between and after them."""
        run, args = self.run, self.run.args
        if args.eval.only:
            return self._evaluate_alone()
        stopping = run.session.first_step == 0 and self._finish(Step(-1))  # line 0: the model as it was given
        if self._unjudged:  # as its scorer failed
            step = Step(self._done - 1)
            step.metrics = {name: value for name, value in self._unjudged.items() if not is_added(name)}
            stopping = self._finish(step)
        for number in range(max(self._done, 0), args.train_steps):
            if stopping:
                return
            step = self._ahead[0] if self._ahead else Step(number)
            busy_s, cpu_s = run.scorer.busy_s, time.process_time()
            run.counts.clear()
            run.calls.clear()
            if run.load:
                run.load.clear()
            self._in_step = True
            begin(f"step {number + 1}")
            yield step
            step.settle()  # where no optimizer step was tried
            self._in_step = False
            begin("")
            if not step.has_signal and run.dist.is_main:
                say(f"step {number + 1}: no sample has a signal, so no optimizer step was taken")
            step.metrics["reward/busy_s"] = run.scorer.busy_s - busy_s + run.counts["busy_ms"] / 1000
            step.metrics |= run.memory("", peak=True)
            step.metrics |= costs(run, time.process_time() - cpu_s)
            if run.model.boundary and not run.breakers.calls.has_failed:
                step.metrics |= {f"policy/forwards_{name}": float(run.counts[name]) for name in run.model.nets}
            step.metrics |= (run.breakers.load(run.load.metrics) or {}) if run.load else {}
            stopping = self._finish(step)
        if self._done == args.train_steps:
            self._conclude("report, weights and metrics")

    def _evaluate_alone(self) -> None:
        """Evaluate and log, and change nothing."""
        done = max(self._done, 0)
        with self.run.phase("eval"):
            metrics = hold_out(self.run, done, self._evals)
        self.run.session.log.log(done, metrics)
        self._conclude("report and metrics")

    def _conclude(self, written: str) -> None:
        """Print the held-out scores of each set, and the folder with all results."""
        changes = []
        for held in self.run.held_out:
            scores = [line[held.metric("reward")] for line in self._evals if held.metric("reward") in line]
            if scores:
                ends = scores[:: max(1, len(scores) - 1)]  # first and last
                changes.append(f"{held.name or 'held-out score'} {' -> '.join(readable(score, 3) for score in ends)}")
        if self.run.dist.is_main:
            scored = ", ".join(changes) or "no held-out score"
            announce(f"{scored}; {written} in {self.run.session.folder}", self.run.args)

    def _save(self) -> None:
        """Begin a checkpoint of the finished steps, unless there is one."""
        run = self.run
        if self._saved < self._done:
            save = run.session.checkpoints.async_save if run.args.async_save else run.session.checkpoints.save
            config = run.session.config
            if run.policy.scaler:
                config = config | {LOSS_SCALE: run.policy.scaler.state_dict()}
            state = run.policy.net, run.policy.optimizer, run.policy.averages
            save(self._done, *state, config=config)
            self._saved = self._done
            run.session.checkpoints.pinned = best_of(self._golds)  # once that save has begun: an older best stays whole

    def _is_evaluated(self, done: int) -> bool:
        """Return True if an evaluation is due after so many steps."""
        args = self.run.args
        return bool(done or args.eval.first) and (done % args.eval.every == 0 or done == args.train_steps)

    def _finish(self, step: Step) -> bool:
        """Evaluate, log and save when due; return True if the run has been asked to stop."""
        run, args, done = self.run, self.run.args, step.number + 1
        num_drawn = run.counts["drawn"] / run.dist.context  # an evaluation draws more
        counted = run.flops.total(run.calls) if run.flops and not run.breakers.calls.has_failed else {}
        flops = {name: n / run.dist.context for name, n in counted.items()}
        log = partial(run.session.log.log, num_samples=num_drawn, flops=flops, peak_tflops=self._peak_tflops)
        if self._is_evaluated(done):
            try:
                with run.phase("eval"):
                    step.metrics |= hold_out(run, done, self._evals)
                    self._golds += gold_of({"step": done} | step.metrics)
                    if done and best_of(self._golds) == done:
                        keep_best(run)
            except RewardError:  # of all ranks: the steps are kept, and judged when the run goes on
                if done:
                    log(done, step.metrics)
                    self._done = done
                    self._save()
                    run.session.checkpoints.wait()
                raise
        log(done, step.metrics)
        self._done = done
        if run.dist.is_main:
            for alarm in self._alarms(self._watch, {"step": done} | step.metrics) or ():
                announce(_alarm_text(done, alarm), args, sys.stderr)
        scores, errors = [gold.score for gold in self._golds], [gold.error for gold in self._golds]
        has_fallen = (
            GOLD_REWARD in step.metrics and args.eval.stop_after > 0 and falls(scores, errors, args.eval.stop_after)
        )
        self._asked = self._stop.requested(run.dist) or has_fallen
        stopping = self._asked and not self._ahead
        is_last = stopping or done == args.train_steps
        is_time = is_last or done % args.save_every == 0 or best_of(self._golds) == done
        if is_time or run.session.checkpoints.is_saving:
            with run.phase("save"):
                run.session.checkpoints.poll()
                if is_time:  # after the line: none must be lost
                    self._save()
                if is_last or not done:  # lines of trained steps without a checkpoint could not be continued
                    run.session.checkpoints.wait()
        if has_fallen and run.dist.is_main:
            best = best_of(self._golds)
            where = f", whose weights are in {run.session.folder / 'best'}" if best else ", the model as it was given"
            announce(f"--eval.stop-on {args.eval.stop_on}: the gold score has fallen since step {best}{where}", args)
        if stopping and done < args.train_steps and run.dist.is_main:
            announce(f"stopped after step {done}", args, more=f"; this continues:\n{resume_command()}")
        return stopping


def costs(run: AnyRun, cpu_s: float) -> dict[str, float]:
    """Return metrics of the cost of a step on all ranks, if all report it. cpu_s: CPU seconds of this rank."""
    names = ("perf/forwards", "perf/backwards", "perf/cpu_s")
    own = run.breakers.calls(own_costs, run, cpu_s) or [math.nan] * len(names)  # other ranks wait for what this one has
    sums = map(sum, zip(*gather_json(run.dist, own), strict=True))
    return {name: total for name, total in zip(names, sums, strict=True) if not math.isnan(total)}


def own_costs(run: AnyRun, cpu_s: float) -> list[float]:
    """Return the forwards and backwards of samples, and the CPU seconds, of this rank."""
    with_gradients = sum(samples for (_, has_gradient, _), samples in run.calls.items() if has_gradient)
    samples = [count / run.dist.context for count in (sum(run.calls.values()), with_gradients)]
    samples[0] += run.counts["forwards"]  # of ranks that only sample
    return [*samples, cpu_s + run.counts["cpu_ms"] / 1000]


def is_judged(line: Mapping[str, float]) -> bool:
    """Return True if a line of the log has an evaluation."""
    return any(name.startswith("eval/") for name in line)


def is_added(name: str) -> bool:
    """Return True for what the log itself adds to a line."""
    return name == "step" or name.startswith("time/") or name.endswith(("samples_per_s", "_tflops", "_mfu"))


def hold_out(run: AnyRun, done: int, evals: list[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics of the held-out prompts under the averaged weights; a run that trains exports these weights.

    evals: metrics of the evaluations so far; this one is appended.
    """
    with run.policy.ema.applied():
        run.sync_weights(done)
        metrics, shown = evaluate(run.held_out, partial(_evaluate_set, run))
        metrics |= settings_since(run)
        if report := run.session.report:
            run.breakers.pictures(lambda: report.show_eval(done, *mixed(shown)))
        evals += [{"step": done} | metrics] if "eval/reward" in metrics else []
        if done and not run.args.eval.only:
            if run.args.checkpoint_url:
                run.session.checkpoints.wait()  # a save in progress sends the weights before
            has_card = run.dist.is_main and "eval/reward" in metrics
            run.export(run, run.breakers.card(_model_card, run, evals) if has_card else None)
    run.sync_weights(done)
    return metrics


def _evaluate_set(run: AnyRun, held: HeldOut[Any, Any]) -> tuple[dict[str, float], Shown]:
    size = held.batch_size(run.args.batch_size, run.dist.num_shares)
    return run.evaluate_set(replace(run, args=change(run.args, batch_size=size)), held)


def settings_since(run: AnyRun) -> dict[str, float]:
    """Return the metrics that tell from which step on each set, also one left out since, is evaluated as it was last.

    There are none if all are since the start.
    """
    dates: Mapping[str, tuple[str, int]] = run.session.config.get(EVALS, {})  # type: ignore[assignment]  # of the loop
    found = {f"{start}{SETTINGS_SINCE}": since for start, since in starts_of(dates).items()}
    return found if any(found.values()) and not run.args.eval.only else {}


def gold_of(line: Mapping[str, float]) -> list[Gold]:
    """Return the gold score of a line that has one, else nothing."""
    error = line.get(error_of(GOLD_REWARD), 0.0)
    return [Gold(line[GOLD_REWARD], error, int(line["step"]))] if GOLD_REWARD in line else []


def best_of(golds: Sequence[Gold]) -> int | None:
    """Return the step with the best gold score, the first of equal ones; None if there is none."""
    return max(golds, key=lambda gold: gold.score).step if golds else None


def keep_best(run: AnyRun) -> None:
    """Copy the weights that were just exported to runs/NAME/best, completely or not at all."""
    weights, best = run.session.folder / "weights", run.session.folder / "best"
    with same_error(run.dist):
        if run.dist.is_main:
            write_folder_atomically(best, lambda into: shutil.copytree(weights, into, dirs_exist_ok=True))


def _model_card(run: AnyRun, evals: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return the facts of the model card, with the latest held-out scores.

    Raises:
        ValueError: they make no card, as a score is not finite.
    """
    first = {"held-out, base": evals[0]["eval/reward"]} if evals[0]["step"] == 0 and len(evals) > 1 else {}
    more = {
        f"held-out, {h.name}": evals[-1][h.metric("reward")]
        for h in run.held_out[1:]
        if h.metric("reward") in evals[-1]
    }
    plain, settings = flat(type(run.args)()), flat(without_secrets(run.args))
    path = run.session.folder / "versions.jsonl"  # which is missing where its record failed
    now = {"command": command_line(sys.argv, hide=secret_flags(run.args))}
    starts = dict.fromkeys(str(start["command"]) for start in (read_jsonl(path) if path.exists() else [now]))
    facts: dict[str, object] = {
        "base": run.base,
        "algorithm": run.algorithm,
        "settings": {name: value for name, value in settings.items() if value != plain[name]},
        "scores": {"held-out": evals[-1]["eval/reward"], **first, **more},
        "command": "\n".join(starts),
    }
    model_card(facts, is_lora=bool(run.args.lora.rank))
    return facts


def _alarm_text(done: int, alarm: Alarm) -> str:
    """Return the line of an alarm; the report shows the same from the log."""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in alarm.numbers.items())
    return f"ALARM after step {done}: {alarm.title} ({numbers}). {alarm.look}"
