"""Tests run on the CPU whatever the machine has, unless CUDA_VISIBLE_DEVICES or its like says otherwise."""

import os
from importlib.util import find_spec

for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
    os.environ.setdefault(name, "")


def pytest_terminal_summary(terminalreporter):
    """Says what was left out and how to run it, so that nobody takes it for passed."""
    if find_spec("vllm_omni") is None:
        terminalreporter.write_line(
            "left out: tests/vllm_engine, as vLLM-Omni is not installed; run make test-vllm-omni"
        )
