"""Weights that leave the trainer mean the same to whoever reads them."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from helpers import sampled
from omni_train.lora import adapter as use_adapter
from omni_train.lora import adapter_params, add_lora, base_name, reference
from omni_train.planned import Meter
from omni_train.shard import shard
from omni_train.weights import full
from omni_train.weights.adapters import load_adapter
from omni_train.weights.full import (
    check_weights,
    load_weights,
    named_weights,
    save_weights,
    saved_files,
)
from safetensors import safe_open
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


@pytest.mark.parametrize("group_bytes", [2**28, 20_000])
def test_shards_are_gathered_in_groups_by_one_collective_each(run_ranks, tiny_qwen, monkeypatch, group_bytes):
    """Also where ranks have other numbers of rows."""
    monkeypatch.setattr(full, "GROUP_BYTES", group_bytes)
    sizes = [tensor.nbytes for _, tensor in named_weights(with_lora(tiny_qwen, torch.bfloat16))]

    def work(dist):
        model = shard(with_lora(tiny_qwen), dist.mesh, mode="fsdp2", block_names=(), compute_dtype=torch.bfloat16)
        alone = {name: value.full_tensor() for name, value in model.state_dict().items()}
        calls, send = [], torch.distributed.all_gather
        monkeypatch.setattr(torch.distributed, "all_gather", lambda *args, **how: calls.append(send(*args, **how)))
        with reference(model):
            found = dict(named_weights(model))
        assert all(torch.equal(found[base_name(name)], alone[name]) for name in alone if "lora_" not in name)
        return len(calls), len(found)

    for calls, weights in run_ranks(work, 3):
        assert calls == 1 if group_bytes > sum(sizes) else 1 < calls < weights


@pytest.mark.parametrize("mode", sampled(["ddp", "fsdp2"], 1))
def test_two_ranks_stream_the_weights_of_one(run_ranks, tiny_qwen, mode):
    expected = dict(named_weights(with_lora(tiny_qwen)))

    def work(dist):
        model = shard(with_lora(tiny_qwen), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        weights = dict(named_weights(model))
        assert weights.keys() == expected.keys()
        assert all(weights[name].dtype == expected[name].dtype for name in expected)
        return max((weights[name] - expected[name]).abs().max().item() for name in expected)

    assert run_ranks(work) == [0.0, 0.0]


@pytest.mark.parametrize("mode", sampled(["none", "ddp", "fsdp2"], 1))
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


@pytest.mark.parametrize("mode", sampled(["none", "ddp", "fsdp2"], 1))
def test_diffusers_opens_a_saved_model(run_ranks, tiny_qwen, tmp_path, mode):
    folder = tmp_path / "weights"

    def work(dist):
        model = shard(tiny_qwen.build(), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        save_weights(model, folder, dist)

    run_ranks(work, 1 if mode == "none" else 2)
    plain = tiny_qwen.build()
    opened = type(plain).from_pretrained(folder, subfolder="transformer")
    assert opened.config.num_layers == 2
    assert torch.equal(tiny_qwen.run(opened), tiny_qwen.run(plain))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "QwenImageTransformer2DModel"


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
    for part in ("transformer", "transformer_2"):
        match = rf"must hold pytorch_lora_weights.*, adapter_model.* or {part}/diffusion_pytorch_model\.safetensors"
        with pytest.raises(ValueError, match=match):
            load_weights(tiny_qwen.build(), tmp_path / ("full" if part != "transformer" else ""), part=part)
    with pytest.raises(ValueError, match="must hold all weights of Linear, lacks 2 such as bias"):
        load_weights(nn.Linear(2, 2), tmp_path / "full")
    net = nn.Sequential(nn.Linear(2, 2))
    add_lora(net, ["0"], rank=1, alpha=1, seed=0)
    save_weights(net, tmp_path / "adapter", alone)
    with pytest.raises(ValueError, match=r"load_lora_adapter\(\).*got Sequential"):
        load_weights(nn.Sequential(nn.Linear(2, 2)), tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_weights_are_checked_without_reading_one(tiny_qwen, tmp_path, alone, kind):
    save_weights(with_lora(tiny_qwen) if kind == "adapter" else tiny_qwen.build(), tmp_path / kind, alone)
    with torch.device("meta"):
        model = tiny_qwen.build()
    check_weights(model, tmp_path / kind)
    (file,) = (tmp_path / kind).rglob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "to_q" in name and "lora_A" not in name)
    for other in ({name: torch.zeros(5, 64)}, {name.replace("to_q", "to_z"): tensors[name].clone()}):
        save_file(tensors | other, file)
        with pytest.raises(ValueError, match=rf"{file.name} (does not fit|must hold .* of) .*to_"):
            check_weights(model, tmp_path / kind)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.name} is no whole safetensors file"):
        check_weights(model, tmp_path / kind)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ValueError, match=f"{file.name} must be the file itself, got its pointer of Git LFS: `git lfs "):
        check_weights(model, tmp_path / kind)
    with pytest.raises(ValueError, match="folder must hold"):
        check_weights(model, tmp_path)


def test_no_host_holds_more_than_a_tensor_while_weights_are_written(run_ranks, tmp_path, monkeypatch):
    """Sixteen of 256 KB, a number and a mask, which lie behind the wider ones; the file is as safetensors has it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(16)])
            self.register_buffer("count", torch.tensor(7))

        def to_json_string(self):
            return "{}"

    def work(dist):
        torch.manual_seed(0)
        net = shard(Net(), dist.mesh, mode="fsdp2")
        peaks = []
        for file_bytes in (2**30, 2**20):
            monkeypatch.setattr("omni_train.weights.full.FILE_BYTES", file_bytes)
            with Meter(torch.device("cpu")) as memory:
                save_weights(net, tmp_path / ("weights" if file_bytes == 2**30 else "dealt"), dist)
            peaks.append(memory.peaks[""] / 2**18)
        return peaks

    for peaks in run_ranks(work):
        assert max(peaks) < 8  # of 16: one gathered, one written, and gloo's threads may hold others a moment longer
    assert len(saved_files(tmp_path / "dealt")) == 2
    torch.manual_seed(0)
    expected = Net().state_dict()
    file = tmp_path / "weights/transformer/diffusion_pytorch_model.safetensors"
    found = load_file(file)
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in expected.items()}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_large_weights_are_files_of_several_ranks_that_diffusers_opens(run_ranks, tiny_qwen, tmp_path, monkeypatch):
    """Of three; also where the second does not see the folder of the first, and where the disk of the last is full."""
    monkeypatch.setattr("omni_train.weights.full.FILE_BYTES", 100_000)
    folder = tmp_path / "weights"

    def work(dist):
        model = shard(tiny_qwen.build(), dist.mesh, mode="fsdp2", block_names=tiny_qwen.block_names)
        save_weights(tiny_qwen.build(seed=1), folder, dist)  # what is to be replaced
        save_weights(model, folder, dist)
        save_weights(model, tmp_path / f"home-{dist.rank % 2}" / "weights", dist)
        before = sorted(path.read_bytes() for path in folder.rglob("*.*"))
        monkeypatch.setattr("torch.Tensor.cpu", no_space) if dist.rank == 2 else None
        with pytest.raises(OSError, match=r"weights could not be written: rank 2: .*No space left"):
            save_weights(tiny_qwen.build(seed=1), folder, dist)
        assert sorted(path.read_bytes() for path in folder.rglob("*.*")) == before

    def no_space(tensor):
        raise OSError(28, "No space left on device")

    run_ranks(work, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home-0", "weights"]
    plain = tiny_qwen.build()
    for home, number in ((folder, 3), (tmp_path / "home-0" / "weights", 2)):
        names = [f"diffusion_pytorch_model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]
        sizes = [sum(t.nbytes for t in load_file(home / "transformer" / name).values()) for name in names]
        assert max(sizes) - min(sizes) < max(p.nbytes for p in plain.parameters())
        index = json.loads((home / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        assert {path.name for path in (home / "transformer").iterdir()} == {
            "config.json", "diffusion_pytorch_model.safetensors.index.json", *names,
        }  # fmt: skip
        opened = type(plain).from_pretrained(home, subfolder="transformer")
        load_weights(ours := tiny_qwen.build(seed=2), home)
        for found in (opened, ours):
            state = found.state_dict()
            assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("mode", sampled(["ddp", "fsdp2"], 1))
def test_a_failed_save_keeps_the_old_folder_and_fails_on_every_rank(
    run_ranks, tiny_qwen, tmp_path, alone, monkeypatch, mode
):
    folder = tmp_path / "adapter"
    save_weights(with_lora(tiny_qwen), folder, alone)
    before = (folder / "pytorch_lora_weights.safetensors").read_bytes()

    class FullDisk(io.BytesIO):
        def write(self, data):
            if self.tell():  # after the header
                raise OSError(28, "No space left on device")
            return super().write(data)

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode="r", **how: FullDisk() if mode == "wb" else opened(path, mode, **how)
    )

    def work(dist):
        model = shard(with_lora(tiny_qwen), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        with pytest.raises(OSError, match=r"adapter could not be written: rank 0: .*No space left on device"):
            save_weights(model, folder, dist)

    run_ranks(work)
    assert (folder / "pytorch_lora_weights.safetensors").read_bytes() == before


def test_nothing_to_save_is_an_error(tiny_qwen, tmp_path, alone):
    with pytest.raises(ValueError, match=r"one of \['default'\], got 'old'"):
        save_weights(with_lora(tiny_qwen), tmp_path / "x", alone, adapter="old")
    with pytest.raises(ValueError, match=r"to_json_string\(\).*got Linear"):
        save_weights(nn.Linear(2, 2), tmp_path / "x", alone)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["transformer", "unet"])
@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_weights_lie_where_a_pipeline_looks_for_the_part(tiny_qwen, tmp_path, alone, kind, part):
    model = with_lora(tiny_qwen) if kind == "adapter" else tiny_qwen.build(seed=1)
    save_weights(model, tmp_path / kind, alone, part=part)
    names = {str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*.*")}
    if kind == "adapter":
        assert names == {"pytorch_lora_weights.safetensors"}
        assert all(name.startswith(f"{part}.") for name in load_file(tmp_path / kind / min(names)))
    else:
        assert names == {f"{part}/config.json", f"{part}/diffusion_pytorch_model.safetensors"}
    other = tiny_qwen.build()
    check_weights(other, tmp_path / kind, part=part)
    load_weights(other, tmp_path / kind, part=part)
    torch.testing.assert_close(tiny_qwen.run(other), tiny_qwen.run(model), rtol=1e-5, atol=1e-5)


def test_the_folder_of_a_pipeline_is_a_folder_of_full_weights(tiny_qwen, tmp_path, alone):
    """Also one whose transformer is in several files, as large ones are."""
    tiny_qwen.build(seed=1).save_pretrained(tmp_path / "transformer", max_shard_size="100KB")
    model = tiny_qwen.build()
    load_weights(model, tmp_path)
    assert torch.equal(tiny_qwen.run(model), tiny_qwen.run(tiny_qwen.build(seed=1)))
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_files_may_be_read_by_whom_the_umask_lets(tiny_qwen, tmp_path, alone, umask, kind):
    before = os.umask(umask)
    try:
        save_weights(with_lora(tiny_qwen) if kind == "adapter" else tiny_qwen.build(), tmp_path / kind, alone)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / kind).rglob("*.*")}
    assert modes == {0o666 & ~umask}


def fresh(tiny_qwen, *, rank=4, alpha=8.0, targets=None, name="default"):
    model = tiny_qwen.build()
    add_lora(model, targets or tiny_qwen.targets, rank=rank, alpha=alpha, adapter=name, seed=9)
    return model


@pytest.mark.parametrize("mode", sampled(["none", "fsdp2"], 1))
def test_an_adapter_goes_on_from_the_one_that_was_saved(run_ranks, tiny_qwen, tmp_path, alone, mode):
    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    expected = [p.tolist() for p in adapter_params(with_lora(tiny_qwen), "default")]

    def work(dist):
        model = shard(fresh(tiny_qwen), dist.mesh, mode=mode, block_names=tiny_qwen.block_names)
        load_adapter(model, tmp_path / "adapter")
        assert all(p.requires_grad for p in adapter_params(model, "default"))
        return [(p.full_tensor() if mode == "fsdp2" else p).tolist() for p in adapter_params(model, "default")]

    for got in run_ranks(work, 1 if mode == "none" else 2):
        assert got == expected  # alpha / rank is 2, so that dividing it out rounds nothing


def test_an_adapter_goes_on_with_the_same_product_under_another_alpha(tiny_qwen, tmp_path, alone):
    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    model = fresh(tiny_qwen, alpha=3.0)
    add_lora(model, tiny_qwen.targets, rank=4, alpha=5.0, adapter="old", seed=1)
    for name in ("default", "old"):
        load_adapter(model, tmp_path / "adapter", adapter=name)
    for name in ("default", "old"):
        with use_adapter(model, name):
            out = tiny_qwen.run(model)
        torch.testing.assert_close(out, tiny_qwen.run(with_lora(tiny_qwen)), rtol=1e-5, atol=1e-5)


def test_an_adapter_that_does_not_fit_changes_nothing_and_says_why(tiny_qwen, tmp_path, alone):
    save_weights(with_lora(tiny_qwen), tmp_path / "adapter", alone)
    file = tmp_path / "adapter" / "pytorch_lora_weights.safetensors"
    model = fresh(tiny_qwen, rank=2)
    before = [p.clone() for p in adapter_params(model, "default")]
    with pytest.raises(
        ValueError, match=rf"{file.name} must be an adapter of the same rank, but .* is \(4, 64\), not \(2"
    ):
        load_adapter(model, tmp_path / "adapter")
    assert all(map(torch.equal, before, adapter_params(model, "default")))
    with pytest.raises(ValueError, match=r"on the same layers, differs in 2 such as .*to_out\.0"):
        load_adapter(fresh(tiny_qwen, targets=["to_q", "to_k", "to_v"]), tmp_path / "adapter")
    with pytest.raises(ValueError, match="on the same layers, differs in 16 such as transformer"):
        load_adapter(fresh(tiny_qwen), tmp_path / "adapter", part="transformer_2")
    with pytest.raises(ValueError, match=r"adapter must be one of \['default'\], got 'old'"):
        load_adapter(fresh(tiny_qwen), tmp_path / "adapter", adapter="old")
    with pytest.raises(
        ValueError, match=r"folder must hold pytorch_lora_weights\.safetensors, or adapter_model\.safetensors with"
    ):
        load_adapter(fresh(tiny_qwen), tmp_path)
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"{file.name} must be finite, got NaN or infinity in transformer\."):
        load_adapter(fresh(tiny_qwen), tmp_path / "adapter")
    tensors[min(tensors)][0, 0] = 3e38
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"{file.name} must hold numbers of at most 1e\+18 in size, got 3e\+38 in "):
        load_adapter(fresh(tiny_qwen), tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_a_pickle_in_place_of_weights_is_never_opened(tiny_qwen, tmp_path, kind):
    name = "pytorch_lora_weights.bin" if kind == "adapter" else "transformer/diffusion_pytorch_model.bin"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save({}, tmp_path / name)
    for load in (load_weights, check_weights):
        with pytest.raises(ValueError, match="folder must hold"):
            load(tiny_qwen.build(), tmp_path)
