"""EditReward: human preference for an edit, given its reference and instruction, from a vision-language model.

    score = (following + quality) / 2,    part_i = head_i(h_i)_0

h_i is the last hidden state of Qwen2.5-VL-7B at the token <|Reward|>, after the reference, the edit and one of two
texts, which ask how well the edit follows the instruction and how good it is (Wu et al., arXiv 2509.26346; their
released model takes the mean). Each head is three linear layers with ReLUs, in float32. The first of its two outputs is
the mean of the preference; the second, the logarithm of its deviation, is not used. An image of any size becomes about
256 tokens.

Notation: N samples, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from omni_reward.media import Arrays, Meta, References
from omni_reward.scorers import neural
from omni_reward.scorers.heads import build_head
from omni_reward.scorers.hpsv3 import NUM_PIXELS, REWARD_TOKEN
from omni_reward.scorers.pixels import FRAMES, MAX_ASPECT, PATCH, fit_size
from omni_reward.scorers.qwen2_vl import Clips, empty_judge, load_judge, read_instruction
from omni_reward.wire import Score, Scorer

EDITREWARD = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
BASE = "Qwen/Qwen2.5-VL-7B-Instruct"
PARTS = ("following", "quality")


def empty_editreward(device: str, *, base: str = BASE, dtype: str = "bfloat16") -> neural.Empty:
    """Return the network of `load_editreward` with uninitialized weights.

    Raises:
        ValueError: an argument is invalid, or the configuration of `base` cannot be read.
    """
    side = round(NUM_PIXELS**0.5) // PATCH
    return empty_judge(device, base, dtype, (2, side, side), "Qwen2.5-VL")


def load_editreward(
    *,
    following: str,
    quality: str,
    model: str = EDITREWARD,
    base: str = BASE,
    device: str | None = None,
    dtype: str = "bfloat16",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, and their first references.

    Args:
        following, quality: paths of the model's two texts.
        model: name of the model, with model.safetensors.
        base: name of Qwen2.5-VL-7B-Instruct, for its configuration and tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
        OSError: a text cannot be read.
    """
    files = dict(zip(PARTS, (following, quality), strict=True))
    texts = [read_instruction(path, [REWARD_TOKEN], name) for name, path in files.items()]
    placement = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    weights = neural.find_weights(model)
    judge = load_judge(following, weights, base, [REWARD_TOKEN], "<|image_pad|>", placement, "Qwen2.5-VL")
    judges = [replace(judge, instruction=text) for text in texts]
    width = judge.network.config.text_config.hidden_size
    head_weights = [neural.strip_prefix(f"rm_heads.head_{i}.", weights) for i in range(len(PARTS))]
    heads = [build_head(weights, width, 2, has_relu=True).to(placement[0]) for weights in head_weights]

    def decline(prompt: str, image: np.ndarray, references: tuple[np.ndarray, ...]) -> str | None:
        if not references:
            return "the sample has no reference"
        if any(max(picture.shape[:2]) > MAX_ASPECT * min(picture.shape[:2]) for picture in (image, references[0])):
            return f"the image or its reference has an aspect ratio above {MAX_ASPECT}"
        return judge.decline(prompt)

    def rate(samples: Sequence[Clips], prompts: list[str]) -> Tensor:
        rated = [head(judge.read(samples, prompts)[:, 0])[:, 0] for head, judge in zip(heads, judges, strict=True)]
        return torch.stack(rated, dim=1)

    def score(media: Arrays, prompts: list[str], meta: Meta, references: References) -> list[Score]:
        images = media["image"]
        reasons = [decline(*args) for args in zip(prompts, images, references, strict=True)]
        read = [i for i, reason in enumerate(reasons) if reason is None]
        with torch.inference_mode():
            pairs = [[repeat_image(references[i][0]), repeat_image(images[i])] for i in read]
            rows = iter(rate(pairs, [prompts[i] for i in read]).tolist() if read else ())
        return [join(next(rows)) if reason is None else Score(None, abstained=reason) for reason in reasons]

    def join(row: list[float]) -> Score:
        return Score.of(sum(row) / len(row), parts=dict(zip(PARTS, row, strict=True)))

    version = f"{neural.short_name(model)} {dtype}"
    move = neural.make_mover(judge.network)
    return Scorer(score, batch_size=neural.BATCH_SIZE, version=version, references=True, move=move)


def repeat_image(image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return an image [H, W, 3] as a clip of equal frames, and the height and width that the model sees."""
    return np.stack([image] * FRAMES), fit_size(*image.shape[:2], min_pixels=NUM_PIXELS, max_pixels=NUM_PIXELS)
