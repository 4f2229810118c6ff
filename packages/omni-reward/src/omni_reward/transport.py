"""HTTP exchanges, each with one deadline; each kind of failure has its class in `omni_reward.errors`.

`requests` restarts its read timeout at every packet, so a slow server could block a caller forever. Therefore each
exchange runs in a thread, and its caller waits for it until the deadline. An abandoned thread ends with the next packet
of the reply's body, or once no packet has arrived for as long as the exchange was allowed to take.
"""

import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, Literal, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from omni_reward.errors import RewardConnectError, RewardFormatError, RewardHTTPError, RewardTimeoutError
from omni_reward.wire import check_token, clean, parse_json

T = TypeVar("T")
Proxy = Literal["none", "env"]
NO_PROXIES = {"http": "", "https": "", "all": ""}  # requests reads the environment only for missing keys
MAX_REPLY_BYTES = 16 * 2**20
MAX_REDIRECTS = 5
MAX_KEPT = 256  # number of servers, and of connections to each, kept alive


class _Body:
    """Body of a request in parts, each sent from its own memory without joining them."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class _Session(requests.Session):
    """Session that follows no redirects: a redirected POST arrives as a GET without its body.

    `requests` reads all of a redirect's body, even with `allow_redirects=False`.
    """

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


class Transport:
    """Kept-alive connections to servers that share a token. Threads may share it.

    Args:
        token: bearer token, if any.
        proxy: `none` connects to servers directly. `env` uses the proxy in HTTP_PROXY and related variables, which
            then sees everything sent over http; loopback is always direct.
        content_type: type of the request bodies.

    Raises:
        ValueError: the token is not valid in a header.
    """

    def __init__(
        self, token: str | None, *, proxy: Proxy = "none", content_type: str = "application/octet-stream"
    ) -> None:
        check_token(token)
        self._token, self._proxy, self._content_type = token, proxy, content_type
        self._session = _Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(MAX_KEPT, MAX_KEPT))

    def exchange(
        self, method: str, url: str, deadline: float, body: Sequence[bytes | memoryview] | None = None
    ) -> bytes:
        """Return the body of the server's 200 reply to a request, whose body may have several parts.

        Raises:
            RewardTimeoutError: the reply was not complete at the deadline, on the monotonic clock.
            RewardConnectError: no server answered, or the connection broke.
            RewardHTTPError: the status was not 200.
            RewardFormatError: the reply was longer than MAX_REPLY_BYTES.
        """
        where, timeout_s = f"{method} {url}", max(0.001, deadline - time.monotonic())
        try:
            response, reply = run_with_timeout(timeout_s, partial(self._fetch, method, url, deadline, body))
        except (TimeoutError, requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            if isinstance(exc, TimeoutError) or time.monotonic() >= deadline:
                raise RewardTimeoutError(f"{where}: no complete reply after {timeout_s:.1f} s") from exc
            raise RewardConnectError(f"{where}: {_root_cause(exc)}") from exc
        if len(reply) > MAX_REPLY_BYTES:
            raise RewardFormatError(f"{where}: the reply must have at most {MAX_REPLY_BYTES} bytes")
        if response.status_code != 200:
            code, message = _parse_error(reply)
            wait_s = _parse_retry_after(response.headers.get("Retry-After", ""))
            text = " ".join(filter(None, (f"{where}: {response.status_code}", code, message)))
            raise RewardHTTPError(text, status=response.status_code, code=code, retry_after_s=wait_s)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _fetch(
        self, method: str, url: str, deadline: float, body: Sequence[bytes | memoryview] | None
    ) -> tuple[requests.Response, bytes]:
        """Return the response and its body, which is truncated if it is too long."""
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
        ) as response:
            reply = bytearray()
            while len(reply) <= MAX_REPLY_BYTES and (piece := response.raw.read1(2**16, decode_content=False)):
                reply += piece
                if time.monotonic() > deadline:
                    raise requests.Timeout
        return response, bytes(reply)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As `auth`, because requests replaces an Authorization header by an entry of .netrc.
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def run_with_timeout(timeout_s: float, work: Callable[[], T]) -> T:
    """Return the result of work in a thread, which is abandoned after `timeout_s`.

    Raises:
        TimeoutError: the time is over. Exceptions of the work are raised too.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as exc:  # of any kind; the caller raises it
            answer.set_exception(exc)

    Thread(target=run, daemon=True).start()
    return answer.result(timeout_s)


def open_url(url: str, headers: Mapping[str, str], wait_s: float) -> requests.Response:
    """Return the response to a GET request, before its body is read.

    Up to MAX_REDIRECTS redirects are followed, without reading their bodies; those to another server only with https.
    wait_s: time limit for each packet.

    Raises:
        requests.RequestException: no server answered, or a redirect is not allowed.
    """
    for _ in range(MAX_REDIRECTS + 1):
        with _Session() as session:
            response = session.get(url, headers=headers, timeout=wait_s, stream=True)
        if not response.is_redirect:
            return response
        response.close()
        url = redirect_target(response)
    raise requests.TooManyRedirects(f"more than {MAX_REDIRECTS} redirects")


def redirect_target(response: requests.Response) -> str:
    """Return the target of a redirect; raise requests.RequestException if it is another server without TLS."""
    target = urljoin(response.url, response.headers["Location"])
    if urlsplit(target).scheme != "https" and urlsplit(target)[:2] != urlsplit(response.url)[:2]:
        raise requests.RequestException(f"a redirect must be to https, got {target}")
    return target


def is_loopback(host: str) -> bool:
    """True if a host name or address is this machine's loopback."""
    with suppress(ValueError):  # a name, not an address
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_loopback(host_header: str, server_name: str) -> bool:
    """True if a Host header names loopback or the server's own name; a page that rebinds DNS sends another name."""
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(host) or host == server_name.lower()


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


def _root_cause(error: BaseException) -> BaseException:
    """Return the original error of a chain; requests and urllib3 wrap errors several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def _parse_retry_after(retry_after: str) -> float:
    """Return the seconds to wait from a Retry-After header, given as a number or a date; else 0."""
    try:
        return urllib3.Retry().parse_retry_after(retry_after)
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):  # the last two for huge numbers and dates
        return 0.0


def _parse_error(reply: bytes) -> tuple[str, str]:
    """Return the code and message of an error reply; for a reply from another server, "" and its first words."""
    try:
        error = parse_json(reply, "the reply")["error"]
        return clean(str(error["code"]), 80), clean(str(error["message"]), 500)
    except (ValueError, KeyError, TypeError):
        page = re.sub(r"(?is)<(head|script|style)\b.*?</\1>|<[^>]*>", " ", reply[:4096].decode(errors="replace"))
        return "", clean(" ".join(filter(str.isprintable, page.split())), 80)
