"""EditReward on a tiny checkpoint in its published form, against transformers' own model and processor."""

from pathlib import Path

import build_tiny_scorers
import numpy as np
import pytest
import torch
from omni_reward import Scorer
from omni_reward.media import References
from omni_reward.scorers import load_scorer
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEXTS = {
    "following": "\nDoes it follow?\nText - {text_prompt}\n\nRating: <|Reward|>\n\nEND\n",
    "quality": "\nIs it good {so}?\nText - {text_prompt}\n\nRating: <|Reward|>\n",
}
PROMPTS = ["make it night", "remove the {tree}", "add a café"]
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (3, 40, 56, 3), np.uint8)
SIZES = [(40, 56), (64, 32), (300, 280)]
REFERENCES: References = [(RANDOM.integers(0, 256, (*size, 3), np.uint8),) for size in SIZES]
META: list[dict[str, object]] = [{}, {}, {}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_scorers.write_editreward(folder / "editreward", folder / "base")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def load(tiny: Path, **changes: object) -> Scorer:
    given = {"model": tiny / "editreward", "base": tiny / "base", "dtype": "float32"}
    given |= {name: tiny / f"{name}.txt" for name in TEXTS}
    return load_scorer("editreward", options={name: str(value) for name, value in {**given, **changes}.items()})


@torch.inference_mode()
def expected(tiny: Path) -> list[list[float]]:
    """Both parts of each sample, one at a time, with the class that EditReward is derived from."""
    weights = load_file(tiny / "editreward" / "model.safetensors")
    config = Qwen2_5_VLConfig.from_pretrained(tiny / "base")
    config.text_config.vocab_size = len(weights["model.language_model.embed_tokens.weight"])
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith("rm_heads.")})
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    see = Qwen2VLImageProcessorPil(min_pixels=256 * 28 * 28, max_pixels=256 * 28 * 28)
    found = []
    for image, (reference,), prompt in zip(IMAGES, REFERENCES, PROMPTS, strict=True):
        seen = see([reference, image], input_data_format="channels_last", return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(-1) // 4).tolist()
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
        parts = []
        for i, text in enumerate(TEXTS.values()):
            chat = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" + shown
            chat += text.replace("{text_prompt}", prompt) + "<|im_end|>\n<|im_start|>assistant\n"
            ids = torch.tensor([tokenizer(chat)["input_ids"]])
            places = torch.arange(ids.shape[1]).expand(3, 1, -1)
            states = model.model(input_ids=ids, position_ids=places, **seen).last_hidden_state
            x = states[0, ids[0] == len(tokenizer) - 1]
            for place in (0, 3, 5):
                x = x @ weights[f"rm_heads.head_{i}.{place}.weight"].T + weights[f"rm_heads.head_{i}.{place}.bias"]
                x = x.relu() if place < 5 else x
            parts.append(x[0, 0].item())
        found.append(parts)
    return found


def test_the_score_is_the_mean_of_both_heads_first_outputs(tiny: Path) -> None:
    scores = load(tiny)({"image": IMAGES}, PROMPTS, META, REFERENCES)
    wanted = expected(tiny)
    assert [score.value for score in scores] == pytest.approx([sum(parts) / 2 for parts in wanted], abs=1e-4)
    for score, (following, quality) in zip(scores, wanted, strict=True):
        assert score.parts == pytest.approx({"following": following, "quality": quality}, abs=1e-4)
    assert np.ptp(wanted, axis=0).min() > 0.002, "the inputs matter"


def test_the_reference_the_edit_and_their_order_matter(tiny: Path) -> None:
    scorer = load(tiny)
    same = IMAGES[:1], [(IMAGES[1],)]
    turned = IMAGES[1:2], [(IMAGES[0],)]
    values = [scorer({"image": image}, PROMPTS[:1], [{}], reference)[0].value for image, reference in (same, turned)]
    assert values[0] != pytest.approx(values[1], abs=1e-4)


def test_samples_that_it_cannot_read_abstain_alone(tiny: Path) -> None:
    thin = np.zeros((1, 201, 3), np.uint8)
    references: References = [(), (thin,), REFERENCES[2]]
    scores = load(tiny)({"image": IMAGES}, PROMPTS, META, references)
    assert scores[0].abstained == "the sample has no reference"
    assert scores[1].abstained == "the image or its reference has an aspect ratio above 200"
    assert scores[2].value == pytest.approx(sum(expected(tiny)[2]) / 2, abs=1e-4)
    [marked] = load(tiny)({"image": IMAGES[:1]}, ["<|Reward|>"], [{}], REFERENCES[:1])
    assert marked.abstained == "the prompt contains <|Reward|>, a control token of the model"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_without_its_places_is_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.txt").write_text("{text_prompt}")
    with pytest.raises(ValueError, match=rf"{name} must be a file with \{{text_prompt\}} and <\|Reward\|> once each"):
        load(tiny, **{name: tmp_path / "bad.txt"})
