"""Decoding in tiles: what it returns where a pixel has its own latent, and how near it comes to a whole decode."""

from itertools import pairwise

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params
from omni_rollout.decoding import tile_slices, tiled_decode
from omni_rollout.models import open_model


def enlarge(parts, x0, cond, params):
    """Media whose pixels are those of the latents, four times as high and wide."""
    assert (params.height, params.width) == (4 * x0.shape[-2], 4 * x0.shape[-1])
    media = x0.repeat_interleave(4, dim=-1).repeat_interleave(4, dim=-2).movedim(1, -1)
    return {"video" if x0.dim() == 5 else "image": media}, {"fps": 8.0}


@pytest.mark.parametrize("shape", [(2, 3, 40, 100), (1, 3, 2, 33, 17), (1, 3, 16, 16), (1, 3, 15, 160)])
def test_tiles_of_pixels_that_have_their_own_latents_make_the_whole(shape):
    x0, params = torch.rand(shape), Params(10, height=4 * shape[-2], width=4 * shape[-1])
    (media, rates), (wanted, _) = (each(None, x0, {}, params) for each in (tiled_decode(enlarge, 64), enlarge))
    assert media.keys() == wanted.keys()
    assert rates == {"fps": 8.0}
    for kind, pixels in wanted.items():
        torch.testing.assert_close(media[kind], pixels, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 27, 33, 40, 199])
@pytest.mark.parametrize(("most", "overlap"), [(16, 4), (8, 2), (26, 4), (2, 1)])
def test_parts_of_a_length_are_equal_and_overlap(length, most, overlap):
    parts = tile_slices(length, most, overlap)
    assert (parts[0].start, parts[-1].stop) == (0, length)
    assert len({part.stop - part.start for part in parts}) == 1
    assert parts[0].stop <= most
    assert all(one.stop - following.start >= overlap for one, following in pairwise(parts))
    assert len(parts) == 1 or (len(parts) - 1) * (most - overlap) + overlap < length  # fewer would not cover it


def test_tiles_come_as_near_to_a_whole_decode_as_those_of_diffusers():
    model = open_model(ROWS["wan22-ti2v"].checkpoint())
    parts = model.load(device="cpu", dtype=torch.float32)
    params = Params(10, height=256, width=320)
    x0 = torch.randn(1, *model.latent_shape(params), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (whole,) = model.decode(parts, x0, {}, params)[0].values()
        (ours,) = tiled_decode(model.decode, 128)(parts, x0, {}, params)[0].values()
        enlarged = {"tile_sample_min_height": 128, "tile_sample_min_width": 128}
        parts.vae.enable_tiling(**enlarged, tile_sample_stride_height=96, tile_sample_stride_width=96)
        (theirs,) = model.decode(parts, x0, {}, params)[0].values()
    assert 0 < (ours - whole).square().mean() < 1.2 * (theirs - whole).square().mean()


def test_gradients_through_tiles_are_those_of_the_whole():
    params = Params(10, height=132, width=160)
    grads = []
    for decode in (enlarge, tiled_decode(enlarge, 64)):
        x0 = torch.randn(1, 3, 33, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
        decode(None, x0, {}, params)[0]["image"].square().sum().backward()
        grads.append(x0.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-5)
