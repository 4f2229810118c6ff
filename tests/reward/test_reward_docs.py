"""The code that the documents show, run as it stands."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from omni_reward import RewardClient, Score, Scorer
from omni_reward.serving import serving
from omni_reward.wire import decode_reply
from reward.reward_helpers import draw_sign

ROOT = Path(__file__).parents[2]
PROTOCOL_PAGE = (ROOT / "docs/reward-protocol.md").read_text()
README = (ROOT / "packages/omni-reward/README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_the_plain_client_of_the_protocol_page_works(serve: Callable[..., str]) -> None:
    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        means = media["image"].mean(axis=(1, 2, 3)).tolist()
        return [mean if prompt else float("nan") for mean, prompt in zip(means, prompts, strict=True)]

    [code] = blocks(PROTOCOL_PAGE, "python")
    names: dict = {}
    exec(code, names)
    images = [bytes([value]) * (4 * 5 * 3) for value in (7, 9, 200)]
    url = serve(score, token="s3cret")
    assert names["score"](url, images, 4, 5, ["a", "", "\u00fc"], "s3cret") == [7.0, None, 200.0]


def test_the_reply_of_the_protocol_page_is_one() -> None:
    reply = blocks(PROTOCOL_PAGE, "json")[0]
    right, none = decode_reply(reply.encode(), request_id="step-7-rank-0", ids=["0", "1"])
    assert right.value == 0.75
    assert none.abstained


@pytest.fixture(scope="module")
def readme_server() -> Iterator[str]:
    """URL of the scorer that the README's command starts, on a free port."""
    [command] = blocks(README, "bash")
    assert command == "python -m omni_reward.server --scorer ocr --option reading=line --port 8100\n"
    with serving("ocr", "--option", "reading=line", "--port", "0") as server:
        yield server.url


def test_the_readme_asks_the_server_that_it_starts(readme_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = blocks(README, "python")[0]
    assert "http://127.0.0.1:8100" in ask
    exec(ask.replace("http://127.0.0.1:8100", readme_server), {})
    assert capsys.readouterr().out == "1.0\n"


def test_a_real_scorer_process_scores_signs(readme_server: str) -> None:
    with RewardClient(readme_server) as client:
        assert client.info()["scorer"] == "ocr"
        images = np.stack([draw_sign("K7QX")] * 3)
        prompts = ['a sign that says "K7QX"', 'a sign that says "K7AB"', "a sign"]
        right, wrong, none = client.submit({"image": images}, prompts).result(60)
    assert right == Score(1.0, details={"read": "K7QX", "target": "K7QX"})
    assert wrong == Score(0.5, details={"read": "K7QX", "target": "K7AB"})
    assert none.value is None


def test_the_readme_s_client_of_two_servers_checks_both(serve: Callable[..., str]) -> None:
    seen = []

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        seen.append(1)
        return [1.0]

    code = blocks(README, "python")[1]
    for port in (8100, 8101):
        assert f"http://127.0.0.1:{port}" in code
        code = code.replace(f"http://127.0.0.1:{port}", serve(score))
    exec(code, {})
    assert len(seen) == 2


def test_the_readme_s_video_scorer_takes_rates_and_abstains(serve: Callable[..., str]) -> None:
    names: dict = {}
    exec(blocks(README, "python")[2], names)
    videos = np.zeros((2, 3, 4, 4, 3), np.uint8)
    videos[1, 1] = 10
    scorer = Scorer(names["stillness"], media=("video",), batch_size=8)
    with RewardClient(serve(scorer)) as client:
        still, moving = client.submit({"video": videos}, ["a", "b"], [{"fps": 8}, {"fps": 24}]).result(10)
    assert still == Score(None, abstained="nothing moves")
    assert moving == Score(-240.0, details={"move": 10.0})
