"""Token policies: rewards, rollout, evaluation, and the batches of an update.

Notation: N samples of a step over all ranks, B samples of a batch. The `index` of a prompt is the place of its sample
among the N.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from omni_losses.sequence import TokenMean, token_weights
from omni_reward import RewardClient, Score
from omni_reward.media import TEXT
from omni_reward.rules import SCORER, Rules, grade, judge
from omni_rollout import Prompt
from omni_rollout.engines.transformers import trajectory_from_texts
from omni_rollout.tokens import TokenEngine, TokenParams, TokenTrajectory
from omni_train.dist import Dist, deal, gather_by_index, gather_json
from omni_train.prompts.chats import answer_text
from omni_train.prompts.files import PromptRecord
from omni_train.shard import gathered
from torch import Tensor

from omni_rl.flow.evals import HeldOut, Shown, score_metrics
from omni_rl.flow.sampling import expand_groups, track_progress
from omni_rl.flow.scorers import Pending, TextScorer, future_of_rules, join_scores, try_submit
from omni_rl.flow.scoring import Rollout, collect, gather_rewards
from omni_rl.media.prompts import with_media
from omni_rl.report import Sample
from omni_rl.run.metrics import EXTREMES
from omni_rl.run.run import Step, TokenRun
from omni_rl.settings.token_args import TokenArgs


class RuleScorer:
    """Rules of `omni_reward.rules` in this process, and a server's score if SCORER is one of their terms.

    size: maximum number of samples in a request to the server; 0: a batch.
    """

    def __init__(self, rules: Rules, client: RewardClient | None = None, size: int = 0) -> None:
        self.rules = rules
        self.client, self.size, self._busy_s = client, size, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of work so far, including the server's."""
        return self._busy_s + (self.client.busy_s if self.client else 0.0)

    def submit(self, answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        """Return the future scores, or the RewardErrors of failed rules, after which all ranks save and end."""
        start, size = time.perf_counter(), self.size or len(answers)
        pieces = [slice(i, i + size) for i in range(0, len(answers), size)] if self.client else [slice(None)]
        server_scores = [
            self._request_scores(self.client, answers[piece], prompts[piece]) if self.client else None
            for piece in pieces
        ]
        pending = [
            self._grade(answers[piece], prompts[piece], server_score)
            for piece, server_score in zip(pieces, server_scores, strict=True)
        ]
        self._busy_s += time.perf_counter() - start
        return pending

    def close(self) -> None:
        """Close the connections."""
        if self.client:
            self.client.close()

    def _request_scores(self, client: RewardClient, answers: Sequence[str], prompts: Sequence[Prompt]) -> Pending:
        """Request the server's scores."""
        references = [[image.numpy() for image in p.images] for p in prompts] if client.takes_references else None
        texts, metas = [p.text for p in prompts], [p.meta for p in prompts]
        return try_submit(partial(client.submit, {TEXT: answers}, texts, metas, references))

    def _grade(self, answers: Sequence[str], prompts: Sequence[Prompt], server_scores: Pending | None) -> Pending:
        """Return the future rewards that combine the rules and the server's score."""
        metas = [p.meta for p in prompts]
        if server_scores is None:
            return future_of_rules(partial(grade, self.rules, answers, metas), "--reward")
        return join_scores(
            future_of_rules(partial(judge, self.rules, answers, metas), "--reward"), server_scores, self._combine
        )

    def _combine(self, rule_values: Mapping[str, float], server_score: Score) -> Score:
        """Return the reward from the server's score and the rules' values, which become its parts."""
        reward = self.rules.reward
        if server_score.value is None or reward.is_plain:
            return server_score
        values = {**{name: server_score.value for name, spec in reward.specs.items() if spec == SCORER}, **rule_values}
        value, gate = reward.total(values)
        parts = {**{f"{SCORER}.{name}": part for name, part in server_score.parts.items()}, **values, **gate}
        return Score.of(value, parts=parts, details={**server_score.details, **parts})


class Unscored:
    """A scorer that gives no answer a score."""

    busy_s = 0.0

    def submit(self, answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        """Return scores without a value."""
        future: Pending = Future()
        future.set_result([Score(None, abstained="answers of training are not scored")] * len(answers))
        return [future]

    def close(self) -> None:
        """Do nothing."""


def evaluate_set(
    run: TokenRun[TokenArgs], eval_set: HeldOut[TokenParams, TextScorer]
) -> tuple[dict[str, float], Shown]:
    """Return metrics of a set's answers, and this rank's answers for the report."""
    prompts = expand_prompts(eval_set.records, eval_set.samples, seed=eval_set.seed, step=-1)  # the same for every run
    multiple = run.args.data.batch_size * run.dist.world_size
    indices = range(-(-len(prompts) // multiple) * multiple)  # ranks of a sharded net run equally many batches
    filled = [replace(prompts[i % len(prompts)], index=i, group=i) for i in indices]
    with gathered(run.policy.net) if "rollout" in run.policy.unshard else nullcontext():
        rollout = sample_answers(run, filled, eval_set.params, eval_set.scorer)
    scores, groups = collect(run.dist, rollout.pending, rollout.num_scored), torch.arange(len(filled))
    rewards = gather_rewards(run.dist, rollout.batches, scores, groups)[: len(prompts)]
    return score_metrics(eval_set, rewards), run.breakers.pictures(_report_answers, rollout.batches, scores) or ([], [])


def expand_prompts(records: Sequence[PromptRecord], group_size: int, *, seed: int, step: int) -> list[Prompt]:
    """Return `group_size` samples of each prompt, group by group, each with its own seed, and with their media."""
    samples = expand_groups(records, group_size, seed=seed, step=step)
    return [with_media(sample, records[sample.group]) for sample in samples]


def sample_round(
    run: TokenRun[TokenArgs], number: int, earlier: Rollout[TokenTrajectory] | None = None
) -> Rollout[TokenTrajectory]:
    """Sample answers to the prompts of the run's round `number`, and append them to those of `earlier`."""
    args = run.args
    round_prompts = expand_prompts(run.prompts.at(number), args.data.group_size, seed=args.run.seed, step=number)
    count = len(earlier.prompts) if earlier else 0
    prompts = [replace(p, index=p.index + count, group=p.group + count // args.data.group_size) for p in round_prompts]
    with run.phase("rollout"):
        rollout = sample_answers(run, prompts, run.base_params)
    if earlier is None:
        return rollout
    return Rollout(
        [*earlier.prompts, *prompts],
        [*earlier.batches, *rollout.batches],
        [*earlier.pending, *rollout.pending],
        rollout.consecutive,
    )


def read_answers(run: TokenRun[TokenArgs], step: Step, key: str) -> list[TokenTrajectory]:
    """Return this rank's batches of the answers stored under `key` with the step's prompts."""
    prompts = expand_prompts(run.prompts.at(step.number), 1, seed=run.args.run.seed, step=step.number)
    with run.phase("read"):
        return [
            trajectory_from_texts(
                run.model,
                batch_prompts,
                [answer_text(p.meta[key], key, p.text) for p in batch_prompts],
                run.base_params,
            )
            for batch_prompts in deal(prompts, run.dist, run.args.data.batch_size)
        ]


def sample_answers(
    run: TokenRun[TokenArgs], prompts: Sequence[Prompt], params: TokenParams, scorer: TextScorer | None = None
) -> Rollout[TokenTrajectory]:
    """Return this rank's batches of answers to `prompts`, with the pending scores of `scorer` or the run's scorer.

    Raises:
        RuntimeError: the engine's weights are not those of the last sync.
    """
    batches: list[TokenTrajectory] = []
    pending: list[Pending] = []
    prompt_batches = deal(prompts, run.dist, run.args.data.batch_size)
    for batch_prompts, batch in zip(
        track_progress(prompt_batches), _generate(run.engine, prompt_batches, params), strict=True
    ):
        if batch.weight_version != run.version:
            raise RuntimeError(f"the engine samples with weights {batch.weight_version}, the trainer has {run.version}")
        batches.append(batch)
        run.counts["sampled"] += len(batch)
        pending += (scorer or run.scorer).submit(batch.answers, batch_prompts)
    return Rollout(prompts, batches, pending, run.args.data.batch_size)


def gather_lengths(dist: Dist, batches: Sequence[TokenTrajectory], total: int) -> tuple[Tensor, Tensor]:
    """Return the lengths [total] of all ranks' texts, and [total] with 1 for each text that has ended."""
    indices = torch.cat([batch.indices for batch in batches])
    lengths = torch.cat([batch.lengths for batch in batches]).float()
    ended = torch.cat([batch.ended for batch in batches]).float()
    return gather_by_index(dist, indices, lengths, total), gather_by_index(dist, indices, ended, total)


def _generate(
    engine: TokenEngine, prompt_batches: Sequence[Sequence[Prompt]], params: TokenParams
) -> Iterator[TokenTrajectory]:
    """Yield the answers to batches of prompts, from one call each, or one call for all if the engine batches itself."""
    if engine.shares_weights:
        yield from (engine.generate(batch_rows, params) for batch_rows in prompt_batches)
        return
    rows = torch.arange(sum(map(len, prompt_batches))).split([len(batch_rows) for batch_rows in prompt_batches])
    answers = engine.generate([*chain(*prompt_batches)], params)
    yield from (answers.select(batch_rows) for batch_rows in rows)


def show_answers(run: TokenRun[TokenArgs], step: Step, rollout: Rollout[TokenTrajectory]) -> None:
    """Show the best and worst of some of rank 0's answers in the report."""
    if report := run.session.report:
        scores = rollout.scores
        run.breakers.pictures(lambda: report.show_samples(step.number + 1, *_report_answers(rollout.batches, scores)))


def _report_answers(batches: Sequence[TokenTrajectory], scores: Sequence[Score]) -> Shown:
    """Return the media of each of this rank's prompts by kind, and the answers' rows in the report."""
    media, rows = [], []
    answered = [(p, answer) for batch in batches for p, answer in zip(batch.prompts, batch.answers, strict=True)]
    for (p, answer), score in zip(answered, scores, strict=True):
        prompt_media = {"image": p.images[0] if p.images else None, "video": p.video, "audio": p.audio}
        media.append({kind: tensor for kind, tensor in prompt_media.items() if tensor is not None})
        fields = (score.value, p.group, p.seed, score.details, score.abstained, p.images[1:], p.rates)
        rows.append(Sample(p.text, *fields, answer=answer))
    return media, rows


@dataclass(frozen=True)
class TokenBatch:
    """Answers of one forward of an update. advantages: [B]. weights: [B], per token of an answer; 0 for a filler.

    by_answer, by_token: number of answers (tokens) of this batch relative to the average forward, as weights of metrics
    that are averaged over forwards and ranks.
    """

    trajectory: TokenTrajectory
    advantages: Tensor
    weights: Tensor
    by_answer: float
    by_token: float

    def weigh(self, metrics: dict[str, Tensor], *, of_answers: bool = False) -> dict[str, Tensor]:
        """Weight a forward's means over answers or tokens, so that averages over forwards and ranks are exact.

        Extremes are unchanged. A filler batch affects neither.
        """
        if not self.by_answer:
            neutral = {"mean": 0.0, "max": -torch.inf, "min": torch.inf}
            return {
                name: torch.full_like(value, neutral[EXTREMES.get(name, "mean")]) for name, value in metrics.items()
            }
        scales = {name: self.by_answer if of_answers or name == "tokens_mean" else self.by_token for name in metrics}
        return {name: value if name in EXTREMES else value * scales[name] for name, value in metrics.items()}


def pack_all(run: TokenRun[TokenArgs], batches: Sequence[TokenTrajectory]) -> list[list[TokenBatch]]:
    """Return the batches of `pack` with all of a step's samples, equally weighted, and a mean over their tokens."""
    ones = torch.ones(run.args.data.prompts_per_step * run.args.data.group_size)
    return pack(run, batches, ones, ones.bool(), mean="token")


def pack(
    run: TokenRun[TokenArgs], batches: Sequence[TokenTrajectory], advantages: Tensor, keep: Tensor, *, mean: TokenMean
) -> list[list[TokenBatch]]:
    """Return this rank's batches of each minibatch, with weights for a mean over all ranks.

    All ranks have the same number of batches.

    A minibatch is a consecutive share of the kept samples. A batch holds at most --batch-size answers of similar
    length, and at most --tokens-per-batch tokens including prompts and padding.

    advantages, keep: [N], of all ranks' samples in order.
    """
    args, dist, trajectory = run.args, run.dist, TokenTrajectory.cat(batches)
    trained = trajectory.sampled.sum(dim=1)
    lengths = gather_by_index(dist, trajectory.indices, trained.float(), len(keep))
    sizes = [
        (len(encoded["input_ids"]), length)
        for encoded, length in zip(trajectory.encoded, trajectory.lengths.tolist(), strict=True)
    ]
    shares, row_batches = keep.nonzero()[:, 0].tensor_split(args.data.num_minibatches), []
    for share in shares:
        rows = torch.isin(trajectory.indices, share).nonzero()[:, 0].tolist()
        row_batches.append(split_rows(rows, sizes, args.data.batch_size, args.data.tokens_per_batch))
    counts = torch.tensor(gather_json(dist, [len(batch_rows) for batch_rows in row_batches])).amax(dim=0)
    chosen: list[list[TokenBatch]] = []
    forwards = sum(max(1, count) for count in counts.tolist()) * dist.world_size
    mean_answers, mean_tokens = int(keep.sum()) / forwards, lengths[keep].sum().item() / forwards
    for share, batch_rows, count in zip(shares, row_batches, counts.tolist(), strict=True):
        weights = torch.zeros(len(keep))
        weights[share] = token_weights(lengths[share], mean=mean, max_tokens=args.sampling.max_new_tokens)
        chosen.append([])
        for rows in [*batch_rows, *[[0]] * (max(1, count) - len(batch_rows))]:
            batch = trajectory.select(rows).trim()
            is_counted = len(chosen[-1]) < len(batch_rows)
            batch_weights, batch_advantages = weights[batch.indices] * is_counted, advantages[batch.indices]
            scales = len(batch) * is_counted / mean_answers, batch.sampled.sum().item() * is_counted / mean_tokens
            chosen[-1].append(
                TokenBatch(batch, batch_advantages.to(dist.device), batch_weights.to(dist.device), *scales)
            )
    return chosen


def split_rows(rows: Sequence[int], sizes: Sequence[tuple[int, int]], max_rows: int, budget: int) -> list[list[int]]:
    """Cut rows, longest first, into batches of at most `max_rows` rows and `budget` tokens (0: no limit).

    A row that exceeds the budget is a batch of its own. sizes: number of tokens of the prompt and of the answer, each
    padded to the longest in the batch.
    """
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -sum(sizes[row])):
        extended = [*(batches[-1] if batches else ()), row]
        width = sum(max(sizes[i][part] for i in extended) for part in (0, 1))
        if not batches or len(extended) > max_rows or (budget and len(extended) * width > budget):
            batches.append([])
        batches[-1].append(row)
    return batches
