"""HPSv2.1: human preference for an image given its prompt, as the cosine of a CLIP model's embeddings, in [-1, 1].

HPSv2 (Wu et al., arXiv 2306.09341) is open_clip's CLIP ViT-H/14, trained on human choices; good images score around
0.3, and the benchmark's tables show 100 times the score. The file HPS_v2.1_compressed.pt of the repository xswu/HPSv2
holds the weights under open_clip's names; HPS_v2_compressed.pt is version 2.0, on another scale.

The model sees the whole image: its longer side is resized to the model's side, and black fills the rest. Pixels are
resized as floats, with antialiasing, as in torchvision 0.17 and later. A prompt is cleaned as in open_clip's tokenizer.

Source: hpsv2/img_score.py and hpsv2/src/open_clip of github.com/tgxs002/HPSv2.

Notation: N samples, H height, W width, S side of the model's input.
"""

import html
import re
from collections.abc import Iterable

import ftfy
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

from omni_reward.scorers import neural
from omni_reward.scorers.clip import PUBLISHED, VIT_H, Embedder, empty_clip
from omni_reward.scorers.pixels import MEAN, STD
from omni_reward.wire import Scorer

HPSV2 = "xswu/HPSv2"
WEIGHTS = "HPS_v2.1_compressed.pt"
NAMES = {  # open_clip's -> transformers'
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
}
LAYERS = {
    "ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}  # fmt: skip


def empty_hpsv2(device: str, *, base: str = VIT_H, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_hpsv2` with uninitialized weights; see `empty_clip`."""
    return empty_clip(device, model=base, dtype=dtype)


def load_hpsv2(
    *,
    model: str = HPSV2,
    weights: str = WEIGHTS,
    base: str = VIT_H,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB.

    Args:
        model: name of the model.
        weights: name of its file.
        base: name of CLIP ViT-H/14, for its configuration and tokenizer.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    placement = neural.pick_dtype(dtype), neural.pick_device(device, threads=threads)
    state = rename_weights(neural.read_weights(neural.find_file(model, weights), key="state_dict"))
    config = neural.load_config(CLIPConfig, base, PUBLISHED)
    network = neural.load_model(CLIPModel, model, *placement, config=config, weights=state)
    clip = Embedder(network, neural.load_part(AutoTokenizer, base), padded_pixels)

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        texts = clip.texts([clean_text(prompt) for prompt in prompts])
        return (clip.images(images) * texts).float().sum(dim=-1)

    return neural.image_scorer(rate, f"{weights} {dtype}", networks=[clip.model])


def rename_weights(weights: neural.Weights) -> dict[str, Tensor]:
    """Return the weights of an open_clip model under the names of transformers' CLIPModel.

    Raises:
        ValueError: the name of a weight is not one of open_clip's vision transformer and text transformer.
    """
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = re.fullmatch(r"((?:visual\.)?transformer\.resblocks)\.(\d+)\.(.+?)([._](?:weight|bias))", name)
        if match and match[3] == "attn.in_proj":
            layer, kind = f"{NAMES[match[1]]}.{match[2]}.self_attn", match[4][1:]
            renamed |= {
                f"{layer}.{part}_proj.{kind}": chunk for part, chunk in zip("qkv", weight.chunk(3), strict=True)
            }
        elif match and match[3] in LAYERS:
            renamed[f"{NAMES[match[1]]}.{match[2]}.{LAYERS[match[3]]}{match[4]}"] = weight
        elif name in NAMES:
            renamed[NAMES[name]] = weight.T.contiguous() if name.endswith("proj") or "projection" in name else weight
        elif (layer := name.rpartition(".")[0]) in NAMES:
            renamed[f"{NAMES[layer]}.{name.rpartition('.')[2]}"] = weight
        else:
            raise ValueError(f"weights must be those of an open_clip model, got {name!r}")
    return renamed


def padded_pixels(images: Iterable[np.ndarray], side: int) -> Tensor:
    """Return the input [N, 3, S, S], float32, normalized, of N images [H, W, 3], uint8, RGB."""
    return torch.stack([_pad_image(torch.from_numpy(image).movedim(-1, 0).float() / 255, side) for image in images])


def _pad_image(pixels: Tensor, side: int) -> Tensor:
    longer = max(pixels.shape[1:])
    size = [max(1, round(length * (side / longer))) for length in pixels.shape[1:]]
    if longer != side:
        pixels = interpolate(pixels[None], size=size, mode="bicubic", antialias=True)[0]
    down, across = side - size[0], side - size[1]
    pixels = pad(pixels, (across // 2, across - across // 2, down // 2, down - down // 2))
    return (pixels - torch.from_numpy(MEAN)[:, None, None]) / torch.from_numpy(STD)[:, None, None]


def clean_text(prompt: str) -> str:
    """Return a prompt with broken characters repaired and HTML entities decoded."""
    return html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
