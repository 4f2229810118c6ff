"""Reward servers for the duration of a block: in a separate process, or in this one for tests.

    python -m omni_reward.testing ocr -- python train.py ...

starts a server, runs the command with the server's flags appended, and then ends the server. Flags of
`omni_reward.server` may precede the two dashes.
"""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from omni_reward.wire import ScoreFn

Env = Mapping[str, str]


@dataclass(frozen=True)
class Server:
    """A reward server in a separate process."""

    url: str
    token_file: Path | None
    process: subprocess.Popen[bytes]

    @property
    def flags(self) -> list[str]:
        """The flags of a trainer that name the server."""
        return ["--scorer-url", self.url, *(("--scorer-token-file", str(self.token_file)) if self.token_file else ())]


@contextmanager
def serving(
    scorer: str, *flags: str, token: str | None = None, python: str = sys.executable, env: Env | None = None
) -> Iterator[Server]:
    """Start a server of a scorer, which ends with the block; Ctrl-C does not reach it.

    Args:
        scorer: as in `python -m omni_reward.server --scorer`.
        flags: further flags of that command.
        token: bearer token that the server requires.
        python: interpreter of the environment with the scorer.
        env: environment variables in addition to this process's.

    Raises:
        RuntimeError: the server ended before it was ready; its message is on stderr.
    """
    with TemporaryDirectory() as scratch:  # only its owner can read it
        url_file, token_file = Path(scratch) / "url", Path(scratch) / "token" if token else None
        command = [python, "-m", "omni_reward.server", "--scorer", scorer, "--url-file", str(url_file), *flags]
        if token_file is not None:
            token_file.write_text(str(token))
            command += ["--token-file", str(token_file)]
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, start_new_session=True)
        try:
            while not url_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the scorer {scorer!r} ended with exit code {process.returncode} at its start")
                time.sleep(0.05)
            yield Server(url_file.read_text(), token_file, process)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def serving_here(score_fn: ScoreFn, *, name: str = "test", token: str | None = None) -> Iterator[str]:
    """Start a server of a score function or Scorer in a thread of this process; yield its URL."""
    import uvicorn

    from omni_reward.server import create_app

    app = create_app(score_fn, name=name, token=token)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def main(argv: list[str]) -> int:
    """Run a command beside a server, and return its exit code."""
    end = argv.index("--") if "--" in argv else 0
    if not 0 < end < len(argv) - 1:
        raise SystemExit("usage: python -m omni_reward.testing SCORER [FLAG ...] -- COMMAND")
    with serving(*argv[:end], token=secrets.token_urlsafe(32)) as server:
        signal.signal(signal.SIGINT, lambda *_: None)  # the command gets it too, and decides
        typed = shlex.join([sys.orig_argv[0], "-m", "omni_reward.testing", *argv])  # continues a run
        process = subprocess.Popen([*argv[end + 1 :], *server.flags], env={**os.environ, "OMNI_RL_COMMAND": typed})
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
