"""Client of reward servers: `submit` sends media and prompts, and returns a future of their scores immediately.

    with RewardClient("http://127.0.0.1:8100") as client:
        client.check()
        future = client.submit({"image": images}, prompts)     # images: uint8 [N, H, W, 3]
        ...                                                    # meanwhile, sample the next batch
        scores = future.result()                               # N Scores, or a RewardError is raised

A sample gets a value, or `Score.abstained` says why it has none. If a request fails, `on_failure` chooses between an
exception and abstention. A failure never becomes a score of 0.

Notation: N samples, H height, W width.
"""

import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from omni_reward import wire
from omni_reward.endpoints import Endpoints
from omni_reward.errors import RewardError, RewardFormatError, RewardHTTPError
from omni_reward.media import TEXT, ScoreRequest, as_texts, canary
from omni_reward.transport import Proxy, Transport, check_url
from omni_reward.wire import MismatchError, Score

Media = Mapping[str, np.ndarray | Sequence[str]]
Meta = Sequence[Mapping[str, object]] | None
References = Sequence[Sequence[np.ndarray]] | None
Groups = Sequence[int] | None
OnFailure = Literal["raise", "mask", "mask_group"]
GREY = np.full((64, 64, 3), 128, np.uint8)
CANARY_PROMPT = 'a sign that says "OK"'


class RewardClient:
    """A scorer at one URL or several. Threads may share one client.

    A request is retried if no server answers, if the connection breaks, and at status 429, 502, 503 and 504, after a
    growing pause or the server's Retry-After. A retry keeps the request's id, so that it is not scored twice. With
    several servers, a request goes to the least busy one that has not just failed. A reply from a different scorer or
    version than `info` or `check` saw is fatal.

    Args:
        url: base URL (http or https) of the server, or of several servers with the same scorer.
        token: bearer token, if the server requires one.
        timeout_s: time limit of a request from the start of its first attempt, including retries and pauses.
        max_in_flight: maximum number of concurrent requests; the media of others wait in the client.
        on_failure: what happens to the samples of a failed request. `raise`: the future's `result()` raises. `mask`:
            they abstain, with the failure as the reason. `mask_group`: the same, and `Score.mask_group` tells the
            trainer to drop their entire groups. A fatal error (`RewardError.fatal`) always raises.
        mask_limit: most consecutive failures that are masked; further ones raise until a request succeeds.
        proxy: `none` connects to the servers directly, `env` through the proxy in HTTP_PROXY or HTTPS_PROXY.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        max_in_flight: int = 8,
        on_failure: OnFailure = "raise",
        mask_limit: int = 16,
        proxy: Proxy = "none",
    ) -> None:
        self.urls = tuple(base.rstrip("/") for base in ([url] if isinstance(url, str) else url))
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"url must name one server or more, each once, got {self.urls}")
        for base in self.urls:
            check_url(base)
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be > 0 and finite, got {timeout_s}")
        for name, count in (("max_in_flight", max_in_flight), ("mask_limit", mask_limit)):
            if count < 1:
                raise ValueError(f"{name} must be >= 1, got {count}")
        for name, choice, choices in (("on_failure", on_failure, OnFailure), ("proxy", proxy, Proxy)):
            if choice not in get_args(choices):
                raise ValueError(f"{name} must be one of {get_args(choices)}, got {choice!r}")
        self._transport = Transport(token, proxy=proxy)
        self._timeout_s, self._on_failure, self._mask_limit = timeout_s, on_failure, mask_limit
        self._endpoints = Endpoints(self.urls)
        self._workers = ThreadPoolExecutor(max_in_flight, thread_name_prefix="omni-reward")
        self.scorer: dict[str, str] | None = None  # `scorer` and `scorer_version` of the first `info`
        self._lock = threading.Lock()  # guards the counts below
        self._num_running, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self._num_failed_in_row = 0

    def submit(
        self,
        media: Media,
        prompts: Sequence[str],
        meta: Meta = None,
        references: References = None,
        groups: Groups = None,
    ) -> Future[list[Score]]:
        """Return a future of N scores in order; its `result()` raises a RewardError if the request fails.

        A thread of the client encodes and sends the arguments without copying them: do not modify them before the
        future is done. Its `result()` raises ValueError if meta is not JSON-serializable.

        Args:
            media: array [N, ...] by kind, as in `omni_reward.media`: `image` is [N, H, W, 3], uint8, RGB. `text` is a
                list of N strings.
            prompts: N prompts.
            meta: N mappings of JSON values for the scorer; video requires `fps`, audio requires `sample_rate`.
            references: the reference images of each of the N samples, uint8 [H, W, 3], if and only if the scorer takes
                them. An array that samples share is sent once.
            groups: group number of each of the N samples, if and only if the scorer takes groups. The samples of a
                group are complete and contiguous.

        Raises:
            ValueError: an argument is invalid.
            RuntimeError: the client is closed.
        """
        request = _build_request(media, prompts, meta, references, groups)
        future = self._workers.submit(self._score, request)
        self._count(+1)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def sleep(self, asleep: bool = True) -> None:
        """Move the scorers' weights on all servers to the host, or back; a later request moves them back too.

        Raises:
            RewardError: a server does not answer or has no token, or its scorer's weights cannot be moved.
        """
        path, deadline = "/sleep" if asleep else "/wake", time.monotonic() + self._timeout_s
        for base in self.urls:
            Endpoints([base]).call(lambda url: self._transport.exchange("POST", url + path, deadline), deadline)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that the scorer takes; the first access queries the first server.

        Raises:
            RewardError: as in `info`.
        """
        return tuple(self.info()["media"])

    @cached_property
    def takes_references(self) -> bool:
        """True if the scorer takes the samples' references; the first access queries the first server.

        Raises:
            RewardError: as in `info`.
        """
        return bool(self.info()["references"])

    @cached_property
    def takes_groups(self) -> bool:
        """True if the scorer compares the samples of a group; the first access queries the first server.

        Raises:
            RewardError: as in `info`.
        """
        return bool(self.info()["groups"])

    @property
    def busy_s(self) -> float:
        """Seconds with at least one running request since the client was created.

        Subtract the time that callers waited to get the scoring time that other work has hidden.
        """
        with self._lock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._num_running else 0.0)

    def info(self) -> dict[str, Any]:
        """Return the first server's reply to GET /info: scorer, scorer_version, media, references, limits and more.

        `limits["max_waiting"]` is the number of requests that may wait there while one is scored.

        Raises:
            RewardError: the server does not answer, or has another protocol.
        """
        return self._info(self.urls[0])

    def check(
        self,
        media: Media | None = None,
        prompts: Sequence[str] = (CANARY_PROMPT,),
        meta: Meta = None,
        references: References = None,
    ) -> list[list[Score]]:
        """Check that all servers answer, accept the token and have the same scorer, then score a canary on each.

        Call it before the first step: it raises an error for any fault in the setup, whatever `on_failure` is. The
        scores also have the scorer's `parts`, unless it abstains.

        Args:
            media: N samples to score, as in `submit`; grey, silent or empty ones by default.
            prompts: their N prompts; for a scorer that takes groups, they are one group.
            meta: their N mappings; a scorer that reads other keys needs the meta of a real prompt.
            references: their references, as in `submit`; by default one grey image each, if the scorer takes them.

        Raises:
            RewardError: a check of a server failed; the class and the message say which.
            ValueError: an argument is invalid, or a kind of media has no default canary.
        """
        infos = [(self._get(url, "/healthz"), self._info(url))[1] for url in self.urls]
        for url, info in zip(self.urls, infos, strict=True):
            for key in ("scorer", "scorer_version", "media", "references", "groups"):
                if info.get(key) != infos[0].get(key):
                    values = f"{infos[0].get(key)!r:.80} at {self.urls[0]} and {info.get(key)!r:.80} at {url}"
                    raise RewardFormatError(f"{key} must be the same on all servers, got {values}", fatal=True)
        if media is None:
            media, rates = canary(infos[0]["media"], len(prompts))
            meta = [{**rates, **entry} for entry in meta or [{}] * len(prompts)]
        if references is None and infos[0]["references"]:
            references = [(GREY,)] * len(prompts)
        groups = [0] * len(prompts) if infos[0]["groups"] else None
        request = _build_request(media, prompts, meta, references, groups)
        deadline = time.monotonic() + self._timeout_s
        return [self._exchange(Endpoints([url]), request, deadline) for url in self.urls]

    def close(self) -> None:
        """Wait for all requests and close the connections."""
        self._workers.shutdown()
        self._transport.close()

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _count(self, change: int) -> None:
        """Update the number of running requests and the time that at least one was running."""
        with self._lock:
            now = time.perf_counter()
            if self._num_running:
                self._busy_s += now - self._busy_since
            self._busy_since = now
            self._num_running += change

    def _score(self, request: ScoreRequest) -> list[Score]:
        """Return the scores of a request, or abstentions if it fails and may be masked; runs in a worker thread."""
        try:
            scores = self._exchange(self._endpoints, request, time.monotonic() + self._timeout_s)
        except RewardError as exc:
            with self._lock:
                self._num_failed_in_row += 1
                is_in_limit = self._num_failed_in_row <= self._mask_limit
            if self._on_failure == "raise" or exc.fatal or not is_in_limit:
                raise
            reason = f"the request failed: {exc}"
            score = Score(None, abstained=reason, mask_group=self._on_failure == "mask_group")
            return [score] * len(request.prompts)
        with self._lock:
            self._num_failed_in_row = 0
        return scores

    def _exchange(self, endpoints: Endpoints, request: ScoreRequest, deadline: float) -> list[Score]:
        """Return the scores of a request, with retries until the deadline."""
        body = wire.encode_request(request)

        def attempt(url: str) -> list[Score]:
            reply = self._transport.exchange("POST", f"{url}/score", deadline, body)
            try:
                return wire.decode_reply(reply, request_id=request.request_id, ids=request.ids, scorer=self.scorer)
            except ValueError as exc:
                raise RewardFormatError(f"POST {url}/score: {exc}", fatal=isinstance(exc, MismatchError)) from exc

        return endpoints.call(attempt, deadline)

    def _info(self, url: str) -> dict[str, Any]:
        try:
            info = wire.parse_message(self._get(url, "/info"), "the reply")
        except MismatchError as exc:
            raise RewardFormatError(f"GET {url}/info: {exc}", fatal=True) from exc
        except ValueError as exc:
            raise RewardFormatError(f"{url} is no reward server: GET {url}/info: {exc}") from exc
        except RewardHTTPError as exc:
            if exc.code or not exc.fatal:
                raise
            raise RewardHTTPError(f"{url} is no reward server: {exc}", status=exc.status) from exc
        kinds: dict[str, type] = {"scorer": str, "scorer_version": str, "media": list, "limits": dict}
        kinds |= {"references": bool, "groups": bool, "sleeps": bool}
        for key, kind in kinds.items():
            if not isinstance(info.get(key), kind):
                text = f"GET {url}/info: {key} must be a {kind.__name__}, got {info.get(key)!r:.80}"
                raise RewardFormatError(text, fatal=True)
        self.scorer = self.scorer or {name: info[name] for name in ("scorer", "scorer_version")}
        return info

    def _get(self, url: str, path: str) -> bytes:
        return self._transport.exchange("GET", url + path, time.monotonic() + self._timeout_s)


def _build_request(
    media: Media, prompts: Sequence[str], meta: Meta, references: References, groups: Groups
) -> ScoreRequest:
    if isinstance(prompts, str):  # a str is a sequence of str too
        raise ValueError(f"prompts must be a list of str, got {prompts!r:.80}")
    entries = [{}] * len(prompts) if meta is None else meta
    objects = [dict(item) if isinstance(item, Mapping) else item for item in entries]
    images = [tuple(row) for row in references or ()]
    arrays: Any = {kind: as_texts(samples) if kind == TEXT else samples for kind, samples in media.items()}
    whole = () if groups is None else list(groups)
    return ScoreRequest(arrays, list(prompts), objects, uuid.uuid4().hex, references=images, groups=whole)
