"""The sampling app: a sheet from the base, from full weights and from an adapter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CHECKPOINT
from omni_rollout.models import open_model
from omni_train.dist import Dist
from omni_train.lora import adapter_params, add_lora
from omni_train.weights import save_weights
from PIL import Image

import sample

ARGS = sample.Args(model=str(CHECKPOINT), num_images=3, num_inference_steps=3, batch_size=2)
ALONE = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def sheet(tmp_path, **changes):
    out = tmp_path / "sheets" / "sheet.png"
    sample.main(replace(ARGS, out=str(out), **changes))
    return np.asarray(Image.open(out))


def test_the_same_seed_draws_the_same_sheet(tmp_path):
    first = sheet(tmp_path)
    assert first.shape == (4 + 64 + 4 + 16, 3 * (192 + 4) + 4, 3)
    assert np.array_equal(first, sheet(tmp_path))
    assert not np.array_equal(first, sheet(tmp_path, seed=1))


@pytest.mark.parametrize("lora", [False, True])
def test_saved_weights_change_what_is_drawn(tmp_path, lora):
    model = open_model(CHECKPOINT)
    net = model.load_net(device="cpu", dtype=torch.float32)
    if lora:
        add_lora(net, model.LORA_TARGETS, rank=4, alpha=8, seed=0)
    params = adapter_params(net, "default") if lora else list(net.parameters())
    with torch.no_grad():
        for parameter in params:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    save_weights(net, tmp_path / "weights", ALONE)
    base, trained = sheet(tmp_path), sheet(tmp_path, weights=str(tmp_path / "weights"))
    assert not np.array_equal(base, trained)


def test_a_missing_weights_folder_is_named():
    with pytest.raises(ValueError, match="--weights must be a folder that a trainer wrote, got nowhere"):
        sample.check_args(replace(ARGS, weights="nowhere"))
