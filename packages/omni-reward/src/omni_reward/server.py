"""HTTP server around one scorer.

    python -m omni_reward.server --scorer ocr --port 0 --url-file scorer.url

The event loop only moves bytes: requests are parsed in a thread pool and scored in one worker thread (batching.py), so
`/healthz` answers while a slow scorer works. Requests wait in a queue with a bound on their number and one on their
bytes; beyond either, the answer is 503. A request that comes again gets the reply of the first (replies.py).
"""

import asyncio
import hmac
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from omni_reward import cli, wire
from omni_reward.batching import Batcher, ScorerFailedError
from omni_reward.openapi import document
from omni_reward.replies import IdReusedError, Replies
from omni_reward.scorers import load_scorer
from omni_reward.wire import ScoreFn, Scorer, ScoreRequest

MB = 2**20
IDLE_S = 150  # a trainer calls once per step; its connection should live from one step to the next

logger = logging.getLogger("omni_reward.server")

_CODES = {
    400: "malformed",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "id_reused",
    413: "too_large",
    415: "unsupported_media_type",
    500: "scorer_failed",
    503: "busy",
}


@dataclass(frozen=True)
class _Limits:
    max_body_mb: int
    max_batch: int
    max_waiting: int
    max_waiting_mb: int
    receive_timeout_s: float

    def __post_init__(self) -> None:
        least = {"max_body_mb": 1, "max_batch": 1, "max_waiting": 0, "max_waiting_mb": self.max_body_mb}
        for argument, bound in least.items():
            if getattr(self, argument) < bound:
                raise ValueError(f"{argument} must be >= {bound}, got {getattr(self, argument)}")
        if not self.receive_timeout_s > 0:
            raise ValueError(f"receive_timeout_s must be > 0, got {self.receive_timeout_s}")

    def public(self) -> dict[str, float]:
        """The limits as clients need them."""
        return {
            "max_body_bytes": self.max_body_mb * MB,
            "max_batch": self.max_batch,
            "max_waiting": self.max_waiting,
            "max_waiting_bytes": self.max_waiting_mb * MB,
            "receive_timeout_s": self.receive_timeout_s,
        }


def create_app(
    score_fn: ScoreFn,
    *,
    name: str,
    token: str | None = None,
    max_body_mb: int = 256,
    max_batch: int = 1024,
    max_waiting: int = 64,
    max_waiting_mb: int = 1024,
    receive_timeout_s: float = 60.0,
) -> Starlette:
    """ASGI app that answers `POST /score`, `GET /info`, `GET /healthz` and `GET /openapi.json`.

    Args:
        score_fn: the scorer, as in `omni_reward.wire.ScoreFn`: score_fn(media, prompts, meta) -> N scores, where
            media is {kind: array [N, ...]} and meta a list of N dicts (with `fps` for video, `sample_rate` for audio).
            It returns a Score or a number per sample; a number that is not finite becomes an abstention. A function
            takes `image` and gets whole requests; wrap it as `omni_reward.wire.Scorer(score_fn, media=, batch_size=,
            version=)` to say otherwise. It is called from one thread, never twice at a time.
        name: what replies call the scorer.
        token: bearer token that /score and /info ask for; None lets everyone in.
        max_body_mb: largest request body, in MiB.
        max_batch: most samples in a request.
        max_waiting: most requests that wait while one is scored.
        max_waiting_mb: most MiB of bodies that are held at a time, of the requests that wait and are scored together.
        receive_timeout_s: longest that a body may take to arrive.

    Raises:
        ValueError: an argument breaks its rule.
    """
    wire.check_token(token)
    limits = _Limits(max_body_mb, max_batch, max_waiting, max_waiting_mb, receive_timeout_s)
    scorer = score_fn if isinstance(score_fn, Scorer) else Scorer(score_fn)
    service = _Service(scorer, name, token, limits)
    return Starlette(
        routes=[
            Route("/healthz", service.health, methods=["GET"]),
            Route("/info", service.info, methods=["GET"]),
            Route("/openapi.json", service.openapi, methods=["GET"]),
            Route("/score", service.score, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _error_reply, ClientDisconnect: _no_reply},
    )


class _Service:
    """The endpoints and what they share."""

    def __init__(self, scorer: Scorer, name: str, token: str | None, limits: _Limits) -> None:
        self._scorer = scorer
        self._name = name
        self._credentials = f"Bearer {token}".encode() if token is not None else None
        self._limits = limits
        self._intake = _Intake(limits)
        self._batcher = Batcher(scorer)
        self._replies = Replies()

    async def health(self, request: Request) -> Response:
        return _json_reply({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return _json_reply(document(has_token=self._credentials is not None))

    async def info(self, request: Request) -> Response:
        self._check_token(request)
        return _json_reply(
            {
                "protocol": wire.PROTOCOL,
                "scorer": self._name,
                "scorer_version": self._scorer.version,
                "version": version("omni-reward"),
                "media": sorted(self._scorer.media),
                "batch_size": self._scorer.batch_size,
                "limits": self._limits.public(),
            }
        )

    async def score(self, request: Request) -> Response:
        self._check_token(request)
        if _media_type(request) != "application/octet-stream":
            raise HTTPException(415, "Content-Type must be application/octet-stream")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "Content-Encoding must be left out")
        async with self._intake.receive(request) as body:
            parsed = await self._parse(body)
            try:
                reply = await self._replies.get(parsed.request_id, body, lambda: self._answer(parsed))
            except IdReusedError as exc:
                raise HTTPException(409, "request_id is that of an earlier request with another body") from exc
            except ScorerFailedError as exc:
                raise HTTPException(500, "the scorer failed; the server's log says why") from exc
        return Response(reply, media_type="application/json")

    async def _parse(self, body: bytes) -> ScoreRequest:
        try:
            request = await run_in_threadpool(wire.decode_request, body, max_batch=self._limits.max_batch)
            if request.media.keys() != set(self._scorer.media):
                raise ValueError(f"media must be {sorted(self._scorer.media)}, got {sorted(request.media)}")
        except ValueError as exc:
            raise HTTPException(400, str(exc)) from exc
        return request

    async def _answer(self, request: ScoreRequest) -> bytes:
        """Body of the reply, once the scorer has had its turn at the request."""
        try:
            scores = await self._batcher.score(request)
        except ScorerFailedError:  # what it raised is for the server's owner only
            logger.exception("scorer %r failed on request %r", self._name, request.request_id)
            raise
        try:
            return wire.encode_reply(request.request_id, request.ids, self._name, scores)
        except (TypeError, ValueError, RecursionError) as exc:
            logger.exception("scorer %r gave details that are not JSON to request %r", self._name, request.request_id)
            raise ScorerFailedError from exc

    def _check_token(self, request: Request) -> None:
        if self._credentials is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._credentials):
            raise HTTPException(401, "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"})


class _Intake:
    """The requests that have been let in and not been answered yet, with the bounds on them.

    Only the event loop touches it.
    """

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self._num_requests = 0
        self._num_bytes = 0

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Body of a request, which counts as long as the `with` lasts."""
        if self._num_requests > self._limits.max_waiting:
            raise _busy("too many requests are waiting")
        self._num_requests += 1
        chunks: list[bytes] = []
        try:
            await self._collect_in_time(request, chunks)
            chunks[:] = [b"".join(chunks)]
            yield chunks[0]
        finally:
            self._num_requests -= 1
            self._num_bytes -= sum(map(len, chunks))

    async def _collect_in_time(self, request: Request, chunks: list[bytes]) -> None:
        try:
            await asyncio.wait_for(self._collect(request, chunks), self._limits.receive_timeout_s)
        except TimeoutError as exc:
            raise HTTPException(408, "the body took too long to arrive") from exc

    async def _collect(self, request: Request, chunks: list[bytes]) -> None:
        """Fills chunks with the body, which is refused as soon as it is too long, whatever its Content-Length says."""
        left = self._limits.max_body_mb * MB
        too_large = HTTPException(413, f"the body must be at most {left} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > left:
            raise too_large
        async for chunk in request.stream():
            chunks.append(chunk)
            self._num_bytes += len(chunk)
            left -= len(chunk)
            if left < 0:
                raise too_large
            if self._num_bytes > self._limits.max_waiting_mb * MB:
                raise _busy("too many bytes are waiting")


def _busy(message: str) -> HTTPException:
    return HTTPException(503, message, headers={"Retry-After": "1"})


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _json_reply(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(wire.to_json(content), status, headers, media_type="application/json")


async def _error_reply(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    error = {"code": _CODES.get(exc.status_code, "error"), "message": exc.detail}
    return _json_reply({"error": error}, status=exc.status_code, headers=dict(exc.headers or {}))


async def _no_reply(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # the client hung up while sending, so nobody reads this


def main(argv: list[str] | None = None) -> None:
    """Serves one scorer until SIGTERM or SIGINT, then finishes the requests that it has accepted."""
    parser = cli.build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))  # uvicorn drains first, then hands the signal on to this
    try:
        token = cli.read_token(args.token_file)
        sock = cli.bind(args.host, args.port, has_token=token is not None)
        cli.forget_url(args.url_file)
        score_fn = load_scorer(args.scorer, threads=args.threads, options=cli.read_options(args.option))
        scorer = score_fn if isinstance(score_fn, Scorer) else Scorer(score_fn)
        if args.batch_size is not None:
            scorer = replace(scorer, batch_size=args.batch_size)
        limits = {"max_body_mb": args.max_body_mb, "max_batch": args.max_batch, "max_waiting": args.max_waiting}
        app = create_app(scorer, name=args.scorer, token=token, **limits)
    except (ImportError, ValueError, OSError) as exc:
        parser.error(str(exc))
    config = uvicorn.Config(
        app, http="h11", ws="none", log_config=None, log_level="warning", access_log=False, timeout_keep_alive=IDLE_S
    )
    _Server(config, args.url_file).run(sockets=[sock])


class _Server(uvicorn.Server):
    """uvicorn's server, which says where it answers, and leaves no connection open for ever."""

    def __init__(self, config: uvicorn.Config, url_file: Path | None) -> None:
        super().__init__(config)
        self._url_file = url_file
        self._idle_since: dict[Any, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        cli.announce_url(self._url_file, sockets[0])

    async def on_tick(self, counter: int) -> bool:
        """Closes connections that have brought no request for too long; uvicorn lets a head trickle in for ever."""
        now, connections = time.monotonic(), cast("set[Any]", self.server_state.connections)
        idle = {conn for conn in connections if conn.cycle is None or conn.cycle.response_complete}
        self._idle_since = {conn: self._idle_since.get(conn, now) for conn in idle}
        for connection, since in self._idle_since.items():
            if now - since > IDLE_S:
                connection.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late_connections())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_late_connections(self) -> None:
        # uvicorn tells the connections it has to close after their reply, then waits until none is left. One that was
        # accepted in the same moment would be kept alive instead, and the process with it.
        while True:
            await asyncio.sleep(0.1)
            for connection in list(self.server_state.connections):
                connection.shutdown()


if __name__ == "__main__":
    main()
