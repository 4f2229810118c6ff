"""Servers that last as long as a block, and the command that runs another beside a scorer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omni_reward import RewardClient, RewardConnectError, RewardHTTPError, Score
from omni_reward.testing import serving, serving_here
from reward.reward_helpers import halves

IMAGES = {"image": np.zeros((2, 4, 4, 3), np.uint8)}


def test_a_server_lasts_as_long_as_the_block() -> None:
    with serving("jpeg", "--option", "mode=incompressibility", token="s3cret") as server:
        assert server.token_file
        assert server.token_file.read_text() == "s3cret"
        assert server.flags == ["--scorer-url", server.url, "--scorer-token-file", str(server.token_file)]
        with RewardClient(server.url, token="s3cret") as client:
            assert client.check()[0][0].value > 0
        with RewardClient(server.url) as client, pytest.raises(RewardHTTPError, match="401"):
            client.check()
    assert server.process.returncode == 0
    assert not server.token_file.exists()
    with RewardClient(server.url) as client, pytest.raises(RewardConnectError):
        client.info()


def test_a_server_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the scorer 'spam' ended with exit code 2 at its start"), serving("spam"):
        pass
    assert "scorer must be one of" in capfd.readouterr().err


def test_a_server_in_this_process_scores() -> None:
    with serving_here(halves, name="h", token="s3cret") as url, RewardClient(url, token="s3cret") as client:
        assert client.info()["scorer"] == "h"
        assert client.submit(IMAGES, ["a", "b"]).result(10) == [Score(0.5)] * 2


def beside(code: str, *words: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "omni_reward.testing", "jpeg", *flags, "--", sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


ASK = """
import os, sys
from pathlib import Path
from omni_reward import RewardClient
own, *flags = sys.argv[1:]
given = dict(zip(flags[::2], flags[1::2]))
token = Path(given["--scorer-token-file"]).read_text()
with RewardClient(given["--scorer-url"], token=token) as client:
    print(own, client.info()["scorer"], client.info()["batch_size"], flush=True)
print(os.environ["OMNI_RL_COMMAND"].split(" -c ")[0], flush=True)
sys.exit(3)
"""
WAIT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
print("ready", sys.argv[2], flush=True)
time.sleep(60)
"""


def test_a_command_beside_a_scorer_with_flags_gets_those_of_the_scorer_and_gives_its_exit_code() -> None:
    process = beside(ASK, "mine", flags=("--batch-size", "7"))
    out, err = process.communicate(timeout=60)
    told, typed = out.splitlines()[-2:]
    assert (process.returncode, told, err) == (3, "mine jpeg 7", "")
    words = [sys.executable, "-m", "omni_reward.testing", "jpeg", "--batch-size", "7", "--", sys.executable]
    assert typed.split() == words  # what continues a run has its scorer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 6)])
def test_a_stopped_command_ends_as_it_likes_with_its_scorer_still_there(number: int, code: int) -> None:
    process = beside(WAIT)
    assert process.stdout
    process.stdout.readline()  # the scorer's
    url = process.stdout.readline().removeprefix("ready ").strip()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(30) == code
    process.communicate()
    with RewardClient(url) as client, pytest.raises(RewardConnectError):
        client.info()


@pytest.mark.parametrize("words", [[], ["jpeg"], ["jpeg", "--"], ["jpeg", "true", "--"]])
def test_a_command_that_is_not_one_is_told_the_usage(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "omni_reward.testing", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: python -m omni_reward.testing SCORER [FLAG ...] -- COMMAND\n")
