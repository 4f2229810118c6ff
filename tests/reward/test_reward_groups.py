"""Groups: whole ones come to the scorers that compare samples, and to no other."""

import json
import struct
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from omni_reward import RewardClient, RewardError, RewardHTTPError, Score, Scorer
from omni_reward.combine import combine
from omni_reward.media import group_slices
from omni_reward.scorers import load_scorer
from omni_reward.scorers.frames import over_frames
from omni_reward.terms import parse
from omni_reward.wire import decode_request
from reward.reward_helpers import halves

Given = dict[str, np.ndarray]


def images(*values: int) -> Given:
    return {"image": np.stack([np.full((2, 3, 3), value, np.uint8) for value in values])}


def above(media: Given, prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
    """The share of the others of a call that each sample is brighter than: it depends on who is in the call."""
    means = media["image"].mean(axis=(1, 2, 3))
    if len(means) < 2:
        return [Score(None, abstained="there is nothing to compare with")]
    return [Score(float((mean > means).sum() / (len(means) - 1))) for mean in means]


def body(groups: object) -> bytes:
    """A request of three images, whose groups may break any rule."""
    request = {"protocol": 1, "request_id": "r", "ids": ["0", "1", "2"], "prompts": ["a"] * 3, "meta": [{}] * 3}
    request["groups"] = groups
    image = {"dtype": "U8", "shape": [3, 1, 1, 3], "data_offsets": [0, 9]}
    header = json.dumps({"__metadata__": {"request": json.dumps(request)}, "image": image}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(9)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_slices_are_those_that_the_sizes_of_groups_add_up_to(sizes: list[int]) -> None:
    groups = [7 - number for number, size in enumerate(sizes) for _ in range(size)]
    starts = np.cumsum([0, *sizes])
    assert group_slices(groups) == [slice(a, b) for a, b in pairwise(starts)]


def test_each_call_holds_one_group_whatever_the_request_and_the_scores_come_in_order(serve: Callable[..., str]) -> None:
    calls: list[int] = []

    def score(media: Given, prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        calls.append(len(prompts))
        return above(media, prompts, meta)

    groups = {"a": (9, 1, 5), "b": (2, 3), "c": (4,)}
    values = [value for own in groups.values() for value in own]
    labels = [place for place, own in enumerate(groups.values()) for _ in own]
    with RewardClient(serve(Scorer(score, groups=True))) as client:
        assert client.takes_groups
        together = client.submit(images(*values), ["p"] * 6, groups=labels).result(10)
        assert calls == [3, 2, 1]
        apart = [
            client.submit(images(*own), ["p"] * len(own), groups=[5] * len(own)).result(10) for own in groups.values()
        ]
    assert [score.value for score in together] == [1.0, 0.0, 0.5, 0.0, 1.0, None]
    assert together[-1].abstained == "there is nothing to compare with"
    assert [score for own in apart for score in own] == together


def test_requests_of_several_clients_share_no_call(serve: Callable[..., str]) -> None:
    with RewardClient(serve(Scorer(above, groups=True))) as client:
        pending = [client.submit(images(i, i + 1), ["p"] * 2, groups=[0, 0]) for i in range(8)]
        assert [[score.value for score in future.result(10)] for future in pending] == [[0.0, 1.0]] * 8


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, r"groups must be a list of one integer per prompt \(3\), got None"),
        ([], r"groups must be a list of one integer per prompt \(3\), got \[\]"),
        ([0, 0], r"groups must be a list of one integer per prompt \(3\), got \[0, 0\]"),
        ([0, 0, True], r"groups must be a list of one integer per prompt \(3\), got \[0, 0, True\]"),
        ([0, 0, 1.0], r"groups must be a list of one integer per prompt"),
        ("000", r"groups must be a list of one integer per prompt"),
        ([0, 1, 0], r"groups must have the samples of a group one after another, got \[0, 1, 0\]"),
    ],
)
def test_groups_that_break_a_rule_are_refused_with_it(groups: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_request(body(groups), max_batch=3)


def test_groups_that_are_missing_or_too_many_are_refused_by_the_server(serve: Callable[..., str]) -> None:
    with RewardClient(serve(Scorer(above, groups=True))) as client:
        missing = client.submit(images(1, 2), ["p"] * 2).exception(10)
    assert isinstance(missing, RewardHTTPError)
    assert missing.fatal
    assert "groups must be given: the scorer takes them" in str(missing)
    with RewardClient(serve(halves)) as client:
        assert not client.takes_groups
        with pytest.raises(RewardHTTPError, match="groups must be left out: the scorer takes none"):
            client.submit(images(1, 2), ["p"] * 2, groups=[0, 0]).result(10)


def test_a_group_whose_scorer_raises_is_a_failure_of_its_request_and_never_a_zero(serve: Callable[..., str]) -> None:
    def score(media: Given, prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        if media["image"].max() == 13:
            raise ValueError
        return above(media, prompts, meta)

    url = serve(Scorer(score, groups=True))
    with RewardClient(url) as client, pytest.raises(RewardError, match="scorer_failed"):
        client.submit(images(1, 2, 13, 4), ["p"] * 4, groups=[0, 0, 1, 1]).result(10)
    with RewardClient(url, on_failure="mask_group") as client:
        scores = client.submit(images(1, 2, 13, 4), ["p"] * 4, groups=[0, 0, 1, 1]).result(10)
        good = client.submit(images(1, 2), ["p"] * 2, groups=[0, 0]).result(10)
    assert [(score.value, score.mask_group) for score in scores] == [(None, True)] * 4
    assert [score.value for score in good] == [0.0, 1.0]


def test_check_scores_its_prompts_as_one_group(serve: Callable[..., str]) -> None:
    with RewardClient(serve(Scorer(above, groups=True))) as client:
        assert [score.value for score in client.check(prompts=["p", "p"])[0]] == [0.0, 0.0]
        assert client.check()[0][0].abstained == "there is nothing to compare with"


def test_info_says_whether_a_scorer_takes_groups(serve: Callable[..., str]) -> None:
    for groups in (True, False):
        info = requests.get(serve(Scorer(above, groups=groups)) + "/info", timeout=10).json()
        assert (info["protocol"], info["groups"], info["batch_size"]) == (1, groups, None)


def test_a_combination_brings_whole_groups_to_all_and_batches_to_those_that_have_them() -> None:
    sizes: list[int] = []

    def single(media: Given, prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        sizes.append(len(prompts))
        return [float(value) for value in media["image"][:, 0, 0, 0]]

    both = combine(parse("2*x + y"), {"x": Scorer(above, groups=True), "y": Scorer(single, batch_size=2)})
    assert (both.groups, both.batch_size) == (True, None)
    scores = both(images(9, 1, 5), ["p"] * 3, [{}] * 3)
    assert [score.value for score in scores] == [2 * 1.0 + 9, 1, 2 * 0.5 + 5]
    assert scores[2].parts == {"x": 0.5, "y": 5.0}
    assert sizes == [2, 1]
    assert not combine(parse("2*x + y"), {"x": Scorer(halves), "y": Scorer(single)}).groups


def test_scorers_of_groups_refuse_a_batch_size_and_frames() -> None:
    with pytest.raises(ValueError, match="batch_size must be None for a scorer of whole groups, got 4"):
        Scorer(above, batch_size=4, groups=True)
    with pytest.raises(ValueError, match="frames: must be followed by a scorer of single images, got one of groups"):
        over_frames(Scorer(above, groups=True))


def test_a_file_of_a_user_s_own_may_hold_a_scorer_of_groups(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from omni_reward import Scorer\n"
        "def above(media, prompts, meta):\n"
        "    means = media['image'].mean(axis=(1, 2, 3))\n"
        "    return (means[:, None] > means).sum(axis=1) / (len(means) - 1)\n"
        "brightest = Scorer(above, groups=True)\n"
    )
    scorer = load_scorer(f"0.5*python:{tmp_path}/own.py:brightest as b")
    assert scorer.groups
    assert [score.value for score in scorer(images(9, 1, 5), ["p"] * 3, [{}] * 3)] == [0.5, 0.0, 0.25]
