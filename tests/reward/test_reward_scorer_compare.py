"""Win rates by a vision-language model: their arithmetic, the judge's favorite place, and questions without answers."""

import base64
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from omni_reward import RewardHTTPError, Score, Scorer
from omni_reward.scorers import load_scorer
from omni_reward.scorers.compare import GROUP_TASKS, question_orders, win_rates
from omni_reward.scorers.vlm import load_vlm
from PIL import Image
from reward.test_reward_scorer_vlm import FakeEndpoint

Answer = Callable[[list[int]], object]  # of the values of the images that a question shows


def judge(answer: Answer) -> Iterator[tuple[str, list[list[int]]]]:
    """The URL of an endpoint, and the values of the images of each of its questions."""
    shown: list[list[int]] = []

    def reply(request: Mapping[str, Any]) -> Any:
        [message] = request["messages"]
        *images, question = message["content"]
        datas = [base64.b64decode(image["image_url"]["url"].partition(",")[2]) for image in images]
        shown.append([int(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0]) for data in datas])
        assert '"a \\"red\\" cube"' in question["text"] or '[a "red" cube]' in question["text"]
        found = answer(shown[-1])
        return found if isinstance(found, tuple | str) else json.dumps(found)

    fake = FakeEndpoint(reply, ["judge-7b"])
    yield fake.url, shown
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def judged() -> Iterator[Callable[[Answer], tuple[str, list[list[int]]]]]:
    """Function that starts an endpoint."""
    started: list[Iterator[tuple[str, list[list[int]]]]] = []

    def start(answer: Answer) -> tuple[str, list[list[int]]]:
        started.append(judge(answer))
        return next(started[-1])

    yield start
    for each in started:
        next(each, None)


def better(values: list[int]) -> dict[str, object]:
    """The brighter of two images."""
    return {"reason": "brighter", "better": 1 if values[0] > values[1] else 2}


def places(values: list[int]) -> dict[str, object]:
    """The places of images by their brightness; equal ones share a place."""
    own = {f"image_{i}": 1 + sum(other > value for other in values) for i, value in enumerate(values, start=1)}
    return {"reason": "brighter", **own}


def pair_text(first: float) -> str:
    """An answer of UnifiedReward that gives the first of two images this score in each dimension."""
    axes = ("Alignment", "Coherence", "Style")
    return "\n\n".join(f"{axis} Score:\n Image 1: {first}\n Image 2: {1 - first}" for axis in axes)


def brighter(values: list[int]) -> str:
    return pair_text((1 + (values[0] > values[1]) - (values[0] < values[1])) / 2)


HONEST: dict[str, Answer] = {"preference": better, "unifiedreward_pair": brighter, "ranking": places}


def score(scorer: Scorer, *values: int) -> list[Score]:
    images = np.stack([np.full((4, 5, 3), value, np.uint8) for value in values])
    return scorer({"image": images}, ['a "red" cube'] * len(values), [{}] * len(values))


@pytest.mark.parametrize("task", GROUP_TASKS)
@pytest.mark.parametrize("orders", ["both", "one"])
def test_an_honest_judge_gives_each_image_the_share_that_it_is_better_than(judged, task, orders) -> None:
    url, shown = judged(HONEST[task])
    scorer = load_vlm(url, task=task, orders=orders)
    assert scorer.groups
    values = [7, 200, 30, 90]
    assert [found.value for found in score(scorer, *values)] == [sum(v > w for w in values) / 3 for v in values]
    pairs = [list(pair) for pair in combinations(values, 2)]
    if task == "ranking":
        assert [sorted(own) for own in shown] == [sorted(values)] * (2 if orders == "both" else 1)
        assert orders == "one" or sorted(shown) == sorted([values, values[::-1]])
    else:
        assert sorted(map(sorted, shown)) == sorted(map(sorted, pairs * (2 if orders == "both" else 1)))
        assert orders == "one" or sorted(shown) == sorted([*pairs, *(pair[::-1] for pair in pairs)])


@pytest.mark.parametrize("task", GROUP_TASKS)
def test_a_judge_that_prefers_the_first_image_tells_nothing_in_both_orders(judged, task) -> None:
    def first(values: list[int]) -> object:
        if task == "unifiedreward_pair":
            return pair_text(0.9)
        return {"reason": "", "better": 1} if task == "preference" else {"reason": ""} | {
            f"image_{i}": i for i in range(1, len(values) + 1)
        }  # fmt: skip

    url, _ = judged(first)
    assert [found.value for found in score(load_vlm(url, task=task), 7, 200, 30)] == [0.5] * 3
    many = range(7, 15)
    assert len({found.value for found in score(load_vlm(url, task=task, orders="one"), *many)}) > 1


def test_equal_places_are_half_a_win(judged) -> None:
    url, _ = judged(places)
    assert [found.value for found in score(load_vlm(url, task="ranking"), 9, 9, 5)] == [0.75, 0.75, 0]


def test_a_drawn_order_repeats_and_differs_between_seeds_and_prompts() -> None:
    def drawn(key: str) -> list[tuple[int, ...]]:
        return question_orders("preference", 6, "one", random.Random(key))

    assert drawn("0 a") == drawn("0 a")
    assert drawn("0 a") != drawn("1 a")
    firsts = [order[0] < order[1] for key in range(200) for order in drawn(str(key))]
    assert np.mean(firsts) == pytest.approx(0.5, abs=0.05)  # 3,000 pairs, of which the drawn seeds are fixed


def test_the_win_rates_are_those_of_the_released_arithmetic_where_all_is_answered() -> None:
    """Wins over comparisons, counted pair by pair as in Pref-GRPO's train_flux_pref_grpo.py."""
    draw = random.Random(0)
    told = {pair: draw.choice([1, 2]) for pair in combinations(range(8), 2)}
    wins, compared = [0.0] * 8, [0] * 8
    for (first, second), winner in told.items():
        compared[first] += 1
        compared[second] += 1
        wins[first if winner == 1 else second] += 1
    found = win_rates(8, [(pair, (winner, 3 - winner)) for pair, winner in told.items()])
    assert [own.value for own in found] == pytest.approx([w / c for w, c in zip(wins, compared, strict=True)])
    assert sum(own.value or 0 for own in found) == pytest.approx(8 / 2)


def test_the_scores_do_not_depend_on_the_order_of_the_answers() -> None:
    told = [(order, (1, 2)) for order in permutations(range(4), 2)]
    draw = random.Random(1)
    shuffled = draw.sample(told, len(told))
    assert win_rates(4, shuffled) == win_rates(4, told)


@pytest.mark.parametrize(
    "failed",
    [
        '{"reason": "", "better": 1.5}',
        '{"reason": "", "better": 3}',
        '{"better": 1}',
        "Image 1 is better",
        (500, b"{}"),
    ],
)
def test_a_comparison_that_fails_counts_for_neither_image_and_is_no_half_win(judged, failed) -> None:
    url, _ = judged(lambda values: failed if values == [30, 7] else better(values))
    seven, most, thirty, ninety = score(load_vlm(url, task="preference"), 7, 200, 30, 90)
    assert (seven.value, most.value, thirty.value, ninety.value) == (0.0, 1.0, 0.0, 2 / 3)
    assert seven.details == {
        "won": 0.0,
        "compared": 2,
        "others": 3,
    }  # the other order of that pair does not count either
    assert most.details == {"won": 3.0, "compared": 3, "others": 3}


def test_an_image_with_fewer_than_half_of_its_comparisons_abstains_and_the_others_do_not(judged) -> None:
    url, _ = judged(lambda values: "no" if 7 in values and 200 not in values else better(values))
    seven, most, thirty, ninety = score(load_vlm(url, task="preference"), 7, 200, 30, 90)
    assert seven.value is None
    assert seven.abstained == "1 of 3 comparisons were answered, fewer than half"
    assert (most.value, thirty.value, ninety.value) == (1.0, 0.0, 0.5)


def test_a_judge_that_answers_nothing_is_an_abstention_of_all_and_one_that_is_broken_a_failure(judged) -> None:
    url, _ = judged(lambda values: "I cannot compare them")
    assert [found.value for found in score(load_vlm(url, task="preference"), 7, 200, 30)] == [None] * 3
    url, _ = judged(lambda values: (401, b"{}"))
    scorer = load_vlm(url, task="preference")
    with pytest.raises(RewardHTTPError, match="401"):
        score(scorer, 7, 200, 30)


def test_a_single_image_has_nothing_to_be_compared_with_and_asks_nothing(judged) -> None:
    url, shown = judged(better)
    [only] = score(load_vlm(url, task="preference"), 7)
    assert only == Score(None, abstained="the group has no other sample to compare with")
    assert shown == []


def test_wrong_settings_and_groups_of_several_prompts_are_refused_by_name(judged) -> None:
    url, _ = judged(better)
    with pytest.raises(ValueError, match=r"orders must be one of \['both', 'one'\], got 'all'"):
        load_vlm(url, task="preference", orders="all")
    with pytest.raises(ValueError, match=re.escape("task must be one of ['alignment'")):
        load_vlm(url, task="pairs")
    with pytest.raises(ValueError, match=re.escape("a group must have one prompt, got 'a' and {'b'}")):
        load_vlm(url, task="preference")({"image": np.zeros((2, 2, 2, 3), np.uint8)}, ["a", "b"], [{}, {}])


def test_a_win_rate_and_a_single_score_make_one_reward(judged) -> None:
    url, _ = judged(better)
    options = {"vlm.url": url, "vlm.task": "preference"}
    scorer = load_scorer("0.7*vlm + 0*color", options=options)
    assert scorer.groups
    assert "preference both" in scorer.version
    assert "color" in score(scorer, 7, 200)[0].abstained  # of no color: it abstains, and so does the sum
