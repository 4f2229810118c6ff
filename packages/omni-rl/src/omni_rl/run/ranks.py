"""torchrun for one machine, without its messages, and with the exit code of the rank that failed first.

    python -m omni_rl.run.ranks --nproc-per-node 2 train.py FLAGS

Its flags are those of torchrun. On Ctrl-C the ranks have half an hour to finish the current step and its checkpoint. A
second Ctrl-C is passed on to them, and a third one kills the remaining ranks.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from omni_train.signals import INTERRUPTS_ENV
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def launch(argv: Sequence[str]) -> None:
    """Start the ranks and wait for them.

    The program ends with the exit code of the rank that failed first, or 128 plus the number of the signal that ended
    it or this process.
    """
    for module in ("elastic.agent.server.api", "elastic.multiprocessing.api", "run"):  # the ranks report errors
        logging.getLogger(f"torch.distributed.{module}").setLevel(logging.CRITICAL)
    start = PContext.start

    def start_and_listen(ranks: PContext) -> None:
        start(ranks)
        forward_interrupts(ranks)

    os.environ[INTERRUPTS_ENV] = "1"
    PContext.start = start_and_listen  # type: ignore[method-assign, assignment]
    try:
        run(parse_args(["--standalone", "--shutdown-timeout", "1800", *argv]))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode < 0:  # it could not report itself
            print(f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    finally:
        PContext.start = start  # type: ignore[method-assign]


def forward_interrupts(ranks: PContext) -> None:
    """Send every Ctrl-C to the ranks, which run in their own sessions and get none from the terminal.

    The third one kills them. torchrun itself passes on only the first one, waits at the second, and at the third exits
    while the ranks continue.
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
