"""FLUX.3 beside its rows: texts of several windows, and folders of modular pipelines."""

import json
import re
import shutil

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model

ROW = ROWS["flux3"]
LONG = "a very long sign " * 8


@pytest.fixture(scope="module")
def model():
    return open_model(ROW.checkpoint())


@pytest.fixture
def folder(model, tmp_path):
    """A copy of the checkpoint."""
    return shutil.copytree(model.folder, tmp_path / "flux3")


def changed(folder, **entries):
    """The folder, with other entries of its index; None removes one."""
    file = folder / "modular_model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


@pytest.mark.parametrize("text", ["", LONG])
def test_a_text_has_the_states_of_the_stock_pipeline_with_its_padding(model, text):
    pipe, parts = ROW.stock_pipeline(model.folder, torch.float64), model.load(device="cpu", dtype=torch.float64)
    encode = pipe.blocks.sub_blocks["text_encoder"]._get_qwen3_vl_prompt_embeds
    theirs = encode(pipe.text_encoder, pipe.tokenizer, text)[0]
    found = model.encode(parts, Prompt(text, 0, 0, seed=0))["embeds"]
    assert len(found) == (160 if text else 80)
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-6)


def test_the_padding_of_a_batch_is_hidden_and_that_of_a_text_is_seen(model):
    net = model.load_net(device="cpu", dtype=torch.float64)
    drawn, params = torch.Generator().manual_seed(0), Params(4, 48, 80)
    x = torch.randn(1, *model.latent_shape(params), generator=drawn).repeat(2, 1, 1, 1)
    embeds = torch.randn(2, 160, 256, generator=drawn, dtype=torch.float64)
    mask = torch.arange(160) < torch.tensor([[160], [80]])
    both = {"embeds": embeds, "embeds_mask": mask}
    with torch.no_grad():
        together = model.predict_velocity(net, x, torch.tensor([0.9, 0.9]), both, params)
        for i, length in enumerate((160, 80)):
            one = {"embeds": embeds[i : i + 1, :length], "embeds_mask": mask[i : i + 1, :length]}
            alone = model.predict_velocity(net, x[:1], torch.tensor([0.9]), one, params)
            torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-6)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_a_part_of_a_modular_folder_is_not_a_pipeline(model):
    with pytest.raises(ValueError, match=r"model must be a whole pipeline, got .*vae, .*: give the folder above it"):
        open_model(model.folder / "vae")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("MiniMaxH3ModularPipeline", "its frames and its sound have separate schedules"),
        ("Flux3DistilledModularPipeline", "its net takes the level at which a step ends; klein-base is a model here"),
        ("WanModularPipeline", r"no parts of it are read with diffusers \d+\.\d+.*; load its WanPipeline"),
        ("MiniMaxMusic3ModularPipeline", r"no parts of it are read with diffusers [\d.]+: known are "),
    ],
)
def test_another_modular_pipeline_is_refused_with_the_reason(folder, kind, said):
    with pytest.raises(ValueError, match=f"^model must not be a '{kind}', which .*{said}") as caught:
        open_model(changed(folder, _class_name=kind))
    assert re.fullmatch("[^\n]+", str(caught.value))


def test_a_part_in_another_place_is_refused_with_its_name(folder):
    kind = ["transformers", "Qwen3VLForConditionalGeneration"]
    place = {"pretrained_model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "type_hint": kind}
    shutil.rmtree(folder / "text_encoder")
    said = "text_encoder must be in .*text_encoder, .* names 'Qwen/Qwen3-VL-4B-Instruct': save_pretrained"
    with pytest.raises(ValueError, match=said):
        open_model(changed(folder, text_encoder=[None, None, place]))


def test_a_flow_map_is_refused_by_name(folder):
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"flow_map": True}))
    with pytest.raises(ValueError, match=r"flow_map of .* must be false for a Flux3ModularPipeline, got true"):
        open_model(folder)
