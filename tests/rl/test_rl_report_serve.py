"""The server of a folder of runs: what it shows, and what it keeps to itself."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from omni_reward import connections
from omni_rl.report import Sample, serve, write_eval
from omni_rl.report.__main__ import main
from omni_rl.report.data import run_data
from omni_rl.report.serve import LiveServer, Runs
from prometheus_client.parser import text_string_to_metric_families
from rl.report_runs import RATES, clips, write_run


@contextmanager
def serving(root, **settings):
    """The server of a folder, answering."""
    server = LiveServer(root, **settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server.socket]})
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


def ask(server, path, method="GET", **headers):
    """Status, headers and body of an answer; the path goes out as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.socket.getsockname()[1], timeout=5)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of runs: two whole ones, one of them in a sweep, two damaged ones, and one whose name is no UTF-8."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a")
    write_run(root / "sweep" / "b c", num_steps=8, total=40)
    (root / "bad").mkdir()
    (root / "bad" / "metrics.jsonl").write_text('no json\n{"step": 1}\n')
    write_run(root / "odd").rename(root / "no\udcff")
    (root / "huge").mkdir()
    (root / "huge" / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 1' + "0" * 400 + "}\n")
    return root


@pytest.fixture(scope="module")
def server(root):
    with serving(root) as server:
        yield server


def test_the_list_tells_of_every_run_and_why_one_cannot_be_read(server):
    status, _, body = ask(server, "/runs.json")
    a, bad, huge, b = json.loads(body)
    assert status == 200
    assert (a["id"], a["trainer"], a["algo"], a["step"], a["total"]) == ("a", "train", "flowgrpo", 12, 12)
    assert a["held"] == {"x": [0, 4, 8, 12], "y": [0, 0.08, 0.16, 0.24]}
    assert (b["id"], b["step"], b["total"], b["seconds"]) == ("sweep/b c", 8, 40, 18)
    assert bad["error"].startswith("bad/metrics.jsonl, line 1")
    assert "64 bits" in huge["error"]


def test_prometheus_reads_the_last_line_of_every_run_that_can_be_read(server):
    status, headers, body = ask(server, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    steps = {sample.labels["run"]: sample.value for sample in families["omni_rl_step"].samples}
    assert steps == {"a": 12, "sweep/b c": 8}
    values = {(s.labels["run"], s.labels["metric"]): s.value for s in families["omni_rl_metric"].samples}
    assert values["a", "eval/reward"] == pytest.approx(0.24)
    assert ("bad", "step") not in values


def test_a_name_that_utf_8_lacks_costs_no_other_run_its_metrics(tmp_path):
    for name, line in {"a": '{"step": 3, "odd \\ud800": 1}', "b": '{"step": 4}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(line + "\n")
    with serving(tmp_path) as server:
        status, _, body = ask(server, "/metrics")
        assert ask(server, "/runs.json")[0] == 200
    assert status == 200
    families = {family.name: family.samples for family in text_string_to_metric_families(body.decode())}
    assert ("a", "odd ?") in {(each.labels["run"], each.labels["metric"]) for each in families["omni_rl_metric"]}
    assert {each.labels["run"]: each.value for each in families["omni_rl_step"]} == {"a": 3, "b": 4}


def test_runs_are_looked_for_down_to_three_levels_and_not_in_runs_or_behind_links(tmp_path, monkeypatch):
    for name in ("1/2/3", "1/2/3b/4", "a", "a/b", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert list(Runs(tmp_path).find()) == ["1/2/3", "a"]
    monkeypatch.setattr(serve, "MAX_RUNS", 1)
    assert list(Runs(tmp_path).find()) == ["1/2/3"]


def test_a_step_that_is_logged_shows_at_the_next_question(tmp_path):
    folder = write_run(tmp_path / "a", total=40)
    with serving(tmp_path) as server:
        assert json.loads(ask(server, "/runs.json")[2])[0]["step"] == 12
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "eval/reward": 0.5}\n')
        (run,) = json.loads(ask(server, "/runs.json")[2])
    assert (run["step"], run["held"]["y"][-1]) == (13, 0.5)


def test_a_run_whose_files_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    folder, count, read = write_run(tmp_path / "a", total=40), [0], serve.load_metrics

    def counted(path):
        count[0] += 1
        return read(path)

    monkeypatch.setattr(serve, "load_metrics", counted)
    runs = Runs(tmp_path)
    rows = [runs.outlines(), runs.outlines()]
    assert (rows[0], count) == (rows[1], [1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    assert "line 14: not valid JSON" in runs.outlines()[0]["error"]


def test_a_report_asks_for_pictures_that_are_the_files(server, root):
    _, headers, body = ask(server, "/report?run=a&run=sweep/b%20c")
    assert headers["Content-Security-Policy"].startswith("frame-ancestors 'none'")
    assert b"data:image" not in body
    assert b'"files/sweep/b%20c/eval/000008/0001.png"' in body
    status, headers, picture = ask(server, "/files/sweep/b%20c/eval/000008/0001.png")
    assert (status, headers["Content-Type"], headers["X-Content-Type-Options"]) == (200, "image/png", "nosniff")
    assert picture == (root / "sweep" / "b c" / "eval" / "000008" / "0001.png").read_bytes()
    status, headers, part = ask(server, "/files/a/eval/000008/0001.png", Range="bytes=8-15")
    assert (status, len(part), headers["Content-Range"].split("/")[0]) == (206, 8, "bytes 8-15")
    assert ask(server, "/files/a/eval/000008/0001.png", Range=f"bytes={'1' * 5000}-")[0] == 400
    assert ask(server, "/files/a/eval/000008/0001.png", Range="bytes=99999999-")[0] == 416


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/report?run=nothing", 404), ("/report", 404), ("/report?run=a&run=a", 400), ("/report?run=bad", 422),
        ("/report?run=huge", 422),
        ("/report?run=../a", 404), ("/files/a/config.toml", 404), ("/files/a/metrics.jsonl", 404),
        ("/files/a/report.html", 404), ("/files/a/eval/000008/rows.json", 404), ("/files/a/eval", 404),
        ("/files/../eval/secret.png", 404), ("/files/%2e%2e/eval/secret.png", 404), ("/files/a/eval/%00.png", 404),
        ("/files//etc/eval/x.png", 404), ("//etc/passwd", 404), ("/elsewhere", 404), ("/runs.json/", 404),
    ],
)  # fmt: skip
def test_what_is_no_picture_of_a_run_is_not_there(server, root, path, status):
    (root.parent / "eval").mkdir(exist_ok=True)
    (root.parent / "eval" / "secret.png").write_bytes(b"secret")
    got, headers, body = ask(server, path)
    assert (got, b"secret" in body) == (status, False)
    assert headers["Content-Security-Policy"] == "default-src 'none'; sandbox"


def test_links_out_of_the_folder_are_refused(tmp_path):
    outside, runs = write_run(tmp_path / "outside"), tmp_path / "runs"
    for name in ("metrics", "pictures", "settings", "rows", "home"):
        shutil.copytree(outside, runs / name)
    shutil.rmtree(runs / "home" / "eval")
    (runs / "home" / "eval").symlink_to(outside / "eval")
    (runs / "folder").symlink_to(outside)
    (runs / "metrics" / "metrics.jsonl").unlink()
    (runs / "metrics" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (runs / "settings" / "config.toml").unlink()
    (runs / "settings" / "config.toml").symlink_to(outside / "config.toml")
    (runs / "rows" / "eval" / "000008" / "rows.json").unlink()
    (runs / "rows" / "eval" / "000008" / "rows.json").symlink_to(outside / "eval" / "000008" / "rows.json")
    (runs / "pictures" / "eval" / "000008" / "0001.png").unlink()
    (runs / "pictures" / "eval" / "000008" / "0001.png").symlink_to(outside / "eval" / "000008" / "0001.png")
    with serving(runs) as server:
        errors = {run["id"]: run.get("error", "") for run in json.loads(ask(server, "/runs.json")[2])}
        refused = {name for name, text in errors.items() if "must be a regular file and no link" in text}
        assert (refused, set(errors)) == ({"metrics", "settings"}, {"metrics", "settings", "rows", "pictures", "home"})
        for name, message in (("rows", b"rows.json must be a regular file"), ("home", b"leads out of the folder")):
            status, _, body = ask(server, f"/report?run={name}")
            assert (status, message in body) == (422, True)
        assert ask(server, "/files/pictures/eval/000008/0001.png")[0] == 404
        assert ask(server, "/files/folder/eval/000008/0001.png")[0] == 404


def test_nothing_is_written_and_no_other_site_can_read(server, root):
    before = sorted(root.rglob("*"))
    assert [ask(server, "/", method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [405] * 4
    status, headers, body = ask(server, "/", "HEAD")
    assert (status, body, int(headers["Content-Length"]) > 1000) == (200, b"", True)
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "/runs.json", Host="evil.example:80")[0] == 403
    assert ask(server, "/runs.json", Host="localhost:9")[0] == 200
    assert sorted(root.rglob("*")) == before


def test_other_machines_need_the_token(root):
    with serving(root, host="0.0.0.0") as server:
        token = urlsplit(server.url).path
        assert len(token) > 30
        for path in ("/", "/runs.json", f"{token[:-2]}/", "/report?run=a"):
            assert ask(server, path)[0] == 404
        assert ask(server, f"{token}runs.json", Host="cluster.example")[0] == 200
        assert ask(server, f"{token}files/a/eval/000008/0001.png")[0] == 200


def test_strangers_cannot_use_up_the_connections(root, monkeypatch):
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    (root / "a" / "eval" / "large.webm").write_bytes(b"x" * 24 * 2**20)
    heads = [b"", b"GET /", b"GET /files/a/eval/large.webm HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    with serving(root) as server, ExitStack() as stack:
        waiting = []
        for head in [*heads, *heads]:  # silent, too slow, or takes no reply
            waiting.append(stack.enter_context(socket.create_connection(server.socket.getsockname(), timeout=5)))
            waiting[-1].sendall(head)
        assert [ask(server, path)[0] for path in ("/", "/runs.json", "/files/a/eval/000008/0001.png")] == [200] * 3
        silent = stack.enter_context(socket.create_connection(server.socket.getsockname(), timeout=5))
        assert silent.recv(1) == b""  # after HEAD_S, also where there is room


def test_a_copy_of_what_a_report_is_drawn_from_is_a_run_of_its_own(tmp_path):
    folder = write_run(tmp_path / "runs" / "a")
    write_eval(folder, 12, clips(1), [Sample("a sign", 0.5, rates=RATES)])
    copy = tmp_path / "elsewhere" / "a"
    copy.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.toml", "versions.jsonl"):
        shutil.copy2(folder / name, copy)
    for name in ("eval", "samples"):
        shutil.copytree(folder / name, copy / name)
    assert run_data(copy) == run_data(folder)
    with serving(copy) as server:  # the run itself, not a folder of runs
        (run,) = json.loads(ask(server, "/runs.json")[2])
        assert (run["id"], run["name"]) == (".", "a")
        names = re.findall(r'"files/\./(eval/000012/[^"]+)"', ask(server, "/report?run=.")[2].decode())
        assert len(names) == 3  # the video, its frames, its sound
        assert [ask(server, f"/files/{name}")[0] for name in names] == [200] * 3


def test_the_command_prints_an_address_that_answers_and_refuses_with_one_line(tmp_path):
    """Ctrl-C ends it in silence, also while a browser takes a part of a video and no more."""
    folder, pipe = write_run(tmp_path / "runs" / "a") / "eval", subprocess.PIPE
    (folder / "large.webm").write_bytes(b"x" * 24 * 2**20)
    command = [sys.executable, "-m", "omni_rl.report", "--serve", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        line = process.stdout.readline()
        connection = http.client.HTTPConnection(urlsplit(line.split()[3]).netloc, timeout=5)
        connection.request("GET", "/files/a/eval/large.webm")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        told = process.communicate()
    assert line.startswith("1 run at http://127.0.0.1:")
    assert (process.returncode, *told) == (0, "", "")
    with pytest.raises(SystemExit) as stop:
        main(["--serve", str(tmp_path / "nothing")])
    assert stop.value.code == 2
