"""The platform: vLLM's own for the CPU, with what vLLM-Omni requires beyond it."""

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
        """Raise RuntimeError: autoregressive stages are not supported."""
        raise RuntimeError(
            "autoregressive stages need a build of vLLM for the CPU: this platform runs diffusion stages alone"
        )

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Raise RuntimeError: autoregressive stages are not supported."""
        raise RuntimeError(
            "autoregressive stages need a build of vLLM for the CPU: this platform runs diffusion stages alone"
        )

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Return vLLM-Omni's worker; without vLLM's kernels, its linear layers use torch's product on every CPU."""
        from vllm.model_executor.layers import utils
        from vllm_omni_cpu import cpu_kernels

        cpu_kernels.register()

        if not hasattr(torch.ops._C, "convert_weight_packed"):
            utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # a CPU with AMX would use them in bfloat16
        return super().get_diffusion_worker_cls()

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """Return torch's attention, whatever was requested."""
        return "vllm_omni_cpu.cpu_attention.CpuAttentionBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Return False: vLLM-Omni compiles only for accelerators."""
        return False

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        """Return False."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """Return the CPU, on every rank."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Return one."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """Return None: a CPU has no compute capability."""
        return None

    @classmethod
    def is_initialized(cls) -> bool:
        """Return True: there is nothing to set up."""
        return True

    @classmethod
    def current_device(cls) -> int:
        """Return the index of the only device."""
        return 0

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Do nothing: there is only one device."""

    @classmethod
    def is_available(cls) -> bool:
        """Return False: vLLM-Omni means an accelerator."""
        return False

    @classmethod
    def synchronize(cls) -> None:
        """Do nothing: the host's work is done when its calls return."""

    @classmethod
    def empty_cache(cls) -> None:
        """Do nothing: the host's allocator has no cache to empty."""

    @classmethod
    def current_stream(cls) -> None:
        """Return None: there are no streams."""

    @classmethod
    def stream(cls, stream: Any = None) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Return the bytes of the host's free memory."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the bytes of the host's memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Return the free and total bytes."""
        return cls.get_free_memory(), cls.get_device_total_memory()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Return the bytes in use on the host."""
        return float(cls.get_device_total_memory() - cls.get_free_memory())

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """Do nothing: the host keeps no such statistics."""

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        """Return 0: the host keeps no such statistics."""
        return 0

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        """Return 0: the host keeps no such statistics."""
        return 0
