"""LoRA files of other trainers become a start of training, and a run's weights get kohya's names."""

import json

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from helpers import REPO
from model_rows import ROWS
from omni_rl.tools import lora
from omni_rollout.models import open_model
from omni_train.dist import init_distributed
from omni_train.lora import adapter_layers, add_lora
from omni_train.lora_layer import factors
from omni_train.weights.full import LORA_FILE, check_adapter, load_adapter, save_weights
from safetensors.torch import load_file, save_file

MODEL = str(REPO / "checkpoints/tiny-signs-qwen-image")
TARGETS = ("attn.to_q", "attn.to_v")


@pytest.fixture(scope="module")
def layers():
    """In and out features of the layers that the files adapt."""
    net = open_model(MODEL).empty_net()
    return {name: tuple(m.weight.shape) for name, m in net.named_modules() if name.endswith(TARGETS)}


def random_factors(layers, rank=4):
    made = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(rank, size, generator=made), torch.randn(out, rank, generator=made))
        for name, (out, size) in layers.items()
    }


def products(file):
    """The product of each layer's factors in a run's file."""
    state = load_file(file)
    names = [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name]
    return {
        name.removeprefix("transformer."): state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
        for name in names
    }


def write_kohya(file, made, *, alpha):
    state = {}
    for name, (down, up) in made.items():
        key = f"lora_unet_{name.replace('.', '_')}"
        state |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(alpha)}
    save_file(state, file)


def write_diffusers(file, made, **config):
    state = {
        f"transformer.{name}.lora_{side}.weight": factor.contiguous()
        for name, pair in made.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    about = {f"transformer.{key}": value for key, value in config.items()}
    save_file(state, file, metadata={"lora_adapter_metadata": json.dumps(about)} if config else None)


@pytest.mark.parametrize("kind", ["kohya", "diffusers", "rslora"])
def test_a_file_becomes_a_start_of_training_with_its_scale(tmp_path, layers, capsys, kind):
    made, file, folder = random_factors(layers), tmp_path / "their.safetensors", tmp_path / "adapters"
    if kind == "kohya":
        write_kohya(file, made, alpha=2.0)
    else:
        own = {"r": 4, "lora_alpha": 2, "target_modules": sorted(made), "use_rslora": kind == "rslora"}
        write_diffusers(file, made, **own)
    lora.main([str(file), str(folder), "--model", MODEL])
    scale = 1.0 if kind == "rslora" else 0.5
    found = products(folder / LORA_FILE)
    assert found.keys() == made.keys()
    for name, (down, up) in made.items():
        torch.testing.assert_close(found[name], up @ down * scale)
    words = f"--init-weights {folder} --lora.rank 4 --lora.targets attn.to_q,attn.to_v"
    assert capsys.readouterr().out.splitlines()[-1] == words
    net = QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer")
    add_lora(net, words.split()[-1].split(","), rank=4, alpha=8, seed=0)
    load_adapter(net, folder)
    for name, layer in adapter_layers(net, "default").items():
        down, up = factors(layer, "default")
        torch.testing.assert_close((up @ down * layer.scaling["default"]).detach(), found[name])


def test_the_weights_of_a_run_by_kohyas_names_are_the_same_to_diffusers(tmp_path, layers):
    net = QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer")
    add_lora(net, TARGETS, rank=2, alpha=8, seed=0)
    for layer in adapter_layers(net, "default").values():
        torch.nn.init.normal_(factors(layer, "default")[1])
    save_weights(net, tmp_path / "weights", init_distributed())
    lora.main([str(tmp_path / "weights"), str(tmp_path / "out.safetensors"), "--model", MODEL])
    written = load_file(tmp_path / "out.safetensors")
    assert {name.rpartition("attn_")[2] for name in written} == {
        f"to_{layer}.{what}" for layer in "qv" for what in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    state = QwenImagePipeline.lora_state_dict(str(tmp_path), weight_name="out.safetensors")
    for name, product in products(tmp_path / "weights" / LORA_FILE).items():
        down, up = (state[f"transformer.{name}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(up @ down, product)


@pytest.mark.parametrize("name", ["qwen-image-edit", "z-image", "flux-dev", "sd35-medium"])
def test_a_run_goes_to_kohyas_names_and_back_where_diffusers_reads_them(tmp_path, capsys, name):
    folder = ROWS[name].checkpoint()
    model = open_model(folder)
    net = model.load_net(device="cpu", dtype=torch.float32)
    add_lora(net, model.LORA_TARGETS, rank=2, alpha=8, seed=0)
    for layer in adapter_layers(net, "default").values():
        torch.nn.init.normal_(factors(layer, "default")[1])
    save_weights(net, tmp_path / "weights", init_distributed())
    file, back = tmp_path / "out.safetensors", tmp_path / "back"
    if name in ("flux-dev", "sd35-medium"):
        with pytest.raises(SystemExit):
            lora.main([str(tmp_path / "weights"), str(file), "--model", str(folder)])
        assert "--model must be one that diffusers reads in kohya's names as written here" in capsys.readouterr().err
        assert not file.exists()
        return
    lora.main([str(tmp_path / "weights"), str(file), "--model", str(folder)])
    lora.main([str(file), str(back), "--model", str(folder)])
    found = products(back / LORA_FILE)
    for layer, product in products(tmp_path / "weights" / LORA_FILE).items():
        torch.testing.assert_close(found.pop(layer), product)
    assert found == {}


def test_a_file_with_scales_of_another_trainer_is_no_start_before_it_is_converted(tmp_path, layers):
    write_diffusers(tmp_path / LORA_FILE, random_factors(layers), r=4, lora_alpha=2, target_modules=sorted(layers))
    net = open_model(MODEL).empty_net()
    add_lora(net, TARGETS, rank=4, alpha=8, seed=0)
    with pytest.raises(ValueError, match="has scales of another trainer: convert it by omni-rl lora"):
        check_adapter(net, tmp_path)


def change_names(made, old, new):
    return {name.replace(old, new): pair for name, pair in made.items()}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda made: change_names(made, "transformer_blocks.0", "text_encoder.0"), "must fit the net: 16 tensors"),
        (lambda made: made | {min(made): (made[min(made)][0][:2], made[min(made)][1][:, :2])}, r"got \[2, 4\]"),
        (lambda made: made | {min(made): (made[min(made)][0][:, :8], made[min(made)][1])}, "must fit the net"),
    ],
    ids=["other layers", "two ranks", "another width"],
)
def test_what_does_not_fit_the_net_is_named(tmp_path, layers, capsys, change, fault):
    write_diffusers(tmp_path / "their.safetensors", change(random_factors(layers)))
    with pytest.raises(SystemExit) as stopped:
        lora.main([str(tmp_path / "their.safetensors"), str(tmp_path / "adapters"), "--model", MODEL])
    assert stopped.value.code == 2
    assert fault.replace("\\", "") in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("lora_unet_x.dora_scale", "must hold LoRA factors only, got lora_unet_x.dora_scale"),
        ("text_encoder.x.lora_A.weight", "must hold LoRA factors of the net only, got text_encoder.x.lora_A.weight"),
    ],
)
def test_what_would_be_left_out_is_an_error(tmp_path, layers, capsys, name, fault):
    write_diffusers(tmp_path / "their.safetensors", random_factors(layers))
    save_file(load_file(tmp_path / "their.safetensors") | {name: torch.ones(4, 4)}, tmp_path / "more.safetensors")
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "more.safetensors"), str(tmp_path / "adapters"), "--model", MODEL])
    assert fault in capsys.readouterr().err


def test_what_is_no_file_or_would_be_overwritten_is_an_error(tmp_path, layers, capsys):
    write_diffusers(tmp_path / "a.safetensors", random_factors(layers))
    (tmp_path / "a.bin").touch()
    for source, target, fault in (
        ("a.bin", "new", "source must be a .safetensors file"),
        ("a.safetensors", "a.bin", "target must be new"),
    ):
        with pytest.raises(SystemExit):
            lora.main([str(tmp_path / source), str(tmp_path / target), "--model", MODEL])
        assert fault in capsys.readouterr().err
