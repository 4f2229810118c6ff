"""Evaluation sets, and the metrics of their scores: means, best of several samples, pass@k."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, zip_longest
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

from omni_rollout import Params
from omni_rollout.tokens import TokenParams
from omni_train.files import probe_digest
from omni_train.prompts.files import PromptRecord
from torch import Tensor

from omni_rl.media.prompts import media_files
from omni_rl.report import Sample
from omni_rl.run.metrics import stderr_name
from omni_rl.settings.args import parse_numbers
from omni_rl.settings.eval_sets import EvalSet, MediaEvalSet

ParamsT = TypeVar("ParamsT", bound=Params | TokenParams)
ScorerT = TypeVar("ScorerT")
Shown = tuple[list[dict[str, Tensor]], list[Sample]]  # media of each sample by kind, and its row in the report


@dataclass(frozen=True)
class HeldOut(Generic[ParamsT, ScorerT]):
    """A set of evaluation prompts, with `samples` samples of each, generated with `params`.

    name: empty for --eval.prompts. threshold: the lowest score that passes. scorer: the set's scorer, if it is not the
    run's; version: its name and version. watch: a second scorer.
    """

    name: str
    records: Sequence[PromptRecord]
    params: ParamsT
    seed: int = 0
    samples: int = 1
    threshold: float | None = None
    scorer: ScorerT | None = None
    version: str = ""
    watch: ScorerT | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts and their files, the parameters, and the version of the set's scorer."""
        media = probe_digest((file for record in self.records for file in media_files(record)), num_blocks=1)
        content = [self.params, self.seed, self.samples, self.threshold, self.version, media, *self.records]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=_to_json_value).encode()).hexdigest()

    def batch_size(self, max_size: int, num_ranks: int) -> int:
        """Return the largest batch size, up to `max_size`, with which no rank is idle."""
        # a prompt's samples stay together
        return min(max_size, math.ceil(len(self.records) / num_ranks) * self.samples)

    def metric(self, name: str) -> str:
        """Return the name of a metric of this set in the log."""
        return f"{metric_prefix(self.name)}{name}"


def metric_prefix(name: str) -> str:
    """Return the prefix of a set's metrics in the log."""
    return f"eval/{name}/" if name else "eval/"


def _to_json_value(value: object) -> object:
    """Return a value as JSON can encode it: the fields of a dataclass, the name of a file or function."""
    if is_dataclass(value):
        return vars(value)
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)


def eval_set_params(eval_set: EvalSet, params: ParamsT) -> ParamsT:
    """Return the sampling parameters of a set: the run's, overridden by the set's."""
    names = {field.name for field in fields(params)} - {"guidance"}
    values = {name: value for name, value in vars(eval_set).items() if name in names and value is not None}
    if isinstance(eval_set, MediaEvalSet) and isinstance(params, Params):
        guidance = {**params.guidance, **parse_numbers(eval_set.guidance, "guidance")}
        if eval_set.true_cfg_scale is not None:
            guidance["true_cfg_scale"] = eval_set.true_cfg_scale
        values["guidance"] = {name: value for name, value in guidance.items() if (name, value) != ("true_cfg_scale", 1)}
    return replace(params, **values)


def score_metrics(eval_set: HeldOut[Any, Any], rewards: Tensor) -> dict[str, float]:
    """Return metrics of a set by their names in the log: the mean score, its standard error, best@n, pass@k.

    The standard error is over prompts, because samples of one prompt are correlated.

    rewards: [P * samples], prompt by prompt; NaN where there is none.
    """
    metrics = {"abstained_ratio": rewards.isnan().float().mean().item()}
    if not rewards.isnan().all():
        metrics["reward"] = rewards.nanmean().item()
    groups = [row[~row.isnan()].tolist() for row in rewards.view(-1, eval_set.samples)]
    means = [fmean(row) for row in groups if row]
    if len(means) > 1:
        metrics[stderr_name("reward")] = stdev(means) / math.sqrt(len(means))
    if eval_set.samples > 1 and any(groups):
        metrics[f"best@{eval_set.samples}"] = fmean([max(row) for row in groups if row])
    if eval_set.threshold is not None:
        passed = [(len(row), sum(score >= eval_set.threshold for score in row)) for row in groups]
        for k in sorted({2**i for i in range(eval_set.samples.bit_length())} | {eval_set.samples}):
            if chances := [pass_at_k(n, c, k) for n, c in passed if n >= k]:
                metrics[f"pass@{k}"] = fmean(chances)
    return {eval_set.metric(name): value for name, value in metrics.items()}


def tag_metrics(eval_set: HeldOut[Any, Any], name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of a score for each `tag` in the prompts' meta and, as `tags`, the mean of these means.

    The result is empty unless every prompt has a tag. `tags` is GenEval's score (arXiv 2310.11513, section 3).

    values: [P * samples], prompt by prompt; NaN where there is none.
    """
    scores_by_tag: dict[str, list[float]] = {}
    for record, row in zip(eval_set.records, values.view(-1, eval_set.samples), strict=True):
        scores_by_tag.setdefault(str(record.meta.get("tag", "")), []).extend(row[~row.isnan()].tolist())
    means = {tag: fmean(scores) for tag, scores in scores_by_tag.items() if scores}
    if "" in scores_by_tag or not means:
        return {}
    return {eval_set.metric(f"{name}/{tag}"): mean for tag, mean in {**means, "tags": fmean([*means.values()])}.items()}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k samples, chosen without replacement, passes.

    This is an unbiased estimator of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not 0 <= num_passed <= num_samples, or not 1 <= k <= num_samples.
    """
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        rule = "num_passed must be in [0, num_samples] and k in [1, num_samples]"
        raise ValueError(f"{rule}, got {num_passed}, {k} and {num_samples} samples")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def date_evaluations(
    sets: Sequence[HeldOut[Any, Any]], earlier: Mapping[str, object], now: int
) -> dict[str, tuple[str, int]]:
    """Return the digest of each set, and the first step since which it is the same: `now` if the digest changed.

    earlier: the result at the last start; sets in it that no longer exist are kept.
    """
    dates = dict(earlier)
    for eval_set in sets:
        match earlier.get(eval_set.name):
            case [digest, int(since)] if digest == eval_set.digest:
                dates[eval_set.name] = digest, since
            case known:
                dates[eval_set.name] = eval_set.digest, now if known else 0
    return dates  # type: ignore[return-value]  # returned by an earlier start


def dates_by_prefix(dates: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """Return the steps of `date_evaluations` by the prefix of a set's metrics."""
    return {metric_prefix(name): float(since) for name, (_, since) in dates.items()}


def evaluate(
    sets: Sequence[HeldOut[Any, Any]], evaluate_set: Callable[[HeldOut[Any, Any]], tuple[dict[str, float], Shown]]
) -> tuple[dict[str, float], list[tuple[str, Shown]]]:
    """Return the metrics of all sets, and each set's name with this rank's samples for the report."""
    metrics, shown = dict[str, float](), list[tuple[str, Shown]]()
    for eval_set in sets:
        set_metrics, set_samples = evaluate_set(eval_set)
        metrics |= set_metrics
        shown.append((eval_set.name, set_samples))
    return metrics, shown


def interleave_sets(sets: Sequence[tuple[str, Shown]]) -> Shown:
    """Interleave the samples of all sets, so that the first ones include every set."""

    def add_name(name: str, row: Sample) -> Sample:
        return replace(row, prompt=f"{name}: {row.prompt}") if name else row

    pairs = [[(media, add_name(name, row)) for media, row in zip(*shown, strict=True)] for name, shown in sets]
    interleaved = [pair for pair in chain.from_iterable(zip_longest(*pairs)) if pair]
    return [media for media, _ in interleaved], [row for _, row in interleaved]
