"""The vLLM-Omni engine with linear layers in 8 bits: what it samples, and that a sync quantizes anew what it brings."""

from dataclasses import replace

import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.models import open_model
from omni_rollout.testing import check_chain, check_fields
from omni_train.lora import add_lora
from omni_train.weights.full import named_weights
from vllm_omni_helpers import MODEL, PARAMS, gap, open_engine

# FLUX.2 klein's quantized text encoder is loaded with torch.accelerator.empty_cache(), which needs an accelerator.
MODELS = (
    "qwen-image", "flux-dev", "flux-schnell", "flux-kontext", "qwen-image-edit", "qwen-image-edit-plus", "wan21",
    "wan22", "wan22-ti2v", "wan22-ti2v-first", "wan21-i2v", "wan22-i2v", "ltx23",
)  # fmt: skip
LIMIT = 2e-2  # of |log-prob - the trainer's|, per element


@pytest.fixture
def opened():
    """`opened(model)` is a quantized engine for a model, and a trainer's net of its own."""
    engines = []

    def open_both(model):
        engines.append(open_engine(model, dtype=torch.bfloat16, quantization="fp8"))
        return engines[0], model.load_net(device="cpu", dtype=torch.bfloat16).to(torch.bfloat16)

    yield open_both
    for engine in engines:
        engine.close()


def values(engine):
    return {name: param.float() for name, param in engine.net.named_parameters()}  # a copy of what is not float32


def equal(found, expected):
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", sampled(MODELS, 2, always=["qwen-image"]))
def test_it_samples_near_the_trainer_and_a_sync_of_its_own_weights_changes_no_bit(opened, name):
    row = ROWS[name]
    model = open_model(row.checkpoint())
    engine, net = opened(model)
    prompts = [Prompt("a sign", 0, i, seed=i, images=row.references(0)) for i in range(2)]
    params = replace(row.unguided, noise_level=0.7, sde_steps=(1, 2))
    trajectory = engine.generate(prompts, params)
    check_fields(trajectory, prompts, model, params)
    check_chain(trajectory)
    assert 0 < gap(net, trajectory, model) < LIMIT
    before, places = values(engine), {name: p.data_ptr() for name, p in engine.net.named_parameters()}
    assert any(p.dtype == torch.float8_e4m3fn for p in engine.net.parameters())
    assert engine.adopt(net.named_parameters()) == sum(net.get_parameter(name).nbytes for name in engine.weights())
    engine.load_weights(named_weights(net), version=1)
    assert equal(values(engine), before)
    assert {name: p.data_ptr() for name, p in engine.net.named_parameters()} == places


def test_a_sync_quantizes_what_lora_has_merged(opened):
    """Each of a fused layer's rows is the nearest multiple of one scale, with which the largest weight fits."""
    engine, net = opened(MODEL)
    before = values(engine)
    add_lora(net, MODEL.LORA_TARGETS, rank=4, alpha=8, seed=0)
    with torch.no_grad():
        for name, param in net.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    merged = dict(named_weights(net))
    engine.load_weights(iter(merged.items()), version=1)
    assert engine.moved_bytes > 0
    place = "transformer_blocks.0.attn"
    fused = torch.cat([merged[f"{place}.to_{part}.weight"].float() for part in "qkv"])
    own = dict(engine.net.named_parameters())
    scale = own[f"{place}.to_qkv.weight_scale"]
    torch.testing.assert_close(scale, fused.abs().max().view(1) / 448)
    found = own[f"{place}.to_qkv.weight"].t().float() * scale
    assert not torch.equal(values(engine)[f"{place}.to_qkv.weight"], before[f"{place}.to_qkv.weight"])
    # 3 bits after the point: half a step is 1/16 of a number, or of the smallest normal one, 2^-6.
    assert ((found - fused).abs() <= fused.abs().clamp(min=2**-6 * scale.item()) / 16 * (1 + 1e-6)).all()


def test_weights_that_slept_come_with_the_next_sync(opened):
    engine, net = opened(MODEL)
    before = values(engine)
    engine._free()
    engine.wake()
    engine.load_weights(named_weights(net), version=1)
    assert equal(values(engine), before)


def test_a_weight_that_is_left_out_or_of_another_shape_is_an_error(opened):
    engine, net = opened(MODEL)
    weights, name = dict(named_weights(net)), "transformer_blocks.0.attn.to_k.weight"
    with pytest.raises(ValueError, match=rf"missing 1 of {len(weights)}: \['{name}'\]"):
        engine.load_weights(((key, t) for key, t in weights.items() if key != name), version=1)
    with pytest.raises(ValueError, match=rf"got {name} \(5, 128\), have \(128, 128\)"):
        engine.load_weights(((key, t[:5] if key == name else t) for key, t in weights.items()), version=1)


def test_a_model_that_vllm_omni_does_not_quantize_is_refused():
    model = open_model(ROWS["sd35-medium"].checkpoint())
    with pytest.raises(ValueError, match=r"quantization must be None for a StableDiffusion3Pipeline, .* got fp8"):
        open_engine(model, dtype=torch.bfloat16, quantization="fp8")


def test_int8_needs_an_accelerator():
    with pytest.raises(NotImplementedError, match="The current platform is not supported int8 online quant"):
        open_engine(dtype=torch.bfloat16, quantization="int8")


def test_images_are_those_of_one_sample_at_a_time_but_for_the_scale_of_activations(opened):
    """A layer's inputs have one scale for the batch, so that another batch rounds them in another way."""
    engine, _ = opened(MODEL)
    prompts = [Prompt(f"a sign {i}", 0, i, seed=i) for i in range(2)]
    both = engine.generate(prompts, PARAMS).x0
    single = torch.cat([engine.generate([prompt], PARAMS).x0 for prompt in prompts])
    assert 0 < (both - single).abs().mean() < 0.1 * both.abs().mean()
