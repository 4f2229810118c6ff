"""Reward servers for the trainers: a cheap one in this process, and the real OCR scorer in its own."""

import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from omni_reward.server import create_app


def brightness(media, prompts, meta):
    """The mean level of each image, in [0, 1]: a reward that any model can raise."""
    return [float(image.mean()) / 255 for image in media["image"]]


@pytest.fixture(scope="session")
def bright_url():
    """URL of a server in this process that scores brightness."""
    server = uvicorn.Server(uvicorn.Config(create_app(brightness, name="brightness"), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="session")
def ocr_flags(tmp_path_factory):
    """The trainer's flags for a real OCR server in a process of its own, with a token."""
    folder = tmp_path_factory.mktemp("scorer")
    (folder / "token").write_text("a-token-for-the-tests")
    flags = ["--scorer", "ocr", "--token-file", str(folder / "token"), "--url-file", str(folder / "url")]
    process = subprocess.Popen([sys.executable, "-m", "omni_reward.server", *flags])
    while not (folder / "url").exists():
        assert process.poll() is None, "the scorer ended before it was ready"
        time.sleep(0.05)
    yield ["--scorer-url", (folder / "url").read_text(), "--scorer-token-file", str(folder / "token")]
    process.terminate()
    assert process.wait(timeout=20) == 0
