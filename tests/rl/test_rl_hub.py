"""Models and scorers of the hub where it does not answer: each asks it once, and briefly."""

import json
import socket
import threading
import time

import pytest
from huggingface_hub import constants
from omni_reward.scorers import load_scorer, neural
from omni_rollout.models import hub, open_model
from transformers import CLIPConfig

ASK = {  # what asks the hub for weights -> the function that does, what it refuses, and the message's beginning
    "model": (
        hub,
        lambda: open_model("some/model"),
        "model must be a folder or a hub id that can be fetched, got some/m",
    ),
    "scorer": (
        neural,
        lambda: load_scorer("pickscore"),
        "a model must be a folder, or a repository of the hub that can",
    ),
}


@pytest.fixture(params=ASK)
def refusal(request, monkeypatch):
    """The refusal of one of ASK, as a function."""
    module, ask, beginning = ASK[request.param]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    module.hub_fault.cache_clear()

    def refused():
        with pytest.raises(ValueError, match=beginning) as caught:
            ask()
        return str(caught.value)

    yield refused
    module.hub_fault.cache_clear()


@pytest.fixture
def server(monkeypatch):
    """A port of this machine in place of the hub, at which nothing listens yet."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def accept(server, answer=b""):
    """Accept connections in a thread, and return the list of them; without an answer they stay open."""
    connections = []

    def serve():
        try:
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)
        except OSError:  # the test is over
            pass

    server.listen()
    threading.Thread(target=serve, daemon=True).start()
    return connections


def test_a_hub_that_accepts_and_never_answers_is_asked_once_for_3_seconds(refusal, server):
    connections, before = accept(server), time.monotonic()
    [message] = {refusal() for _ in range(2)}
    assert time.monotonic() - before >= 3
    assert len(connections) == 1
    assert f": {constants.ENDPOINT} does not answer within 3 s" in message or "ReadTimeout" in message


def test_a_hub_that_refuses_connections_is_named(refusal, server):
    assert f": {constants.ENDPOINT} cannot be reached, ConnectError: " in refusal()


def test_a_hub_that_is_turned_off_is_not_asked(refusal, server, monkeypatch):
    connections = accept(server)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ": HF_HUB_OFFLINE is set" in refusal()
    assert connections == []


@pytest.mark.parametrize("module", [hub, neural])
@pytest.mark.parametrize(("status", "fault"), [(404, ""), (503, " answers with status 503")])
def test_any_answer_of_the_hub_is_one_but_that_of_a_broken_server(module, status, fault, server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    accept(server, b"HTTP/1.1 %d Some\r\nContent-Length: 0\r\n\r\n" % status)
    assert module.hub_fault.__wrapped__() == (fault and f"{constants.ENDPOINT}{fault}")


def test_what_is_no_name_of_the_hub_does_not_ask_it(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    connections = accept(server)
    for ask in (open_model, lambda name: load_scorer("clip", options={"model": name})):
        for name in ("/no/such/folder", "no/such/folder", "../folder"):
            with pytest.raises(ValueError, match=r"must (be|load)"):
                ask(name)
    assert connections == []


def test_without_the_hub_models_are_taken_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text(json.dumps({"_class_name": "Other"}))
    (snapshot / "config.json").write_text(json.dumps({"projection_dim": 7}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    with pytest.raises(ValueError, match=f"model must not be a 'Other', which {snapshot} holds"):
        open_model("some/model")
    assert neural.load_part(CLIPConfig, "some/model").projection_dim == 7
