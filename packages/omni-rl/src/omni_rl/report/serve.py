"""The runs of a folder as pages that follow them: a list, the report of each, and comparisons of several.

    omni-rl report --serve runs/        prints the address, and serves until Ctrl-C

| address | what |
|---|---|
| `/` | the list, which asks for `runs.json` every few seconds |
| `/report?run=a&run=b` | the report of a run, or several runs laid over each other, drawn when asked for |
| `/files/a/eval/000080/0000.png` | a picture, a video or a sound that a report shows |

It only reads. Nothing beyond the folder is shown, whatever its links say; no page of the folder is served as a page.
Where other machines can reach it, every address begins with a random token.
"""

import argparse
import asyncio
import hmac
import logging
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote
from zlib import crc32

import uvicorn
from omni_reward.cli import Parser, bind
from omni_reward.transport import is_loopback, names_loopback
from omni_train.files import read_steps
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from omni_rl.report.data import MEDIA_TYPES, curve, outline, run_data
from omni_rl.report.page import embed, list_page, page

DEPTH = 3  # folders below the one that is served in which runs are looked for
MAX_RUNS = 1000  # of the list
LISTED = ("step", "time/step_s", "eval/reward")  # the metrics that it tells of
MAX_COMPARED = 8  # as many as there are colors
MAX_FILE_MB = 256  # of a file of lines or settings
MAX_CONNECTIONS = 64
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # beside that in the page itself


class Runs:
    """The runs of a folder, or the one run that it is. To be asked for one list at a time."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(f"the folder to serve must exist, got {root}")
        self.root = root.resolve()
        self._listed: dict[str, tuple[object, dict[str, Any]]] = {}  # the state of its files, and what the list says
        # Of what goes on: the bytes and the checksum of its file when it was read, and what was in it.
        self._lines: dict[str, tuple[int, int, list[dict[str, float]]]] = {}

    def find(self) -> dict[str, Path]:
        """The run folders by name, which is their path below the root; `.` where the root is itself a run.

        A folder whose name cannot be printed is no trainer's, and has no address: it is left out.
        """
        found: dict[str, Path] = {}
        for place, folders, _ in os.walk(self.root):  # one that cannot be read hides none beside it
            below = Path(place).relative_to(self.root)
            is_run = os.path.isfile(f"{place}/metrics.jsonl")
            if is_run and len(found) < MAX_RUNS:
                found[below.as_posix()] = Path(place)
            is_last = is_run or len(below.parts) == DEPTH or len(found) == MAX_RUNS
            folders[:] = sorted(name for name in folders if name.isprintable() and name[0] != "." and not is_last)
        return found

    def outlines(self) -> list[dict[str, Any]]:
        """What the list says of each run; of one whose files cannot be read, why."""
        return [{"id": name, "name": self.title(name), **self._outline(name, run)} for name, run in self.find().items()]

    def _outline(self, name: str, folder: Path) -> dict[str, Any]:
        try:
            self.check_files(folder)
            paths = [folder / file for file in ("metrics.jsonl", "config.toml", "versions.jsonl")]
            state = [(stat.st_mtime_ns, stat.st_size) for path in paths if path.exists() for stat in [path.stat()]]
            if self._listed.get(name, ("",))[0] != state:  # only what goes on is read again
                steps = self._steps(name, paths[0])
                found = outline(folder, steps)
                config, start = found["config"], found["starts"][-1] if found["starts"] else {}
                words = [Path(word).stem for word in start.get("command", "").split() if word.endswith(".py")]
                told = {key: found[key] for key in ("step", "total", "seconds", "pace_s", "logged_at")}
                told |= {"held": curve(steps, "eval/reward", 60), "started": start.get("started")}
                told |= {"trainer": words[0] if words else "", "algo": config.get("algo"), "model": config.get("model")}
                self._listed[name] = (state, told)
        except Exception as exc:  # whatever its files hold, the others are listed
            return {"error": str(exc).replace(f"{self.root}/", "")}
        return self._listed[name][1]

    def _steps(self, name: str, path: Path) -> list[dict[str, float]]:
        """The steps as `load_metrics` has them, in LISTED; from a run's third reading on, only new lines are read."""
        data = path.read_bytes()
        size, checksum, lines = self._lines.get(name, (0, 0, []))
        if crc32(data[:size]) != checksum:  # a run that continues has dropped lines
            lines = []
        new = read_steps(path, len(lines))
        lines = lines + [{key: line[key] for key in LISTED if key in line} for line in new]
        if name in self._listed:
            self._lines[name] = len(data), crc32(data), lines
        steps = {line["step"]: line for line in lines}
        return [steps[step] for step in sorted(steps)]

    def title(self, name: str) -> str:
        """What pages call a run."""
        return self.root.name if name == "." else name

    def check_files(self, folder: Path) -> None:
        """Refuse a run that leads out of the root or whose files of text are too large.

        Raises:
            ValueError: so it is.
        """
        read = ["metrics.jsonl", "config.toml", "versions.jsonl"]
        read += [path.relative_to(folder).as_posix() for path in folder.glob("*/*/*.json")]
        for path in [folder / name for name in ["eval", "samples", *read]]:
            if not path.resolve().is_relative_to(self.root):
                raise ValueError(f"{path.relative_to(self.root)} leads out of the folder that is served")
            if path.is_file() and path.stat().st_size > MAX_FILE_MB * 2**20:
                raise ValueError(f"{path.relative_to(self.root)} must be at most {MAX_FILE_MB} MB")

    def report(self, names: list[str]) -> str:
        """The page of one run, or of several."""
        runs = self.find()
        missing = [name for name in names if name not in runs]
        if missing or not names:
            raise HTTPException(404, f"no run {missing[0] if missing else ''}")
        if len(names) > MAX_COMPARED or len(set(names)) < len(names):
            raise HTTPException(400, f"run must be given once for each of at most {MAX_COMPARED} runs")
        try:
            for name in names:
                self.check_files(runs[name])
            data = [run_data(runs[name], num_runs=len(names), link=f"files/{quote(name)}") for name in names]
        except Exception as exc:  # whatever its files hold
            raise HTTPException(422, str(exc)) from exc
        return page([run | {"name": self.title(name)} for name, run in zip(names, data, strict=True)], live=True)

    def media(self, path: str) -> Path:
        """The file that a report shows, by its path below the root."""
        with suppress(OSError, ValueError):
            file = (self.root / path).resolve()
            homes = file.relative_to(self.root).parts[:-1]  # after links were followed
            if file.suffix in MEDIA_TYPES and {"eval", "samples"} & set(homes) and file.is_file():
                return file
        raise HTTPException(404, "no such picture, video or sound")


def create_app(runs: Runs, *, host: str = "localhost", token: str = "") -> Starlette:
    """ASGI app of the pages.

    Args:
        runs: what they show.
        host: one more name of loopback, without a token.
        token: what every address begins with; without one, only who asks for loopback is answered.
    """
    drawing, listing = asyncio.Lock(), asyncio.Lock()  # each takes many times the memory of the files that it reads
    start = f"/{token}/" if token else "/"

    def show(text: str) -> Response:
        return HTMLResponse(text.encode(errors="replace"), headers={"Content-Security-Policy": PAGE_POLICY})

    async def index(request: Request) -> Response:
        return show(list_page(runs.root.name))

    async def listed(request: Request) -> Response:
        async with listing:
            return Response(embed(await run_in_threadpool(runs.outlines)), media_type="application/json")

    async def report(request: Request) -> Response:
        async with drawing:
            return show(await run_in_threadpool(runs.report, request.query_params.getlist("run")))

    def media(request: Request) -> Response:
        file = runs.media(request.path_params["path"])
        return FileResponse(file, media_type=MEDIA_TYPES[file.suffix])

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        asked, path = request.headers.get("host", ""), request.scope["path"]
        if not token and not names_loopback(asked, host):  # else any page could read by rebinding
            answer: Response = PlainTextResponse("ask for it as localhost", 403)
        elif not hmac.compare_digest(path[: len(start)].encode(), start.encode()):
            answer = PlainTextResponse("the address must begin with the token that was printed at the start", 404)
        else:
            answer = await call_next(request)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    pages = {"": index, "runs.json": listed, "report": report, "files/{path:path}": media}
    routes = [Route(start + path, endpoint) for path, endpoint in pages.items()]
    app = Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])
    app.router.redirect_slashes = False
    return app


class LiveServer(uvicorn.Server):
    """The server of a folder of runs, bound to its address. `run(sockets=[server.socket])` serves.

    Args:
        root: a folder of runs, or a run.
        host: the address; one that other machines can reach makes a secret part of all addresses.
        port: 0 takes a free one.

    Raises:
        ValueError: there is no such folder or address.
        OSError: the address is taken.
    """

    def __init__(self, root: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = Runs(root)
        self.socket = bind(host, port, has_token=True)
        self.socket.listen()  # who reads the address may ask at once
        address, port = self.socket.getsockname()[:2]
        token = "" if is_loopback(address) else secrets.token_urlsafe(24)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port}/{token and token + '/'}"
        app, most = create_app(self.runs, host=host, token=token), MAX_CONNECTIONS
        # h11 bounds the head of a request. Addresses hold the token, so nobody is to log them.
        super().__init__(uvicorn.Config(app, http="h11", log_config=None, access_log=False, limit_concurrency=most))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; what is cut, such as a video that a browser has paused, is no error."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.force_exit = True
        super().handle_exit(sig, frame)


def main(argv: list[str] | None = None) -> None:
    """Serve a folder of runs until Ctrl-C. What cannot be served ends it with one line and exit code 2."""
    parser = Parser(prog="omni-rl report --serve", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="folder of runs, or a run")
    parser.add_argument("--host", default="127.0.0.1", help="address; any but this machine's own takes a token")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    args = parser.parse_args(argv)
    try:
        server = LiveServer(args.folder, host=args.host, port=args.port)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    print(f"{(count := len(server.runs.find()))} run{'s' * (count != 1)} at {server.url}  (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[server.socket])


if __name__ == "__main__":
    main()
