"""What the server lets in: kinds of media, bytes that wait, time to arrive, connections that say nothing."""

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import uvicorn
from omni_reward import RewardClient, Score, Scorer, server
from omni_reward.media import ScoreRequest
from omni_reward.wire import encode_request
from reward.reward_helpers import halves

BINARY = {"Content-Type": "application/octet-stream"}
HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"


def pack(media: dict[str, np.ndarray], num: int = 1) -> bytes:
    meta: list[dict[str, object]] = [{"fps": 8, "sample_rate": 16_000}] * num
    request = ScoreRequest(media, ["a"] * num, meta, uuid.uuid4().hex)
    return b"".join(encode_request(request))


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)


IMAGE = {"image": np.zeros((1, 2, 2, 3), np.uint8)}
VIDEO = {"video": np.zeros((1, 3, 2, 2, 3), np.uint8)}
AUDIO = {"audio": np.zeros((1, 160, 2), np.float32)}
LATENT = {"latent": np.zeros((1, 16, 4, 4), np.float16)}


@pytest.mark.parametrize("media", [IMAGE, VIDEO, AUDIO, LATENT, VIDEO | AUDIO], ids=lambda media: "+".join(media))
def test_a_scorer_gets_the_kinds_that_it_names(serve: Callable[..., str], media: dict[str, np.ndarray]) -> None:
    seen = {}

    def score(got: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        seen.update(got)
        return [Score(1.0, details=meta[0])]

    rates = {"fps": 7.5, "sample_rate": 44_100}
    with RewardClient(serve(Scorer(score, media=tuple(media)))) as client:
        assert client.submit(media, ["a"], [rates]).result(10) == [Score(1.0, details=rates)]
    assert {kind: (array.dtype, array.shape) for kind, array in seen.items()} == {
        kind: (array.dtype, array.shape) for kind, array in media.items()
    }


@pytest.mark.parametrize("media", [IMAGE, AUDIO, VIDEO | AUDIO | IMAGE, LATENT], ids=lambda media: "+".join(media))
def test_other_kinds_of_media_are_400(serve: Callable[..., str], media: dict[str, np.ndarray]) -> None:
    url = serve(Scorer(halves, media=("video", "audio")))
    response = requests.post(url + "/score", data=pack(media), headers=BINARY, timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"media must be ['audio', 'video'], got {sorted(media)}"


def test_packed_bodies_are_415(serve: Callable[..., str]) -> None:
    response = requests.post(serve(halves) + "/score", headers={**BINARY, "Content-Encoding": "gzip"}, timeout=10)
    assert response.status_code == 415


@pytest.mark.parametrize("framing", [b"Content-Length: 999", b"Transfer-Encoding: chunked"], ids=["length", "chunked"])
def test_a_body_that_trickles_is_408(serve: Callable[..., str], framing: bytes) -> None:
    url = serve(halves, receive_timeout_s=0.3, max_waiting=0)
    start = time.monotonic()
    with connect(url) as conn:
        conn.sendall(HEAD + framing + b"\r\n\r\n")
        conn.settimeout(0.02)
        reply = b""
        while not reply and time.monotonic() < start + 5:
            try:
                reply = conn.recv(1000)
            except TimeoutError:
                conn.sendall(b"1\r\nx\r\n" if b"chunked" in framing else b"x")
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start < 3
    assert requests.post(url + "/score", data=pack(IMAGE), headers=BINARY, timeout=10).status_code == 200


def test_bytes_that_wait_are_bounded_and_given_back(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        started.set()
        assert go_on.wait(10)
        return [1.0]

    url = serve(slow, max_body_mb=1, max_waiting_mb=1)
    large = {"image": np.zeros((1, 450, 450, 3), np.uint8)}  # 0.6 MB, so there is no room for two
    replies = []
    first = threading.Thread(
        target=lambda: replies.append(requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10))
    )
    first.start()
    assert started.wait(10)
    busy = requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    go_on.set()
    first.join(10)
    for _ in range(3):
        replies.append(requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10))
    assert [reply.status_code for reply in replies] == [200] * 4


def test_connections_that_bring_no_request_are_closed() -> None:
    closed = []

    class Connection:
        def __init__(self, name: str, cycle: object, received: bytes = b"") -> None:
            self.cycle = cycle
            self.conn = SimpleNamespace(trailing_data=(received, False))
            self.transport = SimpleNamespace(close=lambda: closed.append(name))

    at_work, done = (SimpleNamespace(response_complete=is_done) for is_done in (False, True))
    ours = server._Server(uvicorn.Config(server.create_app(halves, name="h"), log_config=None), None)
    silent, idle, busy = Connection("silent", None), Connection("idle", done), Connection("busy", at_work)
    half = Connection("half", done, b"POST /score HTT")
    ours.server_state.connections = {silent, idle, busy, half}  # type: ignore[assignment]
    waits = {(silent, server.HEAD_S), (idle, server.IDLE_S), (half, server.HEAD_S)}
    asyncio.run(ours.on_tick(1))
    assert ours._waits_since.keys() == waits
    idle.cycle = at_work  # it brings a request
    asyncio.run(ours.on_tick(1))
    idle.cycle = done
    asyncio.run(ours.on_tick(1))
    assert ours._waits_since[silent, server.HEAD_S] < ours._waits_since[idle, server.IDLE_S]
    for wait in waits:
        ours._waits_since[wait] -= server.HEAD_S
    assert not closed
    asyncio.run(ours.on_tick(1))
    assert sorted(closed) == ["half", "silent"]
