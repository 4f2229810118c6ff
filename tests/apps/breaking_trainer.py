"""The FlowGRPO trainer, whose last rank hangs in its second update: `breaking_trainer.py FLAGS`, under torchrun.

Each rank writes its process id to a file `pid-RANK`.
"""

import os
import signal
import sys
import time
from pathlib import Path

from omni_rl.run.failures import launch
from omni_rl.settings.cli import parse_cli

import train_flowgrpo as app


def hang_in_second_update() -> None:
    """Hang from the second update on."""
    update = app.update

    def slow(run, step, *others):
        if step.number == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # otherwise torchrun waits 30 s before it sends SIGKILL
            time.sleep(1000)
        return update(run, step, *others)

    app.update = slow


if __name__ == "__main__":
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    while len(list(Path().glob("pid-*"))) < num_ranks:  # imports may take longer than the hang timeout
        time.sleep(0.01)
    if rank == num_ranks - 1:
        hang_in_second_update()
    launch(app.main, parse_cli(app.Args, app.check_args, sys.argv[1:], app="train_flowgrpo"))
