"""What a run exports: stock diffusers draws our images with it, and a card says where it comes from."""

import copy
import re

import pytest
import torch
from diffusers import QwenImagePipeline
from helpers import CHECKPOINT, sampled
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.dist import init_distributed
from omni_train.lora import add_lora
from omni_train.weights.card import model_card
from omni_train.weights.full import save_weights

MODEL, PARAMS = open_model(CHECKPOINT), Params(6, 32, 96)
PROMPT = 'a blue sign that says "K7QX"'
CARD = {
    "base": "Qwen/Qwen-Image",
    "algorithm": "flowgrpo-cps",
    "settings": {"lr": 1e-4, "prompts": "a|b.txt"},
    "scores": {"held-out words, before": 0.506, "held-out words, after": 0.74859},
    "command": "python apps/train_flowgrpo.py --preset tiny-signs",
}


@pytest.fixture(scope="module")
def base():
    """The parts of the checkpoint, as the model's door loads them."""
    return MODEL.load(device="cpu", dtype=torch.float32)


@pytest.fixture
def pipe():
    return open_pipe(CHECKPOINT)


def open_pipe(folder):
    pipe = QwenImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def trained(base, *, lora, **own):
    """The model as training might leave it; alpha is twice the rank, so a reader that ignores it is found out."""
    parts = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(4)
    if lora:
        add_lora(parts.net, MODEL.LORA_TARGETS, rank=4, alpha=8, seed=3, **own)
    changed = (name for name, p in parts.net.named_parameters() if not lora or p.requires_grad)
    for p in (parts.net.get_parameter(name) for name in changed if ".lora_A." not in name):
        p.data += 0.03 * torch.randn(p.shape, generator=generator)
    return parts


def our_image(parts):
    drawn = DiffusersEngine(MODEL, parts).generate([Prompt(PROMPT, group=0, index=0, seed=5)], PARAMS)
    media, _ = MODEL.decode(parts, drawn.x0, drawn.cond, PARAMS)
    return media["image"].permute(0, 3, 1, 2)


def stock_image(pipe):
    noise = step_noise([5], INITIAL_NOISE, (16, 4, 12))
    latents = pipe._pack_latents(noise[:, None], 1, 16, 4, 12)
    size = {"height": 32, "width": 96, "num_inference_steps": 6}
    return pipe(PROMPT, true_cfg_scale=1.0, latents=latents, output_type="pt", **size).images


def exported(base, folder, kind):
    """The image that a run's own engine draws with the weights that it exports to the folder."""
    own = {"pissa": {"init": "pissa"}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}.get(kind, {})
    parts = trained(base, lora=kind != "full", **own)
    save_weights(parts.net, folder, init_distributed(), card=CARD)
    image = our_image(parts)
    assert (image - our_image(base)).abs().max() > 0.1  # training has changed the picture
    return image


def same(image, expected):
    torch.testing.assert_close(image, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", sampled(["lora", "rslora", "pissa", "dora"], 1))
def test_the_stock_pipeline_draws_our_image_with_the_adapter_and_the_bases_without(base, pipe, tmp_path, kind):
    image = exported(base, tmp_path / "weights", kind)
    pipe.load_lora_weights(tmp_path / "weights")
    same(stock_image(pipe), image)
    pipe.unload_lora_weights()
    same(stock_image(pipe), our_image(base))


def test_a_pipeline_folder_with_the_full_weights_in_place_draws_our_image(base, tmp_path):
    image = exported(base, tmp_path / "weights", "full")
    whole = tmp_path / "pipeline"
    whole.mkdir()
    for path in CHECKPOINT.iterdir():
        (whole / path.name).symlink_to(tmp_path / "weights" / path.name if path.name == "transformer" else path)
    same(stock_image(open_pipe(whole)), image)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_code_on_the_card_draws_our_image(base, tmp_path, kind):
    folder = tmp_path / "weights"
    image = exported(base, folder, kind)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    code = code.replace("Qwen/Qwen-Image", str(CHECKPOINT)).replace("PATH/OF/THIS/FOLDER", str(folder))
    names = {}
    exec(compile(code, f"card of {kind}", "exec"), names)
    names["pipe"].set_progress_bar_config(disable=True)
    same(stock_image(names["pipe"]), image)


def test_the_card_tells_base_algorithm_settings_scores_and_command():
    card = model_card(CARD, is_lora=True)
    assert card.startswith('---\nlibrary_name: diffusers\nbase_model: "Qwen/Qwen-Image"\ntags: [')
    for text in (
        "# Qwen-Image, trained with flowgrpo-cps\n",
        "LoRA adapter, trained from `Qwen/Qwen-Image`",
        "| held-out words, before | 0.506 |\n| held-out words, after | 0.7486 |\n",
        "| lr | 0.0001 |\n| prompts | a\\|b.txt |\n",
        "```\npython apps/train_flowgrpo.py --preset tiny-signs\n```",
        '"lora"',
    ):
        assert text in card
    full = model_card(CARD | {"base": "/models/my base/"}, is_lora=False)
    assert "# my base, trained with" in full
    assert "Full weights of the transformer" in full
    assert "base_model" not in full  # a hub would look for a repository of that name
    assert '"lora"' not in full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ""}, r"lacks \['command'\]"),
        ({"scores": {}}, r"lacks \['scores'\]"),
        ({"licence": "x"}, r"does not know \['licence'\]"),
        ({"scores": {"after": float("nan")}}, "scores must be finite numbers, got after = nan"),
        ({"scores": {"after": "0.5"}}, "scores must be finite numbers, got after = '0.5'"),
    ],
)
def test_a_card_that_lacks_a_fact_is_refused_before_anything_is_written(base, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save_weights(base.net, tmp_path / "weights", init_distributed(), card=CARD | change)
    assert list(tmp_path.iterdir()) == []
