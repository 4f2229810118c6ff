"""Live pages of the runs in a folder: a list, the report of each, and comparisons.

    omni-rl report --serve runs/        prints the address, and serves until Ctrl-C

| address | content |
|---|---|
| `/` | the list, which reloads `runs.json` every few seconds |
| `/report?run=a&run=b` | the report of a run, or a comparison, generated on request |
| `/metrics` | the last line of each run's metrics, for Prometheus |
| `/files/a/eval/000080/0000.png` | an image, a video or a sound of a report |

The server only reads, and serves no files outside the folder and no HTML files from it. If other machines can reach it,
every address begins with a random token.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from omni_reward.cli import bind
from omni_reward.connections import configure
from omni_reward.transport import is_loopback, names_loopback
from omni_train.files import load_metrics
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from omni_rl.report.data import MEDIA_TYPES, curve, outline, read_now, run_data
from omni_rl.report.page import embed, list_page, page
from omni_rl.run.metrics import drop_stale_evaluations

FILES = ("metrics.jsonl", "config.toml", "versions.jsonl")  # files of a run that the list reads
MEDIA_FOLDERS = {"eval", "samples"}  # folders of a run with media to serve
DEPTH = 3  # levels of folders to search for runs
MAX_RUNS = 1000  # in the list
MAX_COMPARED = 8  # number of colors
MAX_CONNECTIONS = 64
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
State = tuple[tuple[int, int], ...]  # modification time in ns and size in bytes of each file
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # in addition to the page's own policy


class Runs:
    """The runs of a folder, which may itself be a run."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(f"the folder to serve must exist, got {root}")
        self.root = root.resolve()

    def find(self) -> dict[str, Path]:
        """Return the run folders by name, which is the path below the root, or `.` for the root itself.

        Folders with unprintable names are left out.
        """
        runs: dict[str, Path] = {}
        for path, folders, _ in os.walk(self.root):  # skips folders that cannot be read
            relative = Path(path).relative_to(self.root)
            is_run = os.path.isfile(f"{path}/metrics.jsonl")
            if is_run and len(runs) < MAX_RUNS:
                runs[relative.as_posix()] = Path(path)
            is_last = is_run or len(relative.parts) == DEPTH or len(runs) == MAX_RUNS
            folders[:] = sorted(name for name in folders if name.isprintable() and name[0] != "." and not is_last)
        return runs

    def outlines(self) -> list[dict[str, Any]]:
        """Return the row of each run in the list, or an error in its files."""
        return [{"id": name, "name": self.title(name), **self._outline(run)} for name, run in self.find().items()]

    def gauges(self) -> bytes:
        """Return the last line of each run in Prometheus' text format, without damaged runs."""
        registry = CollectorRegistry()
        step = Gauge("omni_rl_step", "Finished training steps of the run", ["run"], registry=registry)
        values = Gauge("omni_rl_metric", "Metric of the run's last line", ["run", "metric"], registry=registry)
        for name, folder in self.find().items():
            with suppress(Exception):  # files may hold anything; the list shows the error
                line = _last_line(folder, _state(folder))
                title = _encodable(self.title(name))
                step.labels(title).set(line["step"])
                for metric, value in line.items():
                    values.labels(title, _encodable(metric)).set(value)
        return generate_latest(registry)

    def _outline(self, folder: Path) -> dict[str, Any]:
        try:
            return _outline(folder, _state(folder)) | {"now": read_now(folder)}
        except Exception as exc:  # files may hold anything; the other runs are listed
            return {"error": str(exc).replace(f"{self.root}/", "")}

    def title(self, name: str) -> str:
        """Return the name of a run to show."""
        return self.root.name if name == "." else name

    def report(self, names: list[str]) -> str:
        """Return the page of one or several runs."""
        runs = self.find()
        missing = [name for name in names if name not in runs]
        if missing or not names:
            raise HTTPException(404, f"no run {missing[0] if missing else ''}")
        if len(names) > MAX_COMPARED or len(set(names)) < len(names):
            raise HTTPException(400, f"run must be given once for each of at most {MAX_COMPARED} runs")
        try:
            for name in names:
                self._check_links(runs[name])
            data = [run_data(runs[name], num_runs=len(names), link=f"files/{quote(name)}") for name in names]
        except Exception as exc:  # files may hold anything
            raise HTTPException(422, str(exc)) from exc
        return page([run | {"name": self.title(name)} for name, run in zip(names, data, strict=True)], live=True)

    def _check_links(self, folder: Path) -> None:
        for path in [path for home in MEDIA_FOLDERS for path in (folder / home, *folder.glob(f"{home}/*"))]:
            if not path.resolve().is_relative_to(self.root):
                raise ValueError(f"{path.relative_to(self.root)} leads out of the folder that is served")

    def media(self, path: str) -> Path:
        """Return the media file of a report, given its path below the root."""
        with suppress(OSError, ValueError):
            file = (self.root / path).resolve()
            parts = file.relative_to(self.root).parts[:-1]  # with links resolved
            if file.suffix in MEDIA_TYPES and MEDIA_FOLDERS & set(parts) and file.is_file():
                return file
        raise HTTPException(404, "no such image, video or sound")


def _encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode by ?, because JSON may contain lone surrogates."""
    return text.encode(errors="replace").decode()


def _state(folder: Path) -> State:
    """Return modification times and sizes of the run's files."""
    stats = [path.stat() for name in FILES if (path := folder / name).exists()]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


@lru_cache(MAX_RUNS)
def _last_line(folder: Path, state: State) -> dict[str, float]:
    """Return the last line of the run's metrics. state: cache key; the files are read again only if it changes."""
    return load_metrics(folder / FILES[0])[-1]


@lru_cache(MAX_RUNS)
def _outline(folder: Path, state: State) -> dict[str, Any]:
    """Return the row of a run in the list. state: cache key; the files are read again only if it changes."""
    steps = drop_stale_evaluations(load_metrics(folder / FILES[0]))
    run_outline = outline(folder, steps)
    config, start = run_outline["config"], run_outline["starts"][-1] if run_outline["starts"] else {}
    scripts = [Path(word).stem for word in start.get("command", "").split() if word.endswith(".py")]
    row = {key: run_outline[key] for key in ("step", "total", "seconds", "pace_s", "logged_at")}
    row |= {"held": curve(steps, "eval/reward", 60), "started": start.get("started")}
    return row | {"trainer": scripts[0] if scripts else "", "algo": config.get("algo"), "model": config.get("model")}


def create_app(runs: Runs, *, host: str = "localhost", token: str = "") -> Starlette:
    """Return the ASGI app of the pages.

    Args:
        runs: the runs to show.
        host: an additional allowed name of the loopback address, if there is no token.
        token: the beginning of every address. Without a token, only requests to the loopback address are answered.
    """
    # each takes many times the memory of the files that it reads
    report_lock, list_lock = asyncio.Lock(), asyncio.Lock()
    prefix = f"/{token}/" if token else "/"

    def html_response(text: str) -> Response:
        return HTMLResponse(text.encode(errors="replace"), headers={"Content-Security-Policy": PAGE_POLICY})

    async def index(request: Request) -> Response:
        return html_response(list_page(runs.root.name))

    async def list_runs(request: Request) -> Response:
        async with list_lock:
            return Response(embed(await run_in_threadpool(runs.outlines)), media_type="application/json")

    async def gauges(request: Request) -> Response:
        async with list_lock:
            return Response(await run_in_threadpool(runs.gauges), media_type=CONTENT_TYPE_LATEST)

    async def report(request: Request) -> Response:
        async with report_lock:
            return html_response(await run_in_threadpool(runs.report, request.query_params.getlist("run")))

    def media(request: Request) -> Response:
        file = runs.media(request.path_params["path"])
        return FileResponse(file, media_type=MEDIA_TYPES[file.suffix])

    async def check_address(request: Request, call_next: RequestResponseEndpoint) -> Response:
        host_header, path = request.headers.get("host", ""), request.scope["path"]
        if not token and not names_loopback(host_header, host):  # against DNS rebinding
            response: Response = PlainTextResponse("the host of the address must be localhost", 403)
        elif not hmac.compare_digest(path[: len(prefix)].encode(), prefix.encode()):
            response = PlainTextResponse("the address must begin with the token that was printed at start", 404)
        else:
            response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    pages = {"": index, "runs.json": list_runs, "metrics": gauges, "report": report, "files/{path:path}": media}
    routes = [Route(prefix + path, endpoint) for path, endpoint in pages.items()]
    app = Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=check_address)])
    app.router.redirect_slashes = False
    return app


class LiveServer(uvicorn.Server):
    """A server for a folder of runs, bound to its address. Call `run(sockets=[server.socket])` to serve.

    Args:
        root: a folder of runs, or a run.
        host: the address. If other machines can reach it, all addresses contain a secret token.
        port: 0: any free port.

    Raises:
        ValueError: the folder or the address does not exist.
        OSError: the address is in use.
    """

    def __init__(self, root: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = Runs(root)
        self.socket = bind(host, port, has_token=True)
        self.socket.listen()  # requests may arrive once the address is printed
        address, port = self.socket.getsockname()[:2]
        token = "" if is_loopback(address) else secrets.token_urlsafe(24)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port}/{token and token + '/'}"
        super().__init__(configure(create_app(self.runs, host=host, token=token), MAX_CONNECTIONS))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server. An interrupted response, such as a paused video, is not an error."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = True
        super().handle_exit(sig, frame)
