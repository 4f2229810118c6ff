"""The FlowGRPO trainer in which the last rank hangs in its second update: `breaking_trainer.py FLAGS`, under torchrun.

Each rank leaves a file `pid-RANK` with its process id.
"""

import os
import sys
import time
from pathlib import Path

from omni_train.config import parse_cli

import runs
import train_flowgrpo as app


def hang_in_second_update() -> None:
    """Take no part any more, from the second update on."""
    update = app.update

    def slow(run, step, *others):
        if step == 1:
            time.sleep(1000)
        return update(run, step, *others)

    app.update = slow


if __name__ == "__main__":
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        hang_in_second_update()
    runs.launch(app.main, parse_cli(app.Args, app.PRESETS, app.check_args, sys.argv[1:]))
