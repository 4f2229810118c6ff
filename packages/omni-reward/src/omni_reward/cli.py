"""The server's command line: its flags, files and socket."""

import argparse
import logging
import os
import re
import socket
from pathlib import Path
from typing import NoReturn

from omni_reward.scorers import SCORERS
from omni_reward.transport import is_loopback

MAX_CONNECTIONS = 512


class Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message on stderr, in one line."""
        line = printable(message).replace("\n", " ")
        self.exit(2, f"{self.prog}: error: {line}\n")


class PrintableFormatter(logging.Formatter):
    """Formatter for log lines that hold untrusted text, such as prompts and errors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines, safe to print on a terminal."""
        return printable(super().format(record))


def printable(text: str) -> str:
    """Return a text with its unprintable characters, except line feeds, replaced by spaces."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def build_parser() -> Parser:
    """Return the parser of `python -m omni_reward.server`."""
    parser = Parser(prog="omni_reward.server", description="Serves one scorer over HTTP.")
    add = parser.add_argument
    connections = "most connections; at the limit, a new one replaces one that waits for its client, else gets a 503"
    scorers = f"one of {', '.join(sorted(SCORERS))}; python:FILE.py:FUNCTION; or several, as in '0.7*ocr + 0.3*jpeg'"
    scorers += "; or rules:REWARD for texts"
    options = "option of the scorer, or SCORER.NAME=VALUE for one of several; may be repeated"
    add("--scorer", required=True, help=scorers)
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=options)
    add("--host", default="127.0.0.1", help="address to bind; any other than loopback requires a token")
    add("--port", type=int, default=0, help="port; 0 (the default) takes a free one")
    add("--token-file", type=Path, help="file with the bearer token that clients must send")
    add("--url-file", type=Path, help="file that receives the URL once the server answers")
    add("--threads", type=int, default=1, help="cores per request; more than 1 helps only if they are idle")
    add("--batch-size", type=int, help="most samples in one call of the scorer; default: the scorer's")
    add("--max-body-mb", type=int, default=256, help="largest request, in MiB")
    add("--max-batch", type=int, default=1024, help="most samples in a request")
    add("--max-connections", type=int, default=MAX_CONNECTIONS, help=connections)
    add("--shutdown-timeout-s", type=float, default=60, help="seconds to finish the accepted requests after SIGTERM")
    add("--max-waiting", type=int, default=64, help="most requests that wait while one is scored")
    add("--end-with-stdin", action="store_true", help="end when standard input does")
    return parser


def exit_missing_library(exc: ImportError) -> NoReturn:
    """Handle --help and wrong flags, or exit with the name of the missing library."""
    parser = build_parser()
    parser.parse_args()
    parser.error(f"needs {exc.name}: install omni-reward[server]")


def public_name(scorer: str) -> str:
    """Return the value of --scorer without the folders of files."""
    return re.sub(r"python:[^\s*]*/", "python:", scorer)


def read_options(items: list[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts into options by name.

    Raises:
        ValueError: a text does not have this form.
    """
    for item in items:
        if "=" not in item or not item.partition("=")[0].replace(".", "_").isidentifier():
            raise ValueError(f"--option must be NAME=VALUE, got {item!r}")
    return dict(item.split("=", 1) for item in items)


def bind(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Bind a socket to the address before the server starts, so that no other process takes the port.

    Raises:
        ValueError: the address does not exist, or other machines can reach it and there is no token.
        OSError: the address is in use.
    """
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


def remove_url_file(path: Path | None) -> None:
    """Remove an old URL file, which names a server that has ended.

    Raises:
        ValueError: the file's folder does not exist.
    """
    if path is not None:
        if not path.parent.is_dir():
            raise ValueError(f"--url-file must be in a folder that exists, got {path}")
        path.unlink(missing_ok=True)


def announce_url(path: Path | None, sock: socket.socket) -> None:
    """Print the server's URL, and write it to the file atomically."""
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if path is not None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        with partial.open("x") as file:  # fails if a link is there instead of following it
            file.write(url)
        partial.replace(path)
    print(f"scorer ready at {url}", flush=True)
