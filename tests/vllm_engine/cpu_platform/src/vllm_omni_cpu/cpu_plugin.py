"""A vLLM-Omni platform for tests on machines without an accelerator; its releases have none.

`scripts/install_vllm_omni` installs this distribution, whose entry point `vllm_omni.platform_plugins` leads here. vLLM
itself uses its CPU platform when VLLM_TARGET_DEVICE is "cpu", which `omni_rollout.engines.vllm_omni.worker` sets.
"""

import torch


def register() -> str | None:
    """Return the platform's name for vLLM-Omni to import, or None if there is an accelerator."""
    return None if torch.accelerator.is_available() else "vllm_omni_cpu.cpu_platform.CpuOmniPlatform"
