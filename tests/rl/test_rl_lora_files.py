"""LoRA files of other trainers become a start of training, and a run's weights files that others read."""

import json
import re

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from helpers import REPO, sampled
from model_rows import ROWS
from omni_rl.tools import lora
from omni_rollout.models import open_model
from omni_train.dist import init_distributed
from omni_train.lora import adapter_layers, add_lora
from omni_train.lora_layer import factors
from omni_train.weights.adapters import LORA_FILE, check_adapter, load_adapter
from omni_train.weights.full import check_weights, load_weights, save_weights
from peft import PeftModel
from peft.tuners.lora import LoraLayer
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


def write_kohya(file, made, *, alpha, header=None):
    state = {}
    for name, (down, up) in made.items():
        key = f"lora_unet_{name.replace('.', '_')}"
        state |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(alpha)}
    save_file(state, file, metadata=header)


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


@pytest.mark.parametrize("layout", ["diffusers", "peft"])
@pytest.mark.parametrize("name", sampled(["qwen-image-edit", "z-image", "flux-dev", "sd35-medium"], 1))
def test_diffusers_reads_each_layout_that_a_run_goes_to(tmp_path, name, layout):
    folder = ROWS[name].checkpoint()
    model = open_model(folder)
    net = model.load_net(device="cpu", dtype=torch.float32)
    add_lora(net, model.LORA_TARGETS, rank=2, alpha=8, seed=0)
    for layer in adapter_layers(net, "default").values():
        torch.nn.init.normal_(factors(layer, "default")[1])
    save_weights(net, tmp_path / "weights", init_distributed())
    lora.main([str(tmp_path / "weights"), str(tmp_path / "out"), "--model", str(folder), "--layout", layout])
    (file,) = (tmp_path / "out").glob("*.safetensors")
    prefix = {"diffusers": "transformer", "peft": "base_model.model"}[layout]
    theirs = model.load_net(device="cpu", dtype=torch.float32)
    theirs.load_lora_adapter(str(tmp_path / "out"), weight_name=file.name, prefix=prefix)
    found = {name: layer for name, layer in theirs.named_modules() if isinstance(layer, LoraLayer)}
    made = products(tmp_path / "weights" / LORA_FILE)
    assert found.keys() == made.keys()
    for name, layer in found.items():
        (adapter,) = layer.scaling
        torch.testing.assert_close(layer.get_delta_weight(adapter), made[name])


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": ["to_q"], "bias": "none"}
PATTERN = {"alpha_pattern": {"transformer_blocks.0.attn.to_q": 10}}
FORMS = {  # of a scale: the text of the header and of adapter_config.json, and what it is for a rank of 4
    "none": ({}, {}, 0.0),  # B has it
    "peft": ({}, CONFIG, 0.5),
    "peft, rsLoRA": ({}, CONFIG | {"use_rslora": True}, 1.0),
    "peft, one layer with another": ({}, CONFIG | PATTERN, 0.5),
    "diffusers": ({"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})}, {}, 0.5),
    "diffusers, of a net": ({"lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 2})}, {}, 0.5),
    "SimpleTuner": ({"transformer.r": "4", "transformer.lora_alpha": "2"}, {}, 0.5),
    "a header": ({"r": "4", "lora_alpha": "2"}, {}, 0.5),
    "LightX2V": ({"alpha": "2"}, {}, 0.5),
    "kohya's header": ({"ss_network_dim": "4", "ss_network_alpha": "2.0", "ss_scale_weight_norms": "1.0"}, {}, 0.5),
    "two that agree": ({"lora_alpha": "2"}, CONFIG, 0.5),
}


def write_form(folder, made, header, config):
    """An adapter in peft's folder layout, or diffusers' without a configuration; its tensors."""
    part, file = ("base_model.model", "adapter_model.safetensors") if config else ("transformer", LORA_FILE)
    state = {
        f"{part}.{name}.lora_{side}.weight": factor.contiguous()
        for name, pair in made.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    folder.mkdir(exist_ok=True)
    save_file(state, folder / file, metadata=header or None)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize("form", sampled(FORMS, 4))
def test_every_reader_honors_a_scale_wherever_it_is_stored(tmp_path, layers, form):
    """--init-weights and teachers, `omni-rl lora`, and `omni-rl sample --weights`."""
    header, config, scale = FORMS[form]
    made = random_factors(layers)
    write_form(tmp_path / "their", made, header, config)
    expected = {name: (scale or 1.0) * up @ down for name, (down, up) in made.items()}
    if "alpha_pattern" in config:
        expected["transformer_blocks.0.attn.to_q"] *= 5
    net = QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer")
    x = {name: torch.randn(3, down.shape[1]) for name, (down, _) in made.items()}
    before = {name: net.get_submodule(name)(x[name]).detach() for name in made}
    add_lora(net, TARGETS, rank=4, alpha=3, seed=0)
    load_adapter(net, tmp_path / "their")
    for name, layer in adapter_layers(net, "default").items():
        down, up = factors(layer, "default")
        torch.testing.assert_close((up @ down * layer.scaling["default"]).detach(), expected[name])
    lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    for name, product in products(tmp_path / "ours" / LORA_FILE).items():
        torch.testing.assert_close(product, expected[name])
    sampling = QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer")
    check_weights(sampling, tmp_path / "their")
    load_weights(sampling, tmp_path / "their")
    for name in made:
        found = sampling.get_submodule(name)(x[name]) - before[name]
        torch.testing.assert_close(found.detach(), x[name] @ expected[name].T, rtol=1e-3, atol=1e-3)


def test_a_scale_is_not_rounded_to_the_16_bits_of_a_file(tmp_path, layers):
    made = {name: (down.bfloat16(), up.bfloat16()) for name, (down, up) in random_factors(layers).items()}
    write_form(tmp_path / "their", made, {}, CONFIG | {"lora_alpha": 3})
    lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    for name, product in products(tmp_path / "ours" / LORA_FILE).items():
        down, up = (factor.float() for factor in made[name])
        torch.testing.assert_close(product, (0.75 * up) @ down, rtol=1e-6, atol=1e-5)


def test_factors_of_two_ranks_are_refused(tmp_path, layers, capsys):
    made = {name: (down, torch.randn(len(up), 5)) for name, (down, up) in random_factors(layers).items()}
    write_form(tmp_path / "their", made, {}, {})
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    assert "must fit the net of" in " ".join(capsys.readouterr().err.split())


def test_a_scale_that_is_the_run_s_own_changes_no_bit(tmp_path, layers):
    made = random_factors(layers)
    write_form(tmp_path / "their", made, {}, CONFIG | {"lora_alpha": 3})
    net = open_model(MODEL).load_net(device="cpu", dtype=torch.float32)
    add_lora(net, TARGETS, rank=4, alpha=3, seed=0)
    load_adapter(net, tmp_path / "their")
    for name, layer in adapter_layers(net, "default").items():
        assert all(map(torch.equal, factors(layer, "default"), made[name]))


REFUSED = {  # what is said of a scale: the text of the header, and adapter_config.json
    "has 'lora_scale' in its header, which may be a scale and is not known": ({"lora_scale": "2"}, {}),
    "must have a number as 'lora_alpha' in its header, got 'many'": ({"lora_alpha": "many"}, {}),
    "must have scales that are finite and > 0, got 0.0 by lora_alpha of its header": ({"lora_alpha": "0"}, {}),
    "must have scales that are finite and > 0, got -1.0": ({"alpha": "-4"}, {}),
    "must have scales that are finite and > 0, got nan": ({"alpha": "nan"}, {}),
    "must have one scale for each layer, got 0.5 and, by lora_alpha": ({"lora_alpha": "4"}, CONFIG),
    "is not valid JSON": ({"lora_adapter_metadata": "{"}, {}),
    "must have the rank of its configuration, 3, got 4": ({}, CONFIG | {"r": 3}),
    "r of lora_adapter_metadata of .* must be a number > 0, got None": ({"lora_adapter_metadata": "{}"}, {}),
    "must be a number > 0, got 0": ({}, CONFIG | {"lora_alpha": 0}),
    "lora_alpha of .* must be a number > 0, got '2'": ({}, CONFIG | {"lora_alpha": "2"}),
    "lora_alpha of .* must be a number > 0, got 1000": ({}, CONFIG | {"lora_alpha": 10**400}),
    "use_rslora of .* must be true or false, got 'false'": ({}, CONFIG | {"use_rslora": "false"}),
    "rank_pattern of .* must have numbers by names of layers": ({}, CONFIG | {"rank_pattern": ["a"]}),
    "rank_pattern of .* must be a number > 0, got '4'": ({}, CONFIG | {"rank_pattern": {"to_q": "4"}}),
    "alpha_pattern of .* must have numbers by names of layers": ({}, CONFIG | {"alpha_pattern": {"to_q\\\\": 3}}),
    "peft_type of .* must be LORA, got 'LOHA'": ({}, CONFIG | {"peft_type": "LOHA"}),
    "bias of .* must be 'none', got 'all'": ({}, CONFIG | {"bias": "all"}),
    "must have magnitudes if and only if use_dora is set": ({}, CONFIG | {"use_dora": True}),
    "must not change the weights below the adapter": ({}, CONFIG | {"init_lora_weights": "pissa_niter_16"}),
    "alpha_pattern of .* must have numbers by names": ({}, CONFIG | {"alpha_pattern": {"(a+)+b": 3}}),
    "has 'new_kind', which the installed peft does not know": ({}, CONFIG | {"new_kind": 3}),
}


@pytest.mark.parametrize("fault", sampled(REFUSED, 8))
def test_a_scale_that_is_not_known_is_refused_by_name(tmp_path, layers, capsys, fault):
    header, config = REFUSED[fault]
    write_form(tmp_path / "their", random_factors(layers), header, config)
    net = open_model(MODEL).empty_net()
    add_lora(net, TARGETS, rank=4, alpha=8, seed=0)
    with pytest.raises(ValueError, match=fault):
        check_adapter(net, tmp_path / "their")
    with pytest.raises(ValueError, match=fault):
        check_weights(open_model(MODEL).empty_net(), tmp_path / "their")
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    assert re.search(fault, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "ours").exists()


def test_a_run_s_weights_go_to_peft_and_back(tmp_path, layers):
    net = QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer")
    add_lora(net, TARGETS, rank=2, alpha=8, seed=0)
    for layer in adapter_layers(net, "default").values():
        torch.nn.init.normal_(factors(layer, "default")[1])
    save_weights(net, tmp_path / "weights", init_distributed())
    lora.main([str(tmp_path / "weights"), str(tmp_path / "peft"), "--model", MODEL, "--layout", "peft"])
    theirs = PeftModel.from_pretrained(
        QwenImageTransformer2DModel.from_pretrained(f"{MODEL}/transformer"), tmp_path / "peft"
    )
    ours = products(tmp_path / "weights" / LORA_FILE)
    for name, product in ours.items():
        layer = theirs.base_model.model.get_submodule(name)
        torch.testing.assert_close(layer.get_delta_weight("default"), product)
    lora.main([str(tmp_path / "peft"), str(tmp_path / "back"), "--model", MODEL])
    for name, product in products(tmp_path / "back" / LORA_FILE).items():
        torch.testing.assert_close(product, ours[name])


@pytest.mark.parametrize("said", ["2.0", "4.0"])
def test_a_header_that_differs_from_kohya_s_alphas_is_refused(tmp_path, layers, capsys, said):
    file, given = tmp_path / "their.safetensors", [str(tmp_path / "ours"), "--model", MODEL]
    write_kohya(file, random_factors(layers), alpha=2.0, header={"ss_network_alpha": said})
    if said == "2.0":
        lora.main([str(file), *given])
        return
    with pytest.raises(SystemExit):
        lora.main([str(file), *given])
    fault = "must have one scale for each layer, got 0.5 and, by ss_network_alpha of its header, 1 for"
    assert fault in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("alpha", [0.0, -4.0, float("nan")])
def test_kohya_s_alphas_that_are_no_scale_are_refused(tmp_path, layers, capsys, alpha):
    write_kohya(tmp_path / "their.safetensors", random_factors(layers), alpha=alpha)
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "their.safetensors"), str(tmp_path / "ours"), "--model", MODEL])
    assert "must have finite alphas > 0" in " ".join(capsys.readouterr().err.split())


def test_factors_that_are_not_finite_are_refused(tmp_path, layers, capsys):
    made = random_factors(layers)
    made[min(made)][0][0, 0] = torch.nan
    write_form(tmp_path / "their", made, {}, {})
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    assert "must be finite, got NaN or infinity" in " ".join(capsys.readouterr().err.split())


def change_names(made, old, new):
    return {name.replace(old, new): pair for name, pair in made.items()}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda made: change_names(made, "transformer_blocks.0", "text_encoder.0"), "must fit the net of"),
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
    (tmp_path / "empty").mkdir()
    save_file({"proj_out.weight": torch.ones(2, 2)}, tmp_path / "full.safetensors")
    for name in ("weights/transformer/diffusion_pytorch_model", "both/high/pytorch_lora_weights", "both/low/adapter"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / f"{name}.safetensors").touch()
    for source, target, fault in (
        ("a.bin", "new", "source must be a .safetensors file"),
        ("empty", "new", f"source must be a .safetensors file or an adapter's folder, {tmp_path}/empty holds none"),
        ("weights", "new", f"{tmp_path}/weights holds full weights, which --init-weights takes as they are"),
        ("both", "new", f"holds adapters in {tmp_path}/both/high and {tmp_path}/both/low: name one"),
        ("full.safetensors", "new", "source must hold LoRA factors, got proj_out.weight in "),
        ("a.safetensors", "a.bin", "target must be new"),
        ("a.safetensors", "b.safetensors", "target must be a folder, got "),
    ):
        name, *more = target.split()
        with pytest.raises(SystemExit):
            lora.main([str(tmp_path / source), str(tmp_path / name), "--model", MODEL, *more])
        assert fault in capsys.readouterr().err


def alphas_of(state, alpha):
    return {name.replace("lora_A.weight", "alpha"): alpha.clone() for name in state if "lora_A" in name}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda state: {n: t if "lora_A" not in n else t[:0] for n, t in state.items()},
            "must hold factors of rank 1 or",
        ),
        (
            lambda state: {n: t if "lora_A" not in n else t[0, 0] for n, t in state.items()},
            "must hold factors of rank 1",
        ),
        (lambda state: {n: t if "lora_A" not in n else t[0] for n, t in state.items()}, "must fit the net of"),
        (lambda state: {n: t[None] for n, t in state.items()}, "must fit the net of"),
        (lambda state: state | alphas_of(state, torch.ones(2)), "got 2 numbers as"),
        (lambda state: state | alphas_of(state, torch.ones(0)), "got 0 numbers as"),
    ],
    ids=["rank 0", "no axes", "one axis", "three axes", "two alphas", "no alpha"],
)
def test_factors_and_alphas_of_other_shapes_are_named(tmp_path, layers, capsys, change, fault):
    state = write_form(tmp_path / "their", random_factors(layers), {}, {})
    save_file({name: tensor.contiguous() for name, tensor in change(state).items()}, tmp_path / "their" / LORA_FILE)
    with pytest.raises(SystemExit) as stopped:
        lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    assert stopped.value.code == 2
    assert fault in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "ours").exists()


def test_a_file_by_other_names_with_use_dora_must_have_magnitudes(tmp_path, layers, capsys):
    write_kohya(tmp_path / "their.safetensors", random_factors(layers), alpha=4.0)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_dora": True}))
    with pytest.raises(SystemExit):
        lora.main([str(tmp_path / "their.safetensors"), str(tmp_path / "ours"), "--model", MODEL])
    assert "must have magnitudes if use_dora is set, got none" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("modules", [["(a+)+$"], "(.*a){40}$", [".*"] * 10_000])
def test_target_modules_are_not_searched_for(tmp_path, layers, modules):
    """The layers are those of the file."""
    write_form(tmp_path / "their", random_factors(layers), {}, CONFIG | {"target_modules": modules})
    lora.main([str(tmp_path / "their"), str(tmp_path / "ours"), "--model", MODEL])
    assert products(tmp_path / "ours" / LORA_FILE).keys() == layers.keys()
