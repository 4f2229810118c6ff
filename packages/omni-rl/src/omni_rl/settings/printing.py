"""Long texts on standard output, and the one line of a mistake. Imports nothing heavy."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from omni_train.terminal import one_line


@contextmanager
def until_closed() -> Iterator[None]:
    """Discard output of the `with` block after the reader closes the pipe, as `| head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_mistake(mistake: object, program: str = "") -> None:
    """Print one line about a mistake. program: its name; "" is that of this one."""
    print(f"{program or Path(sys.argv[0]).name}: error: {one_line(mistake)}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Parser whose error is one line, without the usage, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message on stderr."""
        print_mistake(message, self.prog)
        sys.exit(2)
