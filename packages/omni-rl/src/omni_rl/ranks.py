"""torchrun for one machine, which Ctrl-C ends without a traceback, after the ranks have saved.

    python -m omni_rl.ranks --nproc-per-node 2 train.py FLAGS

Its flags are those of torchrun. The ranks have half an hour for the step that is under way and its checkpoint. A second
Ctrl-C is passed on to them, and a third one kills those that are left.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from omni_train.signals import HEARS_ALL
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.run import main


def launch(words: Sequence[str]) -> None:
    """Start the ranks and wait for them; a signal ends the program with exit code 128 and its number."""
    for module in ("agent.server.api", "multiprocessing.api"):  # which say that they pass a signal on
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.ERROR)
    start = PContext.start

    def start_and_listen(ranks: PContext) -> None:
        start(ranks)
        pass_interrupts_on(ranks)

    os.environ[HEARS_ALL] = "1"
    PContext.start = start_and_listen  # type: ignore[method-assign, assignment]
    try:
        main(["--standalone", "--shutdown-timeout", "1800", *words])
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    finally:
        PContext.start = start  # type: ignore[method-assign]


def pass_interrupts_on(ranks: PContext) -> None:
    """Send the ranks every Ctrl-C, which a terminal does not as each has a session of its own; the third one kills.

    torchrun sends the first one alone, waits at the second, and at the third ends while they go on.
    """
    count = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise SignalException("Ctrl-C", signal.SIGINT)
        for pid in ranks.pids().values():
            with suppress(OSError):  # it has ended
                os.killpg(pid, signal.SIGINT if count == 2 else signal.SIGKILL)

    signal.signal(signal.SIGINT, interrupt)


if __name__ == "__main__":
    launch(sys.argv[1:])
