"""Signals that stop a run: the loop ends after a step that all ranks have finished, and saves."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from omni_train.dist import Dist, gather_json

COMMAND_ENV = "OMNI_RL_COMMAND"  # the command that the user typed, set by a program that starts the trainer
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT
INTERRUPTS_ENV = "OMNI_RL_HEARS_EVERY_CTRL_C"  # set by `omni_rl.run.ranks`; plain torchrun passes only the first Ctrl-C


@dataclass
class Stop:
    """A request to stop. received: True if this process got a signal."""

    received: bool = False

    def requested(self, dist: Dist) -> bool:
        """True if any rank received a signal: all stop after the same step. Every rank calls it."""
        return any(gather_json(dist, self.received))


@contextmanager
def catch_stop(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[Stop]:
    """Record these signals in the `with` block; they do not end the program.

    Repeated signals have no effect: torchrun, a terminal and a scheduler may each send one, and the save that follows
    the first must not be interrupted. Only a second SIGINT (Ctrl-C) raises KeyboardInterrupt immediately. Call it from
    the main thread.
    """
    stop = Stop()
    interrupts = 0

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        stop.received = True
        interrupts += number == signal.SIGINT
        if number == signal.SIGINT and interrupts > 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":  # no print(), which may be interrupted
            is_heard = "TORCHELASTIC_RUN_ID" not in os.environ or INTERRUPTS_ENV in os.environ
            os.write(2, b"\nstopping after this step" + b"; Ctrl-C once more ends at once" * is_heard + b"\n")

    before = {number: signal.signal(number, record) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command() -> str:
    """Return the shell command that started this program, including torchrun and its number of ranks if used.

    The environment variable COMMAND_ENV overrides it.
    """
    if COMMAND_ENV in os.environ:
        return os.environ[COMMAND_ENV]
    if "RANK" not in os.environ:
        return shlex.join(sys.orig_argv)
    world_size, local = os.environ["WORLD_SIZE"], os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    nodes = [] if world_size == local else ["--nnodes", str(int(world_size) // int(local))]
    return shlex.join(["torchrun", *nodes, "--nproc-per-node", local, *sys.argv])
