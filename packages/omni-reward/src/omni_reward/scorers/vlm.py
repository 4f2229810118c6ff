"""Scorer that asks a vision-language model at an OpenAI-compatible endpoint; the questions are in tasks.py.

A valid answer is a score. An answer in another format, out of range or truncated is an abstention with the reason, and
so is a sample on which the endpoint failed or timed out. If the endpoint failed on all samples of a call, the scorer
fails, and the client decides how to continue: a wrong token or a dead endpoint must not look like abstentions. Tasks
that compare the images of a group are in compare.py.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from omni_reward.errors import RewardError
from omni_reward.files import read_token
from omni_reward.media import Arrays, Meta, References
from omni_reward.scorers.chat import Endpoint, UnansweredError
from omni_reward.scorers.checklist import TASK, checklist
from omni_reward.scorers.compare import GROUP_TASKS, group_scorer
from omni_reward.scorers.tasks import QUESTIONS, TASKS, Task
from omni_reward.wire import Score, Scorer

logger = logging.getLogger("omni_reward.scorers.vlm")


def load_vlm(
    url: str,
    *,
    task: str,
    model: str | None = None,
    token_file: str | Path | None = None,
    timeout_s: float = 60.0,
    max_in_flight: int = 8,
    seed: int = 0,
    orders: str = "both",
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, and their references if the task is about edits.

    Args:
        url: the endpoint's base URL, such as http://127.0.0.1:8000/v1.
        task: a key of TASKS, TASK for the questions in each prompt's metadata, or a key of GROUP_TASKS, which score
            whole groups.
        model: name of the model; None if the endpoint serves only one.
        token_file: file with the endpoint's bearer token.
        timeout_s: time limit of a question, including retries.
        max_in_flight: maximum number of concurrent samples, or questions of GROUP_TASKS.
        seed: seed of the endpoint's sampler; the temperature is 0.
        orders: orders of the images in a question of GROUP_TASKS: `both`, or `one`, chosen at random.

    Raises:
        ValueError: an argument is invalid, or the endpoint does not answer or does not serve the model.
        OSError: the token file cannot be read.
    """
    if task not in (known := sorted((*TASKS, TASK, *GROUP_TASKS))):
        raise ValueError(f"task must be one of {known}, got {task!r}")
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be > 0 and finite, got {timeout_s}")
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be >= 1, got {max_in_flight}")
    endpoint = Endpoint(url, timeout_s, seed, read_token(token_file))
    try:
        models = endpoint.models()
    except RewardError as exc:
        raise ValueError(f"url must be that of an OpenAI-compatible endpoint: {exc}") from exc
    if model is None and len(models) == 1:
        model = models[0]
    if model is None or model not in models:
        raise ValueError(f"model must be one of {models}, got {model!r}")
    pool, ask = ThreadPoolExecutor(max_in_flight, thread_name_prefix="vlm"), partial(_ask, endpoint, model)
    if task in GROUP_TASKS:
        version = f"{model} {task} {orders} {GROUP_TASKS[task](2).version}"
        return Scorer(group_scorer(task, orders, seed, ask, pool), version=version, groups=True)
    about_edits = task in TASKS and TASKS[task].needs_reference

    def score(media: Arrays, prompts: list[str], meta: Meta, references: References = ()) -> list[Score]:
        before = [images[:1] for images in references] if about_edits else [()] * len(prompts)
        chosen = [_choose(task, *args) for args in zip(prompts, meta, before, strict=True)]
        questions = [(i, item) for i, item in enumerate(chosen) if isinstance(item, Task)]
        visible = [(*images, image) for images, image in zip(before, media["image"], strict=True)]
        answers = list(pool.map(lambda pair: ask(pair[1], visible[pair[0]], prompts[pair[0]]), questions))
        failures = [answer for answer in answers if isinstance(answer, RewardError)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        scores = iter(_no_answer(answer) if isinstance(answer, RewardError) else answer for answer in answers)
        return [item if isinstance(item, Score) else next(scores) for item in chosen]

    version = TASKS[task].version if task in TASKS else hashlib.sha256(QUESTIONS[TASK].encode()).hexdigest()[:12]
    return Scorer(score, version=f"{model} {task} {version}", references=about_edits)


def _choose(name: str, prompt: str, meta: Mapping[str, object], before: tuple[np.ndarray, ...]) -> Task | Score:
    """Return the task for a prompt, or the abstention if the prompt does not suit the task."""
    if name == TASK:
        try:
            return checklist(meta)
        except ValueError as exc:
            return Score(None, abstained=f"the prompt's metadata must have questions: {exc}")
    if TASKS[name].needs_reference and not before:
        return Score(None, abstained="the sample has no reference")
    return TASKS[name].decline(prompt) or TASKS[name]


def _ask(endpoint: Endpoint, model: str, task: Task, images: Sequence[np.ndarray], prompt: str) -> Score | RewardError:
    fields: dict[str, Any] = {}
    answer = ""
    try:
        for question in task.questions:
            visible = images if question.shows_all else images[-1:]
            answer = endpoint.ask(
                model, visible, question.ask(prompt), system=question.system, schema=question.schema()
            )
            fields |= question.read(answer)
        return task.score(fields, prompt)
    except UnansweredError as exc:
        return Score(None, abstained=str(exc))
    except RewardError as exc:
        return exc
    except ValueError as exc:
        reason = f"the answer has another form: {exc}"[:500]
        return Score(None, abstained=reason, details={"answer": answer[:1000]})


def _no_answer(error: RewardError) -> Score:
    logger.warning("no answer for a sample: %s", error)  # only the server's log gets the URL
    return Score(None, abstained=f"the endpoint did not answer: {type(error).__name__}")
