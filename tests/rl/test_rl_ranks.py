"""Interrupts, exit codes and messages of several ranks."""

import os
import signal
import subprocess
import sys
import time

import pytest

RANK = """
import os, signal, sys, time
def note(number, frame):
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "a") as file:
        print(os.getpid(), file=file)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(0, None)
until = time.monotonic() + 60
while time.monotonic() < until:
    time.sleep(0.1)
"""


def test_ranks_hear_two_interrupts_and_the_third_leaves_none_behind(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    words = ["-m", "omni_rl.run.ranks", "--nproc-per-node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    process = subprocess.Popen([sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    files = [tmp_path / "0", tmp_path / "1"]
    for heard in (1, 2, 3):  # the start, then two interrupts
        while not all(file.exists() and len(file.read_text().splitlines()) == heard for file in files):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    for file in files:
        pid = int(file.read_text().split()[0])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"rank {file.name} goes on")


BREAKS = """
import os, pathlib, sys, time
lives = pathlib.Path(sys.argv[1]) / f"lives-{os.environ['RANK']}"
with lives.open("a") as file:
    file.write("x")
if os.environ["RANK"] == "1":
    print("mistake", file=sys.stderr, flush=True)
    END
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("os._exit(3)", 3, "mistake\n"),
        ("os.kill(os.getpid(), 9)", 137, "mistake\nrank 1 was killed by SIGKILL\n"),
    ],
)
def test_the_exit_code_and_all_that_is_said_are_those_of_the_rank_that_failed(tmp_path, end, code, told):
    (tmp_path / "rank.py").write_text(BREAKS.replace("END", end))
    words = ["-m", "omni_rl.run.ranks", "--nproc-per-node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", told)


def test_ranks_are_restarted_as_often_as_asked_for(tmp_path):
    (tmp_path / "rank.py").write_text(BREAKS.replace("END", "sys.exit(3)"))
    words = ["-m", "omni_rl.run.ranks", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    command = [sys.executable, *words, str(tmp_path / "rank.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == 3
    assert (tmp_path / "lives-1").read_text() == "xxx"
