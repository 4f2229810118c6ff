"""Processes forked from one that has imported all libraries but run nothing."""

import os
import sys
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext


@cache
def forks() -> ForkServerContext:
    """Return the standard library's fork server: its first process imports `preloaded`, all others are its forks."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, before]))
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
