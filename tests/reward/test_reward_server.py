"""The server over real sockets: what it refuses and how, and that it stays up while a scorer works."""

import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from omni_reward import Score
from omni_reward.media import ScoreRequest
from omni_reward.scorers.user import load_user
from omni_reward.server import Limits, create_app
from omni_reward.wire import Scorer, decode_reply, encode_request
from reward.reward_helpers import HEAD, halves

BINARY = {"Content-Type": "application/octet-stream"}


def pack(
    num: int = 2, *, pixels: int = 4, meta: list[dict[str, object]] | None = None, request_id: str | None = None
) -> bytes:
    media = {"image": np.zeros((num, pixels, pixels, 3), np.uint8)}
    request = ScoreRequest(media, ["a"] * num, meta or [{}] * num, request_id or uuid.uuid4().hex)
    return b"".join(encode_request(request))


def post(url: str, body: bytes | Iterator[bytes], **headers: str) -> requests.Response:
    return requests.post(url + "/score", data=body, headers={**BINARY, **headers}, timeout=10)


def assert_refused(response: requests.Response, status: int, code: str) -> str:
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"code", "message"}
    assert error["code"] == code
    return error["message"]


def test_scorer_gets_the_request_and_its_scores_come_back_in_order(serve: Callable[..., str]) -> None:
    seen = {}

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        seen.update(shape=media["image"].shape, prompts=prompts, thread=threading.current_thread().name)
        return [Score(float(item["i"]), parts={"p": 1.0}, details={"d": item["i"]}) for item in meta]

    response = post(serve(score, name="counter"), pack(3, meta=[{"i": 2}, {"i": 0}, {"i": 1}], request_id="r"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json()["scorer"] == "counter"
    scores = decode_reply(response.content, request_id="r", ids=["0", "1", "2"])
    assert scores == [Score(float(i), parts={"p": 1.0}, details={"d": i}) for i in (2, 0, 1)]
    assert seen["shape"] == (3, 4, 4, 3)
    assert seen["prompts"] == ["a", "a", "a"]
    assert seen["thread"].startswith("scorer")


def test_malformed_bodies_are_400_and_the_server_lives_on(serve: Callable[..., str]) -> None:
    url = serve(halves)
    whole = pack()
    with requests.Session() as session:
        for body in (b"", b"spam", whole[:-1], b"\xff" * 64, whole.replace(b"U8", b"I8"), whole + b"x"):
            assert assert_refused(session.post(url + "/score", data=body, headers=BINARY, timeout=10), 400, "malformed")
        assert session.post(url + "/score", data=whole, headers=BINARY, timeout=10).status_code == 200


def test_paths_methods_and_content_types(serve: Callable[..., str]) -> None:
    url = serve(halves)
    assert_refused(requests.get(url + "/", timeout=10), 404, "not_found")
    assert_refused(requests.get(url + "/scores", timeout=10), 404, "not_found")
    response = requests.get(url + "/score", timeout=10)
    assert_refused(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert_refused(requests.post(url + "/healthz", timeout=10), 405, "method_not_allowed")
    assert_refused(requests.post(url + "/score", data=pack(), timeout=10), 415, "unsupported_media_type")
    assert_refused(requests.post(url + "/score", json={}, timeout=10), 415, "unsupported_media_type")
    assert post(url, pack(), **{"Content-Type": "Application/Octet-Stream; charset=x"}).status_code == 200


def test_token_guards_score_and_info_but_not_health(serve: Callable[..., str]) -> None:
    url = serve(halves, token="s3cret")
    for value in (None, "", "Bearer", "Bearer wrong", "Bearer s3cre", "Bearer s3cret2", "s3cret", "Basic s3cret", "ü"):
        headers = {} if value is None else {"Authorization": value.encode("latin-1")}
        response = post(url, pack(), **headers)
        assert_refused(response, 401, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"
        assert_refused(requests.get(url + "/info", headers=headers, timeout=10), 401, "unauthorized")
    good = {"Authorization": "Bearer s3cret"}
    assert post(url, pack(), **good).status_code == 200
    assert requests.get(url + "/info", headers=good, timeout=10).status_code == 200
    assert requests.get(url + "/healthz", timeout=10).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/info", "/score"])
def test_a_server_of_loopback_without_a_token_answers_loopback_s_names_alone(
    serve: Callable[..., str], path: str
) -> None:
    def ask(url: str, host: str, **headers: str) -> requests.Response:
        call = requests.post if path == "/score" else requests.get
        return call(url + path, data=pack(), headers={**BINARY, "Host": host, **headers}, timeout=10)

    url = serve(halves, host="scorer.lan")
    port = url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "127.8.8.8", f"[::1]:{port}", "Scorer.LAN:80"):
        assert ask(url, host).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "10.0.0.1", "[::2", "0.0.0.0"):
        message = assert_refused(ask(url, host), 403, "forbidden")
        assert message.startswith("Host must be a name of loopback, such as localhost, as the server has no token")
        assert host in message
    with_token = serve(halves, token="s3cret")
    assert ask(with_token, "node0:8100", Authorization="Bearer s3cret").status_code == 200
    assert requests.get(url + "/healthz", headers={"Host": "evil.example"}, timeout=10).status_code == 200


def test_info_says_what_is_accepted(serve: Callable[..., str]) -> None:
    scorer = Scorer(halves, media=("video", "audio"), batch_size=7, version="halves-2")
    info = requests.get(serve(scorer, name="h", max_body_bytes=3 * 2**20, max_batch=5) + "/info", timeout=10).json()
    assert info.pop("version")
    assert info == {
        "protocol": 1,
        "scorer": "h",
        "scorer_version": "halves-2",
        "media": ["audio", "video"],
        "references": False,
        "groups": False,
        "batch_size": 7,
        "sleeps": False,
        "limits": {
            "max_body_bytes": 3 * 2**20,
            "max_batch": 5,
            "max_waiting": 64,
            "max_waiting_bytes": 2**30,
            "receive_timeout_s": 60.0,
        },
    }


def test_body_beyond_the_cap_is_413(serve: Callable[..., str]) -> None:
    url = serve(halves, max_body_bytes=1 * 2**20)
    assert post(url, pack(1, pixels=590)).status_code == 200  # 1.04e6 bytes, 2**20 is 1.05e6
    assert_refused(post(url, pack(1, pixels=592)), 413, "too_large")
    assert_refused(post(url, bytes(8 * 2**20)), 413, "too_large")
    assert_refused(post(url, (bytes(2**16) for _ in range(64))), 413, "too_large")  # chunked, without a length
    body = pack()
    assert post(url, (body[i : i + 9] for i in range(0, len(body), 9))).status_code == 200


@pytest.mark.parametrize(
    ("framing", "sent"),
    [
        (b"Transfer-Encoding: chunked", (b"10000\r\n" + bytes(2**16) + b"\r\n") * 17),
        (b"Content-Length: 99999999999", b""),
    ],
    ids=["chunked", "declared"],
)
def test_413_comes_while_the_body_is_still_on_its_way(serve: Callable[..., str], framing: bytes, sent: bytes) -> None:
    port = int(serve(halves, max_body_bytes=1 * 2**20).rpartition(":")[2])
    head = HEAD + framing + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as conn:
        conn.sendall(head + sent)
        assert conn.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_mid_body_does_no_harm(
    serve: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(halves, max_waiting=0)
    head = HEAD + b"Content-Length: 999\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as conn:
            conn.sendall(head + b"spam")
    deadline = time.monotonic() + 5
    while (status := post(url, pack()).status_code) == 503 and time.monotonic() < deadline:
        time.sleep(0.02)  # the server has yet to see that they left
    assert status == 200
    assert not caplog.records


def test_health_answers_while_a_slow_scorer_works_and_the_queue_is_bounded(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()
    running, most = [], []

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        running.append(1)
        most.append(len(running))
        started.set()
        assert go_on.wait(10)
        running.pop()
        return [1.0] * len(prompts)

    url = serve(slow, max_waiting=1)
    replies: list[requests.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(post(url, pack()))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert started.wait(5)
    for thread in threads:  # one runs, one waits, three are refused
        thread.join(0.01 if len(replies) == 3 else 0.5)
    assert requests.get(url + "/healthz", timeout=1).json() == {"status": "ok"}
    assert [reply.status_code for reply in replies] == [503] * 3
    assert replies[0].headers["retry-after"] == "1"
    assert_refused(replies[0], 503, "busy")
    go_on.set()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies[3:]] == [200] * 2
    assert post(url, pack()).status_code == 200
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    "results",
    [[0.5], [0.5] * 3, [], None, iter([0.5, 0.5]), ["a", "b"]],
    ids=["few", "many", "none", "None", "iterator", "text"],
)
def test_bad_return_values_are_500(serve: Callable[..., str], results: object) -> None:
    assert_refused(post(serve(lambda media, prompts, meta: results), pack(2)), 500, "scorer_failed")


def test_a_scorer_that_raises_is_500_without_internals_and_logs_why(
    serve: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        raise KeyError("/secret/weights.bin")

    url = serve(fail)
    for _ in range(2):  # a failure is not remembered: the same request is another chance
        response = post(url, pack(request_id="r"))
        assert_refused(response, 500, "scorer_failed")
        assert "secret" not in response.text
    assert "KeyError: '/secret/weights.bin'" in caplog.text
    assert "request 'r'" in caplog.text
    assert f'File "{__file__}"' in caplog.text


def test_a_server_of_one_s_own_tells_what_the_scorer_raised(serve: Callable[..., str]) -> None:
    def fail(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        raise KeyError("target\ud800" if prompts == ["a"] else "x" * 9999)

    url = serve(fail, show_errors=True)
    message = assert_refused(post(url, pack(1)), 500, "scorer_failed")
    assert message.startswith("the scorer raised KeyError: 'target")
    assert message.endswith("; the server's log has the traceback")
    assert len(assert_refused(post(url, pack(2)), 500, "scorer_failed")) < 400


def test_a_bug_in_a_user_s_file_is_three_lines_of_the_log_and_one_of_the_reply_with_its_line(
    serve: Callable[..., str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\ndef score(media, prompts, meta):\n    return [json.loads(p) for p in prompts]\n")
    url = serve(load_user(f"python:{file}:score"), show_errors=True)
    message = assert_refused(post(url, pack(1)), 500, "scorer_failed")
    assert message.startswith("the scorer raised json.decoder.JSONDecodeError: ")
    assert message.endswith(f" ({file}, line 4)")
    first, *place = caplog.text.splitlines()
    assert first.endswith(": json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
    own = "<listcomp>" if sys.version_info < (3, 12) else "score"
    assert place == [f'  File "{file}", line 4, in {own}', "    return [json.loads(p) for p in prompts]"]


def test_requests_of_clients_that_have_gone_are_not_scored(serve: Callable[..., str]) -> None:
    scored: list[int] = []
    started, go_on = threading.Event(), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        scored.append(len(prompts))
        started.set()
        assert go_on.wait(10)
        return [0.5] * len(prompts)

    url = serve(slow, max_waiting=5)
    port = int(url.rpartition(":")[2])
    first = threading.Thread(target=post, args=(url, pack(1)))
    first.start()
    assert started.wait(10)
    for _ in range(4):  # five at a time would be too many
        gone = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(5)]
        for conn in gone:
            body = pack(3)
            conn.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
        for conn in gone:
            conn.close()
        time.sleep(0.3)
    honest = threading.Thread(target=lambda: replies.append(post(url, pack(2))))
    replies: list[requests.Response] = []
    honest.start()
    time.sleep(0.3)
    go_on.set()
    honest.join(10)
    first.join(10)
    assert replies[0].status_code == 200
    assert scored == [1, 2]


def test_two_ways_to_say_how_long_a_body_is_are_refused(serve: Callable[..., str]) -> None:
    port = int(serve(halves).rpartition(":")[2])
    body = pack()
    framing = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as conn:
        conn.sendall(HEAD + framing.encode() + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        reply = b""
        while chunk := conn.recv(1000):  # until the server hangs up
            reply += chunk
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Length and Transfer-Encoding must not come together" in reply
    assert reply.count(b"HTTP/1.1") == 1


def test_bodies_that_trickle_keep_nobody_out(serve: Callable[..., str]) -> None:
    url = serve(halves, max_waiting=1)
    port = int(url.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(20)]
    for conn in slow:
        conn.sendall(HEAD + b"Content-Length: 99\r\n\r\nx")
    time.sleep(0.3)
    assert post(url, pack()).status_code == 200
    for conn in slow:
        conn.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes must be >= 1, got 0"),
        ({"max_batch": 0}, "max_batch must be >= 1, got 0"),
        ({"max_waiting": -1}, "max_waiting must be >= 0, got -1"),
        ({"max_body_bytes": 9, "max_waiting_bytes": 8}, "max_waiting_bytes must be >= 9, got 8"),
        ({"receive_timeout_s": 0}, "receive_timeout_s must be > 0, got 0"),
    ],
)
def test_limits_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**options)


@pytest.mark.parametrize("token", ["", "two words"])
def test_a_token_fits_a_header(token: str) -> None:
    with pytest.raises(ValueError, match="token must be printable ASCII"):
        create_app(halves, name="h", token=token)
