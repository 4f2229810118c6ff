"""HTTP server around one scorer.

    python -m omni_reward.server --scorer ocr --port 0 --url-file scorer.url

The event loop only moves bytes: requests are parsed in a thread pool and scored in one worker thread (batching.py), so
that `/healthz` answers while a slow scorer works. The queue limits the number and bytes of requests; beyond these
limits, the answer is 503. A repeated request gets the reply to the first one (replies.py).
"""

import asyncio
import faulthandler
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import cast

from omni_reward import __version__, cli, wire
from omni_reward.batching import Batcher, ScorerFailedError
from omni_reward.files import read_token
from omni_reward.media import ScoreRequest
from omni_reward.replies import IdReusedError, Replies
from omni_reward.scorers import load_scorer
from omni_reward.scorers.user import media_hint, user_frame
from omni_reward.transport import is_loopback, names_loopback
from omni_reward.wire import ScoreFn, Scorer

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

    from omni_reward.connections import Protocol, configure
except ImportError as missing:
    if __name__ == "__main__":
        cli.exit_missing_library(missing)
    raise

MB = 2**20
LAST_BODY_S = 1  # time for incomplete bodies after SIGTERM

logger = logging.getLogger("omni_reward.server")

_CODES = {
    400: "malformed", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "timeout", 409: "id_reused", 413: "too_large", 415: "unsupported_media_type", 500: "scorer_failed",
    503: "busy",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Limits of a server, as returned by GET /info.

    Args:
        max_body_bytes: maximum size of a request body.
        max_batch: maximum number of samples in a request.
        max_waiting: maximum number of requests that wait while one is scored.
        max_waiting_bytes: maximum size of the bodies in memory, both waiting and being scored.
        receive_timeout_s: time in which a body must arrive.

    Raises:
        ValueError: a limit is too small.
    """

    max_body_bytes: int = 256 * MB
    max_batch: int = 1024
    max_waiting: int = 64
    max_waiting_bytes: int = 1024 * MB
    receive_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        minimums = {"max_body_bytes": 1, "max_batch": 1, "max_waiting": 0, "max_waiting_bytes": self.max_body_bytes}
        for name, bound in minimums.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be >= {bound}, got {getattr(self, name)}")
        if not self.receive_timeout_s > 0:
            raise ValueError(f"receive_timeout_s must be > 0, got {self.receive_timeout_s}")


def create_app(
    score_fn: ScoreFn,
    *,
    name: str,
    token: str | None = None,
    host: str = "localhost",
    limits: Limits = Limits(),
    show_errors: bool = False,
) -> Starlette:
    """Return an ASGI app with the paths of docs/reward-protocol.md.

    Args:
        score_fn: the scorer, as in `omni_reward.wire.ScoreFn`: score_fn(media, prompts, meta) -> N scores, where
            media is {kind: array [N, ...]} and meta a list of N dicts (with `fps` for video, `sample_rate` for audio).
            It returns a Score or a number per sample; a number that is not finite becomes an abstention. A plain
            function takes `image` and gets entire requests; `omni_reward.wire.Scorer(score_fn, media=, batch_size=,
            version=, references=, groups=)` changes that. It is called from one thread, never concurrently.
        name: name of the scorer in replies.
        token: bearer token that /score and /info require. If None, anyone may use them; over loopback, only with a
            Host header that names loopback, so that no web page can reach the server by DNS rebinding.
        host: another name of loopback.
        limits: limits of requests.
        show_errors: True if clients get the type and message of the scorer's errors, which are always in the log.

    Raises:
        ValueError: the token is not valid in a header.
    """
    wire.check_token(token)
    credentials = f"Bearer {token}".encode() if token else None
    service = _Service(Scorer.of(score_fn), name, credentials, host, limits, show_errors)
    document = Response((files("omni_reward") / "openapi.json").read_bytes(), media_type="application/json")
    routes = [
        Route("/healthz", _json_reply({"status": "ok"}), methods=["GET"]),
        Route("/openapi.json", document, methods=["GET"]),
        Route("/info", service.info),
        Route("/score", service.score, methods=["POST"]),
        Route("/sleep", partial(service.sleep, asleep=True), methods=["POST"]),
        Route("/wake", partial(service.sleep, asleep=False), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _error_reply, ClientDisconnect: _no_reply})


class _Service:
    """Endpoints and their shared state."""

    def __init__(
        self, scorer: Scorer, name: str, credentials: bytes | None, host: str, limits: Limits, show_errors: bool
    ) -> None:
        self._scorer, self._name, self._host, self._show_errors = scorer, name, host, show_errors
        self._credentials, self._limits = credentials, limits
        self._batcher, self._replies = Batcher(scorer), Replies()
        self._num_requests, self._num_bytes = 0, 0  # accepted but not answered; changed only by the event loop

    async def info(self, request: Request) -> Response:
        self._check_access(request)
        scorer, limits = self._scorer, asdict(self._limits)
        names = {"protocol": wire.PROTOCOL, "scorer": self._name, "scorer_version": scorer.version}
        takes = {"media": sorted(scorer.media), "references": scorer.references, "groups": scorer.groups}
        takes |= {"batch_size": scorer.batch_size, "sleeps": scorer.move is not None}
        return _json_reply({**names, "version": __version__, **takes, "limits": limits})

    async def sleep(self, request: Request, *, asleep: bool) -> Response:
        self._check_access(request)
        if self._credentials is None:
            raise HTTPException(403, "the server must have a token to let clients move its scorer's weights")
        if self._scorer.move is None:
            raise HTTPException(404, "the scorer has no weights that it could move, as GET /info says")
        try:
            await self._batcher.sleep(asleep)
        except ScorerFailedError as exc:
            logger.error("scorer %r failed to %s", self._name, "sleep" if asleep else "wake", exc_info=exc.__cause__)
            raise HTTPException(500, self._failure(exc)) from exc
        return _json_reply({"asleep": asleep})

    async def score(self, request: Request) -> Response:
        self._check_access(request)
        if {"content-length", "transfer-encoding"} <= set(request.headers):
            message = "Content-Length and Transfer-Encoding must not come together"
            raise HTTPException(400, message, headers={"Connection": "close"})
        media_type = request.headers.get("content-type", "").partition(";")[0]
        if media_type.strip().lower() != "application/octet-stream":
            raise HTTPException(415, "Content-Type must be application/octet-stream")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "Content-Encoding must be left out")
        async with self._receive(request) as body:
            parsed = await self._parse(body)
            answer, drop = partial(self._answer, parsed), partial(self._batcher.drop, parsed)
            try:
                reply = await _cancel_on_disconnect(request, self._replies.get(parsed.request_id, body, answer, drop))
            except IdReusedError as exc:
                raise HTTPException(409, "request_id is that of an earlier request with another body") from exc
            except ScorerFailedError as exc:
                raise HTTPException(500, self._failure(exc)) from exc
        return Response(reply, media_type="application/json")

    async def _parse(self, body: bytes | bytearray) -> ScoreRequest:
        try:
            request = await run_in_threadpool(wire.decode_request, body, max_batch=self._limits.max_batch)
            if request.media.keys() != set(self._scorer.media):
                raise ValueError(f"media must be {sorted(self._scorer.media)}, got {sorted(request.media)}")
            for name in ("references", "groups"):
                if bool(getattr(request, name)) != (takes := getattr(self._scorer, name)):
                    rule = "given: the scorer takes them" if takes else "left out: the scorer takes none"
                    raise ValueError(f"{name} must be {rule}, as GET /info says")
        except ValueError as exc:
            raise HTTPException(400, str(exc)) from exc
        return request

    async def _answer(self, request: ScoreRequest) -> bytes:
        """Score the request and return the body of the reply."""
        try:
            scores = await self._batcher.score(request)
        except ScorerFailedError as exc:
            text, frame = _describe_error(exc.__cause__)
            place = traceback.format_list([frame])[0].splitlines()[:2] if frame else []
            summary = f"scorer {self._name!r} failed on request {request.request_id!r}"
            is_clear = frame or isinstance(exc.__cause__, wire.WrongScoresError)
            logger.error("\n".join([f"{summary}: {text}", *place]), exc_info=None if is_clear else exc.__cause__)
            raise
        return wire.encode_reply(request.request_id, request.ids, self._name, scores, version=self._scorer.version)

    def _failure(self, error: ScorerFailedError) -> str:
        if not self._show_errors:
            return "the scorer failed; the server's log has the error"
        text, frame = _describe_error(error.__cause__)
        if isinstance(error.__cause__, wire.WrongScoresError):
            return wire.clean(str(error.__cause__), 300)
        place = f" ({frame.filename}, line {frame.lineno})" if frame else "; the server's log has the traceback"
        return f"the scorer raised {wire.clean(text, 300)}{place}"

    def _check_access(self, request: Request) -> None:
        if self._credentials is None:
            address, _ = request.scope.get("server") or ("", None)
            if is_loopback(address) and not names_loopback(host_header := request.headers.get("host", ""), self._host):
                rule = "Host must be a name of loopback, such as localhost, as the server has no token"
                raise HTTPException(403, f"{rule}, got {wire.clean(host_header, 80)!r}")
            return
        authorization = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(authorization, self._credentials):
            raise HTTPException(401, "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"})

    @asynccontextmanager
    async def _receive(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body of a request, which is counted until the block ends."""
        body = bytearray()  # not bytes: the scorer may write to its arrays, which share this memory
        try:
            try:
                async with asyncio.timeout(self._limits.receive_timeout_s):
                    await self._collect(request, body)
            except TimeoutError as exc:
                raise HTTPException(408, "the body took too long to arrive") from exc
            self._num_requests += 1  # not before: slow bodies must not fill the queue
            try:
                yield body
            finally:
                self._num_requests -= 1
        finally:
            self._num_bytes -= len(body)

    async def _collect(self, request: Request, body: bytearray) -> None:
        """Fill the body, and reject it as soon as it is too long, whatever Content-Length says."""
        declared = request.headers.get("content-length", "")
        self._check_room(int(declared) if declared.isdecimal() else 0)
        async for chunk in request.stream():  # the last one is empty, for a check of the complete body
            body += chunk
            self._num_bytes += len(chunk)
            self._check_room(len(body))

    def _check_room(self, length: int) -> None:
        """Raise an HTTPException if a body of this length is too long, or if too many requests or bytes wait."""
        limits = self._limits
        if length > limits.max_body_bytes:
            raise HTTPException(413, f"the body must be at most {limits.max_body_bytes} bytes")
        if self._num_requests > limits.max_waiting or self._num_bytes > limits.max_waiting_bytes:
            raise HTTPException(503, "too many requests or bytes are waiting", headers={"Retry-After": "1"})


def _describe_error(error: BaseException | None) -> tuple[str, traceback.FrameSummary | None]:
    """Return an error's type and message, and the line of a user's file that raised it, if any."""
    if error is None or (frame := user_frame(error)) is None:
        return "".join(traceback.format_exception_only(error)).strip(), None
    return "".join(traceback.format_exception_only(error)).strip() + media_hint(error), frame


async def _cancel_on_disconnect(request: Request, work: Coroutine[None, None, bytes]) -> bytes:
    """Return the result of the work, which is cancelled if the client disconnects."""
    reply, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise ClientDisconnect
        return reply.result()
    finally:
        gone.cancel()
        reply.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects; the body of its request is complete."""
    if (await request.receive())["type"] != "http.disconnect":
        await asyncio.Event().wait()  # for a server that does not report disconnects


def _json_reply(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(wire.to_json(content), status, headers, media_type="application/json")


async def _error_reply(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    error = {"code": _CODES.get(exc.status_code, "error"), "message": exc.detail}
    return _json_reply({"error": error}, status=exc.status_code, headers=dict(exc.headers or {}))


async def _no_reply(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # for the log only: the client has disconnected


def main(argv: list[str] | None = None) -> None:
    """Serve one scorer until SIGTERM or SIGINT, then finish the accepted requests."""
    parser = cli.build_parser()
    args = parser.parse_args(argv)
    log = logging.StreamHandler()
    log.setFormatter(cli.PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[log])
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))  # uvicorn finishes first, then raises the signal again
    if args.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        try:
            token = read_token(args.token_file)
        except (ValueError, OSError) as exc:
            raise ValueError(f"--token-file: {exc}") from exc
        sock = cli.bind(args.host, args.port, has_token=token is not None)
        cli.remove_url_file(args.url_file)
        scorer = load_scorer(args.scorer, threads=args.threads, options=cli.read_options(args.option))
        if args.batch_size is not None:
            scorer = replace(scorer, batch_size=args.batch_size)
        limits = Limits(args.max_body_mb * MB, args.max_batch, args.max_waiting)
        name, show_errors = cli.public_name(args.scorer), is_loopback(sock.getsockname()[0])
        app = create_app(scorer, name=name, token=token, host=args.host, limits=limits, show_errors=show_errors)
    except (ImportError, ValueError, OSError) as exc:
        parser.error(str(exc))
    config = configure(app, args.max_connections)
    _Server(config, args.url_file, args.shutdown_timeout_s).run(sockets=[sock])


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock makes an ending interpreter abort
        pass
    signal.raise_signal(signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn's server, which announces its URL and limits the time of its shutdown."""

    def __init__(self, config: uvicorn.Config, url_file: Path | None, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._url_file, self._shutdown_timeout_s = url_file, shutdown_timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:  # if the scorer hangs, print its stack and exit
            faulthandler.dump_traceback_later(self._shutdown_timeout_s, exit=True)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        cli.announce_url(self._url_file, sockets[0])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late_connections())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_late_connections(self) -> None:
        # uvicorn lets each connection close after its reply and waits for all of them. It misses a connection accepted
        # at the same moment, which would keep the process alive. A request without its complete body is not accepted.
        while True:
            await asyncio.sleep(LAST_BODY_S)
            for connection in list(cast("set[Protocol]", self.server_state.connections)):
                connection.shutdown()
                if connection.cycle and connection.cycle.more_body:
                    connection.transport.close()


if __name__ == "__main__":
    main()
