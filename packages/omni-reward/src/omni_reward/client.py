"""Client: media and prompts go out to a scorer, a future of scores comes back at once.

    with RewardClient("http://127.0.0.1:8100") as client:
        client.check()
        future = client.submit({"image": images}, prompts)     # images: uint8 [N, H, W, 3]
        ...                                                    # the accelerator works on the next batch meanwhile
        scores = future.result()                               # N times a Score, or a RewardError

A sample gets a value, or none with the reason in `Score.abstained`; or its request fails, which `on_failure` turns into
an exception or a reason. Nothing ever becomes a 0.

Letters: N samples, H height, W width.
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
from omni_reward.errors import RewardError, RewardFormatError
from omni_reward.media import TEXT, ScoreRequest, as_texts, canary
from omni_reward.transport import Proxy, Transport, check_url
from omni_reward.wire import MismatchError, Score

Media = Mapping[str, np.ndarray | Sequence[str]]
Meta = Sequence[Mapping[str, object]]
References = Sequence[Sequence[np.ndarray]]
OnFailure = Literal["raise", "mask", "mask_group"]
GREY = np.full((64, 64, 3), 128, np.uint8)
CANARY_PROMPT = 'a sign that says "OK"'


class RewardClient:
    """A scorer at one URL or several. Threads may share one client.

    A request is tried again, under the same id and so without being scored twice, when no server answers, when the
    connection breaks, and at status 429, 502, 503 and 504; with a growing pause, or the one that the server asks for.
    Among several servers the least busy one that is well gets the request. Nothing else is tried again.

    Args:
        url: base URL of the scorer, http or https, or several of servers with the same scorer.
        token: bearer token, when the scorer asks for one.
        timeout_s: longest that one request may take in all from when it is its turn, all attempts and pauses included.
        max_in_flight: most requests at a time; the media of others wait here, and nobody for them.
        on_failure: fate of the samples of a failed request. `raise`: the future's `result()` raises. `mask`:
            they come back without a value, with the failure as the reason. `mask_group`: the same, and
            `Score.mask_group` asks the trainer to leave out their whole groups. A failure that no later request can
            escape, as something is set up wrongly (`RewardError.fatal`), raises in any case.
        mask_limit: most failures in a row that are masked; from then on they raise, until a request succeeds.
        proxy: `none` talks to the servers directly; `env` goes through the proxy that HTTP_PROXY or HTTPS_PROXY names.

    Raises:
        ValueError: an argument breaks its rule.
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
        self._lock = threading.Lock()  # of the counts below
        self._num_under_way, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self._num_failed_in_row = 0

    def submit(
        self, media: Media, prompts: Sequence[str], meta: Meta | None = None, references: References | None = None
    ) -> Future[list[Score]]:
        """Return a future of N scores, in order; its `result()` raises a RewardError when the request fails.

        The arguments are encoded and sent in a thread of the client, from where they lie: do not change them before
        the future is done. Meta that JSON cannot hold is a ValueError of the `result()`.

        Args:
            media: array [N, ...] by kind, as in `omni_reward.media`: `image` is [N, H, W, 3], uint8, RGB. `text` is a
                list of N strings, which takes a server of protocol 2.
            prompts: N prompts.
            meta: N mappings of JSON values for the scorer; with `fps` for video and `sample_rate` for audio.
            references: for each of the N samples the pictures that it was made from, uint8 [H, W, 3] each, exactly
                where the scorer takes them. Samples that share one array send it once.

        Raises:
            ValueError: an argument breaks its rule.
            RuntimeError: the client is closed.
        """
        request = _build_request(media, prompts, meta, references)
        future = self._workers.submit(self._score, request)
        self._count(+1)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that the scorer takes; asks the (first) server when it is first read.

        Raises:
            RewardError: as of `info`.
        """
        return tuple(self.info()["media"])

    @cached_property
    def takes_references(self) -> bool:
        """True if the scorer takes the samples' references; asks the (first) server when it is first read.

        Raises:
            RewardError: as of `info`.
        """
        return bool(self.info()["references"])

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was under way, since the client was made.

        Less what a caller waited for, it is the scoring time that other work has hidden.
        """
        with self._lock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._num_under_way else 0.0)

    def info(self) -> dict[str, Any]:
        """Return the first server's reply to GET /info: scorer, scorer_version, media, references, limits and more.

        `limits["max_waiting"]` is the number of requests that may wait there while one is scored.

        Raises:
            RewardError: the server could not be asked, or speaks another protocol.
        """
        return self._info(self.urls[0])

    def check(
        self,
        media: Media | None = None,
        prompts: Sequence[str] = (CANARY_PROMPT,),
        meta: Meta | None = None,
        references: References | None = None,
    ) -> list[list[Score]]:
        """Score a canary on each server, after a check that all are up, take the token and have the same scorer.

        Worth a call before the first step: mistakes in the setup show here, and raise whatever `on_failure` says. The
        scores show the scorer's `parts` too, unless it abstains.

        Args:
            media: N samples to score, as in `submit`; grey, silent or empty ones by default.
            prompts: their N prompts.
            meta: their N mappings; a scorer that reads a key of its own needs those of a real prompt.
            references: theirs, as in `submit`; a grey one each by default, where the scorer takes them.

        Raises:
            RewardError: a server is not as it should be; the class and the message say what is wrong.
            ValueError: an argument breaks its rule, or the scorer's kinds of media have no canary that suits them all.
        """
        infos = [(self._ask(url, "/healthz"), self._info(url))[1] for url in self.urls]
        for url, info in zip(self.urls, infos, strict=True):
            for key in ("scorer", "scorer_version", "media", "references"):
                if info.get(key) != infos[0].get(key):
                    values = f"{infos[0].get(key)!r:.80} at {self.urls[0]} and {info.get(key)!r:.80} at {url}"
                    raise RewardFormatError(f"{key} must be the same on all servers, got {values}", fatal=True)
        if media is None:
            media, rates = canary(infos[0]["media"], len(prompts))
            meta = [{**rates, **own} for own in meta or [{}] * len(prompts)]
        if references is None and infos[0]["references"]:
            references = [(GREY,)] * len(prompts)
        request = _build_request(media, prompts, meta, references)
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
        """Update the number of requests under way, and the clock that runs while there are any."""
        with self._lock:
            now = time.perf_counter()
            if self._num_under_way:
                self._busy_s += now - self._busy_since
            self._busy_since = now
            self._num_under_way += change

    def _score(self, request: ScoreRequest) -> list[Score]:
        """Return the scores of a request, or abstentions when it fails and may be masked; runs in a worker thread."""
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
        """Return the scores of a request, after as many attempts as it takes and the deadline allows."""
        body = wire.encode_request(request)

        def attempt(url: str) -> list[Score]:
            reply = self._transport.exchange("POST", f"{url}/score", deadline, body)
            try:
                version = wire.protocol_of(request.media)
                return wire.decode_reply(reply, request_id=request.request_id, ids=request.ids, protocol=version)
            except ValueError as exc:
                raise RewardFormatError(f"POST {url}/score: {exc}", fatal=isinstance(exc, MismatchError)) from exc

        return endpoints.call(attempt, deadline)

    def _info(self, url: str) -> dict[str, Any]:
        try:
            info = wire.parse_message(self._ask(url, "/info"), "the reply")
        except ValueError as exc:
            raise RewardFormatError(f"GET {url}/info: {exc}", fatal=isinstance(exc, MismatchError)) from exc
        info.setdefault("references", False)  # a server of an earlier release takes none
        kinds = {"scorer": str, "scorer_version": str, "media": list, "references": bool, "limits": dict}
        for key, kind in kinds.items():
            if not isinstance(info.get(key), kind):
                text = f"GET {url}/info: {key} must be a {kind.__name__}, got {info.get(key)!r:.80}"
                raise RewardFormatError(text, fatal=True)
        return info

    def _ask(self, url: str, path: str) -> bytes:
        return self._transport.exchange("GET", url + path, time.monotonic() + self._timeout_s)


def _build_request(
    media: Media, prompts: Sequence[str], meta: Meta | None, references: References | None
) -> ScoreRequest:
    if isinstance(prompts, str):  # a str is a sequence of str too
        raise ValueError(f"prompts must be a list of str, got {prompts!r:.80}")
    given = [{}] * len(prompts) if meta is None else meta
    objects = [dict(item) if isinstance(item, Mapping) else item for item in given]
    pictures = [tuple(own) for own in references or ()]
    arrays: Any = {kind: as_texts(samples) if kind == TEXT else samples for kind, samples in media.items()}
    return ScoreRequest(arrays, list(prompts), objects, request_id=uuid.uuid4().hex, references=pictures)
