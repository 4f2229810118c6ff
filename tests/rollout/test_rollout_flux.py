"""FLUX.1: distilled guidance, which is an input of the net, and the reference of Kontext."""

from dataclasses import replace

import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from PIL import Image


@pytest.mark.parametrize("name", ["flux-dev", "flux-schnell"])
def test_texts_are_as_long_as_is_asked_for_whatever_the_checkpoint_and_the_scale_is_the_net_s(name):
    model, row = open_model(ROWS[name].checkpoint()), ROWS[name]
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    seen = []
    engine.net.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    for guidance, length in (({}, 512), ({"max_sequence_length": 256}, 256), ({}, 512)):  # the third text is cached
        engine.generate([Prompt("a sign", 0, 0, seed=0)], replace(row.unguided, guidance=guidance))
        lengths, scales = {len(call["encoder_hidden_states"][0]) for call in seen}, [call["guidance"] for call in seen]
        assert lengths == {length}
        assert scales == ([torch.tensor([3.5])] * 6 if name == "flux-dev" else [None] * 6)
        seen.clear()


def test_losses_that_denoise_data_keep_the_distilled_scale():
    model, row = open_model(ROWS["flux-dev"].checkpoint()), ROWS["flux-dev"]
    assert model.unguided(row.guided) == replace(row.guided, guidance={"true_cfg_scale": 1.0})
    assert model.unguided(row.guided).guidance_scale == 3.5


@pytest.mark.parametrize("size", sampled([(40, 72), (300, 290), (1003, 64), (500, 333)], 2))
def test_a_reference_is_resized_as_the_stock_pipeline_does(monkeypatch, size):
    row = ROWS["flux-kontext"]
    model, pipe = open_model(row.checkpoint()), row.stock_pipeline(row.checkpoint(), torch.float32)
    image = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen, encode = [], type(pipe.vae).encode
    monkeypatch.setattr(type(pipe.vae), "encode", lambda self, pixels: seen.append(pixels) or encode(self, pixels))
    small = {"height": 16, "width": 16, "max_area": 256, "num_inference_steps": 1, "output_type": "latent"}
    pipe(image=Image.fromarray(image.numpy()), prompt="a sign", **small)
    parts = model.load(device="cpu", dtype=torch.float32)
    model.condition(parts, Prompt("a sign", 0, 0, seed=0, images=(image,)), Params(1, 16, 16))
    assert seen[0].shape == seen[1].shape
    assert 0.98 < seen[0][0, 0].numel() / 1024**2 < 1.02
    torch.testing.assert_close(*seen, rtol=0, atol=1e-6)


@pytest.mark.parametrize("area", [384 * 384, 512 * 512])
def test_a_reference_has_about_the_area_that_is_asked_for(area):
    row = ROWS["flux-kontext"]
    model = open_model(row.checkpoint())
    parts, params = model.load(device="cpu", dtype=torch.float32), Params(1, 16, 16, guidance={"image_area": area})
    for height, width in ((64, 64), (40, 72), (200, 64)):
        prompt = Prompt("a sign", 0, 0, seed=0, images=(torch.zeros(height, width, 3, dtype=torch.uint8),))
        *_, h, w = model.condition(parts, prompt, params)["reference_0"].shape
        assert 64 * h * w == pytest.approx(area, rel=0.1)
        assert (h % 2, w % 2) == (0, 0)
        assert (h > w) == (height > width)
