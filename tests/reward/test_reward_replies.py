"""Requests that come again: scored once, answered as the first time, and remembered within bounds."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

import numpy as np
import pytest
import requests
from omni_reward.media import ScoreRequest
from omni_reward.replies import IdReusedError, Replies
from omni_reward.wire import encode_request
from reward.reward_helpers import halves

BINARY = {"Content-Type": "application/octet-stream"}


class Maker:
    """Makes replies of a given size and counts them; the first ones fail where that is asked for."""

    def __init__(self, *, size: int = 1, num_failures: int = 0) -> None:
        self.num_calls = 0
        self._size, self._num_failures = size, num_failures

    async def __call__(self) -> bytes:
        self.num_calls += 1
        await asyncio.sleep(0.001)
        if self.num_calls <= self._num_failures:
            raise ValueError("no luck")
        return bytes([self.num_calls]) * self._size


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(main())


def test_a_repeat_gets_the_first_reply_during_and_after() -> None:
    make = Maker()

    async def main() -> None:
        replies = Replies()
        assert await asyncio.gather(*(replies.get("a", b"body", make) for _ in range(5))) == [b"\1"] * 5
        assert await replies.get("a", b"body", make) == b"\1"
        assert await replies.get("b", b"body", make) == b"\2"

    run(main)
    assert make.num_calls == 2


def test_another_body_under_the_id_is_refused_during_and_after() -> None:
    make = Maker()

    async def main() -> None:
        replies = Replies()
        first, second = await asyncio.gather(
            replies.get("a", b"one", make), replies.get("a", b"two", make), return_exceptions=True
        )
        assert first == b"\1"
        assert isinstance(second, IdReusedError)
        with pytest.raises(IdReusedError):
            await replies.get("a", b"two", make)
        assert await replies.get("a", b"one", make) == b"\1"

    run(main)
    assert make.num_calls == 1


def test_a_failure_is_shared_by_those_who_wait_and_then_forgotten() -> None:
    make = Maker(num_failures=1)

    async def main() -> None:
        replies = Replies()
        failures = await asyncio.gather(*(replies.get("a", b"body", make) for _ in range(3)), return_exceptions=True)
        assert [str(failure) for failure in failures] == ["no luck"] * 3
        assert await replies.get("a", b"another", make) == b"\2"

    run(main)


def test_one_who_gives_up_takes_no_reply_from_another() -> None:
    make = Maker()

    async def main() -> None:
        replies = Replies()
        first = asyncio.ensure_future(replies.get("a", b"body", make))
        second = asyncio.ensure_future(replies.get("a", b"body", make))
        while not make.num_calls:
            await asyncio.sleep(0)
        first.cancel()
        assert await second == b"\1"

    run(main)
    assert make.num_calls == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_work_that_nobody_waits_for_is_dropped_unless_it_has_begun(has_begun: bool) -> None:
    make = Maker()

    async def main() -> None:
        replies = Replies()
        asked = [asyncio.ensure_future(replies.get("a", b"body", make, lambda: not has_begun)) for _ in range(2)]
        while not make.num_calls:
            await asyncio.sleep(0)
        asked[0].cancel()
        await asyncio.sleep(0)
        assert not asked[1].done()  # somebody waits still
        asked[1].cancel()
        await asyncio.wait(asked)
        assert await replies.get("a", b"body", make) == (b"\1" if has_begun else b"\2")
        assert make.num_calls == (1 if has_begun else 2)

    run(main)


@pytest.mark.parametrize(("bounds", "num_kept"), [({"max_replies": 3}, 3), ({"max_bytes": 250}, 2)])
def test_the_oldest_replies_are_forgotten(bounds: dict[str, int], num_kept: int) -> None:
    make = Maker(size=100)

    async def main() -> None:
        replies = Replies(**bounds)
        for i in range(10):
            await replies.get(str(i), b"body", make)
        for i in range(10 - num_kept, 10):
            assert (await replies.get(str(i), b"body", make))[0] == i + 1
        assert make.num_calls == 10
        await replies.get("0", b"body", make)
        assert make.num_calls == 11

    run(main)


def body(value: int, request_id: str) -> bytes:
    request = ScoreRequest({"image": np.full((1, 2, 2, 3), value, np.uint8)}, ["a"], [{}], request_id)
    return b"".join(encode_request(request))


def post(url: str, data: bytes) -> requests.Response:
    return requests.post(url + "/score", data=data, headers=BINARY, timeout=10)


def test_the_server_scores_a_repeated_request_once(serve: Callable[..., str]) -> None:
    calls = []

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        calls.append(len(prompts))
        return [float(len(calls))]

    url = serve(score)
    first, again, another = (post(url, body(value, "r")) for value in (1, 1, 2))
    assert (first.status_code, again.content) == (200, first.content)
    assert another.status_code == 409
    assert another.json()["error"]["code"] == "id_reused"
    assert calls == [1]
    assert post(url, body(2, "s")).json()["results"][0]["score"] == 2.0


def test_repeats_that_wait_hold_places_in_the_queue(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        started.set()
        assert go_on.wait(10)
        return halves(media, prompts, meta)

    url = serve(score, max_waiting=1)
    replies: list[requests.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(post(url, body(1, "r")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    while not replies:
        time.sleep(0.005)
    assert [reply.status_code for reply in replies] == [503]
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 503]
