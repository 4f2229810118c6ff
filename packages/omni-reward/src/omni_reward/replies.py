"""Remembers the latest replies by request id, so that a request sent twice is scored once.

A client that never saw the reply sends the same bytes again under the same id. Whether the first request is still being
scored or long done, the second one gets its reply.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

MAX_REPLIES = 1024
MAX_BYTES = 64 * 2**20
Make = Callable[[], Coroutine[None, None, bytes]]
Drop = Callable[[], bool]


class IdReusedError(Exception):
    """A request id came back with another body."""


@dataclass(eq=False)
class _Entry:
    digest: asyncio.Future[bytes]
    reply: asyncio.Future[bytes]
    drop: Drop
    num_waiting: int = 0


class Replies:
    """Replies that are being made, and the latest ones made; failures are forgotten, so that a repeat tries again.

    Args:
        max_replies: most finished replies that are kept.
        max_bytes: most bytes that they may have together.
    """

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._entries: dict[str, _Entry] = {}  # every request under way, and those below
        self._finished: dict[str, int] = {}  # id -> bytes of its reply, the latest last
        self._num_bytes = 0

    async def get(self, request_id: str, body: bytes | bytearray, make: Make, drop: Drop = lambda: False) -> bytes:
        """Return the reply to the request, made unless it is there already.

        Args:
            request_id: the request's name.
            body: its bytes.
            make: makes the reply; its exceptions go to all who wait for it.
            drop: called when all who waited have been cancelled; True when the work had not begun and never will.

        Raises:
            IdReusedError: the id belongs to a request with another body.
        """
        # In a thread, at the same time as the scorer: the digest is needed only once the id comes again.
        digest = asyncio.ensure_future(asyncio.to_thread(lambda: hashlib.sha256(body).digest()))
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = _Entry(digest, asyncio.ensure_future(make()), drop)
            entry.reply.add_done_callback(partial(self._settle, request_id))
        entry.num_waiting += 1
        try:
            if entry.digest is not digest and await asyncio.shield(entry.digest) != await digest:
                raise IdReusedError(request_id)
            return await asyncio.shield(entry.reply)
        finally:
            entry.num_waiting -= 1
            if not entry.num_waiting and not entry.reply.done() and entry.drop():
                entry.reply.cancel()
                del self._entries[request_id]

    def _settle(self, request_id: str, reply: asyncio.Future[bytes]) -> None:
        if reply.cancelled():
            return
        if reply.exception():
            del self._entries[request_id]
            return
        self._finished[request_id] = len(reply.result())
        self._num_bytes += len(reply.result())
        while len(self._finished) > self._max_replies or self._num_bytes > self._max_bytes:
            oldest = next(iter(self._finished))
            self._num_bytes -= self._finished.pop(oldest)
            del self._entries[oldest]
