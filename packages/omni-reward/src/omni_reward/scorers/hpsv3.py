"""HPSv3: human preference for an image given its prompt, from a vision-language model with a reward head.

    score = head(h)_0, where h is the last hidden state of Qwen2-VL-7B at the token <|Reward|>

The head is three linear layers with ReLUs, in float32; the first of its two outputs is the mean of the preference
(Ma et al., arXiv 2508.03789). Good images score around 10 and above, bad ones around 0 and below; some multiply the
score by 0.1. An image of any size becomes 256 tokens.

Notation: N samples, H height, W width.
"""

import numpy as np
from torch import Tensor

from omni_reward.scorers import neural
from omni_reward.scorers.heads import build_head
from omni_reward.scorers.pixels import FRAMES, PATCH, SIDE, fit_size
from omni_reward.scorers.qwen2_vl import empty_judge, load_judge
from omni_reward.wire import Scorer

HPSV3 = "MizzenAI/HPSv3"
BASE = "Qwen/Qwen2-VL-7B-Instruct"
REWARD_TOKEN = "<|Reward|>"
NUM_PIXELS = 256 * SIDE**2  # approximately, after both sides are rounded


def empty_hpsv3(device: str, *, base: str = BASE, dtype: str = "bfloat16") -> neural.Empty:
    """Return the network of `load_hpsv3` with uninitialized weights.

    Raises:
        ValueError: an argument is invalid, or the configuration of `base` cannot be read.
    """
    side = round(NUM_PIXELS**0.5) // PATCH
    return empty_judge(device, base, dtype, (1, side, side))


def load_hpsv3(
    *,
    instruction: str,
    model: str = HPSV3,
    base: str = BASE,
    device: str | None = None,
    dtype: str = "bfloat16",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB.

    Args:
        instruction: path of the model's instruction.
        model: name of the model, with HPSv3.safetensors.
        base: name of Qwen2-VL-7B-Instruct, for its configuration and tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
        OSError: the instruction cannot be read.
    """
    placement = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    weights = neural.read_weights(neural.find_file(model, "HPSv3.safetensors"))
    judge = load_judge(instruction, weights, base, [REWARD_TOKEN], "<|image_pad|>", placement)
    width = judge.network.config.text_config.hidden_size
    head = build_head(neural.strip_prefix("rm_head.", weights), width, 2, has_relu=True).to(placement[0])

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        size = fit_size(*images.shape[1:3], min_pixels=NUM_PIXELS, max_pixels=NUM_PIXELS)
        clips = [[(clip, size)] for clip in images[:, None].repeat(FRAMES, axis=1)]
        return head(judge.read(clips, prompts)[:, 0])[:, 0]

    return neural.image_scorer(rate, f"{neural.short_name(model)} {dtype}", judge.decline, [judge.network])
