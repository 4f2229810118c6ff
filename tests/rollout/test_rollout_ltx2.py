"""LTX-2 and 2.3: the sound that comes with the frames, how a latent holds both, and what is refused."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from helpers import sampled
from model_rows import ROWS, built
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.models.diffusers_model import pixels, resize_image
from omni_rollout.models.ltx2 import compress_image
from omni_sched import INITIAL_NOISE, step_noise

torch.set_num_threads(1)
ROW = ROWS["ltx23"]


@pytest.mark.parametrize("name", sampled(["ltx2", "ltx23"], 1))
def test_the_frames_and_the_sound_are_those_of_the_stock_pipeline(name):
    row = replace(ROW, checkpoint=built(name))
    model = open_model(row.checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float64))
    pipe = row.stock_pipeline(model.folder, torch.float64)
    prompts = [Prompt(f"a horn, {i}", 0, i, seed=i, negative="bad") for i in range(2)]
    for params in (row.unguided, row.more[0]):
        drawn = engine.generate(prompts, params)
        ours, rates = model.decode(engine.parts, drawn.x0, drawn.cond, params)
        noise = step_noise([p.seed for p in prompts], INITIAL_NOISE, model.latent_shape(params)).double()
        given = {"height": params.height, "width": params.width, "num_inference_steps": params.num_inference_steps}
        given |= row.latents(noise) | row.stock(params, ["bad", "bad"])
        theirs = pipe(prompt=[p.text for p in prompts], output_type="pt", **given)
        for own, other in ((ours["audio"].mT, theirs.audio), (ours["video"].movedim(-1, -3), theirs.frames)):
            assert other.std() > 0.01  # neither silence nor grey
            torch.testing.assert_close(own, other.float(), rtol=0, atol=1e-5)
        assert rates == {"fps": 24.0, "sample_rate": {"ltx2": 24_000, "ltx23": 48_000}[name]}
        assert len(ours["audio"][0]) == (4 * 9 - 3) * rates["sample_rate"] // 100  # ten milliseconds a mel frame


def test_a_latent_holds_the_frames_and_then_a_twenty_fifth_of_a_second_of_sound_after_the_other():
    model = open_model(ROW.checkpoint())
    params = Params(2, 256, 384, num_frames=81, frame_rate=24.0)
    assert model.streams(params) == {"video": 16 * 11 * 8 * 12, "audio": 8 * round(81 / 24 * 25)}
    assert model.latent_shape(params) == (sum(model.streams(params).values()),)


def test_each_part_of_a_latent_decides_its_own_medium():
    model = open_model(ROW.checkpoint())
    parts = model.load(device="cpu", dtype=torch.float32)
    x0 = torch.randn(1, *model.latent_shape(ROW.unguided), generator=torch.Generator().manual_seed(0))
    before, _ = model.decode(parts, x0, {}, ROW.unguided)
    first = model.streams(ROW.unguided)["video"]
    for changed, kept, part in (("video", "audio", slice(0, first)), ("audio", "video", slice(first, None))):
        other = x0.clone()
        other[:, part] += 1
        after, _ = model.decode(parts, other, {}, ROW.unguided)
        assert torch.equal(before[kept], after[kept])
        assert (before[changed] - after[changed]).abs().max() > 1e-3


def test_the_scale_of_the_sound_is_that_of_the_frames_unless_it_is_given():
    model = open_model(ROW.checkpoint())
    assert model.option(replace(ROW.unguided, guidance_scale=4.0), "audio_guidance_scale") == 4
    assert model.is_guided(replace(ROW.unguided, guidance={"audio_guidance_scale": 2.0}))
    assert not model.is_guided(ROW.unguided)


@torch.no_grad()
def test_a_frozen_net_gives_the_velocity_of_a_trained_one_bit_for_bit():
    model = open_model(ROW.checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    drawn = engine.generate([Prompt("a horn", 0, i, seed=i) for i in range(4)], ROW.unguided)
    frozen, trained = (
        model.predict_velocity(net, drawn.x0, torch.full((4,), 0.5), drawn.cond, ROW.unguided)
        for net in (engine.net.requires_grad_(trains) for trains in (False, True))
    )
    assert torch.equal(frozen, trained)


def test_media_are_no_samples_for_preferences():
    model = open_model(ROW.checkpoint())
    with pytest.raises(ValueError, match="samples of a LTX2Pipeline must be given as latents, got video and audio"):
        model.encode_media(None, {"video": None, "audio": None}, ROW.unguided)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (
            "vae/config.json",
            {"timestep_conditioning": True},
            "timestep_conditioning of .* must be false for a LTX2Pipeline, got true",
        ),
        (
            "connectors/config.json",
            {"audio_connector_num_learnable_registers": None},
            "audio_connector_num_learnable_registers of .* must be of type int, got None",
        ),
        ("vocoder/config.json", {"_class_name": "Other"}, "vocoder must be a LTX2VocoderWithBWE, .* says 'Other'"),
    ],
)
def test_a_configuration_that_is_no_ltx2_is_refused_by_its_file(tmp_path, file, change, said):
    folder = tmp_path / "model"
    shutil.copytree(ROW.checkpoint(), folder)
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said):
        open_model(folder)


def test_a_first_frame_is_compressed_as_the_stock_pipeline_does_on_one_core_whatever_the_host_has():
    coarse = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(513, 769), mode="bicubic")[0].movedim(0, -1)
    frame = (smooth.clamp(0, 1) * 255).byte().contiguous()
    found, cores = compress_image(frame, 33), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        stock = torch.from_numpy(apply_image_conditioning_crf(frame.numpy(), 33))
    finally:
        os.sched_setaffinity(0, cores)
    assert torch.equal(found, stock)
    assert 1 < (found.float() - frame[:512, :768].float()).abs().mean() < 10  # of 255


@torch.no_grad()
def test_a_first_frame_is_the_code_of_its_compressed_pixels():
    model = open_model(ROWS["ltx23-first"].checkpoint())
    parts = model.load(device="cpu", dtype=torch.float32)
    frame = torch.randint(0, 256, (41, 91, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    given = pixels(resize_image(compress_image(frame, 33), 32, 64, resample="BILINEAR"))
    code = parts.vae.encode(given[None, :, None]).latent_dist.mode()
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (parts.vae.latents_mean, parts.vae.latents_std))
    found = model.condition(parts, Prompt("a horn", 0, 0, seed=0, images=(frame,)), ROW.unguided)["first"]
    torch.testing.assert_close(found, ((code - mean) / std)[0])
    with pytest.raises(ValueError, match="a first frame must have at least 2 x 2 pixels, got 64 x 1"):
        model.check_image(1, 64)
