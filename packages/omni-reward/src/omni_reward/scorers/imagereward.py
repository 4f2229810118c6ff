"""ImageReward: human preference for an image given its prompt, as a z-score over the training set.

    score = (head(h_0) - 0.16717362830052426) / 1.0333394966054072

h_0 is the last hidden state of the first token in BLIP's text encoder, which attends to the image tokens of BLIP's
ViT-L/16 (Xu et al., arXiv 2304.05977). The head is five linear layers without activations. Most scores are between -2
and 2. A prompt is truncated to 35 tokens.

The published weights (ImageReward.pt, with med_config.json, at zai-org/ImageReward) have the names of BLIP's code; they
are renamed for transformers. Only tensors are read from the PyTorch file. ImageReward.safetensors with the same tensors
takes priority.

Notation: N samples, H height, W width, T tokens.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BlipTextConfig, BlipVisionConfig, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from omni_reward.scorers import neural
from omni_reward.scorers.heads import build_head
from omni_reward.scorers.pixels import square_pixels
from omni_reward.wire import Scorer

IMAGEREWARD = "zai-org/ImageReward"
TOKENIZER = "google-bert/bert-base-uncased"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the training set
MAX_TOKENS = 35
VISION: dict[str, Any] = {  # ViT-L/16; with the text encoder 446 million weights
    "hidden_size": 1024, "image_size": 224, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 24, "patch_size": 16,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "encoder_hidden_size": 1024, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_hidden_layers": 12, "vocab_size": 30_524,
}  # fmt: skip
HEAD_WIDTH = 64  # of an attention head in both sizes of BLIP's vision tower; not in the weights

_VISION_NAMES = (  # BLIP's -> transformers', in this order
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.(\d+)\.", r"encoder.layers.\1."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"^norm\.", "post_layernorm."),
)
_TEXT_SETTINGS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "hidden_act", "layer_norm_eps", "pad_token_id"),
)


def empty_imagereward(device: str, *, dtype: str = "float32") -> neural.Empty:
    """Return the published networks of `load_imagereward` with uninitialized weights.

    Raises:
        ValueError: scorers do not support the dtype.
    """
    vision = neural.empty_model(BlipVisionModel, BlipVisionConfig(**VISION), dtype, device)
    reader = BlipTextConfig(**TEXT, is_decoder=True)
    text = neural.empty_model(partial(BlipTextModel, add_pooling_layer=False), reader, dtype, device)
    side = vision.config.image_size

    def call() -> None:
        pixels = torch.zeros(neural.BATCH_SIZE, 3, side, side).to(device, vision.dtype)
        tokens = torch.ones(neural.BATCH_SIZE, MAX_TOKENS, dtype=torch.int64).to(device)
        image_states = vision(pixel_values=pixels).last_hidden_state
        text(input_ids=tokens, attention_mask=tokens, encoder_hidden_states=image_states)

    return neural.Empty(nn.ModuleList([vision, text]), call)


def load_imagereward(
    *,
    model: str = IMAGEREWARD,
    tokenizer: str = TOKENIZER,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB.

    Args:
        model: name of the model.
        tokenizer: name of BERT's uncased tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`; the head computes in float32.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    where, kind = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    kept = neural.read_config(model, "med_config.json", _TEXT_SETTINGS)
    safe = Path(model) / "ImageReward.safetensors"
    weights = neural.read_weights(safe if safe.is_file() else neural.find_file(model, "ImageReward.pt"))
    visual_weights, text_weights = (
        neural.strip_prefix("blip.visual_encoder.", weights),
        neural.strip_prefix("blip.text_encoder.", weights),
    )
    text_weights.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: new versions do not store it
    if not visual_weights or not text_weights:
        raise ValueError(f"the weights must be ImageReward's, got the names {sorted(weights)[:3]}")
    vision: Any = BlipVisionModel(_vision_config(visual_weights))
    # is_decoder adds cross-attention to the text encoder
    config = BlipTextConfig(**kept, encoder_hidden_size=vision.config.hidden_size, is_decoder=True)
    text = BlipTextModel(config, add_pooling_layer=False)
    _fill(vision, {_rename(name): weight for name, weight in visual_weights.items()}, where, kind)
    _fill(text, text_weights, where, kind)
    head = build_head(neural.strip_prefix("mlp.layers.", weights), text.config.hidden_size, 1, has_relu=False).to(where)
    words = neural.load_part(AutoTokenizer, tokenizer)

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        pixels = torch.from_numpy(square_pixels(images, vision.config.image_size)).to(where, kind)
        tokens = words(prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        ids, mask = tokens.input_ids.to(where), tokens.attention_mask.to(where)
        image_states = vision(pixel_values=pixels).last_hidden_state
        states = text(input_ids=ids, attention_mask=mask, encoder_hidden_states=image_states).last_hidden_state
        return (head(states[:, 0].float())[:, 0] - MEAN) / STD

    return neural.image_scorer(rate, f"{neural.short_name(model)} {dtype}", networks=[vision, text])


def _rename(name: str) -> str:
    for pattern, new in _VISION_NAMES:
        name = re.sub(pattern, new, name)
    return name


def _vision_config(weights: neural.Weights) -> BlipVisionConfig:
    """Return the vision tower's configuration from the shapes of its weights."""
    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=len([name for name in weights if name.endswith(".norm1.weight")]),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        image_size=patch * round((weights["pos_embed"].shape[1] - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )


def _fill(network: Any, weights: neural.Weights, device: torch.device, dtype: torch.dtype) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as exc:
        raise ValueError(f"the weights must be ImageReward's: {exc}") from exc
    network.to(device, dtype).eval().requires_grad_(False)
