"""Positions on accelerators without complex numbers and float64: diffusers' results, to the last digits."""

import math
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_ltx2, transformer_qwenimage
from diffusers.models.transformers.transformer_z_image import RopeEmbedder
from diffusers.pipelines.ltx2 import connectors
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.models import ltx2_net, open_model, qwen_image_net, z_image_net
from omni_rollout.models.rotary import has_float64, rotate, uses_real_rotation
from omni_rollout.sampler import Sampler

CPU = torch.device("cpu")


def rotate_in_real_numbers(monkeypatch):
    """Have the CPU rotate as an accelerator without complex numbers does."""
    for net in (qwen_image_net, z_image_net):
        monkeypatch.setattr(net, "uses_real_rotation", lambda device: True)


@pytest.fixture
def real_cpu(monkeypatch):
    rotate_in_real_numbers(monkeypatch)


def test_devices_without_float64_rotate_in_real_numbers():
    assert [uses_real_rotation(torch.device(kind)) for kind in ("cpu", "meta", "cuda", "mps")] == [
        False,
        False,
        False,
        True,
    ]
    assert [has_float64(torch.device(kind)) for kind in ("cpu", "cuda", "mps")] == [True, True, False]


def errors(x, angles, found, expected):
    """The largest errors of two rotations, in units of the last place of each pair's length."""
    pairs = x.double().unflatten(-1, (-1, 2))
    exact = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    unit = pairs.norm(dim=-1, keepdim=True).expand_as(pairs).flatten(-2) * 2**-23
    return [float(((each.double() - exact) / unit).abs().max()) for each in (found, expected)]


def test_qwen_images_angles_rotate_like_its_complex_numbers(real_cpu):
    kinds = qwen_image_net.Positions, transformer_qwenimage.QwenEmbedRope
    mine, theirs = (kind(theta=10000, axes_dim=[16, 56, 56], scale_rope=True) for kind in kinds)
    shapes, x = [[(1, 6, 10), (1, 4, 4)]], torch.randn(2, 76, 3, 128)
    for angles, freqs in zip(*(each(shapes, CPU, 76) for each in (mine, theirs)), strict=True):
        found = rotate(x[:, : len(angles)], angles)
        expected = transformer_qwenimage.apply_rotary_emb_qwen(x[:, : len(freqs)], freqs, use_real=False)
        exact = torch.angle(freqs.to(torch.complex128))[:, None]
        error, released = errors(x[:, : len(freqs)], exact, found, expected)
        assert angles.dtype == torch.float32
        assert max(error, released) < 3


def test_z_images_angles_are_those_of_its_complex_numbers(real_cpu):
    sizes = {"axes_dims": [32, 48, 48], "axes_lens": [64, 32, 32]}
    places = torch.randint(0, 32, (40, 3))
    angles, freqs = (kind(**sizes)(places) for kind in (z_image_net.Positions, RopeEmbedder))
    torch.testing.assert_close(torch.polar(torch.ones_like(angles), angles), freqs, rtol=0, atol=2**-22)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-edit-plus", "z-image"])
def test_a_net_without_complex_numbers_samples_like_diffusers(monkeypatch, name):
    """Also where texts have two lengths, and so a mask."""
    row = ROWS[name]
    prompts = [
        Prompt(text, 0, i, seed=i, negative="grey", images=row.references(0)) for i, text in enumerate(("a", "two bl"))
    ]
    params = replace(row.guided, num_inference_steps=2, sde_steps=())
    found = []
    for is_complex in (True, False):
        if not is_complex:
            rotate_in_real_numbers(monkeypatch)
        model = open_model(row.checkpoint())
        found.append(
            Sampler(model, model.load(device=CPU, dtype=torch.float32)).sample(prompts, params, weight_version=0).x0
        )
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0, atol=3e-5)


def test_nets_keep_the_names_of_diffusers():
    for module in (qwen_image_net.QwenImageTransformer2DModel, z_image_net.ZImageTransformer2DModel):
        assert issubclass(module, getattr(diffusers, module.__name__))


@pytest.mark.parametrize("form", ["interleaved", "split"])
def test_ltx_2s_positions_without_float64_have_diffusers_bits(monkeypatch, form):
    sizes = {"dim": 64, "double_precision": True, "rope_type": form, "num_attention_heads": 2}
    kinds = ltx2_net.Positions, transformer_ltx2.LTX2AudioVideoRotaryPosEmbed
    mine, theirs = (
        kind(patch_size=1, patch_size_t=1, base_num_frames=20, base_height=64, base_width=64, modality="video", **sizes)
        for kind in kinds
    )
    words = [kind(**sizes) for kind in (ltx2_net.TextPositions, connectors.LTX2RotaryPosEmbed1d)]
    monkeypatch.setattr(ltx2_net, "has_float64", lambda device: False)
    for rate in (24.0, 24.0, 12.0):
        places = mine.prepare_video_coords(2, 3, 4, 5, CPU, fps=rate)
        assert all(map(torch.equal, mine(places, CPU), theirs(places, CPU)))
    assert all(map(torch.equal, *(each(3, 7, CPU) for each in words)))
    assert math.prod(mine.found[1][0].shape) > 0
