"""The vLLM-Omni engine with linear layers in 8 bits: what it samples, and that a sync quantizes anew what it brings."""

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Prompt
from omni_train.lora import add_lora
from omni_train.weights.full import named_weights
from vllm_omni_helpers import MODEL, PARAMS, check_quantized, equal, load_half, open_quantized, values


@pytest.fixture(scope="module", params=["fp8", "int8"])
def engine(request):
    engine = open_quantized(MODEL, request.param)
    yield engine
    engine.close()


@pytest.fixture
def net(engine):
    """A trainer's net of its own; afterwards the engine has the checkpoint's weights again."""
    yield load_half(MODEL)
    engine.adopt(())
    engine.load_weights(named_weights(load_half(MODEL)), version=0)


def test_it_samples_near_the_trainer_and_a_sync_of_its_own_weights_changes_no_bit(engine, net):
    check_quantized(engine, MODEL, net, ROWS["qwen-image"])


def test_a_sync_quantizes_what_lora_has_merged(engine, net):
    """Weights are the nearest numbers of 8 bits, by a scale with which the largest fits, in int8 for each row."""
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
    weight = own[f"{place}.to_qkv.weight"]
    found = weight.t().float() * scale
    assert not torch.equal(values(engine)[f"{place}.to_qkv.weight"], before[f"{place}.to_qkv.weight"])
    if weight.dtype == torch.int8:
        torch.testing.assert_close(scale, fused.abs().amax(1, keepdim=True) / 127)
        half = scale / 2
    else:  # 3 bits after the point: half a step is 1/16 of a number, or of the smallest normal one, 2^-6
        torch.testing.assert_close(scale, fused.abs().max().view(1) / 448)
        half = fused.abs().clamp(min=2**-6 * scale.item()) / 16
    assert ((found - fused).abs() <= half + 1e-6 * fused.abs()).all()


def test_weights_that_slept_come_with_the_next_sync(engine, net):
    before = values(engine)
    engine._free()
    engine.wake()
    engine.load_weights(named_weights(net), version=1)
    assert equal(values(engine), before)


def test_a_weight_that_is_left_out_or_of_another_shape_is_an_error(engine, net):
    weights, name = dict(named_weights(net)), "transformer_blocks.0.attn.to_k.weight"
    with pytest.raises(ValueError, match=rf"missing 1 of {len(weights)}: \['{name}'\]"):
        engine.load_weights(((key, t) for key, t in weights.items() if key != name), version=1)
    with pytest.raises(ValueError, match=rf"got {name} \(5, 128\), have \(128, 128\)"):
        engine.load_weights(((key, t[:5] if key == name else t) for key, t in weights.items()), version=1)


def test_images_are_those_of_one_sample_at_a_time_but_for_the_scale_of_activations(engine):
    """Without CUTLASS's kernels a layer's inputs in fp8 have one scale for the batch."""
    prompts = [Prompt(f"a sign {i}", 0, i, seed=i) for i in range(2)]
    both = engine.generate(prompts, PARAMS).x0
    single = torch.cat([engine.generate([prompt], PARAMS).x0 for prompt in prompts])
    assert (both - single).abs().mean() < 0.1 * both.abs().mean()
