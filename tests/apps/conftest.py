"""Reward servers for the trainers: a cheap one in this process, and the real OCR scorer in its own process."""

import pytest
from apps import app_lives as lives
from omni_reward import Scorer
from omni_reward.serving import serving, serving_in_thread
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from trainer_runs import write_eval_prompts


def brightness(media, prompts, meta):
    """Return the mean level of each image or video in [0, 1], a reward that any model can increase."""
    return [float(sample.mean()) / 255 for kind in media for sample in media[kind]]


def loudness(media, prompts, meta):
    """Return the mean absolute amplitude of each sound."""
    return [float(abs(sound).mean()) for sound in media["audio"]]


@pytest.fixture(scope="session")
def bright_url():
    """URL of a server in this process that scores brightness."""
    with serving_in_thread(brightness, name="brightness") as url:
        yield url


@pytest.fixture(scope="session")
def bright_urls(bright_url):
    """URLs, by kind of media, of servers in this process that score brightness or loudness."""
    with (
        serving_in_thread(Scorer(brightness, media=("video",)), name="brightness") as video,
        serving_in_thread(Scorer(loudness, media=("audio",)), name="loudness") as audio,
    ):
        yield {"image": bright_url, "video": video, "audio": audio}


@pytest.fixture(scope="session")
def ocr_flags():
    """Trainer flags for a real OCR server with a token in its own process."""
    with serving("ocr", "--option", "reading=line", token="a-token-for-the-tests") as server:
        yield server.flags
    assert server.process.returncode == 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own working folder, with a few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path, monkeypatch, bright_url):
    """Working folder with valid settings, prompts and a scorer."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(change(lives.TINY, train_steps=1, scorer_url=bright_url)))
    return tmp_path
