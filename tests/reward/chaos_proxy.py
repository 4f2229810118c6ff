"""A proxy that does to each attempt at a request what a plan says, and writes down what it did."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from omni_reward.wire import decode_request
from reward.reward_helpers import http as reply_bytes
from reward.reward_helpers import read_request

Reply = tuple[int, bytes]
Ask = Callable[[], Reply]


class UpstreamDownError(Exception):
    """The server behind the proxy did not answer."""


class ChaosProxy:
    """Stands between a client and the server at a port; each of its URLs leads there.

    Args:
        port: the server's.
        num_urls: how many ways there are.
        plan: names what happens to the n-th attempt at the request whose samples carry the key: a key of FAULTS.
        restart: kills the server and starts it anew.
    """

    def __init__(
        self, port: int, plan: Callable[[int, int], str], restart: Callable[[], None], *, num_urls: int = 1
    ) -> None:
        self._port, self._plan, self._restart = port, plan, restart
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(num_urls)]
        self.urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        self.done: dict[int, list[str]] = defaultdict(list)  # key -> what happened to its attempts
        self._first_reply = b""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                conn, _ = listener.accept()
                conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError):  # the client hung up
            while (body := read_request(conn)) is not None and self._handle(conn, body):
                pass

    def _handle(self, conn: socket.socket, body: bytes) -> bool:
        """Whether the connection may live on."""
        key: Any = decode_request(body, max_batch=64).meta[0]["key"]
        steps = self.done[key]
        fault = self._plan(key, len(steps))
        steps.append(fault)
        if fault == "restart":
            self._restart()
            return False
        if fault == "stale":
            send(conn, 200, self._first_reply)  # another request's: the first one is never tampered with
            return True
        try:
            return FAULTS[fault](conn, lambda: self._ask(body))
        except UpstreamDownError:
            steps[-1] = "down"
            return False

    def _ask(self, body: bytes) -> Reply:
        upstream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            upstream.request("POST", "/score", body, {"Content-Type": "application/octet-stream"})
            response = upstream.getresponse()
            reply = response.status, response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise UpstreamDownError from exc
        finally:
            upstream.close()
        self._first_reply = self._first_reply or reply[1]
        return reply


def send(conn: socket.socket, status: int, body: bytes, *headers: str) -> None:
    conn.sendall(reply_bytes(f"{status} X", body, *headers, close=False))


def nothing(conn: socket.socket, ask: Ask) -> bool:
    send(conn, *ask())
    return True


def drop(conn: socket.socket, ask: Ask) -> bool:
    return False


def drop_late(conn: socket.socket, ask: Ask) -> bool:
    ask()
    return False


def delay(conn: socket.socket, ask: Ask) -> bool:
    time.sleep(0.1)
    return nothing(conn, ask)


def twice(conn: socket.socket, ask: Ask) -> bool:
    ask()
    return nothing(conn, ask)


def trickle(conn: socket.socket, ask: Ask) -> bool:
    whole = reply_bytes("200 X", ask()[1], close=False)
    size = len(whole) // 20 + 1
    for start in range(0, len(whole), size):
        conn.sendall(whole[start : start + size])
        time.sleep(0.005)
    return True


def stall(conn: socket.socket, ask: Ask) -> bool:
    conn.recv(1)  # until the client hangs up
    return False


def crawl(conn: socket.socket, ask: Ask) -> bool:
    for byte in reply_bytes("200 X", ask()[1], close=False):
        conn.sendall(bytes([byte]))
        time.sleep(0.05)
    return False


def truncate(conn: socket.socket, ask: Ask) -> bool:
    whole = reply_bytes("200 X", ask()[1], close=False)
    conn.sendall(whole[: random.Random(len(whole)).randrange(1, len(whole))])
    return False


def cut_json(conn: socket.socket, ask: Ask) -> bool:
    send(conn, 200, ask()[1][:-9])
    return True


def garbage(conn: socket.socket, ask: Ask) -> bool:
    send(conn, 200, b"<html>Sign in to the network</html>")
    return True


def status(code: int) -> Callable[[socket.socket, Ask], bool]:
    def answer(conn: socket.socket, ask: Ask) -> bool:
        send(conn, code, b"", "Retry-After: 0")
        return True

    return answer


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[socket.socket, Ask], bool]:
    def answer(conn: socket.socket, ask: Ask) -> bool:
        reply = json.loads(ask()[1])
        change(reply)
        send(conn, 200, json.dumps(reply).encode())  # Python's json spells a NaN, as careless servers do
        return True

    return answer


def put_nan(reply: dict[str, Any]) -> None:
    reply["results"][1]["score"] = float("nan")


def put_infinity(reply: dict[str, Any]) -> None:
    reply["results"][1]["score"] = float("inf")


def swap(reply: dict[str, Any]) -> None:
    reply["results"].reverse()


def shorten(reply: dict[str, Any]) -> None:
    reply["results"].pop()


def lengthen(reply: dict[str, Any]) -> None:
    reply["results"].append(reply["results"][0])


def speak_protocol_2(reply: dict[str, Any]) -> None:
    reply["protocol"] = 2


HARMLESS: dict[str, Callable[[socket.socket, Ask], bool]] = {"delay": delay, "twice": twice, "trickle": trickle}
RETRIED: dict[str, Any] = {
    "drop": drop,
    "drop late": drop_late,
    "truncate": truncate,
    "restart": None,
    **{str(code): status(code) for code in (429, 502, 503, 504)},
}
TIMED_OUT = {"stall": stall, "crawl": crawl}
MALFORMED = {"cut json": cut_json, "garbage": garbage, "nan": edit(put_nan), "infinity": edit(put_infinity)}
MISMATCHED: dict[str, Any] = {
    "stale": None,
    "swap": edit(swap),
    "short": edit(shorten),
    "long": edit(lengthen),
    "protocol": edit(speak_protocol_2),
}
REFUSED = {str(code): status(code) for code in (400, 500)}
FAULTS = {"none": nothing, **HARMLESS, **RETRIED, **TIMED_OUT, **MALFORMED, **MISMATCHED, **REFUSED}
