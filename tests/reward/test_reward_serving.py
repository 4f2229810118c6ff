"""Servers that last as long as a block."""

import subprocess
import sys
import time

import numpy as np
import pytest
from omni_reward import RewardClient, RewardConnectError, RewardHTTPError, Score
from omni_reward.serving import serving, serving_in_thread
from reward.reward_helpers import halves

IMAGES = {"image": np.zeros((2, 4, 4, 3), np.uint8)}


def test_a_server_lasts_as_long_as_the_block() -> None:
    with serving("jpeg", "--option", "mode=incompressibility", token="s3cret") as server:
        assert server.token_file
        assert server.token_file.read_text() == "s3cret"
        assert server.flags == ["--scorer.url", server.url, "--scorer.token-file", str(server.token_file)]
        with RewardClient(server.url, token="s3cret") as client:
            assert client.check()[0][0].value > 0
        with RewardClient(server.url) as client, pytest.raises(RewardHTTPError, match="401"):
            client.check()
    assert server.process.returncode == 0
    assert not server.token_file.exists()
    with RewardClient(server.url) as client, pytest.raises(RewardConnectError):
        client.info()


def test_a_server_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="'spam' ended with exit code 2 at its start"), serving("spam"):
        pass
    assert "scorer must be one of" in capfd.readouterr().err


def test_a_server_in_this_process_scores() -> None:
    with serving_in_thread(halves, name="h", token="s3cret") as url, RewardClient(url, token="s3cret") as client:
        assert client.info()["scorer"] == "h"
        assert client.submit(IMAGES, ["a", "b"]).result(10) == [Score(0.5)] * 2


def is_up(url: str) -> bool:
    with RewardClient(url) as client:
        try:
            return bool(client.info())
        except RewardConnectError:
            return False


def test_a_server_ends_with_the_process_that_started_it() -> None:
    code = "from omni_reward.serving import serving\nimport os, signal\nwith serving('jpeg') as server:\n"
    code += "    print(server.url, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    url = done.stdout.splitlines()[-1]
    while is_up(url):
        time.sleep(0.05)


def test_a_server_that_ends_before_its_block_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with serving("jpeg") as server:
        server.process.kill()
        server.process.wait()
        while "the scorer 'jpeg' has ended with exit code -9" not in capfd.readouterr().err:
            time.sleep(0.05)
