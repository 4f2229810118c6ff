"""VideoAlign on a tiny checkpoint in its published form, against transformers' own model with PEFT's own LoRA."""

from pathlib import Path

import build_tiny_scorers
import numpy as np
import pytest
import torch
from omni_reward import Score, Scorer
from omni_reward.scorers import load_scorer
from omni_reward.scorers.videoalign import PARTS, pick_frames
from peft import LoraConfig, get_peft_model
from scorers import instruction
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

INSTRUCTION = "Look.\n{text_prompt} {so}\nVisual: <|VQ_reward|>\nMotion: <|MQ_reward|>\nText: <|TA_reward|>\n"
PROMPTS = ["a cat runs", "two dogs under a {tree}"]
CLIPS = np.random.default_rng(0).integers(0, 256, (2, 9, 40, 56, 3), np.uint8)
META: list[dict[str, object]] = [{"fps": 8.0}, {"fps": 3.0}]  # 4 and 6 frames
SEEN = [[0, 3, 5, 8], [0, 2, 3, 5, 6, 8]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_scorers.write_videoalign(folder / "videoalign", folder / "base")
    (folder / "instruction.txt").write_text(INSTRUCTION)
    return folder


def load(tiny: Path, **changes: object) -> Scorer:
    given = {"model": tiny / "videoalign", "base": tiny / "base", "instruction": tiny / "instruction.txt"}
    options = {name: str(value) for name, value in {**given, "dtype": "float32", **changes}.items()}
    return load_scorer("videoalign", options=options)


@torch.inference_mode()
def reference(tiny: Path) -> list[list[float]]:
    """The three parts of one sample at a time."""
    weights = torch.load(tiny / "videoalign" / "checkpoint-11352" / "model.pth", weights_only=True)
    head = weights.pop("base_model.model.rm_head.weight")
    config = Qwen2VLConfig.from_pretrained(tiny / "base")
    config.text_config.vocab_size = len(weights["base_model.model.model.embed_tokens.weight"])
    targets = r".*language_model.*self_attn\.[qkvo]_proj"
    model = get_peft_model(
        Qwen2VLForConditionalGeneration(config), LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    ).eval()
    top = "base_model.model."
    places = {f"{top}model.": f"{top}model.language_model.", f"{top}visual.": f"{top}model.visual."}
    news = {n: n.replace(old, new, 1) for n in weights for old, new in places.items() if n.startswith(old)}
    missing, unknown = model.load_state_dict({news[n]: weight for n, weight in weights.items()}, strict=False)
    assert (missing, unknown) == (["base_model.model.lm_head.weight"], [])
    tokenizer = AutoTokenizer.from_pretrained(tiny / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{part}_reward|>" for part in PARTS]})
    see = Qwen2VLImageProcessorPil(min_pixels=128 * 28 * 28, max_pixels=200704)
    scores = []
    for clip, prompt, chosen in zip(CLIPS, PROMPTS, SEEN, strict=True):
        stills = [see(clip[i], input_data_format="channels_last", return_tensors="pt") for i in chosen]
        grid = stills[0]["image_grid_thw"] * torch.tensor([[len(chosen) // 2, 1, 1]])
        halves = [still["pixel_values"].reshape(-1, 3, 2, 14, 14)[:, :, :1] for still in stills]
        pairs = [torch.cat(halves[i : i + 2], dim=2).flatten(1) for i in range(0, len(chosen), 2)]
        text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        text += "<|video_pad|>" * (int(grid.prod()) // 4) + "<|vision_end|>"
        text += INSTRUCTION.replace("{text_prompt}", prompt) + "<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        places = torch.arange(ids.shape[1]).expand(3, 1, -1)
        out = model.base_model.model.model(
            input_ids=ids, position_ids=places, pixel_values_videos=torch.cat(pairs), video_grid_thw=grid
        )
        marks = [(ids[0] == tokenizer.convert_tokens_to_ids(f"<|{part}_reward|>")).nonzero().item() for part in PARTS]
        values = (out.last_hidden_state[0, marks] @ head.T)[:, 0]
        scores.append(((values - 0.5) / torch.tensor([2.0, 2.0, 4.0])).tolist())
    return scores


def test_the_parts_are_those_of_the_model_and_the_score_their_sum(tiny: Path) -> None:
    scores = load(tiny)({"video": CLIPS}, PROMPTS, META)
    for score, parts in zip(scores, reference(tiny), strict=True):
        assert score.parts == pytest.approx(dict(zip(PARTS, parts, strict=True)), abs=1e-4)
        assert score.value == pytest.approx(sum(parts), abs=1e-4)
    assert len({round(part, 3) for score in scores for part in score.parts.values()}) == 6


@pytest.mark.parametrize(
    ("num_frames", "fps", "chosen"),
    [
        (49, 24, [0, 16, 32, 48]),
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (7, 2, [0, 1, 2, 4, 5, 6]),
        (5, 2, [0, 1, 3, 4]),
        (3, 24, [0, 2]),
        (1, 24, [0, 0]),
    ],
)
def test_two_frames_a_second_are_seen_and_four_at_least(num_frames: int, fps: float, chosen: list[int]) -> None:
    assert pick_frames(np.arange(num_frames), fps, 2.0).tolist() == chosen


def test_what_cannot_be_read_abstains(tiny: Path) -> None:
    scorer = load(tiny)
    steered, _ = scorer({"video": CLIPS}, ["be <|VQ_reward|>", "a"], META)
    assert steered == Score(None, abstained="the prompt contains <|VQ_reward|>, a control token of the model")


def test_an_instruction_without_its_places_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text(INSTRUCTION.replace("<|MQ_reward|>", ""))
    with pytest.raises(ValueError, match=r"must be a file with .* once each"):
        load(tiny, instruction=tmp_path / "bad.txt")


def test_the_instruction_is_taken_from_source_code(tmp_path: Path) -> None:
    (tmp_path / "prompt_template.py").write_text(f'DETAILED = """{INSTRUCTION}"""\n')
    instruction.main([str(tmp_path / "prompt_template.py"), str(tmp_path / "out.txt"), "DETAILED"])
    assert (tmp_path / "out.txt").read_text() == INSTRUCTION
