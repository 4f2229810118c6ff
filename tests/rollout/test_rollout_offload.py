"""Text encoders: what they never run is not loaded, and from the host they compute the same."""

import json
import shutil
from unittest.mock import MagicMock

import pytest
import torch
from helpers import sampled
from model_rows import NEGATIVE, ROWS
from omni_rollout import Prompt
from omni_rollout.decoding import num_decoded, sliced_decode
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.engines.vllm import VllmEngine
from omni_rollout.models import open_model
from omni_rollout.offload import run_offloaded
from omni_rollout.tokens import TokenParams
from safetensors.torch import load_file, save_file
from torch import nn

torch.set_num_threads(1)

WITH_ENCODER = [name for name in ROWS if not name.startswith(("bagel", "hunyuan"))]


def encode(model, parts, references):
    """Two texts, one of them a negative."""
    prompt = Prompt("a red sign", 0, 0, seed=0, negative=NEGATIVE, images=references)
    with torch.no_grad():
        return [model.encode(parts, prompt, negative=negative) for negative in (False, True)]


def equal(found, expected):
    return all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)


def num_weights(model, parts):
    return sum(p.numel() for name in model.encoders for p in getattr(parts, name).parameters())


@pytest.mark.parametrize("name", sampled(WITH_ENCODER, 2))
def test_a_text_has_the_bits_of_the_whole_encoder_on_the_device(name):
    row = ROWS[name]
    model, whole = (open_model(row.checkpoint()) for _ in range(2))
    whole.UNUSED, model.host_encoders = {}, True
    parts = model.load(device="cpu", dtype=torch.float32)
    all_parts = whole.load(device="cpu", dtype=torch.float32)
    references = row.references(0)
    assert equal(encode(model, parts, references), encode(whole, all_parts, references))
    assert (num_weights(model, parts) < num_weights(whole, all_parts)) == bool(model.UNUSED)


def test_later_layers_and_a_tied_head_are_left_out(tmp_path):
    folder = tmp_path / "klein"
    shutil.copytree(ROWS["flux2-klein"].checkpoint(), folder)
    file = folder / "text_encoder" / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    last = {name: tensor for name, tensor in weights.items() if ".layers.27." in name}
    more = {name.replace(".27.", f".{i}."): tensor * 2 for name, tensor in last.items() for i in (28, 29)}
    save_file(weights | more, file, metadata={"format": "pt"})
    config = json.loads((file.parent / "config.json").read_text())
    config |= {"num_hidden_layers": 30, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 30}
    config["max_window_layers"] = 30
    (file.parent / "config.json").write_text(json.dumps(config))
    model, whole = open_model(folder), open_model(folder)
    whole.UNUSED = {}
    parts, all_parts = (each.load(device="cpu", dtype=torch.float32) for each in (model, whole))
    assert len(parts.text_encoder.model.layers) == 28
    assert len(all_parts.text_encoder.model.layers) == 30
    assert equal(encode(model, parts, ()), encode(whole, all_parts, ()))


@pytest.fixture
def unpinned(monkeypatch):
    """Host memory of a machine that has nothing to pin it for."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)


@pytest.mark.usefixtures("unpinned")
def test_a_block_is_on_the_device_while_it_runs():
    meta, seen = torch.device("meta"), []
    net = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(3, 3))])}))
    net.forward = lambda x: net[1]["blocks"][0](net[0](x))
    first, block = net[0], net[1]["blocks"][0][0]
    for layer in (first, block):
        layer.register_forward_hook(
            lambda layer, args, out: seen.append([m.weight.device.type for m in (first, block)])
        )
    before = [(name, p) for name, p in net.named_parameters()]
    run_offloaded(net.requires_grad_(False), meta)
    assert net(torch.ones(1, 2)).device == meta
    assert seen == [["meta", "cpu"], ["cpu", "meta"]]
    assert all(a is b for (_, a), (_, b) in zip(net.named_parameters(), before, strict=True))


@pytest.mark.usefixtures("unpinned")
def test_weights_return_when_a_block_breaks():
    net = nn.Sequential(nn.Linear(2, 3))
    run_offloaded(net.requires_grad_(False), torch.device("meta"))
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 5))
    assert net[0].weight.device.type == "cpu"


def test_what_sleeps_comes_back():
    model = open_model(ROWS["qwen-image"].checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    params = ROWS["qwen-image"].unguided
    before = engine.generate([Prompt("a", 0, 0, seed=0)], params)
    names = [name for name, _ in engine.parts.vae.named_parameters()]
    for _ in range(2):
        engine.sleep()
        engine.wake()
    assert [name for name, _ in engine.parts.vae.named_parameters()] == names
    assert not any(p.requires_grad for p in engine.parts.vae.parameters())
    after = engine.generate([Prompt("b", 0, 0, seed=0), Prompt("a", 0, 0, seed=0)], params)
    assert torch.equal(after.media["image"][1], before.media["image"][0])


def test_vllm_drops_its_weights_asleep_and_samples_again_after_a_sync():
    """vLLM's own calls, recorded: its second level copies no weight to the host."""
    engine = object.__new__(VllmEngine)  # vLLM itself is not installed here
    engine.llm, engine.can_sleep, engine._dropped = MagicMock(), True, False
    engine.llm.collective_rpc.return_value = [[]]
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="has no weights: call load_weights"):
        engine.generate([Prompt("a", 0, 0, seed=0)], TokenParams(max_new_tokens=1))
    engine.load_weights((), version=3)
    assert [call[0] for call in engine.llm.method_calls][:3] == ["sleep", "wake_up", "collective_rpc"]
    engine.llm.sleep.assert_called_once_with(level=2)
    assert (engine._dropped, engine.weight_version) == (False, 3)


@pytest.mark.parametrize("name", sampled(["qwen-image", "bagel", "flux2-klein", "z-image"], 1, always=["bagel"]))
def test_slices_decode_to_the_same_pictures_but_for_rounding(name):
    row = ROWS[name]
    model = open_model(row.checkpoint())
    parts, seen, decode = model.load(device="cpu", dtype=torch.float32), [], model.decode
    x0 = torch.randn(5, *model.latent_shape(row.unguided), generator=torch.Generator().manual_seed(0))

    def noted(parts, x0, cond, params):
        seen.append((len(x0), len(cond["texts"])))
        return decode(parts, x0, cond, params)

    cond = {"texts": torch.zeros(5, 3)}
    with torch.no_grad():
        whole, rates = decode(parts, x0, cond, row.unguided)
        sliced, same_rates = sliced_decode(noted, 2)(parts, x0, cond, row.unguided)
    assert seen == [(2, 2), (2, 2), (1, 1)]
    assert rates == same_rates
    torch.testing.assert_close(sliced["image"], whole["image"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("side", "count"), [(512, 16), (1024, 4), (2048, 1), (4096, 1)])
def test_four_megapixels_are_decoded_at_a_time_unless_told(side, count):
    assert num_decoded(0, side, side) == count
    assert num_decoded(3, side, side) == 3
    assert num_decoded(0, side, side, tile=512) == 16
    assert count == 1 or count * 256 * side**2 < 2**31  # elements of the widest tensor of an SD3 VAE


def test_a_model_without_an_encoder_has_none():
    assert open_model(ROWS["bagel"].checkpoint()).encoders == []
