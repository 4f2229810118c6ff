"""Qwen-Image sampled by the embedded engine against the stock diffusers pipeline."""

import pytest
import torch
from diffusers import QwenImagePipeline
from helpers import CHECKPOINT
from omni_rollout import Prompt, SamplingParams
from omni_rollout.diffusers_engine import DiffusersEngine
from omni_rollout.models import qwen_image
from omni_sched import INITIAL_NOISE, step_noise

TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QX"', 'a white sign that says "M2N"']


@pytest.fixture(scope="module")
def pipe():
    pipe = QwenImagePipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def model():
    return qwen_image.load(CHECKPOINT)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_images_equal_those_of_the_stock_pipeline(pipe, model, batch, guidance_scale):
    prompts = [Prompt(text, group=0, seed=i, negative="blurry") for i, text in enumerate(TEXTS[:batch])]
    params = SamplingParams(8, 32, 96, guidance_scale=guidance_scale)
    ours = qwen_image.decode(model, DiffusersEngine(qwen_image, model).generate(prompts, params).x0)
    noise = step_noise([p.seed for p in prompts], INITIAL_NOISE, (16, 4, 12))
    theirs = pipe(
        [p.text for p in prompts],
        negative_prompt=[p.negative for p in prompts] if guidance_scale > 1 else None,
        true_cfg_scale=guidance_scale,
        height=32,
        width=96,
        num_inference_steps=8,
        latents=pipe._pack_latents(noise[:, None], batch, 16, 4, 12),
        output_type="pt",
    ).images
    assert theirs.std() > 0.1  # pictures, not grey
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_steps", "height", "width"), [(10, 32, 96), (28, 512, 512), (50, 1024, 768)])
def test_sigmas_are_the_pipelines(pipe, model, num_steps, height, width):
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

    config = pipe.scheduler.config
    tokens = (height // 16) * (width // 16)
    mu = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    linear = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).numpy()
    retrieve_timesteps(pipe.scheduler, num_steps, "cpu", sigmas=linear, mu=mu)
    ours = qwen_image.sigmas(model, num_steps, height=height, width=width)
    torch.testing.assert_close(ours, pipe.scheduler.sigmas, rtol=0, atol=2e-7)


def test_text_features_are_the_pipelines(pipe, model):
    embeds, mask = pipe.encode_prompt(TEXTS, device="cpu")
    for i, text in enumerate(TEXTS):
        ours = qwen_image.encode(model, text)["embeds"]
        torch.testing.assert_close(ours, embeds[i][mask[i].bool()], rtol=0, atol=1e-5)


def test_every_lora_target_and_block_exists(model):
    names = [name for name, module in model.transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in qwen_image.LORA_TARGETS:
        assert any(name.endswith(f".{target}") for name in names), target
    classes = {type(module).__name__ for module in model.transformer.modules()}
    assert set(qwen_image.BLOCK_NAMES) <= classes


@pytest.mark.parametrize(("height", "width"), [(40, 96), (0, 96), (32, -16)])
def test_sizes_off_the_grid_are_refused(model, height, width):
    with pytest.raises(ValueError, match="must be a positive multiple of 16 pixels, got"):
        qwen_image.latent_shape(model, height=height, width=width)
