"""Connection limits of an HTTP server: no client can use up its connections, with or without a token.

The number of connections is limited. At the limit, a new one replaces the connection that has been idle the longest:
one without a request, or whose client has sent and received nothing for STALL_S. If none is idle, the new connection's
request gets a 503. A connection is also closed if its first request does not begin within HEAD_S, or if it has no
request for IDLE_S.
"""

import asyncio
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S, HEAD_BYTES = 10, 2**16  # limits for the head of a request; a browser sends all cookies of localhost
STALL_S = 10
IDLE_S = 150  # a trainer's connection should last from one step to the next
CHUNK_BYTES, FREE_CHUNKS = 1024, 1024  # least mean size of a body's chunks, and the number of exempt chunks


def configure(app: Any, max_connections: int) -> uvicorn.Config:
    """Return the configuration of a server for an ASGI app; requests are not logged, because URLs may hold a token.

    max_connections: maximum number of simultaneous connections.
    """
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=IDLE_S,
        limit_concurrency=max_connections,
        backlog=128,  # asyncio logs a line for each when file descriptors run out
    )


class Connection(h11.Connection):
    """h11 connection that refuses bodies in tiny chunks, each of which takes as long to parse as a kilobyte."""

    _credit = 0  # bytes

    def next_event(self) -> Any:
        """Return the next event; a chunk costs CHUNK_BYTES of the credit and adds its own size."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._credit = FREE_CHUNKS * CHUNK_BYTES
        elif isinstance(event, h11.Data):
            self._credit += len(event.data) - CHUNK_BYTES * event.chunk_start
            if self._credit < 0:
                raise h11.RemoteProtocolError(f"the chunks of a body must have {CHUNK_BYTES} bytes on average")
        return event


class Protocol(H11Protocol):
    """uvicorn's connection protocol with the limits of this module."""

    active_at = 0.0  # when the client last sent or received something, or began to wait, on the loop's clock

    @property
    def is_idle(self) -> bool:
        """True if no request is running, or if one has waited for its client for STALL_S."""
        has_reply = self.cycle is None or self.cycle.response_complete
        is_taken = not self.transport.get_write_buffer_size()
        waits = has_reply or self.cycle.more_body or not is_taken
        return (has_reply and is_taken) or (waits and self.loop.time() - self.active_at > STALL_S)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; at the limit, close an idle one, or refuse the next request if none is idle."""
        others = cast("set[Protocol]", self.connections.copy())
        super().connection_made(transport)
        limit = self.config.h11_max_incomplete_event_size or HEAD_BYTES
        self.conn, self.active_at = Connection(h11.SERVER, limit), self.loop.time()
        self.loop.call_later(HEAD_S, self._check_head)
        self.limit_concurrency = None  # 0 refuses the next request
        if self.config.limit_concurrency and len(others) >= self.config.limit_concurrency:
            idle = [other for other in others if other.is_idle]
            if not idle:
                self.limit_concurrency = 0
                return
            oldest = min(idle, key=lambda other: other.active_at)
            self.limit_concurrency = oldest.limit_concurrency  # a refused connection frees no place
            self.connections.discard(oldest)
            oldest.transport.abort()  # not `close`, which waits until the client has taken all of a reply

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client."""
        self.active_at = self.loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        """Pause until the client has received some of the reply."""
        self.active_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Continue the reply after the client has received some of it."""
        self.active_at = self.loop.time()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.active_at = self.loop.time()
        super().on_response_complete()

    def _check_head(self) -> None:
        if self.cycle is None:
            self.transport.close()
