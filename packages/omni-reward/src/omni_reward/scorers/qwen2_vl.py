"""Reward models that are a Qwen2-VL with a head in place of words: HPSv3 and VideoAlign.

The model reads a chat with the sample, an instruction with the prompt in it, and marks, tokens at which its last state
is graded. The instruction belongs to the weights: with other words the scores mean nothing. It is not part of this
package; scripts/scorers/instruction.py takes it from the source code of the reward model and writes the file that
`instruction` names. As in both, the positions of the tokens are simply counted, where Qwen2-VL itself would give the
tokens of a picture a time, a row and a column.

Letters: N samples, F frames, H height, W width, T tokens, R marks, P patches, D width of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel

from omni_reward.scorers import neural
from omni_reward.scorers.pixels import FRAMES, MERGE, PATCH, to_patches

PLACE = "{text_prompt}"  # of the prompt in the instruction
CHAT = (  # Qwen2-VL's format of a chat
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{sample}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
MAX_PROMPT_CHARS = 8000


@dataclass(frozen=True)
class Judge:
    """A Qwen2-VL that reads samples with an instruction.

    network, tokenizer: of transformers. instruction: with the prompt's place and the marks. marks: their tokens. pad:
    the token in whose place the sample stands.
    """

    network: Any
    tokenizer: Any
    instruction: str
    marks: list[int]
    pad: str

    def decline(self, prompt: str) -> str | None:
        """Reason for which a prompt cannot be read."""
        if len(prompt) > MAX_PROMPT_CHARS:
            return f"the prompt is longer than {MAX_PROMPT_CHARS} characters"
        marks = [token for token in self.tokenizer.get_added_vocab() if token in prompt]
        return f"the prompt holds {marks[0]}, which steers the model" if marks else None

    def read(self, clips: Sequence[np.ndarray], size: tuple[int, int], prompts: Sequence[str]) -> Tensor:
        """Last states [N, R, D], float32, at the marks, of clips [F, H, W, 3], uint8, RGB, brought to a size."""
        device, (height, width) = self.network.device, size
        patches = torch.from_numpy(np.concatenate([to_patches(clip, height, width) for clip in clips]))
        grid = torch.tensor([[len(clip) // FRAMES, height // PATCH, width // PATCH] for clip in clips])
        pads = [self.pad * (int(each.prod()) // MERGE**2) for each in grid]
        asked = [self.instruction.replace(PLACE, prompt) for prompt in prompts]
        texts = [CHAT.format(sample=sample, text=text) for sample, text in zip(pads, asked, strict=True)]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(device)
        ids = tokens.input_ids
        words = self.network.get_input_embeddings()(ids)
        seen = torch.cat(self.network.get_image_features(patches.to(device), grid.to(device)).pooler_output)
        is_sample = ids == self.tokenizer.convert_tokens_to_ids(self.pad)
        words = words.masked_scatter(is_sample[..., None], seen.to(words.dtype))
        states = self.network.language_model(inputs_embeds=words, attention_mask=tokens.attention_mask)
        is_mark = torch.isin(ids, torch.tensor(self.marks, device=device))
        return states.last_hidden_state[is_mark].float().view(len(clips), len(self.marks), -1)


def load_judge(
    instruction: str, weights: neural.Weights, base: str, marks: Sequence[str], pad: str, to: tuple[torch.device, Any]
) -> Judge:
    """The reward model of these weights.

    Args:
        instruction: path of the text, with `{text_prompt}` and the marks in their order.
        weights: the model's, under the names of the time when it was made or of today.
        base: name of the Qwen2-VL beneath, of which only the settings and the tokenizer are read.
        marks: the tokens that the model has besides, in the order in which they were added.
        pad: the token in whose place the sample stands.
        to: device and dtype.

    Raises:
        ValueError: an argument breaks its rule, or the weights do not fit.
        OSError: the instruction cannot be read.
    """
    text = Path(instruction).read_text(encoding="utf-8")
    if any(text.count(part) != 1 for part in (PLACE, *marks)):
        raise ValueError(f"instruction must be a file with {PLACE} and {' '.join(marks)} once each, got {instruction}")
    tokenizer = neural.load_part(AutoTokenizer, base)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids([*marks, pad])
    config = neural.load_part(Qwen2VLConfig, base)
    own = {_rename(name): weight for name, weight in weights.items() if name.startswith(("model.", "visual."))}
    words = own.get("language_model.embed_tokens.weight")
    if words is None or len(words) <= max(ids):
        raise ValueError(f"the model must hold an embedding of each token of {base} and of {' '.join(marks)}")
    config.text_config.vocab_size = len(words)
    network = neural.load_model(Qwen2VLModel, base, to[1], to[0], config=config, weights=own)
    return Judge(network, tokenizer, text, ids[:-1], pad)


def _rename(name: str) -> str:
    """Name of a weight in the Qwen2VLModel of today, from that of its class when the model was made, or a later one."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
