"""URLs of reward servers that each machine has of its own."""

import socket

import pytest
import torch
from omni_reward.serving import serving_in_thread
from omni_rl.flow.scorers import connect
from omni_rl.settings.eval_sets import check_urls, resolve_host
from omni_rl.settings.groups import ScoredScorer, Scorer
from omni_train.dist import Dist
from omni_train.prompts.files import PromptRecord

ASKS = Scorer()


def rank(number, per_machine, num_ranks, monkeypatch):
    """A rank of a run on machines of so many."""
    monkeypatch.setenv("GROUP_RANK", str(number // per_machine))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_machine))
    return Dist(number, num_ranks, number % per_machine, torch.device("cpu"), None)


@pytest.fixture
def servers():
    """Texts of the canaries, two of a kind, that two servers score, and their URLs."""
    texts = [], []

    def server(seen):
        def score(media, prompts, meta):
            seen.extend(prompts)
            return [0.5] * len(prompts)

        return serving_in_thread(score, name="half")

    with server(texts[0]) as first, server(texts[1]) as second:
        yield texts, (first, second)


@pytest.mark.parametrize("per_machine", [1, 2])
def test_each_server_scores_canaries_once_whatever_the_number_of_ranks(servers, monkeypatch, per_machine):
    texts, urls = servers
    ports = [url.rsplit(":", 1)[1] for url in urls]
    record = PromptRecord(0, "a sign")
    for number in range(2 * per_machine):
        dist = rank(number, per_machine, 2 * per_machine, monkeypatch)
        monkeypatch.setenv("GROUP_RANK", ports[number // per_machine])
        client, version = connect("http://127.0.0.1:{node}", ASKS, dist, record, ["image"])
        assert (client.urls, version) == ((urls[number // per_machine],), "half")
        client.close()
    assert texts == (["a sign"] * 2, ["a sign"] * 2)


def test_a_server_of_all_ranks_scores_canaries_once(servers, monkeypatch):
    texts, urls = servers
    for number in range(3):
        connect(",".join(urls), ASKS, rank(number, 3, 3, monkeypatch), PromptRecord(0, "a"), ["image"])[0].close()
    assert texts == (["a"] * 2, ["a"] * 2)


@pytest.mark.parametrize(("name", "flag"), [("", "--scorer.url"), ("python:mine.py:one", "--scorer")])
def test_a_number_for_all_samples_is_told_at_the_start_by_the_flag_that_was_given(monkeypatch, name, flag):
    """Of two samples, so that a list of one number does not pass."""
    scorer_args = ScoredScorer(name=name)
    said = rf"^{flag} must score the first prompt: .* scorer_failed"
    with serving_in_thread(lambda media, prompts, meta: [0.5]) as url, pytest.raises(ValueError, match=said):
        connect(url, scorer_args, rank(0, 1, 1, monkeypatch), PromptRecord(0, "a"), ["image"])


def test_places_in_urls_are_those_of_the_machine(monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "3")
    urls = "http://{host}:8100,https://scorer-{node}:8100/a"
    check_urls(urls, "--scorer.url")
    assert resolve_host(urls) == f"http://{socket.gethostname()}:8100,https://scorer-3:8100/a"
    monkeypatch.delenv("GROUP_RANK")
    assert resolve_host("http://scorer-{node}") == "http://scorer-0"
