"""What the first process of the fork server imports."""

import gc
import os

import row_runs  # noqa: F401
import torch
from emulated import count_waits  # noqa: F401
from records import record

# torch drops its pool of threads in a fork; the first to ask makes another, and two at once find none.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
record.import_all()
gc.freeze()
