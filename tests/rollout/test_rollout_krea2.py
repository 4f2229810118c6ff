"""Krea 2 beside its row: bfloat16 norms, texts of any length, and files that are not its own."""

import json
import re
import shutil

import diffusers
import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from torch import nn

ROW = ROWS["krea2"]


@pytest.fixture(scope="module")
def model():
    return open_model(ROW.checkpoint())


def test_a_net_all_in_bfloat16_has_the_bits_of_diffusers_net_with_norms_in_float32(model):
    """A trained net's frozen weights have one dtype, and diffusers adds 1 to a norm's in their own."""
    stock = diffusers.Krea2Transformer2DModel.from_pretrained(model.folder, subfolder="transformer")
    norms = {name: weight for name, weight in stock.named_parameters() if "norm" in name}
    assert len(norms) == 4 * 2 + 2 + 4 * 2
    for weight in norms.values():
        weight.data = weight.bfloat16().float()
    ours = model.load_net(device="cpu", dtype=torch.float32)
    ours.load_state_dict(stock.state_dict())
    nn.Module.to(ours, torch.bfloat16)
    whole = diffusers.Krea2Transformer2DModel(**stock.config)
    whole.load_state_dict(stock.state_dict())
    nn.Module.to(whole, torch.bfloat16)
    for name, weight in stock.named_parameters():
        if name not in norms:
            weight.data = weight.bfloat16()
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(2, *model.latent_shape(params := Params(4, 48, 80, guidance_scale=0.0)), generator=drawn)
    embeds = torch.randn(2, 7, 3, 32, generator=drawn).bfloat16()
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    cond = {"embeds": embeds, "embeds_mask": mask}
    with torch.no_grad():
        found, theirs, rounded = (
            model.predict_velocity(net, x, torch.tensor([0.9, 0.3]), cond, params) for net in (ours, stock, whole)
        )
    assert torch.equal(found, theirs)
    assert not torch.equal(rounded, theirs)


@pytest.mark.parametrize("text", ["", "a sign", "a very long sign " * 40])
def test_a_text_has_the_states_of_the_stock_pipeline_without_its_padding(model, text):
    pipe = ROW.stock_pipeline(model.folder, torch.float64)
    theirs, mask = pipe.encode_prompt([text], max_sequence_length=512)
    found = model.encode(model.load(device="cpu", dtype=torch.float64), Prompt(text, 0, 0, seed=0))
    assert found["embeds_mask"].all()
    torch.testing.assert_close(found["embeds"], theirs[mask], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"patch_size": 1}, "patch_size of .* must be 2 for a Krea2Pipeline, got 1"),
        ({"text_encoder_select_layers": [0, 5, 3]}, r"text_encoder_select_layers .* from 0 to 4, got \[0, 5, 3\]"),
        ({"text_encoder_select_layers": "all"}, "text_encoder_select_layers of .* must be from 0 to 4, got 'all'"),
        ({"text_encoder_select_layers": [0, 3]}, "num_text_layers of .* must be 2 for a Krea2Pipeline, got 3"),
    ],
)
def test_a_value_of_the_pipeline_that_is_not_computed_is_refused(model, tmp_path, entries, said):
    folder = tmp_path / "krea2"
    shutil.copytree(model.folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | entries))
    with pytest.raises(ValueError, match=said) as caught:
        open_model(folder)
    assert re.fullmatch("[^\n]+", str(caught.value))
