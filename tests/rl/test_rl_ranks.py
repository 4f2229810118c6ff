"""Interrupts of several ranks."""

import os
import signal
import subprocess
import sys
import time

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
    words = ["-m", "omni_rl.ranks", "--nproc-per-node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
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
