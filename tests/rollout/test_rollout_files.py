"""Damaged and forged checkpoints: one line that names the file, before any weight is read and with no code run."""

import json
import os
import shutil

import pytest
import torch
from helpers import CHECKPOINT
from omni_rollout import Params
from omni_rollout.models import open_model
from safetensors.torch import load_file, save_file

PARAMS = Params(4, 32, 96)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose files may be replaced, but not written into."""
    return shutil.copytree(CHECKPOINT, tmp_path / "model", copy_function=os.link)


def replace(file, content):
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def change(file, **entries):
    replace(file, json.loads(file.read_text()) | entries)


def refusal(folder):
    """What a dry run says of the folder: one line."""
    with pytest.raises(ValueError) as refused:
        look_at(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 800
    return message


def look_at(folder):
    model = open_model(folder)
    model.check(PARAMS)
    model.latent_shape(PARAMS)
    model.sigmas(PARAMS)
    model.check_files()


def test_a_sound_folder_passes(folder):
    look_at(folder)


@pytest.mark.parametrize(
    "kind", ["StableDiffusionXLPipeline", "../../evil", "evil.py:Pipeline", None, 5, ["QwenImagePipeline"], {}]
)
def test_a_pipeline_that_is_no_model_of_ours_is_refused_with_the_choices(folder, kind):
    change(folder / "model_index.json", _class_name=kind)
    assert "model must be the folder of a QwenImagePipeline" in refusal(folder)


@pytest.mark.parametrize("kind", [["LlamaForCausalLM"], ["QwenImage"], [], None, "QwenImagePipeline.evil", 5, {}, [[]]])
def test_an_architecture_that_is_no_model_of_ours_is_refused_with_the_choices(tmp_path, kind):
    replace(tmp_path / "config.json", {"architectures": kind})
    assert "model must be the folder of a QwenImagePipeline" in refusal(tmp_path)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"])
@pytest.mark.parametrize(
    "kind", [["diffusers", "../evil/Net"], ["evil", "Net"], ["diffusers", "UNet2DModel"], [None, None], None, "x", [[]]]
)
def test_a_part_of_another_class_is_refused(folder, part, kind):
    change(folder / "model_index.json", **{part: kind})
    message = refusal(folder)
    assert message.startswith(f"{part} must be a ")
    assert "model_index.json says" in message


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        ("transformer/config.json", {"_class_name": "../evil/Net"}, "says '../evil/Net'"),
        ("text_encoder/config.json", {"architectures": ["Evil"]}, "says ['Evil']"),
        ("text_encoder/config.json", {"architectures": 3}, "says 3"),
        ("transformer/config.json", {"num_layers": "4"}, "num_layers"),
        ("transformer/config.json", {"num_layers": [4]}, "num_layers"),
        ("transformer/config.json", {"num_layers": True}, "num_layers"),
        ("transformer/config.json", {"num_layers": 4.5}, "num_layers"),
        ("transformer/config.json", {"num_layers": 3}, "has 32 weights that its configuration lacks"),
        ("transformer/config.json", {"num_layers": 5}, "lacks 32 weights"),
        ("transformer/config.json", {"in_channels": -64}, "transformer/config.json"),
        ("transformer/config.json", {"joint_attention_dim": 63}, "txt_norm.weight"),
        ("transformer/config.json", {"axes_dims_rope": "8, 12"}, "axes_dims_rope"),
        ("transformer/config.json", {"axes_dims_rope": ["8", "12", "12"]}, "transformer/config.json"),
        ("vae/config.json", {"z_dim": "16"}, "z_dim"),
        ("vae/config.json", {"z_dim": None}, "z_dim"),
        ("vae/config.json", {"base_dim": {}}, "base_dim"),
        ("vae/config.json", {"dim_mult": []}, "vae/config.json"),
        ("vae/config.json", {"latents_mean": "0"}, "latents_mean"),
        ("vae/config.json", {"latents_std": ["1"] * 16}, "latents_std"),
        ("text_encoder/config.json", {"text_config": []}, "text_encoder/config.json"),
        ("text_encoder/config.json", {"text_config": {"hidden_size": "64"}}, "text_encoder/config.json"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": "yes"}, "use_dynamic_shifting"),
        ("scheduler/scheduler_config.json", {"base_shift": "0.5"}, "base_shift"),
        ("scheduler/scheduler_config.json", {"shift_terminal": [0.02]}, "shift_terminal"),
    ],
)
def test_a_value_of_another_type_or_range_is_named(folder, file, entries, named):
    change(folder / file, **entries)
    assert named in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"x"'])
@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json", "tokenizer/tokenizer_config.json"])
def test_a_file_that_holds_no_object_is_named(folder, file, content):
    replace(folder / file, content)
    message = refusal(folder)
    assert message.startswith("model is damaged: ")
    assert file in message


def test_a_missing_file_is_named(folder):
    for file in ("vae/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json", "model_index.json"):
        (folder / file).unlink()
        assert (file if file.endswith("json") else "must have its weights as safetensors") in refusal(folder)


def test_neither_a_folder_nor_a_hub_id_is_refused(tmp_path):
    for path in (tmp_path / "nothing", "./nothing", "a/b/c", "nothing"):
        assert "must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at" in refusal(path)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_a_pickle_is_never_opened_whatever_lies_beside_it(folder, part):
    ran = folder / "ran"
    (weights,) = (folder / part).glob("*.safetensors")
    replace(weights.with_suffix(".bin"), f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    replace(folder / part / "decoy.safetensors", weights.read_bytes())
    weights.unlink()
    assert f"{part} holds none" in refusal(folder)
    with pytest.raises(ValueError, match="must have its weights as safetensors"):
        open_model(folder).load(device="cpu", dtype=torch.float32)
    assert not ran.exists()


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_weights_that_are_cut_short_are_named(folder, part):
    (weights,) = (folder / part).glob("*.safetensors")
    whole = weights.read_bytes()
    for content, says in (
        (whole[:-1], "its header says"),
        (whole[:100], "not even its header"),
        (b"", "not even its header"),
        (b"\x10" + bytes(7) + b"{" * 16, "has no header of a safetensors file"),
    ):
        replace(weights, content)
        message = refusal(folder)
        assert says in message
        assert str(weights) in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weight_map": {"proj_out.bias": "../../elsewhere.safetensors"}}, "must have a weight_map of file names"),
        ({"weight_map": {"proj_out.bias": 3}}, "must have a weight_map of file names"),
        ({"weight_map": []}, "must have a weight_map of file names"),
        ({"weight_map": {"proj_out.bias": "part-2.safetensors"}}, "part-2.safetensors is missing"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(folder, content, says):
    replace(folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json", content)
    assert says in refusal(folder)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_weights_that_are_missing_or_not_finite_are_found_while_loading(folder, part):
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = sorted(name for name in weights if name.endswith("norm.weight") or part != "text_encoder")[
        0
    ]  # which is used
    for changed, says in (
        ({n: t for n, t in weights.items() if n != name}, "lacks 1 weights, such as"),
        (weights | {name: torch.full_like(weights[name], float("nan"))}, "is not finite"),
    ):
        file.unlink()
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=says) as refused:
            open_model(folder).load(device="cpu", dtype=torch.float32)
        assert str(folder / part) in str(refused.value)
