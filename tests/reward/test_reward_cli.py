"""The server as a process: ready when it says so, careful with its port, and it finishes what it has accepted."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from omni_reward import RewardClient, RewardConnectError, RewardHTTPError, Score
from omni_reward.cli import announce_url, bind, public_name
from omni_reward.server import main
from reward.reward_helpers import HEAD

OWN = """
import time

def slow(media, prompts, meta):
    print("scoring", flush=True)
    time.sleep(0.5)
    return [1.0] * len(prompts)

def hangs(media, prompts, meta):
    print("scoring", flush=True)
    time.sleep(1000)

def fails(media, prompts, meta):
    return [m["target"] for m in meta]
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Function of a function's name in OWN and of flags that starts a server and returns it with its URL."""
    (tmp_path / "own.py").write_text(OWN)
    with ExitStack() as stack:

        def start(name: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
            url_file = tmp_path / "url"
            process = stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "omni_reward.server", "--scorer", f"python:{tmp_path}/own.py:{name}"),
                        *(*flags, "--port", "0", "--url-file", str(url_file)),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            deadline = time.monotonic() + 60
            while not url_file.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            return process, url_file.read_text()

        yield start


def test_sigterm_finishes_the_accepted_requests(
    launch: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    process, url = launch("slow", "--token-file", str(tmp_path / "token"))
    with RewardClient(url, token="s3cret", timeout_s=10) as client:
        client.info()
        accepted = client.submit({"image": np.zeros((1, 2, 2, 3), np.uint8)}, ["a"])
        assert [process.stdout.readline() for _ in range(2)] == [f"scorer ready at {url}\n", "scoring\n"]
        late = [client.submit({"image": np.zeros((1, 2, 2, 3), np.uint8)}, ["a"]) for _ in range(4)]
        process.terminate()
        assert accepted.result(20) == [Score(1.0)]
        assert all(isinstance(future.exception(20), RewardConnectError | None) for future in late)
        assert process.wait(20) == 0  # while the client still holds its connections
    assert process.communicate()[1] == ""


@pytest.mark.parametrize("framing", ["Content-Length: 999", "Transfer-Encoding: chunked"])
def test_a_body_that_never_comes_does_not_keep_the_server(
    launch: Callable[..., tuple[subprocess.Popen[str], str]], framing: str
) -> None:
    process, url = launch("slow")
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(address) as conn, socket.create_connection(address) as other:
        conn.sendall(HEAD + f"{framing}\r\n\r\n".encode())
        other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert other.recv(100)  # so the other one has been read too
        process.terminate()
        assert process.wait(30) == 0
    assert process.communicate()[1] == ""


def test_a_scorer_that_hangs_does_not_keep_the_server(launch: Callable[..., tuple[subprocess.Popen[str], str]]) -> None:
    process, url = launch("hangs", "--shutdown-timeout-s", "1")
    with RewardClient(url, timeout_s=5) as client:
        future = client.submit({"image": np.zeros((1, 2, 2, 3), np.uint8)}, ["a"])
        assert [process.stdout.readline() for _ in range(2)] == [f"scorer ready at {url}\n", "scoring\n"]
        process.terminate()
        assert process.wait(20) == 1
        assert future.exception(40)
    assert "in hangs" in process.communicate()[1]  # where it hangs


def test_a_server_names_no_folder_but_tells_its_own_machine_what_was_raised_and_where(
    launch: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    _, url = launch("fails")
    with RewardClient(url) as client:
        assert client.info()["scorer"] == "python:own.py:fails"
        with pytest.raises(
            RewardHTTPError, match=r"500 scorer_failed the scorer raised KeyError: 'target' \(.*own\.py, line \d+\)"
        ):
            client.check()
        assert client.check(prompts=["a"], meta=[{"target": 3}])[0][0].value == 3.0
    assert public_name(f"0.7*ocr + python:{tmp_path}/a.py:f if clip >= 0 else 1").startswith("0.7*ocr + python:a.py:f")


def test_one_more_than_so_many_connections_replaces_the_one_that_has_been_idle_for_the_longest(
    launch: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    _, url = launch("slow", "--max-connections", "3")
    with ExitStack() as stack:
        conns = [stack.enter_context(closing(HTTPConnection(url.removeprefix("http://"), timeout=5))) for _ in range(4)]
        for conn in [*conns, conns[1]]:
            conn.request("GET", "/healthz")
            conn.auto_open = 0  # a second request needs the connection of the first
            assert conn.getresponse().read() == b'{"status": "ok"}'
        assert conns[0].sock.recv(1) == b""


def test_without_its_libraries_the_server_says_which_and_has_help() -> None:
    code = (
        "import runpy, sys\nsys.modules['uvicorn'] = None\nrunpy.run_module('omni_reward.server', run_name='__main__')"
    )

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)

    assert "--token-file" in run("--help").stdout
    done = run("--scorer", "ocr")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == "omni_reward.server: error: needs uvicorn: install omni-reward[server]\n"
    assert "--scorer" in run().stderr


def test_the_command_line_sets_the_limits(launch: Callable[..., tuple[subprocess.Popen[str], str]]) -> None:
    flags = ["--batch-size", "3", "--max-body-mb", "5", "--max-batch", "7", "--max-waiting", "9"]
    _, url = launch("slow", *flags)
    with RewardClient(url) as client:
        info = client.info()
    limits = info["limits"]
    assert info["batch_size"] == 3
    assert [limits[name] for name in ("max_body_bytes", "max_batch", "max_waiting")] == [5 * 2**20, 7, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --scorer"),
        (["--scorer", "spam"], "scorer must be one of ['aesthetic'"),
        (["--scorer", "ocr", "--option", "spam"], "--option must be NAME=VALUE, got 'spam'"),
        (["--scorer", "ocr", "--option", "a b=c"], "--option must be NAME=VALUE, got 'a b=c'"),
        (["--scorer", "ocr", "--option", "spam=1"], "options of ocr must fit it: got an unexpected keyword argument"),
        (["--scorer", "ocr", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--scorer", "ocr", "--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["--scorer", "ocr", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
        (["--scorer", "ocr", "--host", "::"], "--host :: can be reached from other machines"),
        (["--scorer", "ocr", "--host", "256.0.0.1"], "--host must be an address of this machine, got '256.0.0.1'"),
        (
            ["--scorer", "ocr", "--token-file", "{tmp}/none"],
            "--token-file: [Errno 2] No such file or directory: '{tmp}/none'",
        ),
        (["--scorer", "ocr", "--token-file", "{tmp}/empty"], "--token-file: token must be printable ASCII"),
        (["--scorer", "ocr", "--url-file", "{tmp}/no/url"], "--url-file must be in a folder that exists"),
        (["--scorer", "ocr", "--threads", "0"], "threads must be >= 1, got 0"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SystemExit) as caught:
        main([argument.replace("{tmp}", str(tmp_path)) for argument in arguments])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message.replace("{tmp}", str(tmp_path)) in err
    assert err.startswith("omni_reward.server: error: ")
    assert err.count("\n") == 1


def test_a_taken_port_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["--scorer", "ocr", "--port", str(taken.getsockname()[1])])
    assert "Address already in use" in capsys.readouterr().err


def test_an_address_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"url.{os.getpid()}.partial").symlink_to(tmp_path / "mine")
    with bind("127.0.0.1", 0, has_token=False) as sock:
        announce_url(tmp_path / "url", sock)
        assert (tmp_path / "url").read_text() == f"http://127.0.0.1:{sock.getsockname()[1]}"
    assert (tmp_path / "mine").read_text() == "mine"
