"""BAGEL against vLLM-Omni's port of it, whose samples `scripts/record_bagel.py` recorded, and against a plain form."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import REPO
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.models.bagel_sequence import join_streams
from omni_rollout.models.bagel_vision import BagelVision, fit_reference
from omni_train.lora import add_lora
from omni_train.weights.load import load_sharded
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config, Qwen3Model, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

torch.set_num_threads(1)
RECORD = REPO / "tests" / "rollout" / "bagel_of_vllm_omni.safetensors"
with safe_open(RECORD, framework="pt") as record:
    FACTS = json.loads(record.metadata()["facts"])
SIZE = {"height": FACTS["height"], "width": FACTS["width"]}


@pytest.fixture(scope="module")
def model():
    return open_model(ROWS["bagel"].checkpoint())


@pytest.fixture(scope="module")
def engine(model):
    return DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))


@pytest.fixture(scope="module")
def recorded():
    return load_file(RECORD)


RENORM = {"global": 0, "channel": 1, "text_channel": 2}
SMALL = {"vae_max_size": 64.0, "vit_max_size": 56.0}


def asked(options, recorded):
    """Our parameters and prompts for arguments of the port, and a negative prompt and references, if it has some."""
    options = SMALL | options
    negative, scale = options.pop("negative", ""), options.pop("cfg_text_scale", 1.0)
    images = tuple(recorded[f"reference_{i}"] for i in range(options.pop("references", 0)))
    low_high = zip(("cfg_interval_low", "cfg_interval_high"), options.pop("cfg_interval", ()), strict=False)
    if "cfg_renorm_type" in options:
        options["cfg_renorm_type"] = RENORM[options["cfg_renorm_type"]]
    params = Params(FACTS["steps"], **SIZE, guidance_scale=scale, guidance=options | dict(low_high))
    texts = enumerate(FACTS["texts"])
    return params, [Prompt(text, 0, i, seed=i, negative=negative, images=images) for i, text in texts]


@pytest.mark.parametrize("case", FACTS["cases"])
def test_a_batch_of_unequal_texts_ends_where_the_port_ends_with_each_alone(engine, recorded, case):
    params, prompts = asked(FACTS["cases"][case], recorded)
    ours = engine.generate(prompts, params).x0
    torch.testing.assert_close(ours, recorded[case], rtol=0, atol=3e-5)
    others = [recorded[name] for name in FACTS["cases"] if name != case]
    assert all((recorded[case] - x0).abs().max() > 0.05 for x0 in others)  # each case is another


def test_with_references_guidance_is_by_default_that_of_released_editing(engine, recorded):
    params, prompts = asked(FACTS["cases"]["edited"], recorded)
    defaults = replace(params, guidance=SMALL)
    assert torch.equal(engine.generate(prompts, defaults).x0, engine.generate(prompts, params).x0)


def test_pictures_are_those_of_the_port_s_autoencoder(engine, model, recorded):
    images = model.decode(engine.parts, recorded["guided"][:1], {}, Params(1, **SIZE))[0]["image"]
    torch.testing.assert_close(images.movedim(-1, 1), recorded["images"], rtol=0, atol=1e-5)


def test_without_a_negative_prompt_guidance_leads_away_from_no_token(engine, model):
    prompt = Prompt("a cat", 0, 0, seed=0)
    marks = engine.parts.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert len(model.encode(engine.parts, prompt, negative=True)["ids"]) == 0
    assert model.encode(engine.parts, Prompt("", 0, 0, seed=0))["ids"].tolist() == marks
    words = model.encode(engine.parts, Prompt("a cat", 0, 0, seed=0, negative="x"), negative=True)["ids"].tolist()
    assert (words[0], words[-1], len(words)) == (*marks, 3)


def cached_velocity(net, model, parts, x, sigma, text):
    """The velocity [C, h, w] of one sample: the text through a language model with a cache, then the image after it.

    The language model is transformers' Qwen3: BAGEL's but for a bias, 0 here. The softmax is spelled out.
    """
    ours, sizes = net.language_model["model"], model.config["transformer"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    heads, key_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["hidden_size"] // heads
    shape = {name: sizes[name] for name in names} | {"num_key_value_heads": key_heads, "head_dim": width}
    rope = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    reader = Qwen3Model(Qwen3Config(**shape, attention_bias=True, rope_parameters=rope)).eval()
    for layer in reader.layers:
        nn.init.zeros_(layer.self_attn.o_proj.bias)
    own = {name: w for name, w in ours.state_dict().items() if "moe_gen" not in name}
    assert all("o_proj.bias" in name for name in reader.load_state_dict(own, strict=False).missing_keys)
    cond = model.encode(parts, Prompt(text, 0, 0, seed=0))
    cache = reader(input_ids=cond["ids"][None], use_cache=True).past_key_values
    h, w = x.shape[-2] // 2, x.shape[-1] // 2
    image = net._embed(x[None], sigma[None])
    marks = ours.embed_tokens(cond["marks"])[None]
    cos, sin = reader.rotary_emb(image, torch.full((1, h * w + 2), len(cond["ids"])))

    def split(name, layer, count):
        both = [getattr(layer, name)(marks_in), getattr(layer, f"{name}_moe_gen")(image_in)]
        return torch.cat(both, dim=1).view(1, h * w + 2, count, width).transpose(1, 2)

    def normed(name, layer, states):
        both = [getattr(layer, name)(states[:, :, :2]), getattr(layer, f"{name}_moe_gen")(states[:, :, 2:])]
        return torch.cat(both, dim=2)

    for i, layer in enumerate(ours.layers):
        attention = layer.self_attn
        marks_in, image_in = layer.input_layernorm(marks), layer.input_layernorm_moe_gen(image)
        query = normed("q_norm", attention, split("q_proj", attention, heads))
        key = normed("k_norm", attention, split("k_proj", attention, key_heads))
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        key = torch.cat([cache.layers[i].keys, key], dim=2).repeat_interleave(heads // key_heads, dim=1)
        value = torch.cat([cache.layers[i].values, split("v_proj", attention, key_heads)], dim=2)
        weights = torch.softmax(query @ key.transpose(-1, -2) / width**0.5, dim=-1)
        out = (weights @ value.repeat_interleave(heads // key_heads, dim=1)).transpose(1, 2).flatten(2)
        marks = marks + attention.o_proj(out[:, :2])
        image = image + attention.o_proj_moe_gen(out[:, 2:])
        marks = marks + layer.mlp(layer.post_attention_layernorm(marks))
        image = image + layer.mlp_moe_gen(layer.post_attention_layernorm_moe_gen(image))
    patches = net.llm2vae(ours.norm_moe_gen(image)).view(h, w, 2, 2, x.shape[0])
    return patches.permute(4, 0, 2, 1, 3).reshape(x.shape)


@pytest.mark.parametrize(  # what torchvision makes of the transforms of released code
    ("size", "clean", "seen"),
    [
        ((300, 300), (512, 512), (518, 518)),
        ((768, 1024), (768, 1024), (728, 980)),
        ((1024, 683), (1024, 688), (980, 658)),
        ((2000, 3000), (688, 1024), (658, 980)),
        ((70, 50), (720, 512), (714, 518)),
        ((40, 90), (448, 1024), (434, 980)),
        ((100, 1000), (96, 1024), (98, 980)),
    ],
)
def test_references_have_the_sizes_of_released_code(size, clean, seen):
    image = fit_reference(torch.zeros(*size, 3, dtype=torch.uint8), unit=16, min_side=512, max_side=1024)
    assert image.shape == (*clean, 3)
    assert fit_reference(image, unit=14, min_side=224, max_side=980).shape == (*seen, 3)


@torch.no_grad()
def test_a_square_picture_of_full_size_is_seen_as_transformers_siglip_sees_it():
    """Its patches lie color by color, in released files pixel by pixel."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    stock = SiglipVisionModel(SiglipVisionConfig(**sizes, num_hidden_layers=2, vision_use_head=False)).eval()
    for weight in stock.parameters():
        nn.init.normal_(weight, std=0.2)
    ours = BagelVision(**sizes, num_hidden_layers=3, width=48)
    weights = stock.state_dict()
    patches = "embeddings.patch_embedding.weight"
    weights[patches] = weights[patches].permute(0, 2, 3, 1).flatten(1)
    ours.vit_model["vision_model"].load_state_dict(weights)
    picture = torch.rand(3, 56, 56) * 2 - 1
    tokens, seen = [], ours.connector["fc1"].register_forward_pre_hook(lambda module, states: tokens.extend(states))
    out = ours(picture)
    seen.remove()
    torch.testing.assert_close(tokens[0], stock(picture[None]).last_hidden_state[0], rtol=0, atol=1e-5)
    led = ours.connector["fc2"](nn.GELU("tanh")(ours.connector["fc1"](tokens[0])))
    torch.testing.assert_close(out, led + ours.vit_pos_embed["pos_embed"])


@torch.no_grad()
def test_references_see_what_is_before_them_and_are_seen_by_all_after_them(engine, model, recorded):
    params, (prompt, *_) = asked(FACTS["cases"]["two references"], recorded)
    cond, before = engine.generate([prompt], params).cond, []
    layer = engine.net.language_model["model"].layers[-1]

    def keep(module, inputs):
        text, image, _, segments, _ = inputs
        before.append(join_streams(text[:, None], image[:, None], segments)[0, 0])

    hook = layer.register_forward_pre_hook(keep)
    starts = {"": None, "reference_0": 0, "seen_0": 10, "reference_1": 20, "seen_1": 34, "ids": 48}
    for name in starts:
        other = {name: cond[name].flip(-1)} if name else {}
        model.predict_velocity(engine.net, torch.ones(1, 16, 6, 4), torch.full((1,), 0.5), cond | other, params)
    hook.remove()
    for states, start in list(zip(before, starts.values(), strict=True))[1:]:
        changed = (states - before[0]).abs().amax(dim=1) > 1e-5
        assert changed.nonzero().flatten().tolist() == list(range(start, len(changed)))


@torch.no_grad()
def test_one_forward_of_text_and_image_equals_an_image_after_a_cached_text(engine, model):
    x = torch.randn(3, 16, 6, 4, generator=torch.Generator().manual_seed(0))
    sigma, prompts = torch.tensor([0.9, 0.5, 0.1]), [Prompt(t, 0, i, seed=i) for i, t in enumerate(FACTS["texts"])]
    params = Params(1, **SIZE)
    together = model.predict_velocity(engine.net, x, sigma, engine.generate(prompts, params).cond, params)
    for i, prompt in enumerate(prompts):
        alone = cached_velocity(engine.net, model, engine.parts, x[i], sigma[i], prompt.text)
        torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["unguided", "two references"])
def test_recomputed_layers_give_the_same_gradients(model, engine, recorded, case):
    params, prompts = asked(FACTS["cases"][case], recorded)
    cond = engine.generate(prompts[:1], replace(params, num_inference_steps=1)).cond
    gradients = []
    for recompute in (False, True):
        net = model.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)
        if recompute:
            net.enable_gradient_checkpointing()
            net.language_model["model"].layers[0].mlp.register_forward_hook(lambda *_: gradients.append(None))
        velocity = model.predict_velocity(net, torch.ones(1, 16, 6, 4), torch.full((1,), 0.5), cond, Params(1, **SIZE))
        velocity.square().mean().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    assert gradients[1:-1] == [None, None]  # the layer has run twice
    assert gradients[0].keys() == gradients[-1].keys()
    assert all(torch.equal(gradient, gradients[-1][name]) for name, gradient in gradients[0].items())


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose files may be replaced, but not written into."""
    return shutil.copytree(ROWS["bagel"].checkpoint(), tmp_path / "model", copy_function=os.link)


def refusal(folder):
    with pytest.raises(ValueError) as refused:
        open_model(folder).check_files()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("file", ["config.json", "llm_config.json", "vit_config.json", "tokenizer_config.json"])
def test_a_missing_configuration_is_named(folder, file):
    (folder / file).unlink()
    named = "model_index.json" if file == "config.json" else file  # a folder without either is no BAGEL
    assert f"{named} is missing" in refusal(folder)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors"])
def test_missing_and_cut_weights_are_named(folder, file):
    whole = (folder / file).read_bytes()
    (folder / file).unlink()
    assert f"{file} is missing" in refusal(folder)
    (folder / file).write_bytes(whole[:-1])
    assert f"{file} is no whole safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_hidden_layers": 4}, "lacks 28 weights"),
        ({"num_hidden_layers": 2}, "has 28 weights that its configuration lacks"),
        ({"hidden_size": 32}, "has the shape"),
        ({"num_key_value_heads": 3}, "k_proj.weight of "),
        ({"hidden_act": "gelu"}, "hidden_act of "),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of "),
    ],
)
def test_a_language_model_of_another_kind_is_refused(folder, entries, named):
    config = json.loads((folder / "llm_config.json").read_text("utf-8"))
    (folder / "llm_config.json").unlink()
    (folder / "llm_config.json").write_text(json.dumps(config | entries), "utf-8")
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"patch_size": "14"}, "patch_size of "),
        ({"num_attention_heads": 3}, "no BagelVision can be made of "),
        ({"hidden_act": "gelu"}, "hidden_act of "),
    ],
)
def test_a_vision_transformer_of_another_kind_is_refused(folder, entries, named):
    config = json.loads((folder / "vit_config.json").read_text("utf-8"))
    (folder / "vit_config.json").unlink()
    (folder / "vit_config.json").write_text(json.dumps(config | entries), "utf-8")
    assert named in refusal(folder)


def test_what_writes_text_may_be_there_and_nothing_else(folder):
    weights = load_file(folder / "ema.safetensors")
    assert "language_model.lm_head.weight" in weights
    open_model(folder).check_files()
    (folder / "ema.safetensors").unlink()
    save_file(weights | {"language_model.model.extra": torch.ones(1)}, folder / "ema.safetensors")
    assert "such as language_model.model.extra" in refusal(folder)


def test_missing_weights_of_what_sees_references_are_named(folder):
    weights = load_file(folder / "ema.safetensors")
    (folder / "ema.safetensors").unlink()
    kept = {name: weight for name, weight in weights.items() if not name.startswith("connector.fc1")}
    save_file(kept, folder / "ema.safetensors")
    with pytest.raises(ValueError, match=r"lacks 2 weights, such as connector\.fc1\.bias"):
        open_model(folder).load(device="cpu", dtype=torch.float32)


def test_a_tokenizer_without_the_marks_is_refused(folder):
    file = folder / "tokenizer.json"
    text = file.read_text("utf-8").replace("<|vision_end|>", "<|other|>")
    file.unlink()
    file.write_text(text, "utf-8")
    config = (folder / "tokenizer_config.json").read_text("utf-8").replace("<|vision_end|>", "<|other|>")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(config, "utf-8")
    with pytest.raises(ValueError, match=r"lacks \['<\|vision_end\|>'\]"):
        open_model(folder).load(device="cpu", dtype=torch.float32)


def test_frequencies_of_positions_stay_float32_under_adapters_in_bfloat16(model):
    """As where no adapter is there while the weights are read, on one rank: sharded ranks sample the same."""
    net = model.empty_net(buffers=True)
    add_lora(net, model.LORA_TARGETS, rank=2, alpha=2, seed=0)
    loaded = load_sharded(net, model.weight_files(), None, param_dtype=torch.bfloat16)
    plain = dict(model.load_net(device="cpu", dtype=torch.bfloat16).named_buffers())
    assert {name: buffer.dtype for name, buffer in loaded.named_buffers()} == dict.fromkeys(plain, torch.float32)
    assert all(torch.equal(buffer, plain[name]) for name, buffer in loaded.named_buffers())
