"""One HTTP exchange under one deadline; each kind of failure has its class in `omni_reward.errors`.

`requests` restarts its read timeout at every packet, so a server that trickles can hold a caller for ever. Here a
watcher thread hangs up once the deadline has passed, whatever the exchange is doing by then. Only the system's search
for an address and its attempts to reach several of them lie outside: each attempt has the deadline for itself.
"""

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InvalidHeader
from urllib3.util.retry import Retry

from omni_reward.errors import RewardConnectError, RewardError, RewardFormatError, RewardHTTPError, RewardTimeoutError
from omni_reward.wire import check_token, clean

Proxy = Literal["none", "env"]
NO_PROXIES = {"http": "", "https": "", "all": ""}  # requests asks the environment only for those that are not given
MAX_REPLY_BYTES = 16 * 2**20


def error_class(exc: requests.RequestException) -> type[RewardError]:
    """The class of ours that a caller sees for an exception of requests."""
    if isinstance(exc, requests.Timeout):  # asked first: a connect timeout is a ConnectionError too
        return RewardTimeoutError
    if isinstance(exc, requests.exceptions.ContentDecodingError):
        return RewardFormatError
    return RewardConnectError


class _Body:
    """A request's body in parts, so that they are sent from where they lie and never joined."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class Transport:
    """Kept-alive connections to one server, one for each thread.

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
        self._local = threading.local()  # each thread's session and adapter
        self._sessions: list[requests.Session] = []

    def exchange(
        self, method: str, path: str, deadline: float, body: Sequence[bytes | memoryview] | None = None
    ) -> bytes:
        """Body of the server's 200 reply to a request whose own body may come in parts.

        Raises:
            RewardTimeoutError: the whole reply was not here at the deadline, on the monotonic clock.
            RewardConnectError: no server answered, or the connection broke.
            RewardHTTPError: the status was not 200.
            RewardFormatError: the reply was longer than MAX_REPLY_BYTES.
        """
        where = f"{method} {self._url}{path}"
        timeout_s, failure = max(0.001, deadline - time.monotonic()), None
        if not vars(self._local):
            self._open()
        try:
            with self._local.adapter.hang_up_after(timeout_s):
                status, retry_after_s, reply = self._send(method, path, body, timeout_s)
        except requests.RequestException as exc:
            failure = exc
        if time.monotonic() >= deadline:  # without a failure too: a reply of unknown length looks whole when cut off
            raise RewardTimeoutError(f"{where}: no whole reply after {timeout_s:.1f} s") from failure
        if failure is not None:
            raise error_class(failure)(f"{where}: {failure}") from failure
        if reply is None:
            raise RewardFormatError(f"{where}: the reply is longer than {MAX_REPLY_BYTES} bytes")
        if status != 200:
            code, message = _error_in(reply)
            text = f"{where}: {status} {code} {message}"
            raise RewardHTTPError(text, status=status, code=code, retry_after_s=retry_after_s)
        return reply

    def close(self) -> None:
        """Close the connections of all threads."""
        for session in self._sessions:
            session.close()

    def _open(self) -> None:
        self._local.adapter, self._local.session = _Adapter(pool_connections=1, pool_maxsize=1), requests.Session()
        for scheme in ("http://", "https://"):
            self._local.session.mount(scheme, self._local.adapter)
        self._sessions.append(self._local.session)

    def _send(
        self, method: str, path: str, body: Sequence[bytes | memoryview] | None, timeout_s: float
    ) -> tuple[int, float, bytes | None]:
        """Status, seconds to wait before another try, and body; the body is None when it is too long."""
        headers = {"Accept-Encoding": "identity"}  # a packed reply could unpack to far more than the cap
        data: Any = None
        if body is not None:
            data, headers["Content-Type"] = _Body(body), self._content_type
        with self._local.session.request(
            method,
            self._url + path,
            data=data,
            headers=headers,
            auth=self._authorize,
            timeout=timeout_s,
            proxies=NO_PROXIES if self._is_direct else None,
            stream=True,
            allow_redirects=False,  # a redirected POST arrives as a GET without its body
        ) as response:
            retry_after_s = _seconds_in(response.headers.get("Retry-After", ""))
            reply = bytearray()
            for chunk in response.iter_content(2**16):
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    return response.status_code, retry_after_s, None
            return response.status_code, retry_after_s, bytes(reply)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # as `auth`, not as a header: requests lets a .netrc entry replace an Authorization header
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Adapter(HTTPAdapter):
    """requests' adapter that knows its one socket, so that another thread can hang it up."""

    _socket: socket.socket | None = None

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Pool of urllib3 for the request, whose connections show their sockets."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        adapter = self
        base: Any = pool.ConnectionCls

        class Connection(base):
            def connect(self) -> None:
                super().connect()
                adapter._socket = self.sock  # kept here: the connection forgets it before the reply is read

        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = Connection
        return pool

    @contextmanager
    def hang_up_after(self, timeout_s: float) -> Iterator[None]:
        """Cut the connection when the body of the `with` takes longer."""
        finished = threading.Event()

        def watch() -> None:
            wait_s = timeout_s
            while not finished.wait(wait_s):
                self._hang_up()
                wait_s = 0.05  # again and again: there may have been no connection yet

        watcher = threading.Thread(target=watch, name="omni-reward-deadline", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()

    def _hang_up(self) -> None:
        if isinstance(self._socket, socket.socket):
            with suppress(OSError):  # the other side may have been faster
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would drop its state mid-read


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
    """Seconds from now that a Retry-After header asks for, as a number or a date; 0 for anything else."""
    try:
        return Retry().parse_retry_after(retry_after)
    except (InvalidHeader, ValueError, OverflowError):  # the last two of numbers and dates too far away
        return 0.0


def _error_in(reply: bytes) -> tuple[str, str]:
    """Code and message of an error reply; the code is empty when it is not one of a scorer's."""
    try:
        error = json.loads(reply)["error"]
        return clean(str(error["code"]), 80), clean(str(error["message"]), 500)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", repr(reply[:200])
