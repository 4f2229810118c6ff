"""Isolation of the trainer's process from guests that expect their own process: vLLM and vLLM-Omni.

They overwrite torchrun's environment variables, rename the process, prefix every line of output, and destroy the
process group when they end. Here they join the trainer's process group (while they start, a temporary one with a single
rank), and everything else is restored.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

try:
    import setproctitle
except ModuleNotFoundError:  # then the guest cannot rename the process either
    setproctitle = None


@contextmanager
def keep_process_group() -> Iterator[None]:
    """Prevent a guest from destroying the default process group in the `with` block."""
    destroy = torch.distributed.destroy_process_group

    def destroy_subgroup(group: Any = None) -> None:
        if group not in (None, torch.distributed.GroupMember.WORLD) and torch.distributed.is_initialized():
            destroy(group)

    with patch.object(torch.distributed, "destroy_process_group", destroy_subgroup):
        yield


@contextmanager
def ensure_process_group(backend: str) -> Iterator[None]:
    """Provide a process group in the `with` block: the trainer's, or one with only this process."""
    group = torch.distributed
    if group.is_initialized():
        yield
        return
    group.init_process_group(backend, store=group.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        group.destroy_process_group()


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Keep the output's format, and restore the process title, generators, and environment variables except vLLM's."""
    environment, python_state, numpy_state = dict(os.environ), random.getstate(), np.random.get_state()
    device = torch.accelerator.current_accelerator()
    devices = [torch.accelerator.current_device_index()] if device else []
    title = setproctitle.getproctitle() if setproctitle else ""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # otherwise vLLM configures logging and prefixes each line of output
    try:
        with torch.random.fork_rng(devices, device_type=device.type if device else "cpu"):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_") or name == "VLLM_CONFIGURE_LOGGING":
                del os.environ[name]
        os.environ.update(environment)
        if setproctitle:
            setproctitle.setproctitle(title)
