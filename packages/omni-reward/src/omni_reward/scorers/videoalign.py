"""VideoAlign: visual quality, motion quality and text alignment of a video, from a vision-language model with a head.

    score = VQ + MQ + TA,    part_i = (head_i(h_i) - mean_i) / std_i

with the last hidden state h_i of Qwen2-VL-2B at <|VQ_reward|>, <|MQ_reward|>, <|TA_reward|> (Liu et al., arXiv
2501.13918). The means and standard deviations are in the published model's settings. As published, the model gets two
frames per second, at least four, evenly spaced from the first to the last. Its LoRA weights are merged.

Notation: N samples, T frames, H height, W width, D width of a state.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_reward.media import Meta
from omni_reward.scorers import neural
from omni_reward.scorers.pixels import FRAMES, PATCH, SIDE, fit_size
from omni_reward.scorers.qwen2_vl import empty_judge, load_judge
from omni_reward.wire import Scorer

VIDEOALIGN = "KwaiVGI/VideoReward"
CHECKPOINT = "checkpoint-11352/model.pth"
BASE = "Qwen/Qwen2-VL-2B-Instruct"
PARTS = ("VQ", "MQ", "TA")
SETTINGS = (  # entries of the published model's settings
    *("peft_lora_config.lora_alpha", "peft_lora_config.lora_r", "data_config.max_frame_pixels", "data_config.fps"),
    *(f"inference_config.{part}_{name}" for name in ("mean", "std") for part in PARTS),
)
MIN_FRAMES = 4
MIN_PIXELS = 128 * SIDE**2  # of a frame
MAX_PIXELS = 256 * SIDE**2  # of a frame, from the published model's settings


def empty_videoalign(device: str, *, base: str = BASE, dtype: str = "bfloat16") -> neural.Empty:
    """Return the network of `load_videoalign` with uninitialized weights, for videos of 5 s at two frames per second.

    Raises:
        ValueError: an argument is invalid, or the configuration of `base` cannot be read.
    """
    side = round(MAX_PIXELS**0.5) // PATCH
    return empty_judge(device, base, dtype, (10 // FRAMES, side, side))


def load_videoalign(
    *,
    instruction: str,
    model: str = VIDEOALIGN,
    base: str = BASE,
    device: str | None = None,
    dtype: str = "bfloat16",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `video` [N, T, H, W, 3], uint8, RGB.

    Args:
        instruction: path of the model's instruction.
        model: name of the model, with model_config.json and checkpoint-11352/model.pth.
        base: name of Qwen2-VL-2B-Instruct, for its configuration and tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
        OSError: the instruction cannot be read.
    """
    placement = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    alpha, rank, max_pixels, sample_fps, *scales = neural.read_config(model, "model_config.json", SETTINGS).values()
    weights = merge_lora(neural.read_weights(neural.find_file(model, CHECKPOINT)), alpha / rank)
    if "rm_head.weight" not in weights:
        raise ValueError(f"the weights must be VideoAlign's, with rm_head.weight, got the names {sorted(weights)[:8]}")
    judge = load_judge(instruction, weights, base, [f"<|{part}_reward|>" for part in PARTS], "<|video_pad|>", placement)
    head = weights["rm_head.weight"].float().to(placement[0]).expand(3, -1)  # one row for all parts, or one per part
    mean, std = torch.tensor(scales).to(placement[0]).chunk(2)

    def rate(clips: np.ndarray, prompts: list[str], meta: Meta) -> Tensor:
        size = fit_size(*clips.shape[2:4], min_pixels=MIN_PIXELS, max_pixels=max_pixels)
        rates: list[Any] = [sample["fps"] for sample in meta]
        frames = [[(pick_frames(clip, fps, sample_fps), size)] for clip, fps in zip(clips, rates, strict=True)]
        return ((judge.read(frames, prompts) * head).sum(dim=-1) - mean) / std

    return neural.network_scorer(
        "video", rate, f"{neural.short_name(model)} {dtype}", judge.decline, PARTS, [judge.network]
    )


def merge_lora(weights: neural.Weights, scale: float) -> dict[str, Tensor]:
    """Merge `scale` B A into each weight with an adapter, and return all weights without PEFT's name prefixes."""
    merged = neural.strip_prefix("base_model.model.", weights)
    for name in [name for name in merged if name.endswith(".base_layer.weight")]:
        layer = name.removesuffix(".base_layer.weight")
        down, up = (merged.pop(f"{layer}.lora_{side}.default.weight").float() for side in "AB")
        merged[f"{layer}.weight"] = merged.pop(name).float() + scale * up @ down
        if f"{layer}.base_layer.bias" in merged:
            merged[f"{layer}.bias"] = merged.pop(f"{layer}.base_layer.bias")
    return merged


def pick_frames(clip: np.ndarray, fps: float, sample_fps: float) -> np.ndarray:
    """Return an even number of evenly spaced frames of a clip [T, H, W, 3], about `sample_fps` per second."""
    count = min(max(len(clip) / fps * sample_fps, MIN_FRAMES), max(2, len(clip) // 2 * 2))
    return clip[np.linspace(0, len(clip) - 1, round(count / 2) * 2).round().astype(int)]
