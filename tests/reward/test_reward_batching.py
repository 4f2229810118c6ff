"""The batcher: calls are full but never mixed, every score finds its request, and one failure stays one failure."""

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_reward import RewardClient
from omni_reward.batching import Batcher, ScorerFailedError
from omni_reward.media import ScoreRequest
from omni_reward.wire import Score, Scorer

Kinds = dict[str, np.ndarray]
Outcome = list[float | None] | BaseException


def request(values: list[int], shape: tuple[int, ...] = (2, 2), **meta: object) -> ScoreRequest:
    """A request whose every image holds one value, which an honest scorer gives back."""
    images = np.stack([np.full((*shape, 3), value, np.uint8) for value in values])
    return ScoreRequest({"image": images}, [str(value) for value in values], [dict(meta) for _ in values], "r")


class Recorder:
    """A scorer that gives back what is in the images, remembers its calls, and waits with the first one until told."""

    def __init__(self, batch_size: int | None) -> None:
        self.calls: list[list[int]] = []
        self.go_on = threading.Event()
        self.scorer = Scorer(self, batch_size=batch_size)

    def __call__(self, media: Kinds, prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        values = [int(image[0, 0, 0]) for image in media["image"]]
        assert prompts == [str(value) for value in values]
        assert len(meta) == len(values)
        self.calls.append(values)
        assert self.go_on.wait(10)
        for sample in meta:
            if "raises" in sample:
                raise sample["raises"]  # type: ignore[misc]
        return [float(value) for value in values]


async def score_all(recorder: Recorder, requests: list[ScoreRequest]) -> list[Outcome]:
    """What each request got; all but the first are in the queue before the first call ends."""
    batcher = Batcher(recorder.scorer)
    tasks = [asyncio.ensure_future(batcher.score(item)) for item in requests]
    while not recorder.calls:
        await asyncio.sleep(0.001)
    recorder.go_on.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return [item if isinstance(item, BaseException) else [score.value for score in item] for item in outcomes]


def test_a_scorer_with_a_time_limit_is_told_when_a_request_came_not_when_its_turn_is():
    """Two ranks that ask it at once wait for one another."""
    calls: list[tuple[float, float]] = []

    def score(media: Kinds, prompts: list[str], meta: object, since: float) -> list[float]:
        calls.append((since, time.monotonic()))
        time.sleep(0.02)
        return [0.0] * len(prompts)

    async def ask() -> None:
        batcher = Batcher(Scorer(score, timed=True))
        await asyncio.gather(*(batcher.score(request([0])) for _ in range(2)))

    asyncio.run(ask())
    (first, began), (second, late) = calls
    assert max(first, second) <= began
    assert late - second >= 0.02


def run(
    batch_size: int | None, requests: list[ScoreRequest]
) -> tuple[list[list[float | None] | BaseException], Recorder]:
    recorder = Recorder(batch_size)
    return asyncio.run(score_all(recorder, requests)), recorder


def test_waiting_requests_are_put_together_up_to_the_batch_size() -> None:
    requests = [request([10 * i, 10 * i + 1, 10 * i + 2]) for i in range(5)]
    outcomes, recorder = run(8, requests)
    assert outcomes == [[10.0 * i, 10.0 * i + 1, 10.0 * i + 2] for i in range(5)]
    # All five were queued before the worker took the first call.
    assert recorder.calls == [[0, 1, 2, 10, 11, 12], [20, 21, 22, 30, 31, 32], [40, 41, 42]]


def test_a_long_request_is_cut() -> None:
    outcomes, recorder = run(4, [request(list(range(10)))])
    assert outcomes == [[float(i) for i in range(10)]]
    assert [len(call) for call in recorder.calls] == [4, 4, 2]


def test_without_a_batch_size_every_request_is_one_call() -> None:
    requests = [request([1, 2]), request([3]), request([4, 5, 6])]
    outcomes, recorder = run(None, requests)
    assert outcomes == [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]]
    assert recorder.calls == [[1, 2], [3], [4, 5, 6]]


def test_shapes_are_never_mixed_and_nobody_is_passed_over() -> None:
    requests = [request([1], (2, 2)), request([2], (3, 2)), request([3], (2, 2)), request([4], (3, 2))]
    outcomes, recorder = run(8, requests)
    assert outcomes == [[1.0], [2.0], [3.0], [4.0]]
    assert recorder.calls == [[1, 3], [2, 4]]


def test_dtypes_are_never_mixed() -> None:
    seen = []

    def score(media: Kinds, prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        seen.append((len(prompts), str(media["latent"].dtype)))
        return [0.0] * len(prompts)

    def latents(dtype: str) -> ScoreRequest:
        return ScoreRequest({"latent": np.zeros((2, 4), dtype)}, ["a", "b"], [{}, {}], "r")

    async def main() -> None:
        batcher = Batcher(Scorer(score, media=("latent",), batch_size=8))
        await asyncio.gather(*(batcher.score(latents(dtype)) for dtype in ("float32", "float16", "float32")))

    asyncio.run(main())
    assert seen == [(4, "float32"), (2, "float16")]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.sampled_from([(1, 1), (1, 2), (2, 1)])), min_size=1, max_size=9),
    batch_size=st.integers(1, 9),
)
def test_every_score_finds_its_request(sizes: list[tuple[int, tuple[int, int]]], batch_size: int) -> None:
    ends = np.cumsum([size for size, _ in sizes]).tolist()
    wanted = [list(range(end - size, end)) for end, (size, _) in zip(ends, sizes, strict=True)]
    outcomes, recorder = run(batch_size, [request(v, shape) for v, (_, shape) in zip(wanted, sizes, strict=True)])
    assert outcomes == wanted
    assert max(map(len, recorder.calls)) <= batch_size
    assert sorted(value for call in recorder.calls for value in call) == list(range(ends[-1]))


@pytest.mark.parametrize("failure", [ValueError("bad"), StopIteration(), SystemExit(1), TimeoutError()], ids=repr)
def test_one_request_s_failure_is_not_another_s(failure: BaseException) -> None:
    requests = [request([1]), request([2], raises=failure), request([3])]
    outcomes, recorder = run(8, requests)
    assert [outcomes[0], outcomes[2]] == [[1.0], [3.0]]
    assert isinstance(outcomes[1], ScorerFailedError)
    assert outcomes[1].__cause__ is failure
    assert recorder.calls == [[1, 2, 3], [1], [2], [3]]


def test_the_rest_of_a_request_that_failed_is_not_scored() -> None:
    outcomes, recorder = run(2, [request([1, 2, 3, 4, 5], raises=ValueError()), request([6])])
    assert isinstance(outcomes[0], ScorerFailedError)
    assert outcomes[1] == [6.0]
    assert recorder.calls == [[1, 2], [6]]
    outcomes, recorder = run(4, [request([6, 7]), request([1, 2, 3, 4, 5], raises=ValueError())])
    assert outcomes[0] == [6.0, 7.0]
    assert isinstance(outcomes[1], ScorerFailedError)
    assert recorder.calls == [[6, 7, 5], [6, 7], [5]]  # its end filled the first call, and its start is not scored


def test_a_caller_that_gives_up_stops_nobody() -> None:
    recorder = Recorder(None)

    async def main() -> list[Score]:
        batcher = Batcher(recorder.scorer)
        first, second = (asyncio.ensure_future(batcher.score(request([value]))) for value in (1, 2))
        while not recorder.calls:
            await asyncio.sleep(0.001)
        first.cancel()
        recorder.go_on.set()
        return await second

    assert asyncio.run(main()) == [Score(2.0)]


def test_requests_of_several_clients_share_calls(serve: Callable[..., str]) -> None:
    recorder = Recorder(8)
    url = serve(recorder.scorer)
    clients = [RewardClient(url) for _ in range(3)]
    futures = [
        clients[i % 3].submit({"image": np.full((2, 2, 2, 3), i, np.uint8)}, [str(i)] * 2, [{}, {}]) for i in range(9)
    ]
    while not recorder.calls:
        time.sleep(0.001)
    time.sleep(0.3)  # by now the others wait in the queue
    recorder.go_on.set()
    assert [[score.value for score in future.result(10)] for future in futures] == [[float(i)] * 2 for i in range(9)]
    for client in clients:
        client.close()
    assert len(recorder.calls) < 9
    assert max(map(len, recorder.calls)) == 8
