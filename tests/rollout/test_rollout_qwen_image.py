"""What Qwen-Image alone has: a schedule that depends on the size, and a template around the text."""

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from helpers import CHECKPOINT
from omni_rollout import Prompt
from omni_rollout.models import open_model
from torch.utils.flop_counter import FlopCounterMode

TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QX"', 'a white sign that says "M2N"', "a word " * 600]


@pytest.fixture(scope="module")
def model():
    return open_model(CHECKPOINT)


def test_text_features_are_the_pipelines_and_as_long_as_its_longest(model):
    pipe = QwenImagePipeline.from_pretrained(CHECKPOINT)
    parts = model.load(device="cpu", dtype=torch.float32)
    for text in TEXTS:
        embeds, mask = pipe.encode_prompt([text], device="cpu", max_sequence_length=512)
        ours = model.encode(parts, Prompt(text, 0, 0, 0))
        assert ours["embeds_mask"].all()
        expected = embeds[0] if mask is None else embeds[0][mask[0].bool()]
        torch.testing.assert_close(ours["embeds"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 4e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_frame_is_decoded_as_diffusers_decodes_it_with_less_than_half_the_products(model, batch, dtype, rounding):
    ours = model.load(device="cpu", dtype=dtype).vae
    stock = AutoencoderKLQwenImage.from_pretrained(CHECKPOINT, subfolder="vae", dtype=dtype)
    latents = torch.randn(batch, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    with FlopCounterMode(display=False) as few, torch.no_grad():
        drawn = ours.decode(latents).sample
    with FlopCounterMode(display=False) as many, torch.no_grad():
        expected = stock.decode(latents).sample
    torch.testing.assert_close(drawn, expected, rtol=0, atol=rounding)
    assert not ours._feat_map  # nothing is kept for a next frame
    assert few.get_total_flops() < 0.5 * many.get_total_flops()


def test_the_default_negative_is_one_space(model):
    parts = model.load(device="cpu", dtype=torch.float32)
    empty, space = (model.encode(parts, Prompt("x", 0, 0, 0, negative=n), negative=True) for n in ("", " "))
    assert torch.equal(empty["embeds"], space["embeds"])
