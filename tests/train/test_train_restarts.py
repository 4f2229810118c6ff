"""docs/machines.md: the command of each machine, two of which are this one, and what follows when a rank is killed."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest
from helpers import REPO

SCRIPT = str(Path(__file__).with_name("restarted_training.py"))


def torchrun(folder, port):
    """The page's command up to the trainer, with one rank a machine."""
    page = (REPO / "docs/machines.md").read_text()
    flags = re.search(r"^torchrun (.*?) *\\?\n *apps/train", page, re.MULTILINE | re.DOTALL)[1].replace("\\\n", " ")
    here = flags.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("node0:29500", f"127.0.0.1:{port}")
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(here), "--local-addr", "127.0.0.1", SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


@pytest.mark.timeout(200)
def test_ranks_of_two_machines_start_anew_after_one_is_killed_and_train_on_from_their_checkpoint(tmp_path):
    """The store that torchrun keeps has the addresses of ranks that have ended; nobody may call them."""
    with closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    machines = [torchrun(tmp_path, port) for _ in range(2)]
    texts = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(texts)
    assert (tmp_path / "killed").exists()
    starts = [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]
    assert starts == ["start\n1\n2\nstart\n3\n4\n"] * 2
