"""The client: it overlaps, it is bounded, and each way to fail has its class, against servers that really fail so."""

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

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
from omni_reward.transport import MAX_REPLY_BYTES
from reward.reward_helpers import halves, http, read_request, reply_to, trickle

IMAGES = {"image": np.zeros((2, 4, 4, 3), np.uint8)}
PROMPTS = ["a", "b"]


def failure(url: str, *, timeout_s: float = 1.0) -> BaseException | None:
    """The error that one request ends in; its message must name the URL."""
    with RewardClient(url, timeout_s=timeout_s) as client:
        exc = client.submit(IMAGES, PROMPTS).exception(timeout_s + 5)
    assert f"POST {url}/score" in str(exc)
    return exc


def test_scores_come_back_in_order_with_meta_as_sent(serve: Callable[..., str]) -> None:
    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        return [Score(float(image.mean()), details=m) for image, m in zip(media["image"], meta, strict=True)]

    images = np.stack([np.full((4, 4, 3), i, np.uint8) for i in range(5)])
    with RewardClient(serve(score) + "/") as client:
        client.check()
        scores = client.submit({"image": images}, list("abcde"), [{"i": i} for i in range(5)]).result(10)
        assert scores == [Score(float(i), details={"i": i}) for i in range(5)]
        assert client.submit({"image": images}, tuple("abcde")).result(10)[4] == Score(4.0)


def test_submit_returns_while_the_scorer_works(serve: Callable[..., str]) -> None:
    go_on = threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        assert go_on.wait(10)
        return [1.0] * len(prompts)

    with RewardClient(serve(slow)) as client:
        start = time.monotonic()
        futures = [client.submit(IMAGES, PROMPTS) for _ in range(8)]
        assert time.monotonic() - start < 0.5
        assert not any(future.done() for future in futures)
        go_on.set()
        assert [future.result(10) for future in futures] == [[Score(1.0)] * 2] * 8


def test_requests_beyond_the_most_in_flight_wait_without_the_caller(serve: Callable[..., str]) -> None:
    go_on = threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        assert go_on.wait(10)
        return [float(image.mean()) for image in media["image"]]

    def grey(level: int) -> dict[str, np.ndarray]:
        return {"image": np.full((1, 8, 8, 3), level, np.uint8)}

    with RewardClient(serve(slow), max_in_flight=2) as client:
        futures = [client.submit(grey(level), ["a"]) for level in range(6)]
        while not all(future.running() for future in futures[:2]):
            time.sleep(0.01)
        assert not any(future.running() for future in futures[2:])
        go_on.set()
    assert [future.result() for future in futures] == [[Score(float(level))] for level in range(6)]


def test_a_request_has_its_time_from_when_it_is_its_turn(misbehave: Callable[..., str]) -> None:
    """Four that take 0.3 s each, one at a time, with 0.8 s for each."""

    def behave(conn: socket.socket, body: bytes) -> None:
        time.sleep(0.3)
        conn.sendall(http("200 OK", reply_to(body)))

    with RewardClient(misbehave(behave), max_in_flight=1, timeout_s=0.8) as client:
        futures = [client.submit(IMAGES, PROMPTS) for _ in range(4)]
    assert [future.result() for future in futures] == [[Score(0.5)] * 2] * 4


def test_busy_time_counts_requests_that_overlap_once(serve: Callable[..., str]) -> None:
    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        time.sleep(0.1)
        return [1.0] * len(prompts)

    with RewardClient(serve(slow)) as client:
        assert client.busy_s == 0.0
        start = time.monotonic()
        for future in [client.submit(IMAGES, PROMPTS) for _ in range(3)]:
            future.result(10)
        while (busy_s := client.busy_s) != client.busy_s:  # the last request is counted a moment after its result
            time.sleep(0.01)
        assert 0.3 <= busy_s <= time.monotonic() - start
        time.sleep(0.05)
        assert client.busy_s == busy_s


def test_connections_are_kept_alive(misbehave: Callable[..., str]) -> None:
    num_connections = 0

    def behave(conn: socket.socket, body: bytes) -> None:
        nonlocal num_connections
        num_connections += 1
        request: bytes | None = body
        while request is not None:
            conn.sendall(http("200 OK", reply_to(request), close=False))
            request = read_request(conn)

    with RewardClient(misbehave(behave), max_in_flight=1) as client:
        for _ in range(3):
            assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2
    assert num_connections == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, PROMPTS), "media must hold at least one of"),
        (({"spam": IMAGES["image"]}, PROMPTS), r"media must be of the kinds \['audio', 'image', .*\], got 'spam'"),
        (({"image": IMAGES["image"].astype(np.float32)}, PROMPTS), "image must be a uint8 array, got float32"),
        (({"image": [[0]]}, PROMPTS), "image must be a uint8 array, got list"),
        (({"image": IMAGES["image"].transpose(0, 3, 1, 2)}, PROMPTS), "image must have the shape .*, got "),
        ((IMAGES, ["a"]), "image must have the shape .*, got "),
        (({"image": IMAGES["image"][:0]}, []), "prompts must hold at least 1"),
        ((IMAGES, "ab"), "prompts must be a list of str, got 'ab'"),
        ((IMAGES, ["a", 1]), "prompts must be a list of str"),
        ((IMAGES, ["a", "\ud800"]), "prompts must be Unicode text"),
        ((IMAGES, PROMPTS, [{}]), "meta must hold one object per prompt"),
        ((IMAGES, PROMPTS, ["a", "b"]), "meta must be a list of dict"),
    ],
)
def test_submit_checks_its_arguments_at_once(arguments: tuple, message: str) -> None:
    with RewardClient("http://127.0.0.1:9", max_in_flight=1) as client:
        for _ in range(2):  # a refused submit takes no place
            with pytest.raises(ValueError, match=message):
                client.submit(*arguments)


@pytest.mark.parametrize("on_failure", ["raise", "mask"])
def test_meta_that_json_cannot_hold_is_refused_by_its_future_and_never_masked(
    serve: Callable[..., str], on_failure: Literal["raise", "mask"]
) -> None:
    with RewardClient(serve(halves), max_in_flight=1, on_failure=on_failure) as client:
        for value in (math.nan, object()):  # a refused request gives its place back
            with pytest.raises(ValueError, match="meta must hold JSON values only"):
                client.submit(IMAGES, PROMPTS, [{}, {"x": value}]).result(10)
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2


BAD_URLS = [
    "127.0.0.1:80",
    "ftp://h",
    "http://",
    "http://user:pw@h",
    "http://h:x",
    "http://a..b",
    "http://[::1",
    "http://h/?a",
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"url": url}, "url must be http") for url in (*BAD_URLS, ["http://h", "h"])),
        *(
            ({"url": urls}, "url must name one server or more, each once, got")
            for urls in ([], ["http://h", "http://h/"])
        ),
        *(({"timeout_s": value}, "timeout_s must be > 0 and finite, got") for value in (0, math.nan, math.inf)),
        *(({"token": token}, "token must be printable ASCII") for token in ("a\nb", "")),
        ({"max_in_flight": 0}, "max_in_flight must be >= 1, got 0"),
        ({"mask_limit": 0}, "mask_limit must be >= 1, got 0"),
        ({"on_failure": "zero"}, "on_failure must be one of .*, got 'zero'"),
        ({"proxy": "http://p"}, "proxy must be one of .*, got 'http://p'"),
    ],
)
def test_client_checks_its_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardClient(**{"url": "http://h", **options})


def test_a_closed_client_says_so() -> None:
    client = RewardClient("http://127.0.0.1:9", max_in_flight=1)
    client.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            client.submit(IMAGES, PROMPTS)


def test_token_is_sent_and_checked_before_the_first_step(serve: Callable[..., str]) -> None:
    url = serve(lambda media, prompts, meta: [1.0] * len(prompts), token="s3cret")
    with RewardClient(url, token="s3cret") as client:
        client.check()
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(1.0)] * 2
    for token in (None, "wrong"):
        with RewardClient(url, token=token) as client:
            with pytest.raises(RewardHTTPError, match="401 unauthorized") as caught:
                client.check()
            assert (caught.value.status, caught.value.code) == (401, "unauthorized")


def test_no_server_is_a_connect_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert type(failure(url)) is RewardConnectError
    with RewardClient(url) as client, pytest.raises(RewardConnectError, match=url):
        client.check()


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 2", http("200 OK", bytes(99))[:-9], b"spam\r\n\r\n"])
def test_a_connection_that_breaks_is_a_connect_error(misbehave: Callable[..., str], reply: bytes) -> None:
    assert type(failure(misbehave(lambda conn, body: conn.sendall(reply)))) is RewardConnectError


def test_errors_of_the_server_carry_status_and_code(misbehave: Callable[..., str]) -> None:
    error = b'{"error": {"code": "busy", "message": "come back"}}'
    exc = failure(misbehave(lambda conn, body: conn.sendall(http("503 No", error, "Retry-After: 1"))))
    assert isinstance(exc, RewardHTTPError)
    assert (exc.status, exc.code) == (503, "busy")
    assert "/score: 503 busy come back" in str(exc)
    for status, page in ((500, b"<html>"), (502, b""), (404, b'{"error": 1}'), (302, b"[]"), (204, b"")):
        exc = failure(misbehave(lambda conn, body, s=status, p=page: conn.sendall(http(f"{s} X", p, "Location: /"))))
        assert isinstance(exc, RewardHTTPError)
        assert (exc.status, exc.code) == (status, "")


def test_a_body_beyond_the_server_s_cap_is_413_not_a_broken_pipe(serve: Callable[..., str]) -> None:
    url = serve(lambda media, prompts, meta: [1.0], max_body_bytes=1 * 2**20)
    with RewardClient(url) as client:
        exc = client.submit({"image": np.zeros((1, 4096, 1024, 3), np.uint8)}, ["a"]).exception(10)
    assert isinstance(exc, RewardHTTPError)
    assert exc.status == 413


def test_pages_that_are_not_json_are_format_errors(misbehave: Callable[..., str]) -> None:
    url = misbehave(lambda conn, body: conn.sendall(http("200 OK", b"<html>")))
    assert type(failure(url)) is RewardFormatError
    said = f"{url} is no reward server: GET {url}/info: the reply must be JSON"
    with RewardClient(url) as client, pytest.raises(RewardFormatError, match=said):
        client.info()


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (
            404,
            b"<!DOCTYPE html><style>p {}</style><script>a > b</script><p class='x'>No such\npage",
            " 404 No such page",
        ),
        (404, b'{"detail": "Not Found"}', ' 404 {"detail": "Not Found"}'),
        (302, b"", " 302"),
        (403, b"<b>" + b"word " * 99, " 403 " + ("word " * 99)[:80] + "..."),
    ],
)
def test_another_web_server_is_named_as_such_with_its_first_words(
    misbehave: Callable[..., str], status: int, page: bytes, said: str
) -> None:
    url = misbehave(lambda conn, body: conn.sendall(http(f"{status} X", page)))
    with RewardClient(url) as client, pytest.raises(RewardHTTPError) as caught:
        client.info()
    assert str(caught.value) == f"{url} is no reward server: GET {url}/info:{said}"


def test_a_server_that_is_down_behind_a_proxy_is_not_called_another_one(misbehave: Callable[..., str]) -> None:
    url = misbehave(lambda conn, body: conn.sendall(http("502 X", b"<h1>Bad Gateway</h1>")))
    with RewardClient(url) as client, pytest.raises(RewardHTTPError) as caught:
        client.info()
    assert str(caught.value) == f"GET {url}/info: 502 Bad Gateway"


@pytest.mark.parametrize("status", ["200 OK", "302 X"])
def test_a_reply_without_end_is_a_format_error(misbehave: Callable[..., str], status: str) -> None:
    poured = 0

    def flood(conn: socket.socket, body: bytes) -> None:
        nonlocal poured
        conn.sendall(f"HTTP/1.1 {status}\r\nLocation: /\r\n\r\n".encode())
        for _ in range(MAX_REPLY_BYTES // 2**20 + 64):
            conn.sendall(bytes(2**20))
            poured += 1

    assert type(failure(misbehave(flood))) is RewardFormatError
    assert poured < MAX_REPLY_BYTES // 2**20 + 32  # MB, the buffers of the network included


def silent(conn: socket.socket, body: bytes) -> None:
    conn.recv(1)  # until the client hangs up


def slow_head(conn: socket.socket, body: bytes) -> None:
    trickle(conn, http("200 OK", reply_to(body), f"X: {'x' * 999}"))


def slow_body(conn: socket.socket, body: bytes) -> None:
    head, _, content = http("200 OK", reply_to(body)).partition(b"\r\n\r\n")
    conn.sendall(head + b"\r\n\r\n")
    trickle(conn, content)


def slow_body_of_unknown_length(conn: socket.socket, body: bytes) -> None:
    conn.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + reply_to(body))
    trickle(conn, b" " * 999)


def slow_chunks(conn: socket.socket, body: bytes) -> None:
    conn.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(999):
        conn.sendall(b"1\r\nx\r\n")
        time.sleep(0.02)


@pytest.mark.parametrize("behave", [silent, slow_head, slow_body, slow_body_of_unknown_length, slow_chunks])
def test_the_deadline_holds_in_all(misbehave: Callable[..., str], behave: Callable) -> None:
    start = time.monotonic()
    assert type(failure(misbehave(behave), timeout_s=0.4)) is RewardTimeoutError
    assert 0.39 < time.monotonic() - start < 1.5


def test_the_deadline_holds_for_a_server_that_does_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        with RewardClient(url, timeout_s=0.4) as client:
            exc = client.submit({"image": np.zeros((1, 4096, 4096, 3), np.uint8)}, ["a"]).exception(10)
        assert type(exc) is RewardTimeoutError
        assert time.monotonic() - start < 2


def test_a_client_works_again_after_a_timeout(misbehave: Callable[..., str]) -> None:
    calls = []

    def behave(conn: socket.socket, body: bytes) -> None:
        calls.append(1)
        if len(calls) == 1:
            silent(conn, body)
        conn.sendall(http("200 OK", reply_to(body)))

    with RewardClient(misbehave(behave), timeout_s=0.3, max_in_flight=1) as client:
        assert isinstance(client.submit(IMAGES, PROMPTS).exception(10), RewardTimeoutError)
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2


def test_no_proxy_stands_between_loopback_and_us(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with RewardClient(serve(lambda media, prompts, meta: [1.0] * len(prompts))) as client:
        client.check()
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(1.0)] * 2


@pytest.mark.parametrize("proxy", ["none", "env"])
def test_scorers_elsewhere_are_asked_directly_unless_a_proxy_is_wanted(
    misbehave: Callable[..., str], monkeypatch: pytest.MonkeyPatch, proxy: Literal["none", "env"]
) -> None:
    asked: list[str] = []

    def answer(name: str) -> Callable[[socket.socket, bytes], None]:
        return lambda conn, body: (asked.append(name), conn.sendall(http("200 OK", reply_to(body))))[1]

    port = misbehave(answer("scorer")).rpartition(":")[2]
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, misbehave(answer("proxy")))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    find = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args: find("127.0.0.1" if host == "scorer.test" else host, *args)
    )
    with RewardClient(f"http://scorer.test:{port}", token="s3cret", proxy=proxy) as client:
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2
    assert asked == ["scorer" if proxy == "none" else "proxy"]


def test_one_except_clause_catches_all() -> None:
    for cls in (RewardTimeoutError, RewardConnectError, RewardHTTPError, RewardFormatError):
        assert issubclass(cls, RewardError)
        assert not issubclass(cls, ValueError | OSError)


TAKES = b'"media": ["image"], "references": false, "groups": false, "sleeps": false'
INFO = b'{"protocol": 1, "scorer": "test", "scorer_version": "1", %b, "limits": {}}' % TAKES


@pytest.mark.parametrize("on_failure", ["raise", "mask"])
@pytest.mark.parametrize(
    ("then", "fault"),
    [
        ({"scorer": "other"}, "scorer must be 'test', as the server said before, got 'other'"),
        ({"scorer_version": "2"}, "scorer_version must be '1', as the server said before, got '2'"),
        ({"scorer_version": None}, "scorer_version must be '1', as the server said before, got None"),
    ],
)
def test_a_server_that_was_restarted_as_another_scorer_is_fatal(
    misbehave: Callable[..., str], on_failure: Literal["raise", "mask"], then: dict[str, object], fault: str
) -> None:
    changes: dict[str, object] = {"scorer_version": "1"}
    url = misbehave(lambda conn, body: conn.sendall(http("200 OK", reply_to(body, **changes) if body else INFO)))
    with RewardClient(url, on_failure=on_failure) as client:
        client.check(IMAGES, PROMPTS)
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2
        changes |= then
        error = client.submit(IMAGES, PROMPTS).exception(10)
        assert isinstance(error, RewardFormatError)
        assert error.fatal
        assert str(error).startswith(f"POST {url}/score: {fault}: start it as it was")
        del changes["scorer_version"]  # which other servers may leave out
        changes["scorer"] = "test"
        assert client.submit(IMAGES, PROMPTS).result(10) == [Score(0.5)] * 2


def test_a_reply_names_its_scorer_and_version(serve: Callable[..., str]) -> None:
    urls = [serve(Scorer(halves, version=version), name="halves") for version in "12"]
    with RewardClient(urls[0]) as client:
        client.check()
        assert client.scorer == {"scorer": "halves", "scorer_version": "1"}
    with RewardClient(urls[1]) as client:
        client.scorer = {"scorer": "halves", "scorer_version": "1"}
        with pytest.raises(RewardFormatError, match="scorer_version must be '1', as the server said before, got '2'"):
            client.submit(IMAGES, PROMPTS).result(10)
