"""`omni-rl prompts NAME` fetches a set of prompts once, checks it, and overwrites nothing."""

import hashlib
import itertools
import re
import subprocess
import time
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import requests
from omni_reward.transport import MAX_REDIRECTS, redirect_target
from omni_rl.tools import prompts

TRAIN = "".join(f'a sign that says "{i}"\n' for i in range(1000)).encode()
TEST = b'a sign that says "K7"\n'
DEAD = "http://127.0.0.1:9"


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`; `server.asked` gets the path of each request."""

    server: "Server"

    def do_GET(self):
        self.server.asked.append(self.path)
        if target := self.server.redirects.get(self.path):
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
            self.pour(b"x" * 2**16)
            return
        if self.server.drips:
            self.pour(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2**16, piece=1)
            return
        data = self.server.files.get(self.path, b"")
        self.send_response(200 if data else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.server.breaks_at])

    def pour(self, data, piece=2**16):
        """Send data without end, until the client hangs up or the test ends; a redirect may have a body."""
        with suppress(OSError):
            for start in itertools.takewhile(lambda _: self.server.is_open, itertools.count(0, piece)):
                self.wfile.write(data[start % len(data) :][:piece])
                self.server.poured += piece
                time.sleep(0.005 if piece == 1 else 0)

    def log_message(self, *words):
        """Log nothing."""


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.breaks_at = f"http://127.0.0.1:{self.server_port}", None
        self.files = {"/o/r/raw/c1/data/train.txt": TRAIN, "/o/r/raw/c1/data/test.txt": TEST}
        self.asked: list[str] = []
        self.redirects: dict[str, str] = {}
        self.drips, self.poured, self.is_open = False, 0, True


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with the files of one set, `signs`, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    write_table(monkeypatch, server.url)
    yield server
    server.is_open = False
    server.shutdown()
    server.server_close()


def write_table(monkeypatch, url):
    lines = ["[signs]", "about = 'signs'", "license = 'MIT'"]
    for name, data in (("train.txt", TRAIN), ("test.txt", TEST)):
        file = f"url = '{url}/o/r/raw/c1/data/{name}', hash = '{hashlib.sha256(data).hexdigest()}', prompts = 1"
        lines.append(f"files.'{name}' = {{ {file} }}")
    Path("table.toml").write_text("\n".join(lines))
    monkeypatch.setattr(prompts, "TABLE", Path("table.toml"))


def fetched():
    return {path.name: path.read_bytes() for path in Path("data/signs").iterdir()}


def refusal(capsys, *words):
    """The line that the command ends with."""
    with pytest.raises(SystemExit, match=r"^2$"):
        prompts.main(["signs", *words])
    return capsys.readouterr().err


def test_a_set_is_fetched_and_counted_and_not_fetched_again(server, capsys):
    for _ in range(2):
        prompts.main(["signs"])
        out = capsys.readouterr().out
        assert re.fullmatch(
            r"data/signs/train.txt  1,000 prompts of .*\ndata/signs/test.txt  1 prompts of .*\nl.*\n", out
        )
        assert fetched() == {"train.txt": TRAIN, "test.txt": TEST}
        assert len(server.asked) == 2
    prompts.main(["signs", "--to", "mine"])
    assert Path("mine/test.txt").read_bytes() == TEST


def test_a_download_that_broke_leaves_no_file_and_is_tried_again(server, capsys):
    server.breaks_at = 7000
    assert "The same command tries again" in refusal(capsys)
    assert fetched() == {}
    server.breaks_at = None
    prompts.main(["signs"])
    assert fetched() == {"train.txt": TRAIN, "test.txt": TEST}


def test_a_file_of_the_users_stays_and_nothing_is_fetched_over_it(server, capsys):
    Path("data/signs").mkdir(parents=True)
    Path("data/signs/test.txt").write_bytes(b"mine")
    want, own = hashlib.sha256(TEST).hexdigest(), hashlib.sha256(b"mine").hexdigest()
    assert f"data/signs/test.txt must have the hash {want}, got {own}: move it away" in refusal(capsys)
    assert fetched() == {"test.txt": b"mine"}
    assert server.asked == []


def test_a_download_of_another_content_is_refused(server, capsys):
    Path("data/signs").mkdir(parents=True)
    Path("data/signs/notes.txt").write_bytes(b"mine")
    server.files["/o/r/raw/c1/data/train.txt"] = TRAIN[:-2]
    fault = r"http\S+train\.txt must have the hash \w{64}, got \w{64}: the same command tries again"
    assert re.search(fault, refusal(capsys))
    assert fetched().keys() == {"notes.txt"}
    server.files["/o/r/raw/c1/data/train.txt"] = TRAIN
    prompts.main(["signs"])
    assert fetched() == {"notes.txt": b"mine", "train.txt": TRAIN, "test.txt": TEST}


def test_a_redirect_is_followed_on_the_same_server_alone(server, capsys, monkeypatch):
    path, other = "/o/r/raw/c1/data/train.txt", Server()
    server.files["/moved"] = TRAIN
    server.redirects[path] = other.url + path
    assert f"a redirect must be to https, got {other.url}" in refusal(capsys)
    other.server_close()
    server.redirects[path] = "/moved"
    prompts.main(["signs"])
    assert fetched()["train.txt"] == TRAIN


@pytest.mark.parametrize(
    ("source", "target", "is_refused"),
    [
        ("https://a.example/x", "https://b.example/x", False),
        ("https://a.example/x", "/y", False),
        ("https://a.example/x", "http://a.example/x", True),
        ("http://a.example/x", "http://b.example/x", True),
    ],
)
def test_a_redirect_goes_to_another_server_with_tls_alone(source, target, is_refused):
    response = requests.Response()
    response.url, response.headers["Location"] = source, target
    with pytest.raises(requests.RequestException, match="must be to https, got http:") if is_refused else nullcontext():
        redirect_target(response)


def test_what_cannot_be_fetched_is_named_with_its_address(server, capsys, monkeypatch):
    del server.files["/o/r/raw/c1/data/test.txt"]
    assert re.search(r"data/signs/test\.txt must be .*, got http.*/c1/data/test\.txt: 404 .*Not Found", refusal(capsys))
    assert fetched() == {"train.txt": TRAIN}
    write_table(monkeypatch, DEAD)
    assert re.search(rf"must be .*, got {DEAD}/.* refused.*without a network, bring the file", refusal(capsys))


@pytest.mark.parametrize(("name", "value", "rule"), [("MAX_BYTES", 5000, "5000 bytes"), ("LIMIT_S", -1.0, "-1.0 s")])
def test_a_download_ends_at_a_size_and_at_a_time(server, capsys, monkeypatch, name, value, rule):
    monkeypatch.setattr(prompts, name, value)
    assert f"more than {rule}" in refusal(capsys)
    assert fetched() == {}


def test_redirects_are_followed_without_their_bodies_and_only_so_many(server, capsys):
    path = "/o/r/raw/c1/data/train.txt"
    server.files["/moved"] = TRAIN
    server.redirects[path] = "/moved"
    prompts.main(["signs"])
    assert fetched()["train.txt"] == TRAIN
    assert server.poured < 2**24  # what fits into the buffers of the network
    Path("data/signs/train.txt").unlink()
    server.redirects[path] = path
    assert f"more than {MAX_REDIRECTS} redirects" in refusal(capsys)
    assert fetched().keys() == {"test.txt"}


def test_a_server_that_drips_takes_no_longer_than_the_limit(server, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "LIMIT_S", 0.3)
    server.drips = True
    start = time.monotonic()
    assert "more than 0.3 s" in refusal(capsys)
    assert time.monotonic() - start < 5  # not the 327 s of the head


def test_a_set_that_there_is_not_is_named_and_the_others_are_listed(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        prompts.main(["pickscores"])
    assert re.search(
        r"NAME must be one of ocr, .*, got 'pickscores'; did you mean 'pickscore'\?", capsys.readouterr().err
    )
    prompts.main([])
    assert re.search(
        r"^pickscore .*\n +train\.txt 25432, test\.txt 2048; license: MIT", capsys.readouterr().out, re.MULTILINE
    )


def test_a_hash_of_forty_digits_is_gits(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEST)
    printed = subprocess.run(["git", "hash-object", "--no-filters", path], capture_output=True, text=True, check=True)
    prompts.check_hash(path, TEST, printed.stdout.strip(), "")
    with pytest.raises(ValueError, match=f"must have the hash {'0' * 40}, got {printed.stdout.strip()}"):
        prompts.check_hash(path, TEST, "0" * 40, "")


def test_every_set_is_pinned_by_a_commit_and_hashes():
    for name, row in prompts.prompt_sets().items():
        assert re.fullmatch(r"\w+", name)
        assert row["license"]
        for key, file in row["files"].items():
            assert re.fullmatch(r"(train|test)\.(txt|jsonl)", key)
            assert re.match("https://github.com/[^/]+/[^/]+/raw/[0-9a-f]{40}/", file["url"])
            assert re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file["hash"])
