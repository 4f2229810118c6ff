"""1,000 faults between client and server: every score that arrives is right, and every failure says what it was.

The plan of faults is a function of (seed, request, attempt), so it does not depend on which thread comes first.
"""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import requests
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
from reward.chaos_proxy import HARMLESS, MALFORMED, MISMATCHED, REFUSED, RETRIED, TIMED_OUT, ChaosProxy

SEED = 20261120
NUM_FAULTS = 1000
NUM_REQUESTS = 1600
TIMEOUT_S = 2.0
WEIGHTS = {
    "none": 60,
    **dict.fromkeys(HARMLESS, 4),
    **dict.fromkeys(RETRIED, 4),
    "restart": 0.3,
    **dict.fromkeys(TIMED_OUT, 1),
    **dict.fromkeys((*MALFORMED, *MISMATCHED, *REFUSED), 1.5),
}
SERVER = """
import sys, zlib
from collections import Counter
import uvicorn
from omni_reward import Score, Scorer
from omni_reward.server import create_app

calls = Counter()

def score(media, prompts, meta):
    calls.update(str(sample) for sample in meta)
    return [
        Score(zlib.crc32(image.tobytes()) / 2**32, details={"prompt": prompt, "calls": calls[str(sample)]})
        for image, prompt, sample in zip(media["image"], prompts, meta)
    ]

app = create_app(Scorer(score, batch_size=8), name="crc")
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


class Server:
    """A scorer in a process, which can be killed; the score is a checksum of the image."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self._lock = threading.Lock()
        self._process = self._start()
        while not self._answers():
            time.sleep(0.05)

    def restart(self) -> None:
        with self._lock:
            self.stop()
            self._process = self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SERVER, str(self.port)])

    def _answers(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"http://127.0.0.1:{self.port}/healthz", timeout=5).ok
        return False


@dataclass(frozen=True)
class Outcome:
    """What became of one request, and how long it took."""

    images: np.ndarray
    prompts: list[str]
    result: list[Score] | BaseException
    took_s: float


def plan(key: int, attempt: int) -> str:
    if key == 0:
        return "none"
    return random.Random(f"{SEED}-{key}-{attempt}").choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


def ask(client: RewardClient, key: int) -> Outcome:
    rng = np.random.default_rng([SEED, key])
    images = rng.integers(0, 256, (int(rng.integers(2, 5)), int(rng.integers(1, 4)), 4, 3), dtype=np.uint8)
    prompts = [f"{key}-{i}" for i in range(len(images))]
    start = time.monotonic()
    future = client.submit({"image": images}, prompts, [{"key": key, "i": i} for i in range(len(images))])
    result = future.exception() or future.result()
    return Outcome(images, prompts, result, time.monotonic() - start)


@pytest.fixture
def proxy() -> Iterator[ChaosProxy]:
    """Three ways to one server."""
    server = Server()
    proxy = ChaosProxy(server.port, plan, server.restart, num_urls=3)
    yield proxy
    proxy.close()
    server.stop()


def check_scores(outcome: Outcome) -> None:
    """The scores are those of these images, in this order, and no image was scored twice by one server."""
    assert isinstance(outcome.result, list)
    values = [zlib.crc32(image.tobytes()) / 2**32 for image in outcome.images]
    assert [score.value for score in outcome.result] == values
    assert [score.details for score in outcome.result] == [{"prompt": p, "calls": 1} for p in outcome.prompts]


def check_failure(error: BaseException, took_s: float, steps: list[str]) -> None:
    """The error is what the last step calls for, and only what passes by itself came before it."""
    assert isinstance(error, RewardError)
    if not steps:
        assert isinstance(error, RewardConnectError)
        return
    last = steps[-1]
    if isinstance(error, RewardTimeoutError) and last not in TIMED_OUT:
        # The deadline came before the end of a step that was not meant to outlast it, or of the way to the proxy.
        assert took_s > TIMEOUT_S - 0.01
        assert error.num_attempts - len(steps) in (0, 1)
        return
    assert error.num_attempts == len(steps)
    if last in TIMED_OUT:
        assert type(error) is RewardTimeoutError
    elif last in MISMATCHED or last in MALFORMED:
        assert type(error) is RewardFormatError
        assert error.fatal == (last in MISMATCHED)
    elif last.isdecimal():
        assert isinstance(error, RewardHTTPError)
        assert error.status == int(last)
    else:
        assert last in RETRIED or last == "down"
        assert type(error) is RewardConnectError


def check(outcome: Outcome, steps: list[str]) -> None:
    assert all(step in RETRIED or step == "down" for step in steps[:-1])
    assert outcome.took_s < TIMEOUT_S + 2
    if isinstance(outcome.result, BaseException):
        check_failure(outcome.result, outcome.took_s, steps)
    else:
        check_scores(outcome)
        assert steps[-1] == "none" or steps[-1] in HARMLESS


def test_a_thousand_faults(proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(endpoints, "MAX_REST_S", 0.2)
    with (
        RewardClient(proxy.urls, timeout_s=TIMEOUT_S, max_in_flight=16) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        outcomes = [ask(client, 0), *pool.map(lambda key: ask(client, key), range(1, NUM_REQUESTS))]
    for key, outcome in enumerate(outcomes):
        try:
            check(outcome, proxy.done[key])
        except AssertionError as exc:
            raise AssertionError(f"request {key} met {proxy.done[key]}, got {outcome.result!r}") from exc
    faults = Counter(step for steps in proxy.done.values() for step in steps if step not in ("none", "down"))
    assert faults.keys() == WEIGHTS.keys() - {"none"}
    assert sum(faults.values()) >= NUM_FAULTS
