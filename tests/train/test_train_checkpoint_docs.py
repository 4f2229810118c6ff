"""The loop in the package's README runs, stops when told, and continues as if it had not been."""

import json
import os
import re
import signal
import time

import pytest
from helpers import REPO

PAGE = (REPO / "packages" / "omni-train" / "README.md").read_text("utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SLOWLY = CODE.replace(
    "        log.log(step, metrics)", "        __import__('time').sleep(0.05)\n        log.log(step, metrics)"
)


@pytest.fixture
def enter(tmp_path, monkeypatch):
    """Make a folder of that name and go there."""

    def enter(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name / "runs" / "example"

    return enter


def run(code):
    exec(compile(code, "README.md", "exec"), {})


def start(code):
    """The process id of a fork that runs the code and ends as a program would."""
    pid = os.fork()
    if pid == 0:
        run(code)
        os._exit(0)
    return pid


def wait_for_lines(path, count):
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss")) for line in lines]


def final_checksums(folder):
    index = json.loads((folder / "checkpoints" / "step-00000008" / "checkpoint.json").read_text())
    return index["files"]


def test_a_run_that_is_told_to_stop_ends_well_and_continues(enter, capfd):
    peace = enter("peace")
    run(CODE)
    assert [step for step, _ in losses(peace)] == list(range(9))
    folder = enter("stopped")
    pid = start(SLOWLY)
    wait_for_lines(folder / "metrics.jsonl", 5)  # steps 0 to 4; the checkpoint before is that of step 3
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
    (newest,) = re.findall(r"stopped after step (\d+); continue with: \S+", capfd.readouterr().out)
    assert 4 <= int(newest) < 8
    assert (folder / "checkpoints" / f"step-{newest:0>8}").is_dir()
    run(CODE)
    assert losses(folder) == losses(peace)
    assert final_checksums(folder) == final_checksums(peace)
    run(CODE)  # there is nothing left to do
    assert losses(folder) == losses(peace)
