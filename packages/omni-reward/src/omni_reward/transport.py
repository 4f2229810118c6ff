"""HTTP exchanges, each with one deadline; each kind of failure has its class in `omni_reward.errors`.

`requests` restarts its read timeout at every packet, so a slow server could block a caller for ever. Therefore each
exchange runs in a thread, and its caller waits for it until the deadline. A thread that its caller left ends with the
next packet of the reply's body, or after as long without a packet as the exchange had time.
"""

import ipaddress
import json
import re
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
NO_PROXIES = {"http": "", "https": "", "all": ""}  # requests reads the environment only for missing keys
MAX_REPLY_BYTES = 16 * 2**20
MAX_KEPT = 256  # servers, and connections to each, that are kept alive


class _Body:
    """A request's body in parts, which are sent from their own memory and never joined."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class Transport:
    """Connections to servers that share a token, kept alive. Threads may share it.

    Args:
        token: sent as a bearer token if set.
        proxy: `none` connects to servers directly. `env` uses the proxy in HTTP_PROXY and related variables, which
            then sees everything that is sent over http; loopback is always direct.
        content_type: of the bodies.

    Raises:
        ValueError: the token is not valid in a header.
    """

    def __init__(
        self, token: str | None, *, proxy: Proxy = "none", content_type: str = "application/octet-stream"
    ) -> None:
        check_token(token)
        self._token, self._proxy, self._content_type = token, proxy, content_type
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(MAX_KEPT, MAX_KEPT))

    def exchange(
        self, method: str, url: str, deadline: float, body: Sequence[bytes | memoryview] | None = None
    ) -> bytes:
        """Return the body of the server's 200 reply to a request, whose own body may have several parts.

        Raises:
            RewardTimeoutError: the reply was not complete at the deadline, on the monotonic clock.
            RewardConnectError: no server answered, or the connection broke.
            RewardHTTPError: the status was not 200.
            RewardFormatError: the reply was longer than MAX_REPLY_BYTES.
        """
        where, timeout_s = f"{method} {url}", max(0.001, deadline - time.monotonic())
        answer: Future[tuple[requests.Response, bytes]] = Future()

        def run() -> None:
            try:
                answer.set_result(self._fetch(method, url, deadline, body))
            except BaseException as exc:  # of any kind: the caller raises it
                answer.set_exception(exc)

        Thread(target=run, daemon=True).start()
        try:
            response, reply = answer.result(timeout_s)
        except (TimeoutError, requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            if isinstance(exc, TimeoutError) or time.monotonic() >= deadline:
                raise RewardTimeoutError(f"{where}: no complete reply after {timeout_s:.1f} s") from exc
            raise RewardConnectError(f"{where}: {_root(exc)}") from exc
        if len(reply) > MAX_REPLY_BYTES:
            raise RewardFormatError(f"{where}: the reply must have at most {MAX_REPLY_BYTES} bytes")
        if response.status_code != 200:
            code, message = _error_in(reply)
            wait_s = _seconds_in(response.headers.get("Retry-After", ""))
            text = " ".join(filter(None, (f"{where}: {response.status_code}", code, message)))
            raise RewardHTTPError(text, status=response.status_code, code=code, retry_after_s=wait_s)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _fetch(
        self, method: str, url: str, deadline: float, body: Sequence[bytes | memoryview] | None
    ) -> tuple[requests.Response, bytes]:
        """Return the response and its body, which ends early if it is too long."""
        data: Any = None if body is None else _Body(body)
        headers = {"Content-Type": self._content_type} if body is not None else {}
        is_direct = self._proxy == "none" or is_loopback(urlsplit(url).hostname or "")
        with self._session.request(
            method,
            url,
            data=data,
            headers={**headers, "Accept-Encoding": "identity"},  # a compressed reply could be far larger
            auth=self._authorize,
            timeout=max(0.001, deadline - time.monotonic()),
            proxies=NO_PROXIES if is_direct else None,
            stream=True,
            allow_redirects=False,  # a redirected POST arrives as a GET without its body
        ) as response:
            reply = bytearray()
            while len(reply) <= MAX_REPLY_BYTES and (piece := response.raw.read1(2**16, decode_content=False)):
                reply += piece
                if time.monotonic() > deadline:
                    raise requests.Timeout
        return response, bytes(reply)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, since requests replaces an Authorization header by an entry of .netrc.
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def is_loopback(host: str) -> bool:
    """True if a host name or address is this machine's loopback."""
    with suppress(ValueError):  # a name, not an address
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_loopback(host_header: str, own: str) -> bool:
    """True if a Host header names loopback or is the server's own name; a web page that rebinds DNS sends another."""
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(host) or host == own.lower()


def check_url(url: str) -> None:
    """Raise ValueError unless the URL is the base URL of an HTTP server."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_plain = parts.username is None and parts.port != 0 and not parts.query and not parts.fragment
        is_valid = parts.scheme in ("http", "https") and bool(host) and is_plain
    except ValueError:  # a port that is not a number, an invalid host
        is_valid = False
    if not is_valid:
        raise ValueError(f"url must be http(s)://host[:port][/path], got {url!r:.200}")


def _root(error: BaseException) -> BaseException:
    """Return the error that began a chain, which requests and urllib3 wrap several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def _seconds_in(retry_after: str) -> float:
    """Return the seconds that a Retry-After header asks to wait, given as a number or a date; else 0."""
    try:
        return urllib3.Retry().parse_retry_after(retry_after)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # the last two for huge numbers and dates
        return 0.0


def _error_in(reply: bytes) -> tuple[str, str]:
    """Return the code and the message of an error; of a reply from another server "" and its first words."""
    try:
        error = json.loads(reply)["error"]
        return clean(str(error["code"]), 80), clean(str(error["message"]), 500)
    except (ValueError, KeyError, TypeError, RecursionError):
        page = re.sub(r"(?is)<(head|script|style)\b.*?</\1>|<[^>]*>", " ", reply[:4096].decode(errors="replace"))
        return "", clean(" ".join(filter(str.isprintable, page.split())), 80)
