"""ImageReward: how much people prefer an image for its prompt, as a z-score over the images of its training set.

    score = (head(h_0) - 0.16717362830052426) / 1.0333394966054072

h_0 is the first token's last state of BLIP's text encoder, which reads the prompt and looks at the image's tokens from
BLIP's ViT-L/16 through cross-attention (Xu et al., arXiv 2304.05977). The head is five linear layers with nothing in
between. Scores lie mostly between -2 and 2. A prompt is cut after 35 tokens.

The published weights (ImageReward.pt, with med_config.json, at zai-org/ImageReward) follow BLIP's own code; here they
are renamed to the BLIP of transformers. They are a PyTorch file, read as tensors only; ImageReward.safetensors of the
same tensors is taken instead where there is one.

Letters: N samples, H height, W width, T tokens.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from omni_reward.scorers.heads import build_head
from omni_reward.scorers.neural import (
    below,
    find_file,
    image_scorer,
    load_tokenizer,
    pick_device,
    pick_dtype,
    read_weights,
    short_name,
)
from omni_reward.scorers.pixels import square_pixels
from omni_reward.wire import Scorer

IMAGEREWARD = "zai-org/ImageReward"
TOKENIZER = "google-bert/bert-base-uncased"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the training set
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of an attention head in both sizes of BLIP's vision tower; the weights do not tell it

_VISION_NAMES = (  # of BLIP's own code -> of transformers, in this order
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


class RewardModel(nn.Module):
    """The network, from the weights under their published names."""

    def __init__(self, weights: Mapping[str, Tensor], text_settings: Mapping[str, Any]) -> None:
        super().__init__()
        vision = below("blip.visual_encoder.", weights)
        text = below("blip.text_encoder.", weights)
        text.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: old versions stored it, new ones count for themselves
        if not vision or not text:
            raise ValueError(f"the weights must be ImageReward's, got the names {sorted(weights)[:3]}")
        width = vision["cls_token"].shape[-1]
        renamed = {_rename(name): weight for name, weight in vision.items()}
        self.vision = _fill(BlipVisionModel(_vision_config(vision)), renamed)
        self.text = _fill(BlipTextModel(_text_config(text_settings, width), add_pooling_layer=False), text)
        self.head = build_head(below("mlp.layers.", weights), self.text.config.hidden_size, 1, has_relu=False)

    def forward(self, pixels: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [N] of pixels [N, 3, S, S] for tokens [N, T], of which the mask [N, T] says which are there."""
        image = self.vision(pixel_values=pixels).last_hidden_state
        states = self.text(input_ids=token_ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state
        return (self.head(states[:, 0].float())[:, 0] - MEAN) / STD


def load_imagereward(
    *,
    model: str = IMAGEREWARD,
    tokenizer: str = TOKENIZER,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Scorer for `image` [N, H, W, 3], uint8, RGB.

    Args:
        model: name of the model.
        tokenizer: name of BERT's uncased tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`; the head computes in float32.

    Raises:
        ValueError: an argument breaks its rule, or the model cannot be read.
    """
    where, kind = pick_device(device, threads=threads), pick_dtype(dtype)
    settings = json.loads(find_file(model, "med_config.json").read_text())
    network = RewardModel(read_weights(_weights_file(model)), settings)
    network.vision.to(kind)
    network.text.to(kind)
    network.to(where).eval().requires_grad_(False)
    words = load_tokenizer(tokenizer)
    side = network.vision.config.image_size

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        pixels = torch.from_numpy(square_pixels(images, side)).to(where, kind)
        tokens = words(prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        return network(pixels, tokens.input_ids.to(where), tokens.attention_mask.to(where))

    return image_scorer(rate, f"{short_name(model)} {dtype}")


def _weights_file(model: str) -> Path:
    safe = Path(model) / "ImageReward.safetensors"
    return safe if safe.is_file() else find_file(model, "ImageReward.pt")


def _rename(name: str) -> str:
    for pattern, new in _VISION_NAMES:
        name = re.sub(pattern, new, name)
    return name


def _vision_config(weights: Mapping[str, Tensor]) -> BlipVisionConfig:
    """Sizes of the vision tower, which its weights tell."""
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


def _text_config(settings: Mapping[str, Any], image_width: int) -> BlipTextConfig:
    """Settings of the text encoder from those of BLIP's own code; `is_decoder` is what gives it cross-attention."""
    kept = {name: settings[name] for name in _TEXT_SETTINGS}
    return BlipTextConfig(**kept, encoder_hidden_size=image_width, is_decoder=True)


def _fill(network: Any, weights: Mapping[str, Tensor]) -> Any:
    try:
        network.load_state_dict(weights)
    except RuntimeError as exc:
        raise ValueError(f"the weights must be ImageReward's: {exc}") from exc
    return network
