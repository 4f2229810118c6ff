"""Reward servers for the trainers: a cheap one in this process, and the real OCR scorer in its own."""

import pytest
from omni_reward import Scorer
from omni_reward.serving import serving, serving_here
from trainer_runs import write_eval_prompts


def brightness(media, prompts, meta):
    """The mean level of each image or video, in [0, 1]: a reward that any model can raise."""
    return [float(sample.mean()) / 255 for kind in media for sample in media[kind]]


def loudness(media, prompts, meta):
    """The mean swing of each sound."""
    return [float(abs(sound).mean()) for sound in media["audio"]]


@pytest.fixture(scope="session")
def bright_url():
    """URL of a server in this process that scores brightness."""
    with serving_here(brightness, name="brightness") as url:
        yield url


@pytest.fixture(scope="session")
def bright_urls(bright_url):
    """By the kind of media, URLs of servers in this process that score brightness, or loudness."""
    with (
        serving_here(Scorer(brightness, media=("video",)), name="brightness") as video,
        serving_here(Scorer(loudness, media=("audio",)), name="loudness") as audio,
    ):
        yield {"image": bright_url, "video": video, "audio": audio}


@pytest.fixture(scope="session")
def ocr_flags():
    """The trainer's flags for a real OCR server in a process of its own, with a token."""
    with serving("ocr", "--option", "reading=line", token="a-token-for-the-tests") as server:
        yield server.flags
    assert server.process.returncode == 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder of its own, with few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path
