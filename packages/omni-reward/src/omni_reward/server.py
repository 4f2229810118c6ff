"""HTTP server around one score function.

    python -m omni_reward.server --scorer ocr --port 0 --url-file scorer.url

The event loop only moves bytes: requests are parsed in a thread pool and scored in one worker thread, so `/healthz`
answers while a slow scorer works. Requests wait in a bounded queue; once it is full, the answer is 503.
"""

import argparse
import asyncio
import hmac
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from omni_reward import wire
from omni_reward.media import MEDIA_KINDS
from omni_reward.scorers import SCORERS, load_scorer
from omni_reward.transport import is_loopback
from omni_reward.wire import Score, ScoreFn, ScoreRequest

MB = 2**20

logger = logging.getLogger("omni_reward.server")


_CODES = {
    400: "malformed",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
    500: "scorer_failed",
    503: "busy",
}


def create_app(
    score_fn: ScoreFn,
    *,
    name: str,
    token: str | None = None,
    max_body_mb: int = 256,
    max_batch: int = 1024,
    max_waiting: int = 64,
) -> Starlette:
    """ASGI app that answers `POST /score`, `GET /info` and `GET /healthz`.

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

    Raises:
        ValueError: an argument breaks its rule.
    """
    wire.check_token(token)
    for argument, value, least in (
        ("max_body_mb", max_body_mb, 1),
        ("max_batch", max_batch, 1),
        ("max_waiting", max_waiting, 0),
    ):
        if value < least:
            raise ValueError(f"{argument} must be >= {least}, got {value}")
    service = _Service(score_fn, name, token, max_body_mb * MB, max_batch, max_waiting)
    return Starlette(
        routes=[
            Route("/healthz", service.health, methods=["GET"]),
            Route("/info", service.info, methods=["GET"]),
            Route("/score", service.score, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _error_reply, ClientDisconnect: _no_reply},
    )


class _Service:
    """The three endpoints and what they share."""

    def __init__(
        self, score_fn: ScoreFn, name: str, token: str | None, max_body: int, max_batch: int, max_waiting: int
    ) -> None:
        self._score_fn = score_fn
        self._name = name
        self._credentials = f"Bearer {token}".encode() if token is not None else None
        self._limits = {"max_body_bytes": max_body, "max_batch": max_batch, "max_waiting": max_waiting}
        self._num_requests = 0  # being received, waiting or scored; only the event loop touches it
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    async def health(self, request: Request) -> Response:
        return _json_reply({"status": "ok"})

    async def info(self, request: Request) -> Response:
        self._check_token(request)
        return _json_reply(
            {
                "protocol": wire.PROTOCOL,
                "scorer": self._name,
                "version": version("omni-reward"),
                "media": sorted(MEDIA_KINDS),
                "limits": self._limits,
            }
        )

    async def score(self, request: Request) -> Response:
        self._check_token(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/octet-stream":
            raise HTTPException(415, "Content-Type must be application/octet-stream")
        if self._num_requests > self._limits["max_waiting"]:
            raise HTTPException(503, "too many requests are waiting", headers={"Retry-After": "1"})
        self._num_requests += 1
        try:
            return Response(await self._answer(await self._receive(request)), media_type="application/json")
        finally:
            self._num_requests -= 1

    async def _receive(self, request: Request) -> ScoreRequest:
        body = await _read_body(request, self._limits["max_body_bytes"])
        try:
            return await run_in_threadpool(wire.decode_request, body, max_batch=self._limits["max_batch"])
        except ValueError as exc:
            raise HTTPException(400, str(exc)) from exc

    async def _answer(self, request: ScoreRequest) -> bytes:
        """Body of the reply, once the scorer has had its turn at the request."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._run_scorer, request)
        except Exception as exc:  # a scorer may raise anything; its text is for the server's owner only
            logger.exception("scorer %r failed on request %r", self._name, request.request_id)
            raise HTTPException(500, "the scorer failed; the server's log says why") from exc

    def _run_scorer(self, request: ScoreRequest) -> bytes:
        """Reply to a sound request; runs in the worker thread."""
        results = self._score_fn(request.media, request.prompts, request.meta)
        if len(results) != len(request.prompts):
            raise ValueError(f"the scorer must return {len(request.prompts)} scores, got {len(results)}")
        scores = [result if isinstance(result, Score) else Score.of(result) for result in results]
        return wire.encode_reply(request.request_id, self._name, scores)

    def _check_token(self, request: Request) -> None:
        if self._credentials is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._credentials):
            raise HTTPException(401, "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"})


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Body of a request, refused as soon as it is known to be too long, whatever its Content-Length says."""
    too_large = HTTPException(413, f"the body must be at most {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


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
    parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))  # uvicorn drains first, then hands the signal on to this
    try:
        token = _read_token(args.token_file)
        sock = _bind(args.host, args.port, has_token=token is not None)
        if args.url_file is not None:
            if not args.url_file.parent.is_dir():
                raise ValueError(f"--url-file must lie in a folder that exists, got {args.url_file}")
            args.url_file.unlink(missing_ok=True)  # an old one would send clients to a server that is gone
        score_fn = load_scorer(args.scorer, threads=args.threads, options=_options(args.option))
    except ImportError as exc:
        parser.error(f"--scorer {args.scorer} needs {exc.name}: install omni-reward[{args.scorer}]")
    except (ValueError, OSError) as exc:
        parser.error(str(exc))
    config = uvicorn.Config(
        create_app(score_fn, name=args.scorer, token=token),
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=150,  # a trainer calls once per step; its connection should live from one step to the next
    )
    _Server(config, args.url_file).run(sockets=[sock])


class _Server(uvicorn.Server):
    """uvicorn's server, which announces its URL once it answers there and leaves no connection open when it stops."""

    def __init__(self, config: uvicorn.Config, url_file: Path | None) -> None:
        super().__init__(config)
        self._url_file = url_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._url_file is not None:
            _write_atomically(self._url_file, url)
        print(f"scorer ready at {url}", flush=True)

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


class _Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="omni_reward.server", description="Serves one scorer over HTTP.")
    parser.add_argument("--scorer", required=True, help=f"one of {', '.join(sorted(SCORERS))}")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="setting of the scorer; may be given again"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; beyond loopback it takes a token")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that clients must send")
    parser.add_argument("--url-file", type=Path, help="file to write the URL to once the server answers")
    parser.add_argument(
        "--threads", type=int, default=1, help="cores that one request may use; more than 1 pays on idle cores only"
    )
    return parser


def _options(items: list[str]) -> dict[str, str]:
    """Settings of the scorer by name, from the NAME=VALUE texts of the command line."""
    for item in items:
        if not item.partition("=")[0].isidentifier() or "=" not in item:
            raise ValueError(f"--option must be NAME=VALUE, got {item!r}")
    return dict(item.split("=", 1) for item in items)


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.read_text().strip()
    wire.check_token(token)
    return token


def _bind(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Socket bound to the address, so that nobody can take the port before the server listens."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as exc:
        raise ValueError(f"--host must be an address of this machine, got {host!r}: {exc}") from exc
    if not has_token and not is_loopback(str(address[0])):
        raise ValueError(f"--host {host} can be reached from other machines: give --token-file too")
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise OSError(f"cannot bind {host}:{port}: {exc}") from exc
    return sock


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    main()
