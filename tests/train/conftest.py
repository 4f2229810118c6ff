"""A tiny Qwen-Image transformer, and ranks: forked processes that form a gloo group through a file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import Dist, init_distributed

torch.set_num_threads(1)


def _rank_main(rank: int, work: Callable[[Dist], object], world_size: int, folder: Path, per_machine: int) -> None:
    first = rank - rank % per_machine
    local = {"LOCAL_RANK": str(rank - first), "LOCAL_WORLD_SIZE": str(min(per_machine, world_size - first))}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)} | local
    dist = init_distributed(timeout_s=60, init_method=f"file://{folder}/store")
    result = json.dumps(work(dist))
    (folder / f"{rank}.json").write_text(result)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # a forked process must not run pytest's teardown, nor wait for gloo's threads


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`run_ranks(work, world_size)` returns the ranks' results of `work(dist)`, through JSON; failures are raised.

    Ranks are on one machine, or have the environment of machines with `per_machine` ranks each, the last with the rest.
    """

    def run(work: Callable[[Dist], object], world_size: int = 2, per_machine: int = 0) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        torch.multiprocessing.start_processes(
            _rank_main,
            args=(work, world_size, folder, per_machine or world_size),
            nprocs=world_size,
            start_method="fork",
        )
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]

    return run


@pytest.fixture
def alone() -> Dist:
    """The only rank of a run."""
    return init_distributed()


@pytest.fixture
def checkpoints(tmp_path: Path, alone: Dist) -> Checkpoint:
    """Checkpoints of one rank, of which three are kept."""
    return Checkpoint(tmp_path / "checkpoints", alone, keep=3)


class TinyQwen:
    """Two blocks with random weights, and inputs of two samples with 12 image tokens and 5 text tokens."""

    block_names = ("QwenImageTransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0")

    @staticmethod
    def build(seed: int = 0) -> Any:
        from diffusers import QwenImageTransformer2DModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = {"attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (8, 12, 12)}
            return QwenImageTransformer2DModel(num_layers=2, joint_attention_dim=32, **heads)

    @staticmethod
    def run(model: Any, samples: slice = slice(0, 2), dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 12, 64, generator=generator)[samples]
        text = torch.randn(2, 5, 32, generator=generator)[samples]
        timestep = torch.tensor([0.9993, 0.5013])[samples]
        return model(
            hidden_states=x.to(dtype),
            timestep=timestep,
            encoder_hidden_states=text.to(dtype),
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, 2, 6)]] * len(x),
            return_dict=False,
        )[0]


@pytest.fixture
def tiny_qwen() -> type[TinyQwen]:
    return TinyQwen
