"""Win rates within a group of images, which a vision-language model compares; the rest is in vlm.py.

| task | a question shows | it asks for |
|---|---|---|
| `preference` | two images, for each pair of the group | the better one |
| `unifiedreward_pair` | the same | scores of both, as in UnifiedReward 2.0's training; their means decide |
| `ranking` | all images of the group | the place of each; equal places are a tie |

A score is the share of the other samples that a sample beats, in [0, 1]. A tie counts one half; a group's mean is 1/2.
With `orders` both, each question is also asked with its images in reverse order, and the shares are averaged, because
models favor one position. With `orders` one, each question is asked once, in a random order that depends on the seed
and the prompt. A pair with an unanswered question counts for neither sample. A sample with fewer than half of its pairs
has no score.

`preference` is the reward of Pref-GRPO (arXiv 2508.20751). Its released code asks once per pair, with the lower index
first, and counts an unparsable answer as half a win for both; here it counts for neither.

Notation: G samples of a group.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np

from omni_reward.errors import RewardError
from omni_reward.scorers.tasks import NUMBER, QUESTIONS, Message, Task
from omni_reward.wire import Score, ScoreFn

Order = tuple[int, ...]  # indices in the group of the images that a question shows
Ask = Callable[[Task, Sequence[np.ndarray], str], Score | RewardError]
ORDERS = ("both", "one")


def ranking_task(count: int) -> Task:
    """Return the task that ranks `count` images; the parts of its score are their places."""
    fields = {"reason": None, **{f"image_{i}": (1, count) for i in range(1, count + 1)}}
    question = QUESTIONS["ranking"].replace("{count}", str(count))
    return Task(
        (Message(question, fields, shows_all=True),),
        lambda answers, prompt: Score(0.0, parts={k: answers[k] for k in fields if k != "reason"}),
    )


def _score_preference(fields: dict[str, float], prompt: str) -> Score:
    """Return the places of two images, as the parts of a score."""
    if (better := fields["better"]) not in (1, 2):
        raise ValueError(f"better must be 1 or 2, got {better}")
    return Score(0.0, parts={"image_1": better, "image_2": 3 - better})


PREFERENCE = Task(
    (Message(QUESTIONS["preference"], {"reason": None, "better": (1, 2)}, shows_all=True),), _score_preference
)
AXES = ("alignment", "coherence", "style")


def _score_pair(fields: dict[str, float], prompt: str) -> Score:
    """Return the places of two images by the means of UnifiedReward's relative scores, as the parts of a score."""
    first, second = (sum(fields[f"{axis}_{i}"] for axis in AXES) for i in (1, 2))
    return Score(0.0, parts={"image_1": 1 + (first < second), "image_2": 1 + (second < first)})


PAIR = Task(
    (
        Message(
            QUESTIONS["unifiedreward_pair"],
            {f"{axis}_{i}": (0, 1) for axis in AXES for i in (1, 2)},
            r".*?".join(rf"{axis} Score:\s*Image 1:{NUMBER}\s*Image 2:{NUMBER}" for axis in AXES),
            shows_all=True,
        ),
    ),
    _score_pair,
)
# The task for a number of images, by name.
GROUP_TASKS: dict[str, Callable[[int], Task]] = {
    "preference": lambda count: PREFERENCE,
    "unifiedreward_pair": lambda count: PAIR,
    "ranking": ranking_task,
}


def question_orders(task: str, count: int, orders: str, draw: random.Random) -> list[Order]:
    """Return the indices of the images in each question about a group of `count` images."""
    questions = [tuple(range(count))] if task == "ranking" else list(combinations(range(count), 2))
    if orders == "both":
        return [*questions, *(order[::-1] for order in questions)]
    return [tuple(draw.sample(order, len(order))) for order in questions]


def win_rates(count: int, answers: Sequence[tuple[Order, Sequence[float] | None]]) -> list[Score]:
    """Return the score of each of `count` samples.

    answers: the images of each question, and their places (1 is the best) or None without an answer.
    """
    shares = defaultdict[Order, list[float]](list)  # share of the first of a pair; NaN without an answer
    for order, places in answers:
        for (a, first), (b, second) in combinations(enumerate(order), 2):
            share = math.nan if places is None else (1 + (places[a] < places[b]) - (places[a] > places[b])) / 2
            shares[min(first, second), max(first, second)].append(share if first < second else 1 - share)
    won: list[list[float]] = [[] for _ in range(count)]
    for (first, second), values in shares.items():
        if not math.isnan(mean := sum(values) / len(values)):
            won[first].append(mean)
            won[second].append(1 - mean)
    return [_score_wins(wins, count - 1) for wins in won]


def _score_wins(won: Sequence[float], others: int) -> Score:
    if not others:
        return Score(None, abstained="the group has no other sample to compare with")
    details = {"won": math.fsum(won), "compared": len(won), "others": others}
    if 2 * len(won) < others:
        reason = f"{len(won)} of {others} comparisons were answered, fewer than half"
        return Score(None, abstained=reason, details=details)
    return Score(math.fsum(won) / len(won), details=details)


def group_scorer(task: str, orders: str, seed: int, ask: Ask, pool: ThreadPoolExecutor) -> ScoreFn:
    """Return the scorer of the images of one group, which asks its questions in the threads of the pool.

    Raises:
        ValueError: orders is not one of ORDERS.
    """
    if orders not in ORDERS:
        raise ValueError(f"orders must be one of {list(ORDERS)}, got {orders!r}")

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        images, prompt = media["image"], prompts[0]
        if len(set(prompts)) > 1:
            raise ValueError(f"a group must have one prompt, got {prompt!r:.80} and {set(prompts) - {prompt}!r:.80}")
        image_orders = (
            question_orders(task, len(images), orders, random.Random(f"{seed} {prompt}")) if len(images) > 1 else []
        )
        question = GROUP_TASKS[task](len(images))
        answers = list(pool.map(lambda order: ask(question, [images[i] for i in order], prompt), image_orders))
        failures = [answer for answer in answers if isinstance(answer, RewardError)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        return win_rates(len(images), list(zip(image_orders, map(_read_places, answers), strict=True)))

    return score


def _read_places(answer: Score | RewardError) -> list[float] | None:
    """Return the places of the images in an answer, in the order of the question, or None without an answer."""
    if isinstance(answer, RewardError) or answer.value is None:
        return None
    return [answer.parts[f"image_{i}"] for i in range(1, len(answer.parts) + 1)]
