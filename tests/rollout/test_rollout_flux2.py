"""FLUX.2 beyond what every model must hold: its schedule at real sizes, and what becomes of references."""

import numpy as np
import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from omni_rollout.models.diffusers_model import pixels
from omni_rollout.models.flux2 import AREA, fit_reference
from omni_rollout.sampler import check_images
from PIL import Image


@pytest.fixture(scope="module")
def model():
    return open_model(ROWS["flux2-klein-base"].checkpoint())


@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (1024, 1088), (1408, 1408)])
@pytest.mark.parametrize("steps", [4, 10, 50])
def test_the_schedule_is_the_stock_pipeline_s(model, size, steps):
    """Both below 4,300 tokens, where the shift depends on the number of steps, and above."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    height, width = size
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model.folder, subfolder="scheduler")
    mu = compute_empirical_mu(image_seq_len=height * width // 256, num_steps=steps)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    torch.testing.assert_close(model.sigmas(Params(steps, height, width)), scheduler.sigmas, rtol=0, atol=2e-7)


@pytest.mark.parametrize("area", [AREA, 384 * 384, 64 * 64])
@pytest.mark.parametrize("size", [(64, 64), (75, 130), (64, 512), (900, 1100), (1300, 2000)])
def test_references_are_reduced_and_cut_as_in_the_stock_pipeline(size, area):
    """Those of more pixels than the area, 1024 x 1024 by default, are reduced to it, and all cut to whole tokens."""
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    image = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    stock, picture = Flux2ImageProcessor(vae_scale_factor=16), Image.fromarray(image.numpy())
    stock.check_image_input(picture)
    picture = stock._resize_if_exceeds_area(picture, area)
    width, height = (side // 16 * 16 for side in picture.size)
    theirs = stock.preprocess(picture, height=height, width=width, resize_mode="crop")
    torch.testing.assert_close(pixels(fit_reference(image, area)[None]), theirs, rtol=0, atol=1e-6)


def test_a_reference_has_about_the_area_that_is_asked_for(model):
    parts = model.load(device="cpu", dtype=torch.float32)
    images = tuple(torch.zeros(*size, 3, dtype=torch.uint8) for size in ((200, 300), (64, 512), (80, 70)))
    for area, tokens in ((16 * 16, [1, 2, 1]), (64 * 64, [12, 11, 12]), (AREA, [12 * 18, 4 * 32, 20])):
        params = Params(1, 64, 64, guidance={"image_area": area})
        model.check(params)
        cond = model.condition(parts, Prompt("a sign", 0, 0, seed=0, images=images), params)
        assert [latents[0].numel() for latents in cond.values()] == tokens


@pytest.mark.parametrize("size", [(63, 64), (64, 513)])
def test_a_reference_that_the_stock_pipeline_refuses_is_refused(model, size):
    with pytest.raises(ValueError, match=f"images must have sides of 64 .*, got height {size[0]} and width {size[1]}"):
        check_images(model, [size])
    check_images(model, [(64, 512)] * 10)
