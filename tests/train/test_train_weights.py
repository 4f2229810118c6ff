"""Weights that leave the trainer mean the same to whoever reads them."""

import json

import pytest
import torch
from omni_train.dist import init_distributed
from omni_train.lora import adapter_params, add_lora, reference
from omni_train.shard import shard
from omni_train.weights import check_weights, load_weights, named_adapter, named_weights, save_weights
from safetensors.torch import load_file, save_file
from torch import nn


def with_lora(tiny_qwen, dtype=torch.float32):
    """A transformer whose adapter has an effect; alpha is twice the rank, so a reader that ignores it is found out."""
    model = tiny_qwen.build().to(dtype)
    add_lora(model, tiny_qwen.targets, rank=4, alpha=8, seed=3)
    generator = torch.Generator().manual_seed(4)
    for p in adapter_params(model, "default")[1::2]:
        p.data = 0.1 * torch.randn(p.shape, generator=generator)
    return model


@pytest.fixture
def alone():
    return init_distributed()


def test_names_and_values_are_those_before_lora(tiny_qwen):
    plain, model = tiny_qwen.build().state_dict(), with_lora(tiny_qwen)
    with reference(model):
        weights = dict(named_weights(model))
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_merged_weights_give_a_plain_model_the_policy(tiny_qwen):
    model, plain = with_lora(tiny_qwen), tiny_qwen.build()
    expected, before = tiny_qwen.run(model), tiny_qwen.run(plain)
    plain.load_state_dict(dict(named_weights(model)))
    torch.testing.assert_close(tiny_qwen.run(plain), expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2


def test_merging_keeps_the_dtype_of_the_base(tiny_qwen):
    model = with_lora(tiny_qwen, torch.bfloat16)
    assert {tensor.dtype for _, tensor in named_weights(model)} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_stream_the_weights_of_one(run_ranks, tiny_qwen, mode):
    expected = dict(named_weights(with_lora(tiny_qwen)))

    def work(dist):
        model = shard(with_lora(tiny_qwen), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        weights = dict(named_weights(model))
        assert weights.keys() == expected.keys()
        return max((weights[name] - expected[name]).abs().max().item() for name in expected)

    assert run_ranks(work) == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp2"])
def test_diffusers_opens_a_saved_adapter(run_ranks, tiny_qwen, tmp_path, mode):
    folder = tmp_path / "adapter"

    def work(dist):
        model = shard(with_lora(tiny_qwen), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        save_weights(model, folder, dist)
        return sorted(path.name for path in folder.iterdir())

    world_size = 1 if mode == "none" else 2
    assert run_ranks(work, world_size) == [["pytorch_lora_weights.safetensors"]] * world_size
    stock = tiny_qwen.build()
    stock.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(tiny_qwen.run(stock), tiny_qwen.run(with_lora(tiny_qwen)), rtol=1e-5, atol=1e-5)
    assert all(name.startswith("transformer.") for name in load_file(folder / "pytorch_lora_weights.safetensors"))


def test_a_stock_pipeline_opens_a_saved_adapter(tiny_qwen, tmp_path, alone):
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=tiny_qwen.build(),
    )
    pipeline.load_lora_weights(tmp_path / "adapter")
    got, expected = tiny_qwen.run(pipeline.transformer), tiny_qwen.run(with_lora(tiny_qwen))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp2"])
def test_diffusers_opens_a_saved_model(run_ranks, tiny_qwen, tmp_path, mode):
    folder = tmp_path / "transformer"

    def work(dist):
        model = shard(tiny_qwen.build(), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        save_weights(model, folder, dist)

    run_ranks(work, 1 if mode == "none" else 2)
    plain = tiny_qwen.build()
    opened = type(plain).from_pretrained(folder)
    assert opened.config.num_layers == 2
    assert torch.equal(tiny_qwen.run(opened), tiny_qwen.run(plain))
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "QwenImageTransformer2DModel"


def test_saved_weights_load_into_a_fresh_model(tiny_qwen, tmp_path, alone):
    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    save_weights(tiny_qwen.build(seed=1), tmp_path / "full", alone)
    model = tiny_qwen.build()
    load_weights(model, tmp_path / "adapter")
    torch.testing.assert_close(tiny_qwen.run(model), tiny_qwen.run(with_lora(tiny_qwen)), rtol=1e-5, atol=1e-5)
    model = tiny_qwen.build()
    load_weights(model, tmp_path / "full")
    assert torch.equal(tiny_qwen.run(model), tiny_qwen.run(tiny_qwen.build(seed=1)))


def test_folders_without_fitting_weights_are_errors(tiny_qwen, tmp_path, alone):
    save_weights(tiny_qwen.build(), tmp_path / "full", alone)
    with pytest.raises(ValueError, match=r"must hold pytorch_lora_weights\.safetensors or"):
        load_weights(tiny_qwen.build(), tmp_path)
    with pytest.raises(ValueError, match="must hold weights of Linear"):
        load_weights(nn.Linear(2, 2), tmp_path / "full")
    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    with pytest.raises(ValueError, match=r"load_lora_adapter\(\).*got Linear"):
        load_weights(nn.Linear(2, 2), tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_weights_are_checked_without_reading_one(tiny_qwen, tmp_path, alone, kind):
    save_weights(with_lora(tiny_qwen) if kind == "adapter" else tiny_qwen.build(), tmp_path / kind, alone)
    with torch.device("meta"):
        model = tiny_qwen.build()
    check_weights(model, tmp_path / kind)
    (file,) = (tmp_path / kind).glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "to_q" in name and "lora_A" not in name)
    for other in ({name: torch.zeros(5, 64)}, {name.replace("to_q", "to_z"): tensors[name].clone()}):
        save_file(tensors | other, file)
        with pytest.raises(ValueError, match=r"does not fit QwenImageTransformer2DModel: \d+ of \d+ tensors, such"):
            check_weights(model, tmp_path / kind)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.name} is no whole safetensors file"):
        check_weights(model, tmp_path / kind)
    with pytest.raises(ValueError, match="folder must hold"):
        check_weights(model, tmp_path)


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(tiny_qwen, tmp_path, alone):
    model = with_lora(tiny_qwen)
    save_weights(model, tmp_path / "adapter", alone)
    for p in adapter_params(model, "default"):
        p.data.fill_(0.5)
    save_weights(model, tmp_path / "adapter", alone)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    tensors = load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors")
    assert tensors["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"].eq(0.5).all()


def test_a_failed_save_keeps_the_old_folder_and_fails_on_every_rank(run_ranks, tiny_qwen, tmp_path, alone, monkeypatch):
    folder = tmp_path / "adapter"
    save_weights(with_lora(tiny_qwen), folder, alone)
    before = (folder / "pytorch_lora_weights.safetensors").read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("omni_train.weights.save_file", full_disk)

    def work(dist):
        with pytest.raises(OSError, match="rank 0 could not write"):
            save_weights(shard(with_lora(tiny_qwen), dist.mesh, mode="ddp"), folder, dist)

    run_ranks(work)
    assert (folder / "pytorch_lora_weights.safetensors").read_bytes() == before


def test_nothing_to_save_is_an_error(tiny_qwen, tmp_path, alone):
    with pytest.raises(ValueError, match=r"one of \['default'\], got 'old'"):
        save_weights(with_lora(tiny_qwen), tmp_path / "x", alone, adapter="old")
    with pytest.raises(ValueError, match=r"to_json_string\(\).*got Linear"):
        save_weights(nn.Linear(2, 2), tmp_path / "x", alone)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_comes_out_scaled(tiny_qwen):
    model = with_lora(tiny_qwen)
    down, up = adapter_params(model, "default")[:2]
    (name_a, a), (name_b, b) = list(named_adapter(model))[:2]
    assert name_a == "transformer_blocks.0.attn.to_q.lora_A.weight"
    assert name_b == "transformer_blocks.0.attn.to_q.lora_B.weight"
    assert torch.equal(a, down)
    assert torch.equal(b, 2 * up)
