"""A trainer's process as it was, around a guest that expects a process of its own: vLLM and vLLM-Omni.

They write torchrun's environment variables anew, rename the process, prefix every line of output, and take the process
group down when they end. Here they join the trainer's process group, or a private one of a single rank that is gone
again once the guest stands, and everything else is put back.
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
except ModuleNotFoundError:  # then nobody can rename the process
    setproctitle = None


@contextmanager
def kept_process_group() -> Iterator[None]:
    """Whatever a guest destroys in the block, the world's process group is not among it."""
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group not in (None, torch.distributed.GroupMember.WORLD) and torch.distributed.is_initialized():
            destroy(group)

    with patch.object(torch.distributed, "destroy_process_group", destroy_own):
        yield


@contextmanager
def some_process_group(backend: str) -> Iterator[None]:
    """A process group for the block's length: the trainer's, or one of this process alone."""
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
def undisturbed_process() -> Iterator[None]:
    """Keeps output as it is, and puts back the process title, generators and all variables but vLLM's own."""
    before, plain, arrays = dict(os.environ), random.getstate(), np.random.get_state()
    device = torch.accelerator.current_accelerator()
    places = [torch.accelerator.current_device_index()] if device else []
    title = setproctitle.getproctitle() if setproctitle else ""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # or it takes over logging, and prefixes each line of output
    try:
        with torch.random.fork_rng(places, device_type=device.type if device else "cpu"):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
        for name in set(os.environ) - set(before):
            if not name.startswith("VLLM_") or name == "VLLM_CONFIGURE_LOGGING":
                del os.environ[name]
        os.environ.update(before)
        if setproctitle:
            setproctitle.setproctitle(title)
