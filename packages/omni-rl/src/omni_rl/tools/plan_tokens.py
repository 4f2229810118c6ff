"""Answers of a planned run on text: each has the maximum length, and only a few of its tokens are sampled."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import torch
from omni_reward import Score
from omni_rollout import Prompt
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.model import wrap
from omni_rollout.tokens import TokenParams, TokenTrajectory
from omni_rollout.types import Cond
from omni_train.planned import PlannedDevice
from torch import Tensor

from omni_rl.flow.scorers import Pending, TextScorer

SAMPLED = 2  # tokens that are sampled at the beginning and at the end of an answer
UNCOUNTED = "answers"  # a phase that no plan includes


def with_distinct_scores(scorer: TextScorer) -> TextScorer:
    """Return a scorer with distinct scores, so that advantages are nonzero."""

    def submit(answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        future: Pending = Future()
        future.set_result([Score(float(prompt.index)) for prompt in prompts])
        return [future]

    return wrap(scorer, submit=submit)


def sample_ends(
    engine: TransformersEngine, device: PlannedDevice, prompts: Sequence[Prompt], params: TokenParams
) -> TokenTrajectory:
    """Return answers of --max-new-tokens tokens, and count memory and operations as if all had been sampled.

    The cost grows linearly from token to token, so the first few and the last few determine the total.
    """
    short_params = replace(params, max_new_tokens=min(SAMPLED, params.max_new_tokens))
    answers, peaks, flops = measure_tokens(engine, device, prompts, short_params)
    model, num_skipped, operations = engine.model, params.max_new_tokens - short_params.max_new_tokens, sum(flops)

    def inputs_with_answer(encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> Cond:
        rows = encoded[0]["input_ids"][-1:].repeat(len(encoded), num_skipped).to(tokens.device)  # any text token
        return model.inputs(encoded, rows, torch.ones_like(rows, dtype=torch.bool))

    if num_skipped:
        last_engine = TransformersEngine(wrap(model, inputs=inputs_with_answer), engine.net, synced=engine.synced)
        _, last_peaks, last_flops = measure_tokens(last_engine, device, prompts, short_params)
        peaks += last_peaks[1:]  # the first one reads all earlier tokens at once
        operations += num_skipped * flops[-1] + (last_flops[-1] - flops[-1]) * (num_skipped + 1) // 2
    device.add_transient(max(peaks), operations)
    answer_mask = torch.ones(len(prompts), params.max_new_tokens, dtype=torch.bool)
    log_prob, ended = torch.zeros(answer_mask.shape), ~answer_mask[:, 0]
    return replace(
        answers,
        tokens=answer_mask.long(),
        mask=answer_mask,
        forced=~answer_mask,
        rollout_log_prob=log_prob,
        ended=ended,
        params=params,
    )


def measure_tokens(
    engine: TransformersEngine, device: PlannedDevice, prompts: Sequence[Prompt], params: TokenParams
) -> tuple[TokenTrajectory, list[int], list[int]]:
    """Return answers, and for each of their tokens the peak bytes beyond those allocated before, and the operations."""
    base, marks = device.start_window(), list[tuple[int, int]]()

    def mark(*_: object) -> None:
        marks.append((device.window - base, device.flops.total()))
        device.start_window()

    with engine.net.register_forward_pre_hook(mark), device.phase(UNCOUNTED):
        answers = engine.generate(prompts, params)
    mark()
    del device.peaks[UNCOUNTED], device.flops[UNCOUNTED]
    peaks, flops = zip(*marks, strict=True)
    return answers, list(peaks[1:]), [after - before for before, after in pairwise(flops)]
