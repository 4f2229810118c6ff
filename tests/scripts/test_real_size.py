"""The script that trains models of real size, on models that are cut down."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import real_size
from helpers import REPO, in_turn, sampled


def run(name, out):
    """What the script prints for a model that is cut down."""
    command = [sys.executable, "scripts/real_size.py", name, "--cut", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)


@in_turn(0, 8)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sampled(real_size.ROWS, 1))
def test_a_model_is_built_planned_trained_killed_continued_and_opened(name, tmp_path):
    ended = run(name, tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert f"| `{name}` |" in ended.stdout
    cells = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", ended.stdout, re.MULTILINE))
    assert cells["distance of the first ratio from 1"] == "0"
    assert float(cells["checkpoint, MB"]) > 0
    assert float(cells["run, until it was killed"]) > 0.2
    assert float(cells["mean difference of the two samples, in standard deviations"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_memory_of_children_counts(tmp_path):
    """A process whose child holds 64 MB more than itself."""
    hold = "data = bytearray(b'x' * (64 << 20)); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE) as process:
        most = 0
        while most < 64 << 20:
            most = max(most, real_size.resident(process.pid))
        process.communicate(b"\n")
    assert most < 256 << 20


def test_what_fails_is_told_with_its_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with exit code 3:\nno such thing"):
        real_size.watch(["-c", "print('no such thing'); raise SystemExit(3)"], tmp_path)
    assert Path(tmp_path / "log.txt").is_file()
