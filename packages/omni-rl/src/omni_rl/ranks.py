"""torchrun for one machine, which Ctrl-C ends without a traceback, after the ranks have saved.

    python -m omni_rl.ranks --nproc-per-node 2 train.py FLAGS

Its flags are those of torchrun. The ranks have half an hour for the step that is under way and its checkpoint.
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main


def launch(words: Sequence[str]) -> None:
    """Start the ranks and wait for them; a signal ends the program with exit code 128 and its number."""
    for module in ("agent.server.api", "multiprocessing.api"):  # which say that they pass a signal on
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.ERROR)
    try:
        main(["--standalone", "--shutdown-timeout", "1800", *words])
    except SignalException as stop:
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    launch(sys.argv[1:])
