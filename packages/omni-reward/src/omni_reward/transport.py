"""One HTTP exchange under one deadline; each kind of failure has its class in `omni_reward.errors`.

`requests` restarts its read timeout at every packet, so a server that trickles can hold a caller for ever. Here each
exchange has a thread, and its caller waits for it until the deadline and no longer. A thread that is left behind ends
with the next packet of the reply's body, or when no packet comes for as long as the exchange had.
"""

import ipaddress
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, Literal
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from omni_reward.errors import RewardConnectError, RewardFormatError, RewardHTTPError, RewardTimeoutError
from omni_reward.wire import check_token, clean

Proxy = Literal["none", "env"]
NO_PROXIES = {"http": "", "https": "", "all": ""}  # requests asks the environment only for those that are not given
MAX_REPLY_BYTES = 16 * 2**20
MAX_KEPT = 256  # connections that are kept alive


class _Body:
    """A request's body in parts, so that they are sent from where they lie and never joined."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class Transport:
    """Kept-alive connections to one server. Threads may share it.

    Args:
        url: the server's base URL, without a trailing slash.
        token: sent as a bearer token when set.
        proxy: `none` talks to the server directly. `env` takes the proxy that HTTP_PROXY and its relatives name, which
            then sees all that is sent over http; none can reach our own loopback.
        content_type: of the bodies.

    Raises:
        ValueError: the URL is not one of an HTTP server, or no header can hold the token.
    """

    def __init__(
        self, url: str, token: str | None, *, proxy: Proxy = "none", content_type: str = "application/octet-stream"
    ) -> None:
        if not _is_base_url(url):
            raise ValueError(f"url must be http(s)://host[:port][/path], got {url!r:.200}")
        check_token(token)
        self._url, self._token, self._content_type = url, token, content_type
        self._is_direct = proxy == "none" or is_loopback(urlsplit(url).hostname or "")
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_connections=1, pool_maxsize=MAX_KEPT))

    def exchange(
        self, method: str, path: str, deadline: float, body: Sequence[bytes | memoryview] | None = None
    ) -> bytes:
        """Return the body of the server's 200 reply to a request whose own body may come in parts.

        Raises:
            RewardTimeoutError: the whole reply was not here at the deadline, on the monotonic clock.
            RewardConnectError: no server answered, or the connection broke.
            RewardHTTPError: the status was not 200.
            RewardFormatError: the reply was longer than MAX_REPLY_BYTES.
        """
        where, timeout_s = f"{method} {self._url}{path}", max(0.001, deadline - time.monotonic())
        answer: Future[tuple[requests.Response, bytes]] = Future()
        Thread(target=self._send, args=(answer, method, path, deadline, body), daemon=True).start()
        try:
            response, reply = answer.result(timeout_s)
        except (TimeoutError, requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            if isinstance(exc, TimeoutError) or time.monotonic() >= deadline:
                raise RewardTimeoutError(f"{where}: no whole reply after {timeout_s:.1f} s") from exc
            raise RewardConnectError(f"{where}: {exc}") from exc
        if len(reply) > MAX_REPLY_BYTES:
            raise RewardFormatError(f"{where}: the reply is longer than {MAX_REPLY_BYTES} bytes")
        if response.status_code != 200:
            code, message = _error_in(reply)
            wait_s = _seconds_in(response.headers.get("Retry-After", ""))
            text = f"{where}: {response.status_code} {code} {message}"
            raise RewardHTTPError(text, status=response.status_code, code=code, retry_after_s=wait_s)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _send(
        self,
        answer: Future[tuple[requests.Response, bytes]],
        method: str,
        path: str,
        deadline: float,
        body: Sequence[bytes | memoryview] | None,
    ) -> None:
        """Bring the reply, or the part of it that is already too long; runs in a thread of its own."""
        data: Any = None if body is None else _Body(body)
        headers = {"Content-Type": self._content_type} if body is not None else {}
        try:
            with self._session.request(
                method,
                self._url + path,
                data=data,
                headers={**headers, "Accept-Encoding": "identity"},  # a packed reply could unpack to far more
                auth=self._authorize,
                timeout=max(0.001, deadline - time.monotonic()),
                proxies=NO_PROXIES if self._is_direct else None,
                stream=True,
                allow_redirects=False,  # a redirected POST arrives as a GET without its body
            ) as response:
                reply = bytearray()
                while len(reply) <= MAX_REPLY_BYTES and (piece := response.raw.read1(2**16, decode_content=False)):
                    reply += piece
                    if time.monotonic() > deadline:
                        raise requests.Timeout
            answer.set_result((response, bytes(reply)))
        except BaseException as exc:  # whatever it is, the caller gets it
            answer.set_exception(exc)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # as `auth`, not as a header: requests lets a .netrc entry replace an Authorization header
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def is_loopback(host: str) -> bool:
    """True for a host name or address that means this machine only."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_loopback(host_header: str, own: str) -> bool:
    """True for a Host header that names loopback, or the server's own name. A page that rebinds a name sends that."""
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(host) or host == own.lower()


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_plain = parts.username is None and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, a host that no resolver takes
        return False
    return parts.scheme in ("http", "https") and bool(host) and is_plain


def _seconds_in(retry_after: str) -> float:
    """Return the seconds from now that a Retry-After header asks for, as a number or a date; 0 for anything else."""
    try:
        return urllib3.Retry().parse_retry_after(retry_after)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # the last two of numbers, dates too far away
        return 0.0


def _error_in(reply: bytes) -> tuple[str, str]:
    """Return code and message of an error reply; the code is empty when it is not one of a scorer's."""
    try:
        error = json.loads(reply)["error"]
        return clean(str(error["code"]), 80), clean(str(error["message"]), 500)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", repr(reply[:200])
