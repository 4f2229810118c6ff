"""Every model that vLLM-Omni samples: the contract, one name for every weight, and a sync that brings LoRA merged."""

from dataclasses import replace

import pytest
import torch
from helpers import sampled
from model_rows import ROWS, built
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.engines.vllm_omni.formats import LAYERS, quantized_names
from omni_rollout.engines.vllm_omni.pipelines import PIPELINES
from omni_rollout.models import open_model
from omni_rollout.testing import check_engine, check_scores
from omni_train.lora import add_lora, unadapted_params
from omni_train.weights.full import named_weights
from vllm_omni_helpers import check_quantized, load_half, open_engine, open_quantized

MODELS = (
    "qwen-image", "sd35-medium", "sd35-large", "flux-dev", "flux-schnell", "flux-kontext", "flux2-klein",
    "flux2-klein-base", "qwen-image-edit", "qwen-image-edit-plus", "wan21", "wan22", "wan22-ti2v", "wan22-ti2v-first",
    "wan21-i2v", "wan22-i2v", "ltx2", "ltx23", "hunyuan-video15", "hunyuan-video15-i2v", "z-image", "flux2-dev",
)  # fmt: skip
OLDER = {"ltx2": replace(ROWS["ltx23"], checkpoint=built("ltx2"))}  # the same sizes, other flags


def check_draws(engine, embedded, prompts, params):
    """Both engines draw the same: latents, and pictures, frames and sound."""
    found, wanted = (each.generate(prompts, params) for each in (engine, embedded))
    torch.testing.assert_close(found.x0, wanted.x0, rtol=0, atol=1e-5)
    assert found.rates == wanted.rates
    assert found.media.keys() == wanted.media.keys()
    for kind, media in wanted.media.items():
        atol = 1e-5 if kind == "audio" else 1  # of a color's 256 levels, where rounding differs
        torch.testing.assert_close(found.media[kind].float(), media.float(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_samples_the_model(name):
    row = (ROWS | OLDER)[name]
    model, prompt = open_model(row.checkpoint()), Prompt("a sign", 0, 0, seed=0, images=row.references(0))
    unguided, guided = (replace(each, noise_level=0.7, sde_steps=(1, 2)) for each in (row.unguided, row.guided))
    engine = open_engine(model)
    try:
        own = model.load(device="cpu", dtype=torch.float32)
        net = own.net
        if row.images:  # its parts see what the model's own do
            with torch.no_grad():
                assert model.condition(own, prompt, guided)
                found, wanted = (
                    model.encode(parts, prompt) | model.condition(parts, prompt, guided)
                    for parts in (engine.parts, own)
                )
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert engine.weights().keys() == dict(net.named_parameters()).keys()
        assert engine.adopt(net.named_parameters()) == sum(p.nbytes for p in net.parameters())
        for params in (unguided, guided):
            check_engine(engine, model, params, net=net, tolerance=1e-5)
            check_draws(engine, DiffusersEngine(model, own), [prompt, replace(prompt, index=1, seed=1)], params)
        trained = model.load_net(device="cpu", dtype=torch.float32)
        add_lora(trained, model.LORA_TARGETS, rank=4, alpha=8, seed=0)
        engine.adopt(unadapted_params(trained))
        with torch.no_grad():
            for layer, p in trained.named_parameters():
                if "lora_B" in layer:
                    p.normal_(std=1.0 if name.startswith("flux2") else 0.1, generator=torch.Generator().manual_seed(1))
        stale = engine.generate([prompt], guided)
        engine.load_weights(named_weights(trained), version=5)
        fresh = engine.generate([prompt], guided)
        check_scores(fresh, model, trained, tolerance=1e-5)
        with pytest.raises(AssertionError):
            check_scores(stale, model, trained, tolerance=1e-5)
    finally:
        engine.close()


def test_a_first_frame_of_ltx2_is_refused():
    row = ROWS["ltx23-first"]
    engine = open_engine(open_model(row.checkpoint()))
    try:
        with pytest.raises(
            ValueError, match="a first frame of an LTX2Pipeline must be sampled with --engine diffusers"
        ):
            engine.generate([Prompt("a sign", 0, 0, seed=0, images=row.references(0))], row.unguided)
    finally:
        engine.close()


QUANTIZED = (
    "flux-dev", "flux-schnell", "flux-kontext", "flux2-klein", "qwen-image-edit", "qwen-image-edit-plus", "wan21",
    "wan22", "wan22-ti2v", "wan22-ti2v-first", "wan21-i2v", "wan22-i2v", "ltx23", "flux2-dev", "z-image",
    "hunyuan-video15", "hunyuan-video15-i2v",
)  # fmt: skip


@pytest.mark.parametrize("bits", sampled(["fp8", "int8"], 1))
@pytest.mark.parametrize("name", sampled(QUANTIZED, 1))
def test_a_quantized_engine_samples_the_model(monkeypatch, name, bits):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # which loads of text encoders call
    row = ROWS[name]
    model = open_model(row.checkpoint())
    engine = open_quantized(model, bits)
    try:
        assert {*quantized_names(model)} == engine._quantized.keys()  # as plans have it
        check_quantized(engine, model, load_half(model), row)
    finally:
        engine.close()


def test_plans_know_the_models_of_this_engine():
    assert LAYERS.keys() == PIPELINES.keys()


def test_a_model_that_vllm_omni_does_not_quantize_is_refused():
    model = open_model(ROWS["sd35-medium"].checkpoint())
    assert not quantized_names(model)
    with pytest.raises(ValueError, match=r"quantization must be None for a StableDiffusion3Pipeline, .* got fp8"):
        open_quantized(model)
