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


class RewardModel:
    """The network with its tokenizer and its instruction.

    Args:
        name: name of the model.
        weights: its weights under their published names.
        base: name of the Qwen2-VL that it was made of, for settings and tokenizer.
        instruction: what the model is told, with the place of the prompt and the token.
        dtype, device: of the network; the head computes in float32.

    Raises:
        ValueError: they do not fit one another.
    """

    def __init__(
        self, name: str, weights: neural.Weights, base: str, instruction: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._instruction = instruction
        self._tokenizer = neural.load_part(AutoTokenizer, base)
        self._tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self._reward_id, self._image_id = self._tokenizer.convert_tokens_to_ids([REWARD_TOKEN, IMAGE_TOKEN])
        network = {_rename(key): weight for key, weight in weights.items() if key.startswith(("model.", "visual."))}
        config = neural.load_part(Qwen2VLConfig, base)
        words = network.get("language_model.embed_tokens.weight")
        if words is None or len(words) <= max(self._reward_id, self._image_id):
            raise ValueError(f"{name} must hold an embedding of each token of {base} and of {REWARD_TOKEN}")
        config.text_config.vocab_size = len(words)
        self._network = neural.load_model(Qwen2VLModel, name, dtype, device, config=config, weights=network)
        width = config.text_config.hidden_size
        self._head = build_head(neural.below("rm_head.", weights), width, 2, has_relu=True).to(device)

    def decline(self, prompt: str) -> str | None:
        """Reason for which the model cannot read a prompt; None where it can."""
        if len(prompt) > MAX_PROMPT_CHARS:
            return f"the prompt is longer than {MAX_PROMPT_CHARS} characters"
        marks = [token for token in self._tokenizer.get_added_vocab() if token in prompt]
        return f"the prompt holds {marks[0]}, which steers the model" if marks else None

    def rate(self, images: np.ndarray, prompts: list[str]) -> Tensor:
        """Scores [N] of images [N, H, W, 3], uint8, RGB, and N prompts."""
        pixels, grid = self._see(images)
        merge = self._network.config.vision_config.spatial_merge_size
        marks = IMAGE_TOKEN * (int(grid[0].prod()) // merge**2)
        texts = [CHAT.format(image=marks, text=self._instruction.replace(PLACE, prompt)) for prompt in prompts]
        tokens = self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        tokens = tokens.to(self._network.device)
        ids = tokens.input_ids
        words = self._network.get_input_embeddings()(ids)
        seen = torch.cat(self._network.get_image_features(pixels, grid).pooler_output)
        words = words.masked_scatter((ids == self._image_id)[..., None], seen.to(words.dtype))
        states = self._network.language_model(inputs_embeds=words, attention_mask=tokens.attention_mask)
        return self._head(states.last_hidden_state[ids == self._reward_id].float())[:, 0]

    def _see(self, images: np.ndarray) -> tuple[Tensor, Tensor]:
        """Patches [N P, D] of the images, and how many there are of each along time, height and width: [N, 3]."""
        vision = self._network.config.vision_config
        factor = vision.patch_size * vision.spatial_merge_size
        height, width = fit_size(*images.shape[1:3], factor=factor, num_pixels=NUM_IMAGE_TOKENS * factor**2)
        sizes = {"patch": vision.patch_size, "merge": vision.spatial_merge_size, "frames": vision.temporal_patch_size}
        cut = [to_patches(image, height, width, **sizes) for image in images]
        grid = torch.tensor([[1, height // vision.patch_size, width // vision.patch_size]] * len(images))
        return torch.from_numpy(np.concatenate(cut)).to(self._network.device), grid.to(self._network.device)


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
    network = RewardModel(model, weights, base, text, kind, where)
    return neural.image_scorer(network.rate, f"{neural.short_name(model)} {dtype}", network.decline)


def _rename(name: str) -> str:
    """Name of a weight in the Qwen2VLModel of today, from that of its class when HPSv3 was made, or a later one."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
