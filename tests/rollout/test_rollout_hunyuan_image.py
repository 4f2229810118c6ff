"""HunyuanImage-3.0 against vLLM-Omni's port, whose samples a script recorded, and against transformers' layers."""

import json
import os
import shutil

import pytest
import torch
from build_tiny_models import draw_weights
from helpers import REPO
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.models.hunyuan_image import buckets
from omni_rollout.models.hunyuan_image_moe import mm_experts
from omni_rollout.models.hunyuan_image_vae import HunyuanImageVAE
from omni_train.lora import add_lora
from omni_train.weights.full import save_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_runs import place
from transformers import HunYuanMoEV1Config
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1DecoderLayer

torch.set_num_threads(1)
RECORD = REPO / "tests" / "rollout" / "hunyuan_image_of_vllm_omni.safetensors"
with safe_open(RECORD, framework="pt") as record:
    FACTS = json.loads(record.metadata()["facts"])
SIZE = {"height": 48, "width": 80}


@pytest.fixture(scope="module")
def model():
    return open_model(ROWS["hunyuan-image"].checkpoint())


@pytest.fixture(scope="module")
def engine(model):
    return DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))


@pytest.fixture(scope="module")
def recorded():
    return load_file(RECORD)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose files may be replaced, but not written into."""
    return shutil.copytree(ROWS["hunyuan-image"].checkpoint(), tmp_path / "model", copy_function=os.link)


def rewrite(file, **entries):
    content = json.loads(file.read_text("utf-8")) | entries
    file.unlink()
    file.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("case", FACTS["cases"])
def test_a_batch_of_unequal_texts_ends_where_the_port_ends_with_each_alone(folder, engine, recorded, case):
    asked = FACTS["cases"][case]
    height, width = asked["size"]
    params = Params(FACTS["steps"], height, width, guidance_scale=asked.get("scale", 1.0))
    if "template" in asked:
        rewrite(folder / "generation_config.json", sequence_template=asked["template"])
        engine = DiffusersEngine(open_model(folder), engine.parts)
    prompts = [Prompt(text, 0, i, seed=i) for i, text in enumerate(FACTS["texts"])]
    torch.testing.assert_close(engine.generate(prompts, params).x0, recorded[case], rtol=0, atol=3e-5)


def test_pictures_and_codes_are_those_of_the_port_s_autoencoder(engine, model, recorded):
    params = Params(1, **SIZE)
    images = model.decode(engine.parts, recorded["guided"][:1], {}, params)[0]["image"]
    torch.testing.assert_close(images.movedim(-1, 1), recorded["images"], rtol=0, atol=1e-5)
    code = model.encode_media(engine.parts, {"image": images}, params) / 0.5
    torch.testing.assert_close(code, recorded["code"], rtol=0, atol=2e-5)


@torch.no_grad()
def test_frames_that_a_latent_stands_for_are_those_of_the_port(recorded):
    vae = HunyuanImageVAE(16, [32] * 5, **FACTS["vae"]).eval()
    draw_weights(vae)
    torch.testing.assert_close(vae.decode(recorded["latents"])[0], recorded["decoded"], rtol=0, atol=3e-5)
    code = vae.encode(recorded["decoded"]).latent_dist.mode()
    torch.testing.assert_close(code, recorded["encoded"], rtol=0, atol=3e-5)


@torch.no_grad()
def test_a_layer_is_that_of_transformers_for_the_released_names_of_its_weights(engine):
    """Fused queries, keys and values by key heads; per expert what goes up, and below it its gate."""
    block, heads, key_heads, width = engine.net.model.layers[0], 4, 2, 16
    own = block.state_dict()
    qkv = own["self_attn.qkv_proj.weight"].view(key_heads, heads // key_heads + 2, width, -1)
    parts = zip("qkv", qkv.split([heads // key_heads, 1, 1], dim=1), strict=True)
    weights = {f"self_attn.{name}_proj.weight": part.flatten(0, 2) for name, part in parts}
    weights |= {name: w for name, w in own.items() if "norm" in name or "o_proj" in name or "gate.wg" in name}
    both = [own[f"mlp.experts.{e}.gate_and_up_proj.weight"] for e in range(4)]
    weights["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(w.chunk(2)[::-1]) for w in both])
    weights["mlp.experts.down_proj"] = torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in range(4)])
    up, gate = own["mlp.shared_mlp.gate_and_up_proj.weight"].chunk(2)
    weights |= {"mlp.shared_mlp.up_proj.weight": up, "mlp.shared_mlp.gate_proj.weight": gate}
    weights["mlp.shared_mlp.down_proj.weight"] = own["mlp.shared_mlp.down_proj.weight"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": heads, "head_dim": width}
    sizes |= {"num_key_value_heads": key_heads, "num_experts": 4, "moe_topk": 2, "rms_norm_eps": 1e-5}
    stock = HunYuanMoEV1DecoderLayer(HunYuanMoEV1Config(**sizes, attn_implementation="sdpa"), 0).eval()
    stock.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 25, 64, generator=generator)
    rope = engine.net._rope(torch.tensor([6, 3]), 6, 3, 5)
    words = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    words = torch.cat([words, torch.ones(2, 19, dtype=torch.bool)], dim=1)[:, None, None]
    before, around = words[..., :10] & torch.ones(10, 10, dtype=torch.bool).tril(), words
    visible = torch.cat(
        [torch.cat([before, torch.zeros(2, 1, 10, 15, dtype=torch.bool)], -1), words.expand(-1, -1, 15, -1)], 2
    )
    theirs = stock(states, attention_mask=visible, position_embeddings=rope)
    torch.testing.assert_close(block(states, rope, 10, before, around, None)[0], theirs, rtol=0, atol=1e-5)


def test_the_product_of_experts_and_its_gradients_are_those_of_each_expert_alone():
    generator = torch.Generator().manual_seed(0)
    rows, ends = torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.tensor([3, 3, 8, 9])
    weights = [torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in ends]
    given = [rows.requires_grad_(), *(weight.requires_grad_() for weight in weights)]
    alone = torch.cat([part @ w.t() for part, w in zip(rows.split([3, 0, 5, 1]), weights, strict=True)])
    together = mm_experts(rows, ends, weights)
    assert torch.equal(together, alone)
    grad = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    wanted, found = torch.autograd.grad(alone, given, grad), torch.autograd.grad(together, given, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[2].count_nonzero() == 0  # of an expert that no row has chosen: ranks must have equally many gradients


def test_no_token_is_dropped_where_all_choose_the_same_experts(model, engine):
    """With a capacity a sample would lose experts to the others of its batch."""
    net = model.load_net(device="cpu", dtype=torch.float32)
    for layer in net.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.wg.weight)
    cond = engine.condition([Prompt("x", 0, i, seed=i) for i in range(4)], Params(1, **SIZE))
    x = torch.randn(4, 16, 3, 5, generator=torch.Generator().manual_seed(0))
    chosen = []
    net.routing.register_forward_hook(lambda module, args, out: chosen.append(torch.cat(out, dim=1)))
    together, alone = (
        model.predict_velocity(
            net, x[rows], torch.full((len(x[rows]),), 0.5), {n: t[rows] for n, t in cond.items()}, Params(1, **SIZE)
        )
        for rows in (slice(0, 4), slice(0, 1))
    )
    assert chosen[0].unique().numel() == 2
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_export_has_released_names_and_takes_the_place_of_released_weights(folder, model, tmp_path):
    net = model.load_net(device="cpu", dtype=torch.float32)
    for weight in net.parameters():
        weight.mul_(1.1)
    save_weights(net, tmp_path / "weights", place())
    (exported,) = (load_file(file) for file in (tmp_path / "weights").rglob("*.safetensors"))
    files = {file: load_file(file) for file in folder.glob("*.safetensors")}
    assert exported.keys() < {name for weights in files.values() for name in weights}
    assert "model.layers.1.mlp.experts.3.gate_and_up_proj.weight" in exported
    for file, weights in files.items():
        file.unlink()
        save_file({name: exported.get(name, weight) for name, weight in weights.items()}, file)
    again = open_model(folder).load_net(device="cpu", dtype=torch.float32)
    assert all(torch.equal(weight, other) for weight, other in zip(net.parameters(), again.parameters(), strict=True))


def test_experts_take_no_adapters(model):
    with pytest.raises(ValueError, match=r"must name linear layers, got .*down_proj, a ParameterDict"):
        add_lora(model.empty_net(), ["down_proj"], rank=2, alpha=2, seed=0)


def test_sizes_are_those_of_the_released_tokenizer():
    """33 ratios from 1:4 to 4:1 about 1024 x 1024 pixels, four of displays, and four smaller squares."""
    sizes = buckets(1024)
    assert len(sizes) == 41
    assert [sizes[size] for size in ((512, 2048), (1024, 1024), (2048, 512))] == [0, 16, 32]
    assert [sizes[size] for size in ((1024, 768), (1280, 720), (768, 1024), (720, 1280))] == [33, 34, 35, 36]
    assert [sizes[side, side] for side in (512, 640, 768, 896)] == [16] * 4
    ratios = [height / width for height, width in list(sizes)[:33]]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        ("config.json", {"use_qk_norm": False}, "use_qk_norm of .*config.json must be True, got False"),
        ("config.json", {"cfg_distilled": True}, "cfg_distilled of .* must be False, got True"),
        ("config.json", {"moe_topk": [2, 1]}, "moe_topk of .* must be of type int"),
        ("config.json", {"moe_topk": 1}, "moe_topk of .* must be > 1"),
        ("config.json", {"vae": None}, "vae of .* must be an object, got None"),
        ("config.json", {"num_experts": 5}, "lacks 6 weights, such as model.layers.0.mlp.experts.4.down_proj.weight"),
        ("generation_config.json", {"sequence_template": "chat"}, "must be pretrain or instruct, got 'chat'"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(folder, file, entries, named):
    rewrite(folder / file, **entries)
    with pytest.raises(ValueError, match=named):
        open_model(folder).check_files()
