"""One HTTP exchange under one deadline, with every way it can fail told by an `omni_reward.errors` class.

`requests` restarts its read timeout at every packet, so a server that trickles can hold a caller for ever. Here a
watcher thread hangs up once the deadline has passed, whatever the exchange is doing by then.
"""

import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from omni_reward.errors import RewardConnectError, RewardError, RewardFormatError, RewardHTTPError, RewardTimeoutError

MAX_REPLY_BYTES = 16 * 2**20

# First match wins: a connect timeout is both a Timeout and a ConnectionError.
_MEANINGS: tuple[tuple[type[requests.RequestException], type[RewardError]], ...] = (
    (requests.Timeout, RewardTimeoutError),
    (requests.exceptions.ContentDecodingError, RewardFormatError),
    (requests.RequestException, RewardConnectError),
)


def error_class(exc: requests.RequestException) -> type[RewardError]:
    """The class of ours that a caller sees for an exception of requests."""
    return next(ours for theirs, ours in _MEANINGS if isinstance(exc, theirs))


class Transport:
    """A kept-alive connection to one server, for one thread at a time.

    Args:
        url: the server's base URL, without a trailing slash.
        token: sent as a bearer token when set.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token
        self._adapter = _Adapter(pool_connections=1, pool_maxsize=1)
        self._session = requests.Session()
        self._session.trust_env = not is_loopback(urlsplit(url).hostname or "")  # no proxy can reach our own loopback
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)

    def exchange(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float) -> bytes:
        """Body of the server's 200 reply.

        Raises:
            RewardTimeoutError: the whole reply was not here after timeout_s.
            RewardConnectError: no server answered, or the connection broke.
            RewardHTTPError: the status was not 200.
            RewardFormatError: the reply was longer than MAX_REPLY_BYTES.
        """
        where = f"{method} {self._url}{path}"
        with self._adapter.hang_up_after(timeout_s) as expired:
            try:
                status, reply = self._send(method, path, body, timeout_s)
            except requests.RequestException as exc:
                if expired.is_set():
                    raise RewardTimeoutError(f"{where}: no whole reply after {timeout_s} s") from exc
                raise error_class(exc)(f"{where}: {exc}") from exc
        if expired.is_set():  # hanging up also ends a reply of unknown length, which then looks whole
            raise RewardTimeoutError(f"{where}: no whole reply after {timeout_s} s")
        if reply is None:
            raise RewardFormatError(f"{where}: the reply is longer than {MAX_REPLY_BYTES} bytes")
        if status != 200:
            code, message = _error_in(reply)
            raise RewardHTTPError(f"{where}: {status} {code} {message}", status=status, code=code)
        return reply

    def close(self) -> None:
        """Closes the connection."""
        self._session.close()

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes | None]:
        """Status and body; the body is None when it is too long."""
        headers = {"Accept-Encoding": "identity"}  # a packed reply could unpack to far more than the cap
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"
        with self._session.request(
            method,
            self._url + path,
            data=body,
            headers=headers,
            auth=self._authorize,
            timeout=timeout_s,
            stream=True,
            allow_redirects=False,  # a redirected POST arrives as a GET without its body
        ) as response:
            reply = bytearray()
            for chunk in response.iter_content(2**16):
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    return response.status_code, None
            return response.status_code, bytes(reply)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # as `auth`, not as a header: requests lets a .netrc entry replace an Authorization header
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Adapter(HTTPAdapter):
    """requests' adapter that knows its one connection, so that another thread can hang it up."""

    _connection: HTTPConnection | None = None

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """urllib3's pool for the request, told to show us each connection that it makes."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = self._remember(type(pool).ConnectionCls)
        return pool

    def _remember(self, connection_class: Any) -> Any:
        def connect(*args: Any, **kwargs: Any) -> HTTPConnection:
            self._connection = connection_class(*args, **kwargs)
            return self._connection

        return connect

    @contextmanager
    def hang_up_after(self, timeout_s: float) -> Iterator[threading.Event]:
        """Event that is set when the body of the `with` took longer; from then on its connection is cut."""
        finished, expired = threading.Event(), threading.Event()

        def watch() -> None:
            if finished.wait(timeout_s):
                return
            expired.set()
            while not finished.wait(0.05):  # again and again: the body may have been between two connections
                self._hang_up()

        watcher = threading.Thread(target=watch, name="omni-reward-deadline", daemon=True)
        watcher.start()
        try:
            yield expired
        finally:
            finished.set()
            watcher.join()

    def _hang_up(self) -> None:
        sock = self._connection.sock if self._connection is not None else None
        if isinstance(sock, socket.socket):
            with suppress(OSError):  # the other side may have been faster
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of the plain class: TLS would drop its state mid-read


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _error_in(reply: bytes) -> tuple[str, str]:
    """Code and message of an error reply; the code is empty when it is not one of a scorer's."""
    try:
        error = json.loads(reply)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", repr(reply[:200])
