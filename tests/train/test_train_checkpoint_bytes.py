"""A checkpoint of any model holds each trained number, its two moments and its average, and not a byte more."""

import pytest
import torch
from helpers import REPO, load_newest, sampled
from model_rows import ROWS, built
from omni_rollout.models import open_model
from omni_rollout.models.tokens import open_token_model
from omni_train.checkpoint.store import Checkpoint
from omni_train.memory.recompute import Recompute
from omni_train.optim import build_adamw
from omni_train.prepare import Lora, Preparation, prepare
from omni_train.weights.snapshot import Ema
from torch import nn

TEXT = {
    "qwen3": built("qwen3"),
    "qwen2.5-vl": built("qwen2.5-vl"),
    "qwen3-omni": lambda: REPO / "checkpoints" / "tiny-beeps-qwen3-omni",
}
STEP_BYTES = 4  # of AdamW's count of steps, one a parameter
RANK = 4


def open_row(name):
    return open_token_model(TEXT[name]()) if name in TEXT else open_model(ROWS[name].checkpoint())


def header_bytes(file):
    """How long the names of a safetensors file are."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def trained(net):
    """AdamW after one step and an average over what training changes."""
    optimizer = build_adamw(net, lr=1e-3)
    params = [p for p in net.parameters() if p.requires_grad]
    for p in params:
        nn.init.constant_(p, 0.5)
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer, Ema(params, decay=0.9)


@pytest.mark.parametrize("rank", [RANK, 0], ids=["lora", "all"])
@pytest.mark.parametrize("name", sampled([*ROWS, *TEXT], 6))
def test_the_bytes_are_those_of_what_is_trained(name, rank, alone, tmp_path):
    model = open_row(name)
    lora = Lora(model.LORA_TARGETS, rank, 2.0 * rank, "default", seed=0)
    frozen = tuple(f"{part}." for part in getattr(model, "FROZEN", ()))
    how = Preparation(
        torch.device("cpu"),
        model.BLOCK_NAMES,
        torch.bfloat16,
        lora if rank else None,
        is_frozen=lambda path: not rank and f"{path}.".startswith(frozen),
        recompute=Recompute(0.0),
    )
    net = prepare(model.empty_net(buffers=True), how)
    optimizer, ema = trained(net)
    folder = Checkpoint(tmp_path, alone).save(1, net, optimizer, ema, config={})
    files = sorted(folder.glob("*.safetensors"))
    held = sum(file.stat().st_size - header_bytes(file) for file in files)
    sizes = [p.nbytes for p in net.parameters() if p.requires_grad]
    assert sizes
    assert held == sum(sizes) * 4 + len(sizes) * STEP_BYTES
    assert sum(map(header_bytes, files)) < 1000 * len(sizes)


def test_running_means_of_layers_in_training_are_kept_and_tables_of_others_are_not(checkpoints):
    """A batch norm that trains moves its statistics; one in evaluation mode has those of the base model."""

    def build():
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        net[2].eval()
        return net

    torch.manual_seed(0)
    net, fresh = build(), build()
    fresh[2].running_mean.fill_(7.0)  # as a base model brings it
    for _ in range(3):
        net(torch.randn(5, 3) * 2 + 1)
    checkpoints.save(1, net, config={})
    saved = load_newest(checkpoints, fresh)
    buffers = {name for name in saved.tensors if name.startswith("buffer/")}
    assert buffers == {f"buffer/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert not net[1].running_mean.eq(0).any()
    assert all(torch.equal(kept, found) for kept, found in zip(net[1].buffers(), fresh[1].buffers(), strict=True))
    assert fresh[2].running_mean.eq(7.0).all()
