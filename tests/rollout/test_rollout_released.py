"""The configurations of released models in the package: what the libraries make of them, and the lengths of texts."""

import inspect

import pytest
import torch
from helpers import sampled
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from omni_rollout.models.hub import released_models
from omni_rollout.models.hunyuan_video import REQUEST
from omni_rollout.models.parts import open_tokenizer
from omni_rollout.models.qwen_image import TEMPLATE
from omni_rollout.models.qwen_image_edit import TEMPLATE as EDIT_TEMPLATE
from omni_train.planned import PLANNED, PlannedDevice, planned_ranks
from released_models import RELEASES

QWEN = released_models()["Qwen/Qwen-Image"] / "tokenizer"
SIZES = {"tencent/HunyuanImage-3.0": {"height": 1024, "width": 1024}}


@pytest.mark.parametrize("name", RELEASES)
def test_a_configuration_says_what_the_classes_of_diffusers_take(name):
    model = open_model(released_models()[name])
    for part, config in model.config.items():
        if isinstance(config, dict) and "_class_name" in config:
            taken = inspect.signature(model._class(part)).parameters
            assert config.keys() - {"_class_name"} <= taken.keys(), part


@pytest.mark.parametrize("name", sampled(RELEASES, 1))
def test_all_parts_of_a_released_model_can_be_planned(name):
    """They encode, predict and decode on a device that is not there, which holds at least their weights."""
    model = open_model(released_models()[name])
    model.reads_weights = False
    frames = 9 if "video" in model.MEDIA else 1
    params = model.unguided(Params(4, **{"height": 256, "width": 256} | SIZES.get(name, {}), num_frames=frames))
    images = (torch.zeros(256, 256, 3, dtype=torch.uint8),) * model.IMAGES.start
    with planned_ranks(1), PlannedDevice() as device, torch.no_grad():
        parts = model.load(device=PLANNED, dtype=torch.bfloat16)
        prompt = Prompt('a sign that says "K7"', 0, 0, seed=0, images=images)
        cond = model.encode(parts, prompt) | model.condition(parts, prompt, params)
        cond = {key: value[None] for key, value in cond.items()}
        x = torch.zeros(1, *model.latent_shape(params)).to(PLANNED)
        velocity = model.predict_velocity(parts.net, x, torch.ones(1).to(PLANNED), cond, params)
        media, _ = model.decode(parts, x, cond, params)
    assert velocity.shape == x.shape
    assert tuple(media) == model.MEDIA
    assert max(device.peaks.values()) / 1e9 > 2 * 0.89 * RELEASES[name].billions


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (TEMPLATE.partition("{}")[0], 34),
        (EDIT_TEMPLATE.partition("{}")[0], 64),
        (f"<|im_start|>system\n{REQUEST}<|im_end|>\n<|im_start|>user\n", 108),
    ],
)
def test_texts_have_as_many_tokens_as_by_the_released_vocabularies_or_a_few_more(text: str, tokens: int):
    """By what the pipelines of three released models drop of their templates."""
    found = len(open_tokenizer(None, QWEN)(text).input_ids)
    assert tokens <= found <= 1.15 * tokens


def test_special_tokens_have_their_ids_and_words_none_of_their_own():
    tokenizer = open_tokenizer(None, QWEN)
    assert tokenizer("<|vision_start|><|image_pad|>a word<|vision_end|>").input_ids == [151652, 151655, 0, 0, 151653]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi."}]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert [i for i in ids if i] == [151644, 151652, 151655, 151653, 151645, 151644]
    assert tokenizer("a b c", padding="max_length", max_length=5, truncation=True).attention_mask == [1, 1, 1, 0, 0]
