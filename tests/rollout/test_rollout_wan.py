"""Wan: the checkpoint for a first and a last frame, given frames, how texts are cleaned, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import ulps
from model_rows import ROWS, built
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, add_noise, step_noise

torch.set_num_threads(1)
BOTH_FRAMES = replace(ROWS["wan21-i2v"], checkpoint=built("wan21-flf2v"), images=((40, 90), (32, 64)))


def open_row(row, dtype=torch.float32):
    """A row's model, and an engine with its parts."""
    model = open_model(row.checkpoint())
    return model, DiffusersEngine(model, model.load(device="cpu", dtype=dtype))


@pytest.mark.parametrize("guided", [False, True])
def test_with_a_first_and_a_last_frame_that_clip_sees_videos_are_those_of_the_stock_pipeline(guided):
    row, params = BOTH_FRAMES, BOTH_FRAMES.guided if guided else BOTH_FRAMES.unguided
    model, engine = open_row(row, torch.float64)
    assert list(model.IMAGES) == [2]
    prompts = [Prompt(f"a sign, {i}", 0, i, seed=i, negative="bad", images=row.references(i)) for i in range(2)]
    drawn = engine.generate(prompts, params)
    ours = model.decode(engine.parts, drawn.x0, drawn.cond, params)[0]["video"]
    noise = step_noise([p.seed for p in prompts], INITIAL_NOISE, model.latent_shape(params))
    theirs = row.draw_stock(row.stock_pipeline(model.folder, torch.float32), prompts, params, noise.double())
    torch.testing.assert_close(ours.movedim(-1, -3), theirs.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["wan21-i2v", "wan22-i2v"])
def test_every_given_frame_changes_the_video(name):
    row = ROWS[name]
    _, engine = open_row(row)
    prompt = Prompt("a sign", 0, 0, seed=0, images=row.references(0))
    drawn = engine.generate([prompt], row.unguided).x0
    for i in range(len(prompt.images)):
        images = [255 - image if i == k else image for k, image in enumerate(prompt.images)]
        other = engine.generate([replace(prompt, images=tuple(images))], row.unguided).x0
        assert (drawn - other).abs().max() > 1e-3


def test_a_given_frame_is_encoded_once_for_a_group_that_is_drawn_in_batches():
    row = ROWS["wan22-ti2v-first"]
    model, engine = open_row(row)
    seen, encode = [], model.encode_media
    model.encode_media = lambda parts, media, params: seen.append(media) or encode(parts, media, params)
    first, second, third = [Prompt("a sign", 0, i, seed=i, images=row.references(i // 2)) for i in range(3)]
    second = replace(second, text="another", images=first.images)
    params = replace(row.unguided, noise_level=0.7)
    batches = [engine.generate([p], replace(params, sde_steps=(i,))) for i, p in enumerate((first, second))]
    assert len(seen) == 1
    assert torch.equal(batches[0].cond["first"], batches[1].cond["first"])
    engine.generate([third, first], params)
    assert len(seen) == 2  # another frame
    engine.generate([first], replace(params, height=params.height * 2))
    assert len(seen) == 3  # another size
    assert torch.equal(engine.condition([first], params)["first"], batches[0].cond["first"])


def test_a_given_first_frame_is_where_samples_end_and_nothing_is_learned_about_it():
    row = ROWS["wan22-ti2v-first"]
    model, engine = open_row(row)
    prompts = [Prompt(f"a sign, {i}", 0, i, seed=i, images=row.references(i)) for i in range(2)]
    drawn = engine.generate(prompts, replace(row.guided, noise_level=0.7, sde_steps=(1, 2)))
    first = drawn.cond["first"]
    torch.testing.assert_close(drawn.x0[:, :, :1], first, rtol=0, atol=1e-5)
    noise, sigma = step_noise([5, 6], 0, model.latent_shape(row.guided)), torch.tensor([0.9, 0.3])
    x = add_noise(drawn.x0, noise, sigma)
    engine.net.requires_grad_(True)
    velocity = model.predict_velocity(engine.net, x, sigma, drawn.cond, row.guided)
    torch.testing.assert_close(velocity[:, :, :1], (noise - drawn.x0)[:, :, :1], rtol=0, atol=1e-4)
    velocity[:, :, 0].sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in engine.net.parameters())


@pytest.mark.parametrize(
    "text",
    [
        "  a  sign\n\tof &amp;lt;b&amp;gt; &quot;A&quot; ",
        "a\u00a0sign",
        "é &eacute;",
        "a sign that says \u201cA\u201d, it\u2019s red",
        "a sign\uff0cblue\uff0cJPEG\u3002",
        "a \ufb01sh, cafÃ©",
    ],
)
def test_texts_are_cleaned_as_the_stock_pipeline_does(text):
    """Curly quotes, full-width marks and ligatures too, which its library makes plain."""
    model, engine = open_row(ROWS["wan21"])
    pipe = ROWS["wan21"].stock_pipeline(model.folder, torch.float32)
    theirs, _ = pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=512)
    own = model.encode(engine.parts, Prompt(text, 0, 0, seed=0))["embeds"]
    torch.testing.assert_close(own, theirs[0].to(own.dtype), rtol=0, atol=ulps(16, theirs.abs().max()))
    negative = model.encode(engine.parts, Prompt("a", 0, 0, seed=0, negative=text), negative=True)["embeds"]
    assert torch.equal(own, negative)
    assert own.shape[0] == 512


@pytest.mark.parametrize(
    ("name", "file", "change", "said"),
    [
        ("wan21", "model_index.json", {"boundary_ratio": 0.9}, "boundary_ratio must be null without a transformer_2"),
        ("wan22", "model_index.json", {"boundary_ratio": None}, r"boundary_ratio must be in \(0, 1\) for two experts"),
        ("wan22", "model_index.json", {"boundary_ratio": 1.5}, r"must be in \(0, 1\) for two experts, .* says 1.5"),
        (
            "wan21",
            "scheduler/scheduler_config.json",
            {"prediction_type": "epsilon"},
            'must be "flow_prediction" for a WanPipeline, got "e',
        ),
        (
            "wan21",
            "scheduler/scheduler_config.json",
            {"final_sigmas_type": "sigma_min"},
            'final_sigmas_type of .* "zero"',
        ),
        ("wan21", "scheduler/scheduler_config.json", {"use_flow_sigmas": False}, "use_flow_sigmas of .* must be true"),
        ("wan21", "vae/config.json", {"temperal_downsample": [False, True]}, "temperal_downsample of .* 3 entries"),
        ("wan21", "transformer/config.json", {"_class_name": "Other"}, "transformer must be a WanTransformer3DModel"),
    ],
)
def test_a_configuration_that_is_no_wan_is_refused_by_its_file(tmp_path, name, file, change, said):
    folder = tmp_path / "model"
    shutil.copytree(ROWS[name].checkpoint(), folder)
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said):
        open_model(folder)


def test_frames_are_refused_where_the_model_takes_none_or_another_number():
    for name, num, said in (("wan21", 1, "must have no images, got 1"), ("wan22-i2v", 3, "must have 1 to 2 images")):
        _, engine = open_row(ROWS[name])
        prompt = Prompt("a sign", 0, 0, seed=0, images=ROWS["wan21-i2v"].references(0) * num)
        with pytest.raises(ValueError, match=said):
            engine.generate([prompt], ROWS[name].unguided)
