"""Long texts on standard output. Imports nothing heavy."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def until_closed() -> Iterator[None]:
    """In the `with` block, print until the reader closes the pipe, as `| head` does; the rest goes nowhere."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
