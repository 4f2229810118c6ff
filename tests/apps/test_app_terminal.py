"""What someone sees who starts two ranks in a terminal and presses Ctrl-C."""

import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import CHECKPOINT, REPO, in_turn
from omni_reward.serving import serving_in_thread
from trainer_runs import PROMPTS

SMALL = "--prompts-per-step 2 --group-size 2 --batch-size 2 --num-minibatches 1 --num-inference-steps 5"


@pytest.fixture
def slow_url(here):
    """URL of a server that scores held-out prompts in 3 s, in which a bar is drawn again."""
    held_out = Path("eval.txt").read_text().splitlines()

    def score(media, prompts, meta):
        time.sleep(3.0 * (prompts[0] in held_out))
        return [float(image.mean()) / 255 for image in media["image"]]

    with serving_in_thread(score) as url:
        yield url


def in_terminal(command, *, until, keys):
    """All that the command shows in a terminal, where `keys` are pressed once it has shown `until`; its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the terminal of the session
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    while True:
        try:
            shown += os.read(ours, 2**16).decode(errors="replace")
        except OSError:  # the other end has been closed
            break
        if keys and re.search(until, shown):
            os.write(ours, keys)
            keys = b""
    os.close(ours)
    return shown, process.wait()


@in_turn(0, 2)
def test_ranks_show_a_bar_and_ctrl_c_saves_and_tells_how_to_go_on(here, slow_url):
    """The model's attention is of all weights in fsdp2, of which torch would warn."""
    trainer = [str(REPO / "apps" / "train_flowgrpo.py"), "--preset", "tiny-signs", "--sharding.mode", "fsdp2"]
    trainer += ["--model", str(CHECKPOINT), "--prompts", str(PROMPTS / "train.txt"), "--eval.prompts", "eval.txt"]
    trainer += ["--scorer.url", slow_url, *SMALL.split()]
    ranks = [sys.executable, "-m", "omni_rl.run.ranks", "--nproc-per-node", "2"]
    shown, code = in_terminal([*ranks, *trainer], until=r" 2/\d+ eta ", keys=b"\x03")
    assert code == 130
    assert not re.search("Traceback|Warning|Loading weights|death signal", shown), shown
    assert re.search(r" 2/320 eta 0:\d\d:\d\d eval/reward=\S+ reward/mean=\S+ \([+-]\S+\) perf/samples_per_s", shown)
    assert re.search(r" (evaluating|step \d: (rollout|update))(: scores)? \d of \d (samples|batches), ", shown), shown
    stopped = re.search(r"stopped after step (\d+); this continues:\s", shown)
    assert shlex.join(["torchrun", "--nproc-per-node", "2", *trainer]) in shown[stopped.end() :]  # in one line
    assert (here / "runs" / "tiny-signs" / "checkpoints" / f"step-{int(stopped[1]):08}").is_dir()
