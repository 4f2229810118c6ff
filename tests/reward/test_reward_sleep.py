"""Servers that sleep: who may ask, when weights move, and that a request finds them awake."""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import requests
import torch
from omni_reward import RewardClient, RewardHTTPError, Score, Scorer
from omni_reward.combine import combine
from omni_reward.scorers import neural
from omni_reward.scorers.frames import over_frames
from omni_reward.terms import parse
from reward.reward_helpers import halves

IMAGES = np.zeros((2, 3, 4, 3), np.uint8)


class Mover:
    """A scorer that notes its calls and its moves, and may not score asleep."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()

    def score(self, media: dict, prompts: list[str], meta: list) -> list[float]:
        self.threads.add(threading.current_thread().name)
        self.events.append("begin")
        assert self.go_on.wait(10)
        assert [each for each in self.events if each in ("sleep", "wake")][-1:] != ["sleep"]
        self.events.append("end")
        return [1.0] * len(prompts)

    def move(self, asleep: bool) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise MemoryError("the device is full")
        self.events.append("sleep" if asleep else "wake")

    @property
    def scorer(self) -> Scorer:
        return Scorer(self.score, move=self.move)


def test_a_scorer_sleeps_and_wakes_when_asked_and_once_only(serve: Callable[..., str]) -> None:
    mover = Mover()
    with RewardClient(serve(mover.scorer, token="s3cret"), token="s3cret") as client:
        assert client.info()["sleeps"] is True
        for asleep in (True, True, False, False, True):
            client.sleep(asleep)
        assert mover.events == ["sleep", "wake", "sleep"]
        assert client.submit({"image": IMAGES}, ["a"] * 2).result(10) == [Score(1.0)] * 2  # a request wakes it
    assert mover.events == ["sleep", "wake", "sleep", "wake", "begin", "end"]
    assert len(mover.threads) == 1  # that of the scorer


def test_sleep_waits_for_the_call_that_runs_and_answers_when_it_is_done(serve: Callable[..., str]) -> None:
    mover = Mover()
    mover.go_on.clear()
    with RewardClient(serve(mover.scorer, token="s3cret"), token="s3cret") as client:
        scores = client.submit({"image": IMAGES}, ["a"] * 2)
        while not mover.events:
            pass
        asked = threading.Thread(target=client.sleep)
        asked.start()
        mover.go_on.set()
        asked.join(10)
        assert scores.result(10)[0].value == 1
        assert mover.events == ["begin", "end", "sleep"]


def test_all_servers_of_a_client_sleep(serve: Callable[..., str]) -> None:
    movers = Mover(), Mover()
    urls = [serve(mover.scorer, token="t") for mover in movers]
    with RewardClient(urls, token="t") as client:
        client.sleep()
    assert [mover.events for mover in movers] == [["sleep"], ["sleep"]]


@pytest.mark.parametrize("path", ["/sleep", "/wake"])
def test_only_clients_with_a_token_move_weights(serve: Callable[..., str], path: str) -> None:
    mover = Mover()
    secret, open_to_all = serve(mover.scorer, token="s3cret"), serve(mover.scorer)
    assert requests.post(secret + path, timeout=10).status_code == 401
    wrong = {"Authorization": "Bearer other"}
    assert requests.post(secret + path, headers=wrong, timeout=10).status_code == 401
    refused = requests.post(open_to_all + path, timeout=10)
    assert refused.status_code == 403
    assert "the server must have a token" in refused.json()["error"]["message"]
    assert requests.get(secret + path, headers={"Authorization": "Bearer s3cret"}, timeout=10).status_code == 405
    assert mover.events == []


def test_a_scorer_without_weights_says_so(serve: Callable[..., str]) -> None:
    with RewardClient(serve(halves, token="t"), token="t") as client:
        assert client.info()["sleeps"] is False
        with pytest.raises(
            RewardHTTPError, match="404 not_found the scorer has no weights that it could move"
        ) as caught:
            client.sleep()
    assert caught.value.fatal


def test_weights_that_cannot_be_moved_are_a_failure_and_no_score(serve: Callable[..., str]) -> None:
    mover = Mover()
    with RewardClient(serve(mover.scorer, token="t", show_errors=True), token="t") as client:
        client.sleep()
        mover.fails = True
        with pytest.raises(RewardHTTPError, match=r"500 scorer_failed .*MemoryError: the device is full"):
            client.sleep(False)
        with pytest.raises(RewardHTTPError, match=r"500 scorer_failed .*MemoryError: the device is full"):
            client.submit({"image": IMAGES}, ["a"] * 2).result(10)
        mover.fails = False
        assert client.submit({"image": IMAGES}, ["a"] * 2).result(10)[0].value == 1


def test_a_combination_moves_all_that_have_weights_and_frames_their_scorer_s() -> None:
    movers = Mover(), Mover()
    scorers = {"x": movers[0].scorer, "y": Scorer(halves), "z": over_frames(movers[1].scorer)}
    both = combine(parse("x + y + z"), {name: replace(scorer, media=("image",)) for name, scorer in scorers.items()})
    assert both.move
    both.move(True)
    both.move(False)
    assert [mover.events for mover in movers] == [["sleep", "wake"]] * 2
    assert combine(parse("x + y"), {"x": Scorer(halves), "y": Scorer(halves)}).move is None
    assert over_frames(Scorer(halves)).move is None


def test_networks_come_back_to_their_devices_with_all_bits() -> None:
    first, second = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
    before = [tensor.clone() for net in (first, second) for tensor in net.state_dict().values()]
    move = neural.make_mover(first, second)
    move(True)
    move(False)
    after = [tensor for net in (first, second) for tensor in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
