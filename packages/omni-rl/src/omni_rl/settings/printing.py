"""Long texts on standard output, and one-line errors. Imports nothing heavy."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from omni_train.terminal import one_line


@contextmanager
def ignore_closed_pipe() -> Iterator[None]:
    """Discard the output of the block after the reader closes the pipe, as `| head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: object, program: str = "") -> None:
    """Print an error as one line on stderr. program: its name; "" for this program."""
    print(f"{program or Path(sys.argv[0]).name}: error: {one_line(error)}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Parser that reports an error as one line, without the usage, and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message on stderr."""
        print_error(message, self.prog)
        sys.exit(2)
