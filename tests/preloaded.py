"""What the first process of the fork server imports."""

import gc

import row_runs  # noqa: F401
from emulated import count_waits  # noqa: F401
from records import record

record.import_all()
gc.freeze()
