"""Tests run on the CPU whatever the machine has, unless CUDA_VISIBLE_DEVICES or its like says otherwise."""

import os

for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
    os.environ.setdefault(name, "")
