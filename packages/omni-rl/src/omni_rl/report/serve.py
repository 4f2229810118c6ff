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
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit
from zlib import crc32

from omni_reward.cli import Parser, bind
from omni_reward.transport import is_loopback, names_loopback
from omni_train.files import read_steps

from omni_rl.report.data import MEDIA_TYPES, curve, outline, run_data
from omni_rl.report.page import embed, list_page, page

DEPTH = 3  # folders below the one that is served in which runs are looked for
MAX_RUNS = 1000  # of the list
LISTED = ("step", "time/step_s", "eval/reward")  # the metrics that it tells of
MAX_COMPARED = 8  # as many as there are colors
MAX_FILE_MB = 256  # of a file of lines or settings, and of one that is played
MAX_CONNECTIONS = 64
HEAD_S = 10  # longest that a browser may say nothing, or take for a piece of an answer
PIECE = 2**16  # bytes of an answer that are sent, and of a file that are in memory, at a time
CONNECTION_S = 120  # longest that a request and its answer may take
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # beside that in the page itself


class Refusal(Exception):  # noqa: N818 - an answer, and no error of this program
    """An answer other than the one that was asked for."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class LiveServer(ThreadingHTTPServer):
    """The server of a folder of runs, bound to its address."""

    daemon_threads = True

    def __init__(self, root: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind the address.

        Args:
            root: a folder of runs, or a run.
            host: the address; one that other machines can reach makes `token` a secret part of all addresses.
            port: 0 takes a free one.

        Raises:
            ValueError: there is no such folder or address.
            OSError: the address is taken.
        """
        if not root.is_dir():
            raise ValueError(f"the folder to serve must exist, got {root}")
        sock = bind(host, port, has_token=True)
        self.root, self.host = root.resolve(), host
        self.is_open = not is_loopback(sock.getsockname()[0])
        self.token = secrets.token_urlsafe(24) if self.is_open else ""
        self._outlines: dict[str, tuple[object, dict[str, Any]]] = {}
        # Of what goes on: the bytes and the checksum of its file when it was read, and what was in it.
        self._lines: dict[str, tuple[int, int, list[dict[str, float]]]] = {}
        self._since: dict[object, float] = {}  # connection -> when it was made
        self._lock, self.drawing = threading.Lock(), threading.Lock()
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.address_family, self.server_address = sock, sock.family, sock.getsockname()
        self.server_activate()

    @property
    def url(self) -> str:
        """The address of the list."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_address[1]}/{self.token and self.token + '/'}"

    def runs(self) -> dict[str, Path]:
        """The run folders by name, which is their path below the root; `.` where the root is itself a run.

        A folder whose name cannot be printed is no trainer's, and has no address: it is left out.
        """
        found: dict[str, Path] = {}

        def look(folder: Path, left: int) -> None:
            with suppress(OSError):  # a folder that cannot be read hides none beside it
                if (folder / "metrics.jsonl").is_file():
                    found[folder.relative_to(self.root).as_posix()] = folder
                elif left and len(found) < MAX_RUNS:
                    for path in sorted(folder.iterdir()):
                        is_named = path.name.isprintable() and not path.name.startswith(".")
                        if is_named and path.is_dir() and not path.is_symlink():
                            look(path, left - 1)

        look(self.root, DEPTH)
        return found

    def outlines(self) -> list[dict[str, Any]]:
        """What the list says of each run; of one whose files cannot be read, why."""
        return [self._outline(name, folder) for name, folder in self.runs().items()]

    def _outline(self, name: str, folder: Path) -> dict[str, Any]:
        try:
            self.check_files(folder)
            paths = [folder / file for file in ("metrics.jsonl", "config.toml", "versions.jsonl")]
            state = [(stat.st_mtime_ns, stat.st_size) for path in paths if path.exists() for stat in [path.stat()]]
            known, found = self._outlines.get(name, (None, {}))
            if known != state:  # only what goes on is read again
                steps = self._steps(name, paths[0])
                found = outline(folder, steps) | {"held": curve(steps, "eval/reward", 60)}
                self._outlines[name] = (state, found)
        except Exception as exc:  # whatever its files hold, the others are listed
            return {"id": name, "name": self.title(name), "error": str(exc).replace(f"{self.root}/", "")}
        config, start = found["config"], found["starts"][-1] if found["starts"] else {}
        told = {key: found[key] for key in ("step", "total", "seconds", "pace_s", "logged_at", "held")}
        words = [Path(word).stem for word in start.get("command", "").split() if word.endswith(".py")]
        about = {"trainer": words[0] if words else "", "algo": config.get("algo"), "model": config.get("model")}
        return {"id": name, "name": self.title(name), "started": start.get("started"), **about, **told}

    def _steps(self, name: str, path: Path) -> list[dict[str, float]]:
        """The steps as `load_metrics` has them, in LISTED; from a run's third reading on, only new lines are read."""
        data = path.read_bytes()
        size, checksum, lines = self._lines.pop(name, (0, 0, []))  # so that no other thread adds to them meanwhile
        if crc32(data[:size]) != checksum:  # a run that continues has dropped lines
            lines = []
        lines += [{key: line[key] for key in LISTED if key in line} for line in read_steps(path, len(lines))]
        steps = {line["step"]: line for line in lines}
        if name in self._outlines:
            self._lines[name] = len(data), crc32(data), lines
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
        runs = self.runs()
        missing = [name for name in names if name not in runs]
        if missing or not names:
            raise Refusal(HTTPStatus.NOT_FOUND, f"no run {missing[0] if missing else ''}")
        if len(names) > MAX_COMPARED or len(set(names)) < len(names):
            raise Refusal(HTTPStatus.BAD_REQUEST, f"run must be given once for each of at most {MAX_COMPARED} runs")
        try:
            for name in names:
                self.check_files(runs[name])
            data = [run_data(runs[name], num_runs=len(names), link=f"files/{quote(name)}") for name in names]
        except Exception as exc:  # whatever its files hold
            raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(exc)) from exc
        return page([run | {"name": self.title(name)} for name, run in zip(names, data, strict=True)], live=True)

    def media(self, path: str) -> tuple[str, BinaryIO]:
        """Type and content of a file that a report shows, by its path below the root; to be closed."""
        missing = Refusal(HTTPStatus.NOT_FOUND, "no such picture, video or sound")
        try:
            file = (self.root / path).resolve()
            below = file.relative_to(self.root)  # after links were followed
            is_shown = file.suffix in MEDIA_TYPES and {"eval", "samples"} & set(below.parts[:-1]) and file.is_file()
            if not is_shown:
                raise missing
            if file.stat().st_size > MAX_FILE_MB * 2**20:
                raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_FILE_MB} MB")
            return MEDIA_TYPES[file.suffix], file.open("rb")
        except (OSError, ValueError) as exc:
            raise missing from exc

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or hang up where there are too many."""
        with self._lock:
            is_full = len(self._since) >= MAX_CONNECTIONS
            if not is_full:
                self._since[request] = time.monotonic()
        if is_full:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection and close it."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on who takes too long, however often it sends a byte."""
        with self._lock:
            late = [sock for sock, since in self._since.items() if time.monotonic() - since > CONNECTION_S]
        for sock in late:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]  # its thread then ends

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that hung up; of all else what it was."""
        exc = sys.exception()
        if not isinstance(exc, OSError):
            print(f"WARNING: a request failed: {type(exc).__name__}: {exc}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; the base class refuses all else."""

    server: LiveServer
    timeout = HEAD_S
    server_version, sys_version = "omni-rl", ""

    def do_GET(self) -> None:
        content: BinaryIO
        try:
            kind, content = self._answer()
            status, policy = HTTPStatus.OK, PAGE_POLICY if kind.startswith("text/html") else None
        except Refusal as exc:
            status, policy = exc.status, None
            kind, content = "text/plain; charset=utf-8", BytesIO(f"{exc}\n".encode())
        with content:
            self._send(status, kind, content, policy)

    def _send(self, status: HTTPStatus, kind: str, content: BinaryIO, policy: str | None) -> None:
        total = content.seek(0, os.SEEK_END)
        first, last = 0, total - 1
        if status is HTTPStatus.OK and (asked := self._range(total)):
            status, (first, last) = HTTPStatus.PARTIAL_CONTENT, asked
        self.send_response(status)
        for name, value in {**HEADERS, **({"Content-Security-Policy": policy} if policy else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Accept-Ranges", "bytes")
        if status is HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.end_headers()
        left = last - first + 1 if self.command == "GET" else 0
        content.seek(first)
        while piece := content.read(min(left, PIECE)):
            left -= len(piece)
            self.wfile.write(piece)  # the socket's timeout is for each of these calls

    do_HEAD = do_GET  # noqa: N815 - the name that the base class asks for

    def _answer(self) -> tuple[str, BinaryIO]:
        """Type and content of what the address names."""
        server = self.server
        if not server.is_open and not names_loopback(self.headers.get("Host", ""), server.host):
            raise Refusal(HTTPStatus.FORBIDDEN, "ask for it as localhost")  # else any page could read by rebinding
        _, *parts = urlsplit(self.path).path.split("/")
        if server.token and not hmac.compare_digest(parts.pop(0).encode(), server.token.encode()):
            raise Refusal(HTTPStatus.NOT_FOUND, "the address must begin with the token that was printed at the start")
        match parts:
            case [""]:
                return "text/html; charset=utf-8", BytesIO(list_page(server.root.name).encode(errors="replace"))
            case ["runs.json"]:
                return "application/json", BytesIO(embed(server.outlines()).encode())
            case ["report"]:
                names = parse_qs(urlsplit(self.path).query).get("run", [])
                with server.drawing:  # one at a time, as each takes many times the memory of its files
                    return "text/html; charset=utf-8", BytesIO(server.report(names).encode())
            case ["files", *path]:
                return server.media(unquote("/".join(path)))
        raise Refusal(HTTPStatus.NOT_FOUND, "no such page")

    def _range(self, total: int) -> tuple[int, int] | None:
        """The first and the last byte that a player asks for; None for all of them."""
        first, dash, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not dash or not first.isdecimal() or not (last == "" or last.isdecimal()) or len(first + last) > 40:
            return None
        found = int(first), min(int(last or total), total - 1)
        return found if found[0] <= found[1] else None

    def log_message(self, *args: object) -> None:
        """Say nothing: addresses hold the token."""


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
    print(f"{(count := len(server.runs()))} run{'s' * (count != 1)} at {server.url}  (Ctrl-C ends it)", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
