"""The platform: vLLM's own for the CPU, and what vLLM-Omni asks of one beyond that."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Diffusion stages on the CPU; autoregressive stages need vLLM's own CPU build and are refused."""

    _omni_enum = OmniPlatformEnum.OOT
    device_type = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Refuse autoregressive stages, with a RuntimeError."""
        raise RuntimeError(
            "autoregressive stages need a build of vLLM for the CPU: this platform runs diffusion stages alone"
        )

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Refuse autoregressive stages, with a RuntimeError."""
        raise RuntimeError(
            "autoregressive stages need a build of vLLM for the CPU: this platform runs diffusion stages alone"
        )

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """vLLM-Omni's own; its linear layers take torch's product, whatever the CPU has, where vLLM has no kernels."""
        from vllm.model_executor.layers import utils
        from vllm_omni_cpu import cpu_kernels

        cpu_kernels.register()

        if not hasattr(torch.ops._C, "convert_weight_packed"):
            utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # which a CPU with AMX would take in bfloat16
        return super().get_diffusion_worker_cls()

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """Torch's attention, whatever was asked for."""
        return "vllm_omni_cpu.cpu_attention.CpuAttentionBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """False: vLLM-Omni compiles for accelerators only."""
        return False

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        """False."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """The CPU, on every rank."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """One."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """None: a CPU has no compute capability."""
        return None

    @classmethod
    def is_initialized(cls) -> bool:
        """True: there is nothing to set up."""
        return True

    @classmethod
    def current_device(cls) -> int:
        """The first and only one."""
        return 0

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Nothing: there is one."""

    @classmethod
    def is_available(cls) -> bool:
        """False: vLLM-Omni asks this of an accelerator."""
        return False

    @classmethod
    def synchronize(cls) -> None:
        """Nothing: the host's work is done when its calls return."""

    @classmethod
    def empty_cache(cls) -> None:
        """Nothing: the host's allocator keeps no cache that could be emptied."""

    @classmethod
    def current_stream(cls) -> None:
        """None: there are no streams."""

    @classmethod
    def stream(cls, stream: Any = None) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes of free memory of the host."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory of the host."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Free and total bytes."""
        return cls.get_free_memory(), cls.get_device_total_memory()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes in use on the host."""
        return float(cls.get_device_total_memory() - cls.get_free_memory())

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """Nothing: the host keeps no such statistics."""

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        """0: the host keeps no such statistics."""
        return 0

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        """0: the host keeps no such statistics."""
        return 0
