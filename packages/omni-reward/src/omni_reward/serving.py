"""Reward servers for the duration of a block: in a separate process, or in this one for tests."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from omni_reward.cli import MAX_CONNECTIONS, bind
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
        """Trainer flags that name the server."""
        return ["--scorer.url", self.url, *(("--scorer.token-file", str(self.token_file)) if self.token_file else ())]


@contextmanager
def serving(
    scorer: str, *flags: str, token: str | None = None, python: str = sys.executable, env: Env | None = None
) -> Iterator[Server]:
    """Start a server of a scorer, which ends with the block or with this process; Ctrl-C does not reach it.

    If the server ends earlier, a line on stderr says so.

    Args:
        scorer: scorer, as in `python -m omni_reward.server --scorer`.
        flags: further flags of that command.
        token: bearer token that the server requires.
        python: interpreter of the environment with the scorer.
        env: environment variables in addition to this process's.

    Raises:
        ValueError: the server ended before it was ready; its message is on stderr.
    """
    with TemporaryDirectory() as scratch:  # only its owner can read it
        url_file, token_file = Path(scratch) / "url", Path(scratch) / "token" if token else None
        command = [python, "-m", "omni_reward.server", "--end-with-stdin", "--scorer", scorer]
        command += ["--url-file", str(url_file), *flags]
        if token_file is not None:
            token_file.write_text(str(token))
            command += ["--token-file", str(token_file)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**os.environ, **(env or {})}, start_new_session=True
        )
        is_over = threading.Event()

        def watch() -> None:
            code = process.wait()
            if not is_over.is_set():
                print(f"the scorer {scorer!r} has ended with exit code {code}", file=sys.stderr, flush=True)

        try:
            while not url_file.exists():
                if process.poll() is not None:
                    raise ValueError(f"{scorer!r} ended with exit code {process.returncode} at its start")
                time.sleep(0.05)
            threading.Thread(target=watch, daemon=True).start()
            yield Server(url_file.read_text(), token_file, process)
        finally:
            is_over.set()
            process.terminate()
            process.wait()


@contextmanager
def serving_in_thread(
    score_fn: ScoreFn, *, name: str = "test", token: str | None = None, show_errors: bool = False
) -> Iterator[str]:
    """Start a server of a score function or Scorer in a thread of this process, and yield its URL.

    name, token, show_errors: as in `omni_reward.server.create_app`.
    """
    import uvicorn

    from omni_reward.connections import configure
    from omni_reward.server import create_app

    app = create_app(score_fn, name=name, token=token, show_errors=show_errors)
    server = uvicorn.Server(configure(app, MAX_CONNECTIONS))
    sock = bind("127.0.0.1", 0, has_token=token is not None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
