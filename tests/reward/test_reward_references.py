"""References: the pictures that samples were made from reach the scorers that take them, once each, and no other."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import requests
from omni_reward import RewardClient, RewardFormatError, RewardHTTPError, Score, Scorer
from omni_reward.combine import combine
from omni_reward.media import MAX_REFERENCES, ScoreRequest
from omni_reward.terms import parse
from omni_reward.wire import decode_request, encode_request
from reward.reward_helpers import halves

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
PROMPTS = ["a", "b", "c"]
SMALL, WIDE = (RNG.integers(0, 256, shape, dtype=np.uint8) for shape in ((2, 5, 3), (7, 9, 3)))
Given = Sequence[tuple[np.ndarray, ...]]


def request(references: Given, request_id: str = "r") -> ScoreRequest:
    return ScoreRequest({"image": IMAGES}, PROMPTS, [{}] * 3, request_id, references=references)


def sums(media: dict, prompts: list, meta: list, references: Given) -> list[float]:
    """What tells the references of one sample from those of another."""
    return [float(sum((i + 1) * int(picture.sum()) for i, picture in enumerate(own))) for own in references]


def assert_same(got: Given, wanted: Given) -> None:
    assert [[p.tolist() for p in own] for own in got] == [[p.tolist() for p in own] for own in wanted]


@pytest.mark.parametrize(
    "references",
    [[(SMALL,)] * 3, [(SMALL, WIDE), (WIDE, SMALL), (SMALL.copy(), WIDE)], [(SMALL,), (), (WIDE, WIDE)], [()] * 3],
    ids=["shared", "several", "uneven", "none of any sample"],
)
def test_references_come_back_as_they_were_sent(references: Given) -> None:
    got = decode_request(b"".join(encode_request(request(references))), max_batch=3)
    assert_same(got.references, references)
    assert got.media.keys() == {"image"}


def test_a_picture_that_samples_share_travels_once() -> None:
    alone = sum(map(len, encode_request(request([(WIDE,), (), ()]))[1:]))
    views = [(WIDE[:],), (np.asarray(WIDE),), (WIDE,)]  # other objects, the same memory
    assert sum(map(len, encode_request(request(views))[1:])) == alone == IMAGES.nbytes + WIDE.nbytes
    transposed = [(WIDE,), (WIDE[::-1],), (WIDE[:, ::-1],)]  # other pictures in the same memory
    assert_same(decode_request(b"".join(encode_request(request(transposed))), max_batch=3).references, transposed)


def test_a_request_without_references_has_the_bytes_of_before() -> None:
    head = bytes(encode_request(request(()))[0])
    assert b"reference" not in head


def test_bad_references_are_refused_on_the_side_that_sends() -> None:
    for references, message in (
        ([(SMALL,)], r"references must hold the images of each prompt \(3\), got 1"),
        ([(SMALL,) * (MAX_REFERENCES + 1)] * 3, "references must hold at most 16 of a sample, got 17"),
        ([(SMALL.astype(float),)] * 3, "references must be uint8 arrays, got dtype"),
        ([("a.png",)] * 3, "references must be uint8 arrays, got 'a.png'"),
        ([(SMALL[0],)] * 3, r"references must have the shape \[H, W, 3\], got \(5, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            request(references)


def test_a_scorer_that_takes_references_gets_each_sample_s_own(serve: Callable[..., str]) -> None:
    references = [(SMALL, WIDE), (WIDE,), ()]
    wanted = [Score(value) for value in sums({}, [], [], references)]
    for batch_size in (None, 2):
        with RewardClient(serve(Scorer(sums, references=True, batch_size=batch_size))) as client:
            assert client.takes_references
            assert client.submit({"image": IMAGES}, PROMPTS, references=references).result(10) == wanted


def test_requests_of_other_references_share_a_call() -> None:
    import asyncio

    from omni_reward.batching import Batcher

    calls = []

    def score(media: dict, prompts: list, meta: list, references: Given) -> list[float]:
        calls.append(len(prompts))
        return sums(media, prompts, meta, references)

    async def main() -> list[list[Score]]:
        batcher = Batcher(Scorer(score, references=True, batch_size=8))
        return await asyncio.gather(*(batcher.score(request([(p,)] * 3)) for p in (SMALL, WIDE)))

    assert asyncio.run(main()) == [[Score(float(p.sum()))] * 3 for p in (SMALL, WIDE)]
    assert calls == [6]


def test_info_says_whether_a_scorer_takes_references(serve: Callable[..., str]) -> None:
    for references, fn in ((True, sums), (False, halves)):
        info = requests.get(serve(Scorer(fn, references=references)) + "/info", timeout=10).json()
        assert info["references"] is references


def test_references_that_are_missing_or_too_many_are_refused_with_the_rule(serve: Callable[..., str]) -> None:
    with RewardClient(serve(Scorer(sums, references=True))) as client:
        missing = client.submit({"image": IMAGES}, PROMPTS).exception(10)
    assert isinstance(missing, RewardHTTPError)
    assert "references must be given: the scorer takes them" in str(missing)
    with RewardClient(serve(halves)) as client:
        assert not client.takes_references
        with pytest.raises(RewardHTTPError, match="references must be left out: the scorer takes none"):
            client.submit({"image": IMAGES}, PROMPTS, references=[(SMALL,)] * 3).result(10)


def test_check_shows_a_grey_reference_or_one_s_own(serve: Callable[..., str]) -> None:
    url = serve(Scorer(sums, references=True))
    with RewardClient(url) as client:
        assert client.check() == [[Score(128.0 * 64 * 64 * 3)]]
        assert client.check(references=[[SMALL]]) == [[Score(float(SMALL.sum()))]]
    message = r"references must be the same on all servers, got True at .* and False at "
    with RewardClient([url, serve(halves)]) as client, pytest.raises(RewardFormatError, match=message):
        client.check()


def test_a_combination_hands_references_to_those_that_take_them() -> None:
    scorers = {"x": Scorer(halves), "y": Scorer(sums, references=True, batch_size=2)}
    both = combine(parse("2*x + y"), scorers)
    assert both.references
    scores = both({"image": IMAGES}, PROMPTS, [{}] * 3, [(SMALL,), (WIDE,), (SMALL, WIDE)])
    values = sums({}, [], [], [(SMALL,), (WIDE,), (SMALL, WIDE)])
    assert [score.value for score in scores] == [1 + value for value in values]
    assert not combine(parse("2*x + y"), {"x": Scorer(halves), "y": Scorer(halves)}).references


def test_a_function_of_three_arguments_takes_no_references() -> None:
    with pytest.raises(ValueError, match=r"a scorer must be a function of \(media, prompts, meta, references\)"):
        Scorer(halves, references=True)
    with pytest.raises(ValueError, match=r"a scorer must be a function of \(media, prompts, meta\): "):
        Scorer(sums)
