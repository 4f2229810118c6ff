"""Imports of the fork server's first process."""

import gc
import os

import row_runs  # noqa: F401
import torch
from emulated import count_waits  # noqa: F401
from records import record

# torch drops its thread pool in a fork; the first user creates another, and two users at once find none.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
record.import_all()
gc.freeze()
