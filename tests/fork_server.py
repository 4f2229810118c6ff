"""Processes that are forked from one in which all libraries are imported, and which has run nothing."""

import os
import sys
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext


@cache
def forks() -> ForkServerContext:
    """The standard library's fork server: its first process imports `preloaded`, and every other is a fork of it."""
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
