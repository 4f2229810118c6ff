"""Choice of a server for each attempt at a request: the least busy one that has not just failed.

A server that fails is paused, each time for longer, and the others get its requests. After several consecutive failures
it gets a single trial request, and more once that has succeeded. A request waits until a server is free; LAST_TRY_S
before its deadline it makes its last attempt, even on a paused server.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from omni_reward.errors import RewardConnectError, RewardError, RewardHTTPError, RewardTimeoutError

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
MAX_RETRY_AFTER_S = 30.0  # longest pause that a server can ask for
LAST_TRY_S = 0.5
NUM_FAILURES_TO_TRIAL = 3
RETRY_STATUSES = frozenset({429, 502, 503, 504})
T = TypeVar("T")


def is_worth_a_retry(error: RewardError) -> bool:
    """True if the same request may soon succeed: the server is down, restarting or full."""
    if isinstance(error, RewardHTTPError):
        return error.status in RETRY_STATUSES
    return isinstance(error, RewardConnectError)


@dataclass(eq=False)
class Endpoint:
    """A server with its requests and failures; times are on the monotonic clock."""

    url: str
    num_requests: int = 0  # running now
    num_failures: int = 0  # consecutive; failures of concurrent attempts count once
    failed_at: float = 0.0
    paused_until: float = 0.0

    def is_free(self, now: float, last: float) -> bool:
        """True if it can take a request whose last attempt is due at `last`; on trial it takes one at a time."""
        is_on_trial = self.num_failures >= NUM_FAILURES_TO_TRIAL
        return now >= min(self.paused_until, last) and not (is_on_trial and self.num_requests)

    def fail(self, error: RewardError, *, started: float, now: float) -> None:
        """Pause the server after a failed attempt that began at `started`."""
        if started >= self.failed_at:
            self.num_failures += 1
            self.failed_at = now
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.num_failures - 1, 20)) * random.uniform(0.5, 1.0)
        if isinstance(error, RewardHTTPError):
            pause_s = max(pause_s, min(error.retry_after_s, MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.25))
        self.paused_until = max(self.paused_until, now + pause_s)


class Endpoints:
    """Servers of a client. Threads may share it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._changed = threading.Condition()
        self._last_failure = "none yet"

    def call(self, attempt: Callable[[str], T], deadline: float) -> T:
        """Call `attempt` with the URLs of servers until it succeeds, and return its result.

        Raises:
            RewardError: the last attempt failed, or an attempt failed with an error that is not retried.
        """
        error: RewardError | None = None
        num_attempts = 0
        while endpoint := self.acquire(deadline):
            started, failure = time.monotonic(), None
            num_attempts += 1
            try:
                return attempt(endpoint.url)
            except RewardError as exc:
                error = failure = exc
                exc.num_attempts = num_attempts
            finally:
                self.release(endpoint, failure, started=started)
            if not is_worth_a_retry(error) or started >= deadline - LAST_TRY_S:
                break
        raise error or RewardConnectError(f"no server was free in time; last failure: {self._last_failure}")

    def acquire(self, deadline: float) -> Endpoint | None:
        """Return a server for one attempt, to be given back, or None if none is free before the deadline."""
        last = deadline - LAST_TRY_S
        with self._changed:
            while (now := time.monotonic()) < deadline:
                free = [endpoint for endpoint in self._endpoints if endpoint.is_free(now, last)]
                if free:
                    endpoint = min(free, key=lambda endpoint: (endpoint.num_requests, random.random()))
                    endpoint.num_requests += 1
                    return endpoint
                times = [last, deadline, *(endpoint.paused_until for endpoint in self._endpoints)]
                self._changed.wait(min(moment for moment in times if moment > now) - now)
        return None

    def release(self, endpoint: Endpoint, error: RewardError | None, *, started: float) -> None:
        """Record the end of an attempt that began at `started`; errors of the request itself are not failures."""
        with self._changed:
            endpoint.num_requests -= 1
            if error is not None and (is_worth_a_retry(error) or isinstance(error, RewardTimeoutError)):
                endpoint.fail(error, started=started, now=time.monotonic())
                self._last_failure = str(error)
            else:
                endpoint.num_failures, endpoint.paused_until = 0, 0.0
            self._changed.notify_all()
