"""A real server in a thread, and servers that misbehave."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from helpers import REPO
from omni_reward.cli import MAX_CONNECTIONS
from omni_reward.connections import configure
from omni_reward.server import Limits, create_app
from omni_reward.wire import ScoreFn
from reward.reward_helpers import Misbehaving


@pytest.fixture(scope="session")
def stopping() -> Iterator[list[threading.Thread]]:
    """Threads of servers that were told to stop; only the end of the session waits for them."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(10)


@pytest.fixture
def serve(stopping: list[threading.Thread]) -> Iterator[Callable[..., str]]:
    """Function that serves a score function, with create_app's options or limits, and returns the URL."""
    with contextlib.ExitStack() as stack:

        def start(score_fn: ScoreFn, *, max_connections: int = MAX_CONNECTIONS, **options: object) -> str:
            limits = Limits(**{name: options.pop(name) for name in Limits.__annotations__ if name in options})
            app = create_app(score_fn, limits=limits, **{"name": "test", **options})
            sock = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(configure(app, max_connections))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
            stack.callback(stopping.append, thread)
            stack.callback(setattr, server, "should_exit", True)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            thread.start()
            return url

        yield start


@pytest.fixture
def misbehave() -> Iterator[Callable[..., str]]:
    """Function that starts a Misbehaving server and returns its URL."""
    with contextlib.ExitStack() as stack:

        def start(behave: Callable[[socket.socket, bytes], None]) -> str:
            return stack.enter_context(contextlib.closing(Misbehaving(behave))).url

        yield start


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The folder of the tiny checkpoints of all scorers, which is written once."""
    import build_tiny_scorers
    from build_tiny_models import kept

    source = Path(build_tiny_scorers.__file__)
    return kept("tiny-scorers", REPO / ".pytest_cache" / "tiny-models", build_tiny_scorers.write_all, source)
