"""1,000 faults between client and server: every score that arrives is right, and every failure says what it was.

The plan of faults is a function of (seed, request, attempt), so it does not depend on which thread comes first.
"""

import json
import random
import socket
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

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
    endpoints,
)
from omni_reward.media import ScoreRequest
from omni_reward.wire import decode_request
from reward.reward_helpers import http, read_request, trickle

SEED = 20261120
NUM_FAULTS = 1000
NUM_REQUESTS = 1600
TIMEOUT_S = 2.0
Reply = dict[str, Any]
Fault = Callable[[socket.socket, Reply], None]


def send(conn: socket.socket, reply: object, status: int = 200) -> None:
    conn.sendall(http(f"{status} X", json.dumps(reply).encode(), "Retry-After: 0", close=False))


def delay(conn: socket.socket, reply: Reply) -> None:
    time.sleep(0.1)
    send(conn, reply)


def crumbs(conn: socket.socket, reply: Reply) -> None:
    whole = http("200 X", json.dumps(reply).encode(), close=False)
    for start in range(0, len(whole), 20):
        conn.sendall(whole[start : start + 20])
        time.sleep(0.005)


def truncate(conn: socket.socket, reply: Reply) -> None:
    whole = http("200 X", json.dumps(reply).encode(), close=False)
    conn.sendall(whole[: random.Random(len(whole)).randrange(whole.index(b"\r\n\r\n"), len(whole))])


def edit(change: Callable[[list[Reply]], list[Reply]], **fields: object) -> Fault:
    """A reply with other results or fields; Python's json spells a NaN, as careless servers do."""
    return lambda conn, reply: send(conn, {**reply, "results": change(reply["results"]), **fields})


def scored(value: float) -> Fault:
    return edit(lambda results: [results[0], {**results[1], "score": value}, *results[2:]])


def status(code: int) -> Fault:
    return lambda conn, reply: send(conn, {}, code)


HARMLESS: dict[str, Fault] = {"none": send, "delay": delay, "crumbs": crumbs}
RETRIED: dict[str, Fault] = {
    "drop": lambda conn, reply: None,
    "truncate": truncate,
    **{str(code): status(code) for code in (429, 502, 503, 504)},
}
TIMED_OUT: dict[str, Fault] = {
    "stall": lambda conn, reply: conn.recv(1) and None,  # until the client hangs up
    "crawl": lambda conn, reply: trickle(conn, http("200 X", json.dumps(reply).encode()), pause_s=0.05),
}
MALFORMED: dict[str, Fault] = {
    "cut json": lambda conn, reply: conn.sendall(http("200 X", json.dumps(reply).encode()[:-9])),
    "garbage": lambda conn, reply: conn.sendall(http("200 X", b"<html>Sign in to the network</html>")),
    "nan": scored(float("nan")),
    "infinity": scored(float("inf")),
}
MISMATCHED: dict[str, Fault] = {
    "stale": edit(list, request_id="another"),
    "swap": edit(lambda results: results[::-1]),
    "short": edit(lambda results: results[:-1]),
    "long": edit(lambda results: [*results, results[0]]),
    "protocol": edit(list, protocol=2),
}
REFUSED: dict[str, Fault] = {str(code): status(code) for code in (400, 500)}
FAULTS = HARMLESS | RETRIED | TIMED_OUT | MALFORMED | MISMATCHED | REFUSED
HANG_UP = {"drop", "truncate", "stall", "crawl", "cut json", "garbage"}
WEIGHTS = {
    **dict.fromkeys(FAULTS, 1.5),
    **dict.fromkeys(HARMLESS | RETRIED, 4),
    **dict.fromkeys(TIMED_OUT, 1),
    "none": 45,
}


class Chaos:
    """Servers that score images by their checksum, and do to each attempt at a request what the plan says."""

    def __init__(self) -> None:
        self.done: dict[int, list[str]] = defaultdict(list)  # key -> what happened to the attempts
        self.bodies: dict[int, set[bytes]] = defaultdict(set)

    def __call__(self, conn: socket.socket, body: bytes | None) -> None:
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while body is not None:
            request = decode_request(body, max_batch=64)
            key: Any = request.meta[0]["key"]
            fault = random.Random(f"{SEED}-{key}-{len(self.done[key])}").choices(list(WEIGHTS), list(WEIGHTS.values()))[
                0
            ]
            self.done[key].append(fault)
            self.bodies[key].add(body)
            FAULTS[fault](conn, right_reply(request))
            body = None if fault in HANG_UP else read_request(conn)


def checksum(image: np.ndarray) -> float:
    return zlib.crc32(image.tobytes()) / 2**32


def right_reply(request: ScoreRequest) -> Reply:
    results = [
        {"id": name, "score": checksum(image), "details": {"prompt": prompt}}
        for name, image, prompt in zip(request.ids, request.media["image"], request.prompts, strict=True)
    ]
    return {"protocol": 1, "request_id": request.request_id, "scorer": "crc", "results": results}


@dataclass(frozen=True)
class Outcome:
    """What became of one request, and how long it took."""

    images: np.ndarray
    prompts: list[str]
    result: list[Score] | BaseException
    took_s: float


def ask(client: RewardClient, key: int) -> Outcome:
    rng = np.random.default_rng([SEED, key])
    images = rng.integers(0, 256, (int(rng.integers(2, 5)), int(rng.integers(1, 4)), 4, 3), dtype=np.uint8)
    prompts = [f"{key}-{i}" for i in range(len(images))]
    start = time.monotonic()
    future = client.submit({"image": images}, prompts, [{"key": key}] * len(images))
    result = future.exception() or future.result()
    return Outcome(images, prompts, result, time.monotonic() - start)


def check(outcome: Outcome, steps: list[str]) -> None:
    """What came back is what the last step calls for, and only what passes by itself came before it."""
    assert set(steps[:-1]) <= set(RETRIED)
    assert outcome.took_s < TIMEOUT_S + 2
    error, last = outcome.result, steps[-1] if steps else ""
    if isinstance(error, list):
        assert last in HARMLESS
        assert [score.value for score in error] == [checksum(image) for image in outcome.images]
        assert [score.details for score in error] == [{"prompt": prompt} for prompt in outcome.prompts]
        return
    assert isinstance(error, RewardError)
    if isinstance(error, RewardTimeoutError) and last not in TIMED_OUT:
        assert outcome.took_s > TIMEOUT_S - 0.01  # before the end of a step that was not meant to outlast the deadline
        assert error.num_attempts - len(steps) in (0, 1)
    elif steps:
        assert error.num_attempts == len(steps)
        kinds = {
            RewardTimeoutError: TIMED_OUT,
            RewardFormatError: MALFORMED | MISMATCHED,
            RewardHTTPError: {str(getattr(error, "status", ""))},
            RewardConnectError: {"drop", "truncate"},
        }
        assert last in kinds[type(error)]
        assert error.fatal == (last in MISMATCHED or last == "400")


def test_a_thousand_faults(misbehave: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoints, "MAX_PAUSE_S", 0.2)
    chaos = Chaos()
    with (
        RewardClient([misbehave(chaos) for _ in range(3)], timeout_s=TIMEOUT_S, max_in_flight=16) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        outcomes = list(pool.map(lambda key: ask(client, key), range(NUM_REQUESTS)))
    for key, outcome in enumerate(outcomes):
        try:
            check(outcome, chaos.done[key])
        except AssertionError as exc:
            raise AssertionError(f"request {key} met {chaos.done[key]}, got {outcome.result!r}") from exc
    assert {len(bodies) for bodies in chaos.bodies.values()} == {1}  # the same bytes each time
    faults = Counter(step for steps in chaos.done.values() for step in steps if step != "none")
    assert faults.keys() == FAULTS.keys() - {"none"}
    assert sum(faults.values()) >= NUM_FAULTS
