"""Models of the hub where it does not answer: it is asked once, and briefly."""

import json
import socket
import threading
import time

import pytest
from huggingface_hub import constants
from omni_rollout.models import hub, open_model


@pytest.fixture
def asked(monkeypatch):
    """A port of this machine in place of the hub, and the connections that it gets."""
    connections = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.hub_fault.cache_clear()
        yield server, connections
    hub.hub_fault.cache_clear()


def serve(server, connections, answer=b""):
    """Accept connections in a thread; without an answer they stay open."""

    def accept():
        try:
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)
        except OSError:  # the test is over
            pass

    server.listen()
    threading.Thread(target=accept, daemon=True).start()


def refusal(name):
    with pytest.raises(ValueError, match="model must") as caught:
        open_model(name)
    return str(caught.value)


def test_a_hub_that_accepts_and_never_answers_is_asked_once_for_3_seconds(asked):
    serve(*asked)
    before = time.monotonic()
    messages = {refusal("some/model") for _ in range(2)}
    assert 3 <= time.monotonic() - before < 30  # the library would wait for ever
    assert len(asked[1]) == 1
    [message] = messages
    assert message == (
        f"model must be a folder or a hub id that can be fetched, got some/model: {constants.ENDPOINT} does not answer "
        "within 3 s. Fetch it where there is a network, with `hf download some/model`, or give a folder"
    )


def test_a_hub_that_refuses_connections_is_named(asked):
    assert f"got some/model: {constants.ENDPOINT} cannot be reached, ConnectError: " in refusal("some/model")


def test_a_hub_that_answers_is_no_fault(asked):
    serve(*asked, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    assert hub.hub_fault() == ""


def test_without_the_hub_a_model_is_taken_from_its_cache(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("0" * 40) / "model_index.json").write_text(json.dumps({"_class_name": "Other"}))
    assert "must not be a 'Other'" in refusal("some/model")


def test_a_hub_that_is_turned_off_is_not_asked(asked, monkeypatch):
    serve(*asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "got some/model: HF_HUB_OFFLINE is set. " in refusal("some/model")
    assert asked[1] == []
