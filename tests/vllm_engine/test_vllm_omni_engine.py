"""The vLLM-Omni engine on one rank: the contract, parity with diffusers, whose weights are where, what is refused."""

from dataclasses import replace

import pytest
import torch
from diffusers import QwenImagePipeline
from helpers import CHECKPOINT
from omni_rollout import Params, Prompt
from omni_rollout.engines.vllm_omni.engine import PROBES, _probe
from omni_rollout.testing import check_engine
from omni_sched import INITIAL_NOISE, cps_step, dance_step, sde_step, step_noise
from omni_train.lora import adapter_params, add_lora, base_name, unadapted_params
from omni_train.weights.full import named_weights
from vllm_omni_helpers import MODEL, PARAMS, gap, open_engine, train

TEXTS = ['a red sign that says "AB"', 'a blue sign that says "K7QX"', 'a red sign that says "AB"']
PROMPTS = [Prompt(text, group=0, index=i, seed=i, negative="blurry") for i, text in enumerate(TEXTS)]
FUSED = "transformer_blocks.0.attn.to_qkv.weight"


@pytest.mark.parametrize("rule", [sde_step, cps_step, dance_step])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_engine_keeps_the_contract(engine, net, rule, scale):
    engine.adopt(net.named_parameters())
    params = replace(PARAMS, rule=rule, guidance={"true_cfg_scale": scale}, keep_mean=True)
    check_engine(engine, MODEL, params, net=net, tolerance=1e-5)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_images_without_noise_equal_those_of_the_stock_pipeline(engine, scale):
    pipe = QwenImagePipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    params = Params(8, 32, 96, guidance={"true_cfg_scale": scale})
    trajectory = engine.generate(PROMPTS, params)
    with torch.no_grad():
        media, _ = MODEL.decode(engine.parts, trajectory.x0, trajectory.cond, params)
    noise = step_noise([p.seed for p in PROMPTS], INITIAL_NOISE, (16, 4, 12))
    theirs = pipe(
        [p.text for p in PROMPTS],
        negative_prompt=[p.negative for p in PROMPTS] if scale > 1 else None,
        true_cfg_scale=scale,
        height=32,
        width=96,
        num_inference_steps=8,
        latents=pipe._pack_latents(noise[:, None], 3, 16, 4, 12),
        output_type="pt",
    ).images
    assert theirs.std() > 0.1  # pictures, not grey
    atol = 1e-5 if scale == 1 else 5e-5  # what guidance rescales by is the length of a difference
    torch.testing.assert_close(media["image"].movedim(-1, 1), theirs, rtol=0, atol=atol)


def test_nothing_that_comes_out_is_an_inference_tensor(engine):
    trajectory = engine.generate(PROMPTS, replace(PARAMS, guidance={"true_cfg_scale": 3.0}, keep_mean=True))
    values = [*vars(trajectory).values(), *trajectory.cond.values(), *trajectory.media.values()]
    tensors = [value for value in values if torch.is_tensor(value)]
    assert len(tensors) == 12
    assert not any(tensor.is_inference() for tensor in tensors)


def test_a_group_is_one_forward_a_step_and_its_text_is_encoded_once(engine, monkeypatch):
    forwards, encoded = [], []
    hook = engine.pipeline.transformer.register_forward_pre_hook(lambda module, args: forwards.append(1))
    encode = MODEL.encode
    monkeypatch.setattr(
        MODEL, "encode", lambda parts, prompt, **how: encoded.append(prompt.text) or encode(parts, prompt, **how)
    )
    texts = [f'a white sign that says "{word}"' for word in ("ONCE", "TWICE")]
    prompts = [Prompt(text, group, 4 * group + seed, seed) for group, text in enumerate(texts) for seed in range(4)]
    engine.generate(prompts, PARAMS)
    engine.generate(prompts, PARAMS)
    hook.remove()
    assert encoded == texts
    assert len(forwards) == 2 * PARAMS.num_inference_steps


def test_an_adopted_trainer_trains_the_engine_and_a_sync_moves_nothing(engine, net):
    assert engine.adopt(net.named_parameters()) == sum(p.nbytes for p in net.parameters())
    own = dict(engine.pipeline.transformer.named_parameters())
    attention = net.transformer_blocks[0].attn
    rows = attention.to_q.weight.shape[0]
    for i, layer in enumerate((attention.to_q, attention.to_k, attention.to_v)):
        assert layer.weight.untyped_storage().data_ptr() == own[FUSED].untyped_storage().data_ptr()
        assert layer.weight.data_ptr() == own[FUSED][i * rows].data_ptr()
    before = {name: param.clone() for name, param in own.items()}
    trajectory = engine.generate(PROMPTS, PARAMS)
    train(net, trajectory)
    engine.load_weights(named_weights(net), version=7)
    assert engine.moved_bytes == 0
    after = engine.generate(PROMPTS, PARAMS)
    assert after.weight_version == 7
    assert gap(net, after) <= 1e-5 < 1e-3 < gap(net, trajectory)
    with_gradient = [name for name, param in own.items() if not torch.equal(param, before[name])]
    assert len(with_gradient) > 0.9 * len(own)  # the last block's text stream leads nowhere


def test_every_weight_has_one_name_on_either_side(engine, net):
    views = engine.weights()
    assert views.keys() == dict(net.named_parameters()).keys()
    num_elements = sum(param.numel() for param in engine.pipeline.transformer.parameters())
    assert sum(view.numel() for view in views.values()) == num_elements


def test_weights_that_are_not_adopted_are_copied(engine, net):
    trajectory = engine.generate(PROMPTS, PARAMS)
    train(net, trajectory)
    engine.load_weights(named_weights(net), version=2)
    assert engine.moved_bytes == sum(p.nbytes for p in net.parameters())
    assert gap(net, engine.generate(PROMPTS, PARAMS)) <= 1e-5


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_lora_arrives_merged_on_a_base_that_is_adopted_but_for_what_it_changes(engine, net, scale):
    params = replace(PARAMS, guidance={"true_cfg_scale": scale})
    add_lora(net, MODEL.LORA_TARGETS, rank=4, alpha=8, seed=0)
    adopted = engine.adopt(unadapted_params(net))
    targeted = [name for name in engine.weights() if name not in dict(unadapted_params(net))]
    assert all(name.removesuffix(".weight").endswith(MODEL.LORA_TARGETS) for name in targeted)
    trajectory = engine.generate(PROMPTS, params)
    train(net, trajectory, [p for p in net.parameters() if p.requires_grad])
    with torch.no_grad():
        for p in adapter_params(net, "default"):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    engine.load_weights(named_weights(net), version=1)
    assert engine.moved_bytes == sum(engine.weights()[name].nbytes for name in targeted)
    assert adopted + engine.moved_bytes == sum(view.nbytes for view in engine.weights().values())
    assert gap(net, engine.generate(PROMPTS, params)) <= 1e-5 < gap(net, trajectory)


def test_the_base_is_bit_identical_after_1000_merges(engine, net):
    """Shared where it can be; each sync replaces the last merge, where adding and taking off would lose bits."""
    base = {name: p.clone() for name, p in net.named_parameters()}
    add_lora(net, ("to_q", "to_out.0"), rank=4, alpha=8, seed=0)
    engine.adopt(unadapted_params(net))
    factors = adapter_params(net, "default")
    generator = torch.Generator().manual_seed(0)
    for version in range(1000):
        with torch.no_grad():
            for p in factors[:4]:
                p.copy_(torch.randn(p.shape, generator=generator))
        engine.load_weights(named_weights(net), version=version)
    merged = engine.weights()["transformer_blocks.0.attn.to_q.weight"]
    assert not torch.equal(merged, base["transformer_blocks.0.attn.to_q.weight"])
    for name, param in net.named_parameters():
        if "lora_" not in name:
            assert torch.equal(param, base[base_name(name)])
    with torch.no_grad():
        for p in factors:
            p.zero_()
    engine.load_weights(named_weights(net), version=1000)
    assert all(torch.equal(view, base[name]) for name, view in engine.weights().items())


def test_a_sync_never_writes_over_what_is_adopted(engine, net):
    """As when adapters are added after sharing: each merge would become the base of the next."""
    engine.adopt(net.named_parameters())
    add_lora(net, ("to_q",), rank=4, alpha=8, seed=0)
    before = net.transformer_blocks[0].attn.to_q.weight.clone()
    with pytest.raises(ValueError, match=r"must not replace adopted weights, got .*to_q.weight"):
        engine.load_weights(named_weights(net), version=1)
    assert torch.equal(net.transformer_blocks[0].attn.to_q.weight, before)


def test_a_name_left_out_unknown_or_of_another_shape_is_an_error(engine, net):
    weights = dict(named_weights(net))
    left_out = {name: tensor for name, tensor in weights.items() if name != "proj_out.bias"}
    with pytest.raises(ValueError, match=r"that is not adopted, missing 1 of 141: \['proj_out.bias'\]"):
        engine.load_weights(left_out.items(), version=1)
    with pytest.raises(ValueError, match=r"got proj_out.lora_A.bias .* have no such weight"):
        engine.load_weights([("proj_out.lora_A.bias", weights["proj_out.bias"])], version=1)
    with pytest.raises(ValueError, match=r"got proj_out.bias \(3,\), have"):
        engine.load_weights([("proj_out.bias", torch.zeros(3))], version=1)
    assert engine.weight_version != 1


def test_weights_that_did_not_arrive_are_an_error(engine, net):
    """As when the engine samples with other storage than the one that was written to."""
    layer = engine.pipeline.transformer.proj_out
    before = layer.weight.data

    def swapped_at_the_end():
        yield from named_weights(net)
        layer.weight.data = before.clone().zero_()

    with pytest.raises(RuntimeError, match=r"has other weights than it received.*\['proj_out.weight'\]"):
        engine.load_weights(swapped_at_the_end(), version=1)
    layer.weight.data = before


def test_storage_that_moved_away_from_the_trainer_is_an_error(engine, net):
    engine.adopt(net.named_parameters())
    layer = engine.pipeline.transformer.proj_out
    before = layer.weight.data
    layer.weight.data = before.clone()
    with pytest.raises(RuntimeError, match=r"storage is no longer the trainer's: \['proj_out.weight'\]"):
        engine.load_weights((), version=1)
    layer.weight.data = before


def test_a_trainer_whose_storage_moved_away_from_the_engine_s_is_an_error(engine, net):
    """As when sharding or a cast gives its parameters new storage: the engine would sample with old weights."""
    engine.adopt(net.named_parameters())
    net.proj_out.weight.data = net.proj_out.weight.data + 1
    with pytest.raises(RuntimeError, match=r"storage is no longer the trainer's: \['proj_out.weight'\]"):
        engine.load_weights((), version=1)


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 64, 1000, 4097])
def test_syncs_one_after_the_other_look_at_every_element(numel):
    elements = torch.arange(numel)
    seen = [_probe(elements, version) for version in range(7, 7 + -(-numel // PROBES))]
    assert all(0 < len(probe) <= PROBES for probe in seen)
    assert sorted(torch.cat(seen).tolist()) == elements.tolist()


def test_half_of_a_weight_that_did_not_arrive_is_found_by_the_next_sync_at_the_latest(engine, net):
    with torch.no_grad():
        net.proj_out.weight.add_(1)
    view = engine.weights()["proj_out.weight"].flatten()
    before = view.clone()

    def every_other_element_is_lost():
        yield from named_weights(net)
        view[::2] = before[::2]

    engine.load_weights(every_other_element_is_lost(), version=1)  # looks at the others
    with pytest.raises(RuntimeError, match=r"has other weights than it received.*\['proj_out.weight'\]"):
        engine.load_weights(every_other_element_is_lost(), version=2)


def test_only_what_the_engine_has_loaded_can_be_adopted(engine, net):
    with torch.no_grad():
        net.proj_out.bias[0] += 1
    with pytest.raises(ValueError, match=r"params must equal the engine's weights, but proj_out.bias"):
        engine.adopt(net.named_parameters())
    with pytest.raises(ValueError, match=r"proj_out.bias \(torch.bfloat16\)"):
        engine.adopt([("proj_out.bias", torch.nn.Parameter(net.proj_out.bias.to(torch.bfloat16)))])


def test_an_engine_that_has_adopted_nothing_wants_every_weight(engine):
    with pytest.raises(ValueError, match="missing 141 of 141"):
        engine.load_weights((), version=1)


def test_no_prompts_are_refused(engine):
    with pytest.raises(ValueError, match="prompts must hold at least one prompt"):
        engine.generate([], PARAMS)
    with pytest.raises(ValueError, match="height must be a positive multiple of 16"):
        engine.generate(PROMPTS, replace(PARAMS, height=40))


def test_sleeping_on_a_cpu_changes_nothing(engine):
    before = [p.data_ptr() for p in engine.pipeline.parameters()]
    engine.sleep()
    assert [p.data_ptr() for p in engine.pipeline.parameters()] == before
    engine.wake()


@pytest.mark.parametrize("lora", [False, True])
def test_asleep_the_engine_holds_only_what_is_adopted_and_copies_only_what_no_sync_has(engine, net, lora):
    """What `sleep` does on an accelerator, here from the host to the host."""
    if lora:
        add_lora(net, MODEL.LORA_TARGETS, rank=4, alpha=8, seed=0)
    engine.adopt(unadapted_params(net))
    before, copies = engine.generate(PROMPTS, PARAMS), []
    frozen = {id(t): t for t in [*engine.pipeline.parameters(), *engine.pipeline.buffers()]}
    frozen = [t.nbytes for key, t in frozen.items() if key not in {id(p) for p in engine.net.parameters()}]
    for version in (1, 2):
        engine._free()
        held = {t.untyped_storage().data_ptr() for t in engine.pipeline.parameters() if t.numel()}
        assert held == {p.untyped_storage().data_ptr() for _, p in unadapted_params(net)}
        copies.append([values.data_ptr() for values in engine._kept.values() if not values.is_meta])
        assert sum(values.nbytes for values in engine._kept.values() if not values.is_meta) == sum(frozen)
        assert gap(net, before) <= 1e-5  # the trainer goes on
        for use in (
            lambda: engine.generate(PROMPTS, PARAMS),
            lambda: engine.load_weights((), version=1),
            engine.weights,
        ):
            with pytest.raises(RuntimeError, match="the engine sleeps: call wake"):
                use()
        engine.wake()
        if lora:
            with pytest.raises(RuntimeError, match="has no weights: call load_weights"):
                engine.generate(PROMPTS, PARAMS)
        engine.load_weights(named_weights(net) if lora else (), version=version)
        assert torch.equal(engine.generate(PROMPTS, PARAMS).x0, before.x0)
    assert copies[0] == copies[1]


def test_a_device_that_the_platform_does_not_have_is_refused():
    with pytest.raises(ValueError, match="device must be vLLM-Omni's, cpu, got xpu:1"):
        open_engine(device="xpu:1")
