"""HPSv3: how much people prefer an image for its prompt, by a vision-language model with a head in place of words.

    score = head(h)_0, h the last state of Qwen2-VL-7B at the token <|Reward|>

The head is three linear layers with ReLUs in between, in float32; the first of its two outputs is the mean of the
preference (Ma et al., arXiv 2508.03789). Good images lie around 10 and above, bad ones around 0 and below; some
multiply the score by 0.1.

The model reads a chat with the image, an instruction with the prompt in it, and the token. The instruction belongs to
the weights: with other words the scores mean nothing. It is not part of this package;
scripts/scorers/hpsv3_instruction.py takes it from the source code of HPSv3 and writes the file that `instruction`
names. As there, the positions of the tokens are simply counted, where Qwen2-VL itself would give an image's tokens a
row and a column, and an image has 256 tokens, whatever its size.

Letters: N samples, H height, W width, T tokens, P patches, D numbers in a patch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel

from omni_reward.scorers import neural
from omni_reward.scorers.heads import build_head
from omni_reward.scorers.pixels import fit_size, to_patches
from omni_reward.wire import Scorer

HPSV3 = "MizzenAI/HPSv3"
BASE = "Qwen/Qwen2-VL-7B-Instruct"
REWARD_TOKEN = "<|Reward|>"
IMAGE_TOKEN = "<|image_pad|>"
NUM_IMAGE_TOKENS = 256  # about, after rounding both sides
PLACE = "{text_prompt}"  # of the prompt in the instruction
CHAT = (  # Qwen2-VL's format of a chat
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
MAX_PROMPT_CHARS = 8000


def load_hpsv3(
    *,
    instruction: str,
    model: str = HPSV3,
    base: str = BASE,
    device: str | None = None,
    dtype: str = "bfloat16",
    threads: int = 1,
) -> Scorer:
    """Scorer for `image` [N, H, W, 3], uint8, RGB.

    Args:
        instruction: path of the text that the model is told.
        model: name of the model, which holds HPSv3.safetensors.
        base: name of Qwen2-VL-7B-Instruct, of which only the settings and the tokenizer are read.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument breaks its rule, or the model cannot be read.
        OSError: the instruction cannot be read.
    """
    text = Path(instruction).read_text(encoding="utf-8")
    if text.count(PLACE) != 1 or text.count(REWARD_TOKEN) != 1:
        raise ValueError(f"instruction must be a file with {PLACE} and {REWARD_TOKEN} once each, got {instruction}")
    where, kind = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    weights = neural.read_weights(neural.find_file(model, "HPSv3.safetensors"))
    tokenizer = neural.load_part(AutoTokenizer, base)
    tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
    reward_id, image_id = tokenizer.convert_tokens_to_ids([REWARD_TOKEN, IMAGE_TOKEN])
    config = neural.load_part(Qwen2VLConfig, base)
    own = {_rename(name): weight for name, weight in weights.items() if name.startswith(("model.", "visual."))}
    words = own.get("language_model.embed_tokens.weight")
    if words is None or len(words) <= max(reward_id, image_id):
        raise ValueError(f"{model} must hold an embedding of each token of {base} and of {REWARD_TOKEN}")
    config.text_config.vocab_size = len(words)
    network = neural.load_model(Qwen2VLModel, model, kind, where, config=config, weights=own)
    head = build_head(neural.below("rm_head.", weights), config.text_config.hidden_size, 2, has_relu=True).to(where)

    def decline(prompt: str) -> str | None:
        if len(prompt) > MAX_PROMPT_CHARS:
            return f"the prompt is longer than {MAX_PROMPT_CHARS} characters"
        marks = [token for token in tokenizer.get_added_vocab() if token in prompt]
        return f"the prompt holds {marks[0]}, which steers the model" if marks else None

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        patches, grid = _cut(images, network.config.vision_config)
        marks = IMAGE_TOKEN * (int(grid[0].prod()) // network.config.vision_config.spatial_merge_size**2)
        texts = [CHAT.format(image=marks, text=text.replace(PLACE, prompt)) for prompt in prompts]
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(where)
        ids = tokens.input_ids
        words = network.get_input_embeddings()(ids)
        seen = torch.cat(network.get_image_features(patches.to(where), grid.to(where)).pooler_output)
        words = words.masked_scatter((ids == image_id)[..., None], seen.to(words.dtype))
        states = network.language_model(inputs_embeds=words, attention_mask=tokens.attention_mask)
        return head(states.last_hidden_state[ids == reward_id].float())[:, 0]

    return neural.image_scorer(rate, f"{neural.short_name(model)} {dtype}", decline)


def _cut(images: np.ndarray, vision: Any) -> tuple[Tensor, Tensor]:
    """Patches [N P, D] of images [N, H, W, 3], and how many each has along time, height and width: [N, 3]."""
    factor = vision.patch_size * vision.spatial_merge_size
    height, width = fit_size(*images.shape[1:3], factor=factor, num_pixels=NUM_IMAGE_TOKENS * factor**2)
    sizes = {"patch": vision.patch_size, "merge": vision.spatial_merge_size, "frames": vision.temporal_patch_size}
    patches = np.concatenate([to_patches(image, height, width, **sizes) for image in images])
    grid = torch.tensor([[1, height // vision.patch_size, width // vision.patch_size]] * len(images))
    return torch.from_numpy(patches), grid


def _rename(name: str) -> str:
    """Name of a weight in the Qwen2VLModel of today, from that of its class when HPSv3 was made, or a later one."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
