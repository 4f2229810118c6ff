"""The loop of a run: everything around and between its training steps.

    with Loop(run, evaluate_set, export) as steps:
        for step in steps:
            ...

Between steps it evaluates, logs, raises alarms, saves, and stops on request. If a step fails, it saves the finished
steps and reports the error.

`omni_rl.run.sources` yields the steps with their samples and may sample ahead. Once `is_stop_requested`, nothing more
is sampled ahead, and the run stops after the last step that has samples.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from omni_reward import RewardError
from omni_train.breaker import Breaker
from omni_train.dist import gather_json, same_error
from omni_train.files import load_metrics
from omni_train.log import is_log_field
from omni_train.progress import start_phase
from omni_train.signals import resume_command

from omni_rl.run.alarms import Line, Watch
from omni_rl.run.costs import Work, measure_step, step_work
from omni_rl.run.evaluation import (
    EvaluateSet,
    Export,
    best_step,
    describe_changes,
    evaluate_held_out,
    has_evaluation,
    has_fallen,
    is_due,
    keep_best,
    record_set_dates,
)
from omni_rl.run.failures import catch_failures
from omni_rl.run.metrics import GOLD_REWARD, drop_stale_evaluations
from omni_rl.run.notify import announce, print_line
from omni_rl.run.run import AnyRun, Step
from omni_rl.settings.saved import LOSS_SCALE


class Loop:
    """The remaining training steps of a run. The `with` block closes the log and, on success, the run.

    evaluate_set: `(run, eval_set) -> metrics, samples for the report` of a held-out set, without injected noise.
    export: `(run, card)` writes the trained weights to runs/NAME/weights. is_stop_requested: True if the run is to
    stop.
    next_to_sample: one past the last step that has samples; set by `sources`.
    """

    def __init__(self, run: AnyRun, evaluate_set: EvaluateSet, export: Export) -> None:
        self.run, self.evaluate_set, self.export = run, evaluate_set, export
        self.is_stop_requested, self.next_to_sample = False, 0
        self._done = run.session.num_done  # finished steps; line n of the log is written after n steps
        self._saved = self._done  # finished steps of the newest checkpoint, which may still be in progress
        self._in_step = False  # True while the trainer's code runs
        self._watch, self._alarms = Watch(), Breaker("the alarms")
        self._evals: list[Line] = []  # lines with an evaluation, in step order, the same on every rank
        self._pending_line: dict[str, float] = {}  # the last line, if its evaluation is still due
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self._open.enter_context(self._open_run())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    @contextmanager
    def _open_run(self) -> Iterator[Self]:
        """Read the log of the run before it resumed. If the block fails, save the finished steps."""
        self._read_lines()
        start_phase("")
        run, checkpoints = self.run, self.run.session.checkpoints
        checkpoints.pinned = best = best_step(self._evals)
        with same_error(run.dist):
            if best and run.dist.is_main:
                run.session.fetch_best(best)
        with catch_failures(run) as self._stop:
            try:
                yield self
            except Exception as error:
                if isinstance(error, RewardError) and self._in_step:  # on all ranks, before the weights changed
                    run.policy.optimizer.zero_grad(set_to_none=True)  # an update may have begun before all scores came
                    self._save()
                    checkpoints.wait()
                else:
                    checkpoints.wait_alone()
                raise

    def _read_lines(self) -> None:
        """Read the evaluations before the run resumed, and the last line if its evaluation is still due."""
        run, done = self.run, self._done
        lines = load_metrics(run.session.folder / "metrics.jsonl") if run.dist.is_main else []
        if lines and done == lines[-1]["step"] > 0 and is_due(run, done) and not has_evaluation(lines[-1]):
            self._pending_line = lines.pop()
        self._pending_line = gather_json(run.dist, self._pending_line)[0]
        dates = record_set_dates(run, max(0, done + (not self._pending_line)))
        for line in (kept_lines := drop_stale_evaluations(lines, dates)):
            self._alarms(self._watch, line)
        self._evals = gather_json(run.dist, [line for line in kept_lines if has_evaluation(line)])[0]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.run.world.steps(self.run, self._remaining_steps()))

    def _remaining_steps(self) -> Iterator[Step]:
        """Yield the remaining steps, and do the work before, between and after them."""
        run, args = self.run, self.run.args
        if args.eval.only:
            return self._evaluate_alone()
        stops = run.session.num_done < 0 and self._finish(Step(-1))  # line 0: the initial model
        if self._pending_line:  # its scorer failed
            step = Step(self._done - 1)
            step.metrics = {name: value for name, value in self._pending_line.items() if not is_log_field(name)}
            stops = self._finish(step)
        for number in range(max(self._done, 0), args.run.train_steps):
            if stops:
                return
            step = Step(number)
            start_phase(f"step {number + 1}")
            with measure_step(run, step):
                self._in_step = True
                yield step
                step.finish_grading()  # if no optimizer step was attempted
                self._in_step = False
            start_phase("")
            if not step.has_signal and run.dist.is_main:
                print_line(f"step {number + 1}: no sample has a signal, so no optimizer step was taken")
            stops = self._finish(step)
        if self._done == args.run.train_steps:
            self._announce_end("report, weights and metrics")

    def _evaluate_alone(self) -> None:
        """Evaluate and log without changing the run."""
        step = Step(max(self._done, 0) - 1)
        self._evaluate(step)
        self.run.session.log.log(step.number + 1, step.metrics)
        self._announce_end("report and metrics")

    def _announce_end(self, written: str) -> None:
        """Print the held-out scores of each set, and the folder of the results."""
        if self.run.dist.is_main:
            announce(
                f"{describe_changes(self.run, self._evals)}; {written} in {self.run.session.folder}", self.run.args
            )

    def _finish(self, step: Step) -> bool:
        """Evaluate, log and save if due; return True if the run stops here."""
        run, args, done, is_main = self.run, self.run.args, step.number + 1, self.run.dist.is_main
        work = step_work(run)  # before an evaluation samples more
        try:
            if is_due(run, done):
                self._evaluate(step)
        except RewardError:  # on all ranks: save the steps, and evaluate them when the run resumes
            if done:
                self._log(step, work)
                self._save()
                run.session.checkpoints.wait()
            raise
        self._log(step, work)
        if is_main:
            for alarm in self._alarms(self._watch, {"step": done} | step.metrics) or ():
                announce(alarm.text, args, sys.stderr)
        count = args.eval.stop_after if GOLD_REWARD in step.metrics else 0
        has_gold_fallen = count > 0 and has_fallen(self._evals, count)
        self.is_stop_requested = self._stop.requested(run.dist) or has_gold_fallen
        stops = self.is_stop_requested and done >= self.next_to_sample
        best, is_last = best_step(self._evals), stops or done == args.run.train_steps
        self._save_when_due(is_last=is_last, must_save=is_last or done % args.run.save_every == 0 or done == best)
        if has_gold_fallen and is_main:
            location = (
                f", whose weights are in {run.session.folder / 'best'}" if best else ", the model as it was given"
            )
            announce(f"--eval.stop-on {args.eval.stop_on}: the gold score has fallen since step {best}{location}", args)
        if stops and done < args.run.train_steps and is_main:
            announce(f"stopped after step {done}", args, more=f"; this continues:\n{resume_command()}")
        return stops

    def _evaluate(self, step: Step) -> None:
        """Evaluate, and keep the weights that are the best so far."""
        run, done = self.run, step.number + 1
        with run.phase("eval"):
            metrics = evaluate_held_out(run, done, self._evals, self.evaluate_set, self.export)
            step.metrics |= metrics
            self._evals.append({"step": done} | metrics)
            if done and not run.args.eval.only and best_step(self._evals) == done:
                keep_best(run)

    def _log(self, step: Step, work: Work) -> None:
        """Write the line of a step and mark it finished."""
        self.run.session.log.log(step.number + 1, step.metrics, **work)
        self._done = step.number + 1

    def _save_when_due(self, *, is_last: bool, must_save: bool) -> None:
        """Poll a save in progress, begin one if `must_save`, and wait for the last one.

        It is called after the line of its step is written, so that no line is lost.
        """
        checkpoints = self.run.session.checkpoints
        if not (must_save or checkpoints.is_saving):
            return
        with self.run.phase("save"):
            checkpoints.poll()
            if must_save:
                self._save()
            if is_last or not self._done:  # a run with logged steps but no checkpoint could not resume
                checkpoints.wait()

    def _save(self) -> None:
        """Begin a checkpoint of the finished steps, unless it exists."""
        run, checkpoints = self.run, self.run.session.checkpoints
        if self._saved == self._done:
            return
        scale = {LOSS_SCALE: run.policy.scaler.state_dict()} if run.policy.scaler else {}
        save = checkpoints.async_save if run.args.run.async_save else checkpoints.save
        state = run.policy.net, run.policy.optimizer, run.policy.averages
        save(self._done, *state, config=run.session.config | scale)
        self._saved = self._done
        # only once that save has begun, so that an older best stays complete
        checkpoints.pinned = best_step(self._evals)
