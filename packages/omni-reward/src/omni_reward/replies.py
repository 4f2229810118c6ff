"""Cache of the latest replies by request id, so that a request sent twice is scored once.

A client that did not receive the reply sends the same bytes again, with the same id. It then gets the reply to the
first request, which may still be running.
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
    """A request id was used again with a different body."""


@dataclass(eq=False)
class _Entry:
    digest: asyncio.Future[bytes]
    reply: asyncio.Future[bytes]
    drop: Drop
    num_waiting: int = 0


class Replies:
    """Replies in progress and the latest finished ones. Failures are not cached: a repeated request tries again.

    Args:
        max_replies: maximum number of finished replies in the cache.
        max_bytes: maximum total size of the finished replies.
    """

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._entries: dict[str, _Entry] = {}  # requests in progress, and those below
        self._finished: dict[str, int] = {}  # id -> size of its reply, the latest last
        self._num_bytes = 0

    async def get(self, request_id: str, body: bytes | bytearray, make: Make, drop: Drop = lambda: False) -> bytes:
        """Return the reply to the request, from the cache if it has one.

        Args:
            request_id: the request's id.
            body: the request's bytes.
            make: computes the reply; all callers that wait for it get its exceptions.
            drop: called when all waiting callers were cancelled; True if it has withdrawn work that had not begun.

        Raises:
            IdReusedError: the id belongs to a request with a different body.
        """
        # In a thread, concurrently with the scorer: the digest is needed only if the id comes again.
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
