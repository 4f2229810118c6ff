"""The client when servers fail: what it tries again, where, for how long, and what becomes of the samples."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from email.utils import formatdate

import numpy as np
import pytest
from omni_reward import (
    RewardClient,
    RewardConnectError,
    RewardError,
    RewardFormatError,
    RewardHTTPError,
    RewardTimeoutError,
    Score,
    Scorer,
)
from omni_reward.endpoints import (
    LAST_TRY_S,
    MAX_PAUSE_S,
    MAX_RETRY_AFTER_S,
    NUM_FAILURES_TO_TRIAL,
    Endpoint,
    Endpoints,
    is_worth_a_retry,
)
from omni_reward.transport import _parse_retry_after
from reward.reward_helpers import Misbehaving, halves, http, reply_to

IMAGES = {"image": np.zeros((2, 4, 4, 3), np.uint8)}
PROMPTS = ["a", "b"]
GOOD = [Score(0.5)] * 2
Behave = Callable[[socket.socket, bytes], None]


def answers(*replies: bytes, seen: list[bytes] | None = None) -> Behave:
    """A behaviour that sends these in turn, and good replies after them; b"" hangs up."""
    left = iter(replies)
    lock = threading.Lock()

    def behave(conn: socket.socket, body: bytes) -> None:
        with lock:
            reply = next(left, None)
            if seen is not None:
                seen.append(body)
        conn.sendall(http("200 OK", reply_to(body)) if reply is None else reply)

    return behave


@contextmanager
def page_server(page: bytes) -> Iterator[str]:
    """URL of a server that answers everything with one page."""
    with closing(Misbehaving(lambda conn, body: conn.sendall(http("200 OK", page)))) as server:
        yield server.url


def nowhere() -> str:
    """URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


BUSY = http("503 No", b'{"error": {"code": "busy", "message": "full"}}')


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", BUSY, *(http(f"{n} X", b"") for n in (429, 502, 504))],
    ids=["dropped", "truncated", "503", "429", "502", "504"],
)
def test_what_passes_by_itself_is_tried_again_with_the_same_bytes(misbehave: Callable[..., str], reply: bytes) -> None:
    seen: list[bytes] = []
    with RewardClient(misbehave(answers(reply, reply, seen=seen)), timeout_s=20) as client:
        assert client.submit(IMAGES, PROMPTS).result(20) == GOOD
    assert len(seen) == 3
    assert len(set(seen)) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 500, 501, 301, 204])
def test_what_no_repeat_can_mend_is_tried_once(misbehave: Callable[..., str], status: int) -> None:
    seen: list[bytes] = []
    with RewardClient(misbehave(answers(http(f"{status} X", b""), seen=seen))) as client:
        exc = client.submit(IMAGES, PROMPTS).exception(10)
    assert isinstance(exc, RewardHTTPError)
    assert (exc.status, exc.num_attempts, len(seen)) == (status, 1, 1)
    assert exc.fatal == (status < 500)


def test_all_attempts_share_one_deadline() -> None:
    start = time.monotonic()
    with RewardClient(nowhere(), timeout_s=1) as client:
        exc = client.submit(IMAGES, PROMPTS).exception(10)
    assert time.monotonic() - start < 2
    assert isinstance(exc, RewardConnectError)
    assert exc.num_attempts > 1
    assert str(exc).endswith(f"(after {exc.num_attempts} attempts)")


def test_a_server_that_asks_for_an_hour_is_asked_again_right_before_the_deadline(misbehave: Callable[..., str]) -> None:
    seen: list[bytes] = []
    busy = http("503 No", b'{"error": {"code": "busy", "message": "full"}}', "Retry-After: 3600")
    start = time.monotonic()
    with RewardClient(misbehave(answers(busy, seen=seen)), timeout_s=2) as client:
        assert client.submit(IMAGES, PROMPTS).result(10) == GOOD
    assert 1.4 < time.monotonic() - start < 2
    assert len(set(seen)) == 1
    assert len(seen) == 2


def test_an_hour_that_a_server_asks_for_is_cut_to_a_bound_of_ours() -> None:
    endpoint = Endpoint("http://h")
    endpoint.fail(RewardHTTPError("x", status=503, retry_after_s=3600), started=100, now=100)
    assert MAX_RETRY_AFTER_S <= endpoint.paused_until - 100 <= 1.25 * MAX_RETRY_AFTER_S


def test_the_last_attempt_is_right_before_the_deadline_and_is_the_last() -> None:
    deadline, tried = time.monotonic() + LAST_TRY_S + 0.3, []

    def attempt(url: str) -> None:
        tried.append(time.monotonic())
        raise RewardHTTPError("full", status=503, retry_after_s=20)

    with pytest.raises(RewardHTTPError, match=r"full \(after 2 attempts\)"):
        Endpoints(["http://h"]).call(attempt, deadline)
    assert deadline - LAST_TRY_S <= tried[1] < time.monotonic() < deadline - LAST_TRY_S / 2  # it is not waited for


def test_a_scorer_that_is_back_just_before_the_deadline_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    servers: list[Misbehaving] = []
    timer = threading.Timer(2.2, lambda: servers.append(Misbehaving(answers(), port=port)))
    timer.start()
    with RewardClient(f"http://127.0.0.1:{port}", timeout_s=3) as client:
        assert client.submit(IMAGES, PROMPTS).result(10) == GOOD
    timer.join()
    servers[0].close()


def test_retry_after_is_a_number_or_a_date() -> None:
    assert _parse_retry_after("7") == 7.0
    assert _parse_retry_after(" 0 ") == 0.0
    assert (
        _parse_retry_after("")
        == _parse_retry_after("soon")
        == _parse_retry_after("-5")
        == _parse_retry_after("1.5")
        == 0.0
    )
    assert 50 < _parse_retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert _parse_retry_after(formatdate(time.time() - 60, usegmt=True)) == 0.0


def test_rests_grow_to_a_bound_and_failures_side_by_side_count_once() -> None:
    endpoint, now = Endpoint("http://h"), 100.0
    for number in range(1, 30):
        for later in (0.0, 0.01):  # of attempts that began together
            endpoint.fail(RewardConnectError("x"), started=now, now=now + 0.1 + later)
        whole = min(MAX_PAUSE_S, 0.1 * 2 ** (number - 1))
        assert endpoint.num_failures == number
        assert 0.5 * whole <= endpoint.paused_until - now - 0.1 <= whole + 0.02
        now = endpoint.paused_until


def test_a_server_on_trial_gets_one_attempt_at_a_time_and_a_request_that_waits_says_why() -> None:
    endpoints, deadline = Endpoints(["http://h"]), time.monotonic() + 30
    for _ in range(NUM_FAILURES_TO_TRIAL):
        endpoint = endpoints.acquire(deadline)
        assert endpoint
        endpoints.release(endpoint, RewardConnectError("refused"), started=time.monotonic())
    trial = endpoints.acquire(deadline)
    assert trial
    with pytest.raises(RewardConnectError, match="no server was free in time; last failure: refused"):
        endpoints.call(lambda url: None, time.monotonic() + 0.05)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(endpoints.acquire, deadline) for _ in range(3)]
        time.sleep(0.1)
        assert not any(other.done() for other in others)
        endpoints.release(trial, None, started=time.monotonic())  # it has recovered: all may come
        assert [other.result(10) for other in others] == [trial] * 3


@pytest.mark.parametrize(
    ("error", "rests"),
    [
        (RewardConnectError("x"), True),
        (RewardTimeoutError("x"), True),
        (RewardHTTPError("x", status=503), True),
        (RewardHTTPError("x", status=500), False),
        (RewardHTTPError("x", status=400), False),
        (RewardFormatError("x"), False),
    ],
)
def test_only_servers_that_are_not_well_rest(error: RewardError, rests: bool) -> None:
    endpoints = Endpoints(["http://h"])
    endpoint = endpoints.acquire(math.inf)
    assert endpoint
    endpoints.release(endpoint, error, started=time.monotonic())
    assert (endpoint.paused_until > time.monotonic()) == rests
    assert is_worth_a_retry(error) == (rests and not isinstance(error, RewardTimeoutError))


def test_several_servers_share_the_requests(misbehave: Callable[..., str]) -> None:
    seen: list[list[bytes]] = [[], []]
    with RewardClient([misbehave(answers(seen=bodies)) for bodies in seen], max_in_flight=4) as client:
        for future in [client.submit(IMAGES, PROMPTS) for _ in range(40)]:
            assert future.result(10) == GOOD
    assert len(seen[0]) + len(seen[1]) == 40
    assert min(map(len, seen)) >= 4


def test_another_server_takes_over_at_once(misbehave: Callable[..., str]) -> None:
    for bad in (nowhere(), misbehave(lambda conn, body: conn.sendall(BUSY)), misbehave(lambda conn, body: None)):
        with RewardClient([bad, misbehave(answers())], timeout_s=20) as client:
            assert [client.submit(IMAGES, PROMPTS).result(20) for _ in range(10)] == [GOOD] * 10


def failures(url: str, num: int, **options: object) -> list[list[Score] | BaseException]:
    """What becomes of that many requests, one after the other."""
    outcomes: list[list[Score] | BaseException] = []
    with RewardClient(url, timeout_s=2, max_in_flight=1, **options) as client:  # type: ignore[arg-type]
        for _ in range(num):
            future = client.submit(IMAGES, PROMPTS)
            outcomes.append(future.exception(10) or future.result())
    return outcomes


@pytest.mark.parametrize("on_failure", ["mask", "mask_group"])
def test_a_masked_failure_is_an_abstention_with_its_reason(misbehave: Callable[..., str], on_failure: str) -> None:
    error = http("500 X", b'{"error": {"code": "scorer_failed", "message": "the scorer failed"}}')
    [masked, good] = failures(misbehave(answers(error)), 2, on_failure=on_failure)
    assert isinstance(masked, list)
    for score in masked:
        assert score.value is None
        assert score.abstained
        assert score.abstained.startswith("the request failed: POST http://127.0.0.1:")
        assert "500 scorer_failed the scorer failed" in score.abstained
        assert score.mask_group == (on_failure == "mask_group")
    assert len(masked) == 2
    assert good == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": 2},
        {"request_id": "another"},
        {"results": [{"id": "0", "score": 0.5}]},
        {"results": [{"id": "1", "score": 0.5}, {"id": "0", "score": 0.5}]},
    ],
    ids=["protocol", "request", "count", "order"],
)
def test_replies_to_something_else_are_never_masked(misbehave: Callable[..., str], changes: dict[str, object]) -> None:
    url = misbehave(lambda conn, body: conn.sendall(http("200 OK", reply_to(body, **changes))))
    [exc] = failures(url, 1, on_failure="mask")
    assert isinstance(exc, RewardFormatError)
    assert exc.fatal


def test_a_wrong_token_is_never_masked(serve: Callable[..., str]) -> None:
    [exc] = failures(serve(halves, token="s3cret"), 1, on_failure="mask", token="wrong")
    assert isinstance(exc, RewardHTTPError)
    assert (exc.status, exc.fatal) == (401, True)


def test_a_scorer_that_always_fails_is_not_masked_for_ever(misbehave: Callable[..., str]) -> None:
    error = http("500 X", b"")
    outcomes = failures(misbehave(answers(*[error] * 5)), 7, on_failure="mask", mask_limit=3)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [list, list, list, RewardHTTPError, RewardHTTPError, list, list]
    assert outcomes[5:] == [GOOD, GOOD]


def test_check_scores_a_canary_on_every_server(serve: Callable[..., str]) -> None:
    seen = []

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        seen.append((media["video"].shape, media["audio"].shape, meta[0]["fps"], meta[0]["sample_rate"], prompts))
        return [3.0]

    urls = [serve(Scorer(score, media=("video", "audio")), name="x") for _ in range(2)]
    with RewardClient(urls) as client:
        assert client.check() == [[Score(3.0)], [Score(3.0)]]
    assert seen == [((1, 8, 64, 64, 3), (1, 16_000, 1), 8.0, 16_000, ['a sign that says "OK"'])] * 2


def test_check_takes_a_canary_of_one_s_own(serve: Callable[..., str]) -> None:
    latents = {"latent": np.zeros((2, 16, 4, 4), np.float32)}
    with RewardClient(serve(Scorer(halves, media=("latent",)))) as client:
        with pytest.raises(ValueError, match="media must be given for a scorer of \\['latent'\\]"):
            client.check()
        assert client.check(latents, PROMPTS) == [GOOD]


def test_check_takes_prompts_and_meta_of_one_s_own_and_shows_the_parts(serve: Callable[..., str]) -> None:
    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        assert media["video"].shape == (2, 8, 64, 64, 3)
        assert [item["fps"] for item in meta] == [8.0, 24]
        return [Score(1.0, parts={str(item["target"]): 2.0}) for item in meta]

    with RewardClient(serve(Scorer(score, media=("video",)))) as client:
        [scores] = client.check(prompts=PROMPTS, meta=[{"target": "x"}, {"target": "y", "fps": 24}])
    assert [score.parts for score in scores] == [{"x": 2.0}, {"y": 2.0}]


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": 2},
        {"scorer": None},
        {"scorer_version": 3},
        {"media": "image"},
        {"references": None},
        {"groups": 1},
        {"sleeps": None},
        {"limits": None},
    ],
    ids=str,
)
def test_an_info_that_lacks_what_clients_use_is_refused(changes: dict[str, object]) -> None:
    info = {"protocol": 1, "scorer": "s", "scorer_version": "", "media": ["image"], "limits": {"max_waiting": 3}}
    info |= dict.fromkeys(("references", "groups", "sleeps"), False)
    with page_server(json.dumps(info).encode()) as url, RewardClient(url) as client:
        assert client.info()["limits"]["max_waiting"] == 3
    [name] = changes
    with page_server(json.dumps(info | changes).encode()) as url, RewardClient(url) as client:
        with pytest.raises(RewardFormatError, match=f"GET {url}/info: {name} must be (a |1, got 2)") as caught:
            client.info()
        assert caught.value.fatal


def test_check_raises_what_is_wrong_whatever_on_failure_says(serve: Callable[..., str]) -> None:
    url = serve(lambda media, prompts, meta: 1 / 0)
    with RewardClient(url, on_failure="mask") as client, pytest.raises(RewardHTTPError, match="500 scorer_failed"):
        client.check()
    start = time.monotonic()
    with RewardClient(nowhere(), on_failure="mask") as client, pytest.raises(RewardConnectError):
        client.check()
    assert time.monotonic() - start < 10  # at once: nobody waits a deadline for a server that was never started


def test_check_refuses_servers_with_different_scorers(serve: Callable[..., str]) -> None:
    for other, name in ((Scorer(halves, version="2"), "x"), (Scorer(halves, version="1"), "y")):
        urls = [serve(Scorer(halves, version="1"), name="x"), serve(other, name=name)]
        with RewardClient(urls) as client, pytest.raises(RewardFormatError, match="must be the same on all servers"):
            client.check()
