"""A platform of vLLM-Omni for machines without an accelerator; none of its releases brings one.

The entry point `vllm_omni.platform_plugins` of this distribution leads here. vLLM itself takes its CPU platform when
VLLM_TARGET_DEVICE is "cpu", which `omni_rollout.engines.vllm_omni.worker` sees to.
"""

import torch


def register() -> str | None:
    """The platform's name for vLLM-Omni to import, or None where there is an accelerator."""
    return None if torch.accelerator.is_available() else "omni_rollout.engines.vllm_omni.cpu.platform.CpuOmniPlatform"
