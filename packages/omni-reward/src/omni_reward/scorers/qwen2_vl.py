"""Reward models based on Qwen2-VL and Qwen2.5-VL with a reward head: HPSv3, VideoAlign and EditReward.

The model reads a chat of one or several clips, an instruction that contains the prompt, and marks: the tokens whose
last hidden states are scored. Scores are only meaningful with the instruction used in training, which is not part of
this package; scripts/scorers/instruction.py extracts it from the source code of the reward model. As in these models,
token positions are one-dimensional, while Qwen2-VL has time, row and column for image tokens.

Notation: N samples, F frames, H height, W width, T tokens, R marks, P patches, D width of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel

from omni_reward.files import read_file
from omni_reward.scorers import neural
from omni_reward.scorers.pixels import FRAMES, MERGE, PATCH, to_patches

PLACE = "{text_prompt}"  # placeholder of the prompt in the instruction
CHAT = (  # Qwen2-VL's chat format
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{sample}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
MAX_PROMPT_CHARS = 8000
MAX_INSTRUCTION_BYTES = 2**20
TEXT_TOKENS = 512  # an estimate for an instruction with its prompt
TEXT_2B = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28}
TEXT_2B |= {"num_key_value_heads": 2, "vocab_size": 151_936}
TEXT_7B = {"hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_hidden_layers": 28}
TEXT_7B |= {"num_key_value_heads": 4, "vocab_size": 152_064}
ROPE = {"mrope_section": [16, 24, 24], "rope_theta": 1e6, "rope_type": "default"}
PUBLISHED: dict[str, dict[str, Any]] = {  # 2.2 and 7.7 billion weights without the language-model heads
    f"Qwen/Qwen2-VL-{size}-Instruct": {
        "text_config": text | {"rope_parameters": ROPE},
        "vision_config": {"hidden_size": text["hidden_size"]},
    }
    for size, text in (("2B", TEXT_2B), ("7B", TEXT_7B))
} | {
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "text_config": TEXT_7B | {"rope_parameters": ROPE},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": TEXT_7B["hidden_size"]},
    }
}
NEXT_CLIP = "<|vision_end|><|vision_start|>"  # between two clips of a chat
Clips = Sequence[tuple[np.ndarray, tuple[int, int]]]  # frames [F, H, W, 3], uint8, and their new height and width


Kind = Literal["Qwen2-VL", "Qwen2.5-VL"]
KINDS: dict[Kind, tuple[Any, Any]] = {
    "Qwen2-VL": (Qwen2VLConfig, Qwen2VLModel),
    "Qwen2.5-VL": (Qwen2_5_VLConfig, Qwen2_5_VLModel),
}


@dataclass(frozen=True)
class Judge:
    """Qwen2-VL or Qwen2.5-VL model that reads samples with an instruction.

    network, tokenizer: from transformers. instruction: text with the placeholder of the prompt and the marks. marks:
    ids of the marks' tokens. pad: the placeholder token of the sample.
    """

    network: Any
    tokenizer: Any
    instruction: str
    marks: list[int]
    pad: str

    def decline(self, prompt: str) -> str | None:
        """Return why a prompt cannot be read, or None."""
        if len(prompt) > MAX_PROMPT_CHARS:
            return f"the prompt is longer than {MAX_PROMPT_CHARS} characters"
        marks = [token for token in self.tokenizer.get_added_vocab() if token in prompt]
        return f"the prompt contains {marks[0]}, a control token of the model" if marks else None

    def read(self, samples: Sequence[Clips], prompts: Sequence[str]) -> Tensor:
        """Return the last hidden states [N, R, D], float32, at the marks, for the resized clips of each sample."""
        device = self.network.device
        clips = [clip for sample in samples for clip in sample]
        patches = torch.from_numpy(np.concatenate([to_patches(clip, *size) for clip, size in clips]))
        grid = torch.tensor([[len(clip) // FRAMES, *(side // PATCH for side in size)] for clip, size in clips])
        grid_pads = iter([self.pad * (int(shape.prod()) // MERGE**2) for shape in grid])
        pads = [NEXT_CLIP.join(next(grid_pads) for _ in sample) for sample in samples]
        instructions = [self.instruction.replace(PLACE, prompt) for prompt in prompts]
        texts = [CHAT.format(sample=sample, text=text) for sample, text in zip(pads, instructions, strict=True)]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(device)
        ids = tokens.input_ids
        words = self.network.get_input_embeddings()(ids)
        features = torch.cat(self.network.get_image_features(patches.to(device), grid.to(device)).pooler_output)
        is_sample = ids == self.tokenizer.convert_tokens_to_ids(self.pad)
        words = words.masked_scatter(is_sample[..., None], features.to(words.dtype))
        states = self.network.language_model(inputs_embeds=words, attention_mask=tokens.attention_mask)
        is_mark = torch.isin(ids, torch.tensor(self.marks, device=device))
        return states.last_hidden_state[is_mark].float().view(len(samples), len(self.marks), -1)


def empty_judge(
    device: str, base: str, dtype: str, grid: tuple[int, int, int], kind: Kind = "Qwen2-VL"
) -> neural.Empty:
    """Return the network of `load_judge` with uninitialized weights.

    grid: patches of a sample along time, height and width; several images are counted along time.

    Raises:
        ValueError: an argument is invalid, or the configuration of `base` cannot be read.
    """
    config = neural.load_config(KINDS[kind][0], base, PUBLISHED)
    network = neural.empty_model(KINDS[kind][1], config, dtype, device)
    count, area = neural.BATCH_SIZE, grid[1] * grid[2]

    def call() -> None:
        patches = torch.zeros(count * grid[0] * area, 3 * FRAMES * PATCH**2).to(device)
        ends = torch.arange(count * grid[0] + 1, dtype=torch.int32).to(device) * area
        network.get_image_features(patches, torch.tensor([grid] * count).to(device), cu_seqlens=ends)
        ids = torch.ones(count, grid[0] * area // MERGE**2 + TEXT_TOKENS, dtype=torch.int64).to(device)
        network.language_model(inputs_embeds=network.get_input_embeddings()(ids), attention_mask=ids)

    return neural.Empty(network, call)


def load_judge(
    instruction: str,
    weights: neural.Weights,
    base: str,
    marks: Sequence[str],
    pad: str,
    placement: tuple[torch.device, Any],
    kind: Kind = "Qwen2-VL",
) -> Judge:
    """Load the reward model with these weights.

    Args:
        instruction: path of the text, with `{text_prompt}` and the marks in their order.
        weights: the model's weights, under old or current names of transformers.
        base: name of the base model, for its configuration and tokenizer.
        marks: the added tokens, in their order.
        pad: the placeholder token of the sample.
        placement: device and dtype.
        kind: kind of the base model.

    Raises:
        ValueError: an argument is invalid, or the weights do not fit.
        OSError: the instruction cannot be read.
    """
    text = read_instruction(instruction, marks)
    tokenizer = neural.load_part(AutoTokenizer, base)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids([*marks, pad])
    config = neural.load_part(KINDS[kind][0], base)
    renamed = {_rename(name): weight for name, weight in weights.items() if name.startswith(("model.", "visual."))}
    words = renamed.get("language_model.embed_tokens.weight")
    if words is None or len(words) <= max(ids):
        raise ValueError(f"the model must hold an embedding of each token of {base} and of {' '.join(marks)}")
    config.text_config.vocab_size = len(words)
    network = neural.load_model(KINDS[kind][1], base, placement[1], placement[0], config=config, weights=renamed)
    return Judge(network, tokenizer, text, ids[:-1], pad)


def read_instruction(path: str, marks: Sequence[str], name: str = "instruction") -> str:
    """Return the text of an instruction. name: name of the option that holds the path.

    Raises:
        ValueError: a mark or the placeholder of the prompt is missing or occurs twice.
        OSError: it cannot be read.
    """
    text = read_file(path, MAX_INSTRUCTION_BYTES).decode()
    if any(text.count(part) != 1 for part in (PLACE, *marks)):
        raise ValueError(f"{name} must be a file with {PLACE} and {' '.join(marks)} once each, got {path}")
    return text


def _rename(name: str) -> str:
    """Return a weight's name in the current Qwen2VLModel from its name in an earlier or current version."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
