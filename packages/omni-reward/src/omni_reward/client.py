"""Client: media and prompts go out to a scorer, a future of scores comes back at once.

    with RewardClient("http://127.0.0.1:8100") as client:
        client.check()
        future = client.submit({"image": images}, prompts)     # images: uint8 [N, H, W, 3]
        ...                                                    # the accelerator works on the next batch meanwhile
        scores = future.result()                               # N times a Score, or a RewardError

Letters: N samples, H height, W width.
"""

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from omni_reward import wire
from omni_reward.errors import RewardFormatError
from omni_reward.transport import Transport
from omni_reward.wire import Score, ScoreRequest


class RewardClient:
    """A scorer at a URL. Threads may share one client.

    Args:
        url: base URL of the scorer, http or https.
        token: bearer token, when the scorer asks for one.
        timeout_s: longest that one request may take in all, from its first byte sent to its last byte received.
        max_in_flight: most requests at a time; one more `submit` waits until one of them is done.

    Raises:
        ValueError: an argument breaks its rule.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 60.0, max_in_flight: int = 8) -> None:
        if not _is_base_url(url):
            raise ValueError(f"url must be http(s)://host[:port][/path], got {url!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        wire.check_token(token)
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be >= 1, got {max_in_flight}")
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(max_in_flight)
        self._workers = ThreadPoolExecutor(max_in_flight, thread_name_prefix="omni-reward")
        self._clock = threading.Lock()
        self._num_under_way, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self._local = threading.local()  # one transport per worker thread
        self._transports: list[Transport] = []

    def submit(
        self,
        media: Mapping[str, np.ndarray],
        prompts: Sequence[str],
        meta: Sequence[Mapping[str, object]] | None = None,
    ) -> Future[list[Score]]:
        """Future of N scores, in the order of the prompts; its `result()` raises a RewardError when the request fails.

        Args:
            media: array by kind: `image` is [N, H, W, 3], uint8, RGB. Must not be written to before the future is done.
            prompts: N prompts.
            meta: N mappings of JSON values for the scorer.

        Raises:
            ValueError: an argument breaks its rule.
            RuntimeError: the client is closed.
        """
        request = _build_request(media, prompts, meta)
        header = request.header()
        self._places.acquire()
        self._count(+1)
        try:
            future = self._workers.submit(self._score, request, header)
        except RuntimeError:
            self._release()
            raise
        future.add_done_callback(lambda _: self._release())
        return future

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was under way, since the client was made.

        Less what a caller waited for, it is the scoring time that other work has hidden.
        """
        with self._clock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._num_under_way else 0.0)

    def info(self) -> dict[str, Any]:
        """What the server says of itself: scorer, version, protocol, media kinds, limits.

        Raises:
            RewardError: the server could not be asked, or speaks another protocol.
        """
        reply = self._ask("/info")
        try:
            return wire.parse_message(reply, "the reply")
        except ValueError as exc:
            raise RewardFormatError(f"GET {self.url}/info: {exc}") from exc

    def check(self) -> None:
        """Returns when the server is up, accepts the token and speaks our protocol; worth a call before the first step.

        Raises:
            RewardError: it is not so; the class and the message say what is wrong.
        """
        self._ask("/healthz")
        self.info()

    def close(self) -> None:
        """Waits for the requests in flight and closes the connections."""
        self._workers.shutdown()
        for transport in self._transports:
            transport.close()

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _release(self) -> None:
        self._count(-1)
        self._places.release()

    def _count(self, change: int) -> None:
        """Keeps the number of requests under way, and the clock that runs while there are any."""
        with self._clock:
            now = time.perf_counter()
            if self._num_under_way:
                self._busy_s += now - self._busy_since
            self._busy_since = now
            self._num_under_way += change

    def _score(self, request: ScoreRequest, header: str) -> list[Score]:
        """Scores of one request; runs in a worker thread."""
        body = wire.encode_request(header, request.media)
        # One attempt: whether a lost request is worth another one is the caller's choice.
        reply = self._transport().exchange("POST", "/score", body=body, timeout_s=self._timeout_s)
        try:
            return wire.decode_reply(reply, request_id=request.request_id, count=len(request.prompts))
        except ValueError as exc:
            raise RewardFormatError(f"POST {self.url}/score: {exc}") from exc

    def _transport(self) -> Transport:
        if not hasattr(self._local, "transport"):
            self._local.transport = Transport(self.url, self._token)
            self._transports.append(self._local.transport)
        return self._local.transport

    def _ask(self, path: str) -> bytes:
        """Body of the reply to a GET from the calling thread, past the requests in flight."""
        transport = Transport(self.url, self._token)
        try:
            return transport.exchange("GET", path, timeout_s=self._timeout_s)
        finally:
            transport.close()


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_plain = parts.username is None and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, a host that no resolver takes
        return False
    return parts.scheme in ("http", "https") and bool(host) and is_plain


def _build_request(
    media: Mapping[str, np.ndarray], prompts: Sequence[str], meta: Sequence[Mapping[str, object]] | None
) -> ScoreRequest:
    if isinstance(prompts, str):  # a str is a sequence of str too
        raise ValueError(f"prompts must be a list of str, got {prompts!r:.80}")
    if meta is None:
        meta = [{}] * len(prompts)
    objects = [dict(item) if isinstance(item, Mapping) else item for item in meta]
    return ScoreRequest(dict(media), list(prompts), objects, request_id=uuid.uuid4().hex)
