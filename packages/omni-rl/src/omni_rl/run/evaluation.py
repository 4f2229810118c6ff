"""Evaluations of a run: held-out sets under the averaged weights, export of these weights with a card, the best so far.

A `Line` is a line of the log, with its `step`. Lines of evaluations have a metric `eval/...`.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omni_train.dist import same_error
from omni_train.files import new_folder, read_jsonl
from omni_train.weights.card import model_card

from omni_rl.flow.evals import HeldOut, Shown, date_evaluations, dates_by_prefix, evaluate, interleave_sets
from omni_rl.media.write import format_score
from omni_rl.report.folder import command_line
from omni_rl.run.alarms import Line
from omni_rl.run.metrics import GOLD_REWARD, SETTINGS_SINCE, is_below_best, stderr_name
from omni_rl.run.run import AnyRun
from omni_rl.settings.args import secret_flags, without_secrets
from omni_rl.settings.fields import build, change, flatten
from omni_rl.settings.saved import EVALS

EvaluateSet = Callable[[Any, HeldOut[Any, Any]], tuple[dict[str, float], Shown]]
Export = Callable[[Any, Mapping[str, object] | None], None]


def is_due(run: AnyRun, done: int) -> bool:
    """Return True if an evaluation is due after `done` steps."""
    args = run.args
    return bool(done or args.eval.first) and (done % args.eval.every == 0 or done == args.run.train_steps)


def has_evaluation(line: Line) -> bool:
    """Return True if a line of the log contains an evaluation."""
    return any(name.startswith("eval/") for name in line)


def record_set_dates(run: AnyRun, now: int) -> dict[str, float]:
    """Record in the checkpoints since which step each set is evaluated as now; return `dates_by_prefix` of them."""
    earlier: Mapping[str, object] = run.session.config.get(EVALS, {})  # type: ignore[assignment]  # from an earlier start
    run.session.config[EVALS] = dates = date_evaluations(run.held_out, earlier, now)
    return dates_by_prefix(dates)


def evaluate_held_out(
    run: AnyRun, step: int, earlier: Sequence[Line], evaluate_set: EvaluateSet, export: Export
) -> dict[str, float]:
    """Evaluate the held-out prompts under the averaged weights, export these weights, and return the metrics.

    The weights are exported only if the run has trained. earlier: the lines of evaluations so far. evaluate_set,
    export: see `Loop`.
    """

    def evaluate_one(eval_set: HeldOut[Any, Any]) -> tuple[dict[str, float], Shown]:
        size = eval_set.batch_size(run.args.data.batch_size, run.dist.dp_size)
        return evaluate_set(replace(run, args=change(run.args, batch_size=size)), eval_set)

    with run.policy.ema.applied():
        run.sync_weights(step)
        metrics, shown = evaluate(run.held_out, evaluate_one)
        metrics |= settings_since(run)
        if report := run.session.report:
            run.breakers.pictures(lambda: report.show_eval(step, *interleave_sets(shown)))
        if step and not run.args.eval.only:
            if run.args.run.checkpoint_url:
                run.session.checkpoints.wait()  # a save in progress uploads the previous weights
            has_card = run.dist.is_main and "eval/reward" in metrics
            lines = [*earlier, {"step": step} | metrics]
            export(run, run.breakers.card(card_facts, run, lines) if has_card else None)
    run.sync_weights(step)
    return metrics


def settings_since(run: AnyRun) -> dict[str, float]:
    """Return, as metrics, the step since which each set is evaluated as it was last, including sets left out since.

    Empty if this holds for all sets since the start.
    """
    dates: Mapping[str, tuple[str, int]] = run.session.config.get(EVALS, {})  # type: ignore[assignment]  # `record_set_dates`
    since_by_metric = {f"{start}{SETTINGS_SINCE}": since for start, since in dates_by_prefix(dates).items()}
    return since_by_metric if any(since_by_metric.values()) and not run.args.eval.only else {}


def card_facts(run: AnyRun, evals: Sequence[Line]) -> dict[str, object]:
    """Return the facts of the model card, with the latest held-out scores.

    evals: the lines of evaluations.

    Raises:
        ValueError: a score is not finite, so there is no card.
    """
    evals = [line for line in evals if "eval/reward" in line]
    first = {"held-out, base": evals[0]["eval/reward"]} if evals[0]["step"] == 0 and len(evals) > 1 else {}
    other_sets = {
        f"held-out, {eval_set.name}": evals[-1][eval_set.metric("reward")]
        for eval_set in run.held_out[1:]
        if eval_set.metric("reward") in evals[-1]
    }
    defaults, settings = flatten(build(type(run.args), {})), flatten(without_secrets(run.args))
    path = run.session.folder / "versions.jsonl"  # missing if it could not be written
    command = {"command": command_line(sys.argv, hide=secret_flags(type(run.args)))}
    starts = dict.fromkeys(str(start["command"]) for start in (read_jsonl(path) if path.exists() else [command]))
    facts: dict[str, object] = {
        "base": run.base,
        "algorithm": run.algorithm,
        "settings": {name: value for name, value in settings.items() if value != defaults[name]},
        "scores": {"held-out": evals[-1]["eval/reward"], **first, **other_sets},
        "command": "\n".join(starts),
    }
    model_card(facts, is_lora=bool(run.args.lora.rank))
    return facts


def describe_changes(run: AnyRun, evals: Sequence[Line]) -> str:
    """Return the first and the last held-out score of each set as text."""
    changes = []
    for eval_set in run.held_out:
        scores = [line[eval_set.metric("reward")] for line in evals if eval_set.metric("reward") in line]
        if scores:
            first_and_last = scores[:: max(1, len(scores) - 1)]
            changes.append(
                f"{eval_set.name or 'held-out score'} {' -> '.join(format_score(score, 3) for score in first_and_last)}"
            )
    return ", ".join(changes) or "no held-out score"


def gold_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with a gold score."""
    return [line for line in lines if GOLD_REWARD in line]


def best_step(lines: Sequence[Line]) -> int | None:
    """Return the step with the best gold score, the first of equal ones, or None without gold scores."""
    scored = gold_lines(lines)
    return int(max(scored, key=lambda line: line[GOLD_REWARD])["step"]) if scored else None


def has_fallen(lines: Sequence[Line], count: int) -> bool:
    """Return True if the gold score has fallen, by `is_below_best`, in the last `count` lines that have one."""
    scored = gold_lines(lines)
    scores, errors = (
        [line[GOLD_REWARD] for line in scored],
        [line.get(stderr_name(GOLD_REWARD), 0.0) for line in scored],
    )
    return is_below_best(scores, errors, count)


def keep_best(run: AnyRun) -> None:
    """Copy the weights that were just exported to runs/NAME/best, atomically."""
    weights, best = run.session.folder / "weights", run.session.folder / "best"
    with same_error(run.dist):
        if run.dist.is_main:
            with new_folder(best) as folder:
                shutil.copytree(weights, folder, dirs_exist_ok=True)
