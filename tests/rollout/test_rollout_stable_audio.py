"""Stable Audio 3: sound to latents and back, its length and levels, and the distilled checkpoint."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from model_rows import ROWS
from omni_rollout.models import open_model

torch.set_num_threads(1)
ROW = ROWS["stable-audio3"]
STRIDE = 64  # points


class BlockVAE:
    """A VAE that has an inverse: each channel's mean of STRIDE points, in the first two of the latent's channels."""

    device, dtype = torch.device("cpu"), torch.float32

    def encode(self, sound, return_dict):
        means = sound.unflatten(-1, (-1, STRIDE)).mean(-1)
        return (torch.cat([means, means.new_zeros(len(means), 6, means.shape[-1])], dim=1),)

    def decode(self, latents, return_dict):
        return (latents[:, :2].repeat_interleave(STRIDE, dim=-1),)


def test_sound_is_encoded_by_the_inverse_of_decoding_up_to_silence_at_its_end():
    model, parts = open_model(ROW.checkpoint()), SimpleNamespace(vae=BlockVAE())
    blocks = torch.rand(2, 13, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    sound = blocks.repeat_interleave(STRIDE, dim=1)[:, :800]  # half of the last block
    x0 = model.encode_media(parts, {"audio": sound}, ROW.unguided)
    assert x0.shape == (2, *model.latent_shape(ROW.unguided)) == (2, 8, 13)
    media, rates = model.decode(parts, x0, {}, ROW.unguided)
    assert rates == {"sample_rate": 800.0}
    assert media["audio"].shape == (2, 800, 2)
    torch.testing.assert_close(media["audio"][:, : 12 * STRIDE], sound[:, : 12 * STRIDE], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("seconds", "frames"), [(0.08, 1), (0.09, 2), (1.0, 13), (384.0, 4800)])
def test_a_length_is_filled_up_to_whole_latent_frames(seconds, frames):
    model, params = open_model(ROW.checkpoint()), replace(ROW.unguided, guidance={"duration": seconds})
    model.check(params)
    assert model.latent_shape(params) == (8, frames)


def test_levels_are_even_steps_of_the_log_snr():
    levels = open_model(ROW.checkpoint()).sigmas(replace(ROW.unguided, num_inference_steps=4))
    between = [1 / (1 + torch.tensor(2.0 - 8.2 * t).exp().item()) for t in (0.75, 0.5, 0.25)]
    assert levels.tolist() == pytest.approx([1, *between, 0], abs=1e-6)


def test_the_distilled_checkpoint_is_refused_by_its_sampler(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROW.checkpoint(), folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stochastic_sampling": True}))
    with pytest.raises(
        ValueError, match=r"stochastic_sampling of .* must be false for a StableAudio3Pipeline, got true"
    ):
        open_model(folder)
