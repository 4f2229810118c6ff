"""CLIP and PickScore: the similarity of an image to its prompt by a CLIP model.

    clip = cos(image, prompt)                                   in [-1, 1]; good matches are around 0.3
    pickscore = exp(logit_scale) cos(image, prompt)             good images are around 20 to 23

CLIPScore is from Radford et al. (arXiv 2103.00020) and Hessel et al. (arXiv 2104.08718); others multiply it by 100 or
2.5. PickScore (Kirstain et al., arXiv 2305.01569) is a CLIP model trained on human choices; some divide it by 26. A
prompt is truncated to the model's length, 77 tokens for the published models.

Notation: N samples, H height, W width, S side of the model's input, E size of an embedding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

from omni_reward.scorers import neural
from omni_reward.scorers.pixels import square_pixels
from omni_reward.wire import Scorer

CLIP = "openai/clip-vit-large-patch14"
PICKSCORE = "yuvalkirstain/PickScore_v1"
VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PUBLISHED: dict[str, dict[str, Any]] = {  # ViT-L/14 and ViT-H/14, with 428 and 986 million weights
    CLIP: {
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
            "patch_size": 14,
        },
    },
    VIT_H: {
        "projection_dim": 1024,
        "text_config": {
            "hidden_act": "gelu", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
        "vision_config": {
            "hidden_act": "gelu", "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16,
            "num_hidden_layers": 32, "patch_size": 14,
        },
    },
}  # fmt: skip
PUBLISHED[PICKSCORE] = PUBLISHED[VIT_H]


@dataclass(frozen=True)
class Embedder:
    """A CLIP model with its tokenizer.

    Args:
        model: transformers' CLIPModel.
        tokenizer: its tokenizer; None if only images are embedded.
        preprocess: returns the model's input [N, 3, S, S] for images and the side S.
    """

    model: Any
    tokenizer: Any
    preprocess: Callable[[Iterable[np.ndarray], int], Tensor] = lambda images, side: torch.from_numpy(
        square_pixels(images, side)
    )

    def images(self, images: Iterable[np.ndarray]) -> Tensor:
        """Return normalized embeddings [N, E] of N images [H, W, 3], uint8, RGB."""
        pixels = self.preprocess(images, self.model.config.vision_config.image_size).to(
            self.model.device, self.model.dtype
        )
        return normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def texts(self, prompts: list[str]) -> Tensor:
        """Return normalized embeddings [N, E] of N prompts."""
        max_length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(prompts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        tokens = tokens.to(self.model.device)
        features = self.model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        return normalize(features.pooler_output, dim=-1)


def load_embedder(model: str, tokenizer: str | None, *, device: str | None, dtype: str, threads: int) -> Embedder:
    """Load a CLIP model by name.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    where = neural.pick_device(device, threads=threads)
    loaded = neural.load_model(CLIPModel, model, neural.pick_dtype(dtype), where)
    return Embedder(loaded, neural.load_part(AutoTokenizer, tokenizer) if tokenizer else None)


def empty_clip(device: str, *, model: str = CLIP, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_clip` with uninitialized weights.

    Raises:
        ValueError: an argument is invalid, or the model's configuration cannot be read.
    """
    config = neural.load_config(CLIPConfig, model, PUBLISHED)
    network = neural.empty_model(CLIPModel, config, dtype, device)
    side, length = config.vision_config.image_size, config.text_config.max_position_embeddings

    def call() -> None:
        pixels = torch.zeros(neural.BATCH_SIZE, 3, side, side)
        tokens = torch.ones(neural.BATCH_SIZE, length, dtype=torch.int64).to(device)
        network.get_image_features(pixel_values=pixels.to(device, network.dtype))
        network.get_text_features(input_ids=tokens, attention_mask=tokens)

    return neural.Empty(network, call)


def empty_pickscore(device: str, *, model: str = PICKSCORE, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_pickscore` with uninitialized weights; see `empty_clip`."""
    return empty_clip(device, model=model, dtype=dtype)


def load_clip(
    *,
    model: str = CLIP,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, by the cosine similarity.

    Args:
        model: name of a CLIP model.
        tokenizer: name of its tokenizer; the model's own name by default.
        device: device of the computation; by default the accelerator if there is one, else the CPU.
        dtype: float32, bfloat16 or float16.
        threads: CPU cores to use.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    clip = load_embedder(model, tokenizer or model, device=device, dtype=dtype, threads=threads)

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        return (clip.images(images) * clip.texts(prompts)).sum(dim=-1)

    return neural.image_scorer(rate, f"{neural.short_name(model)} {dtype}", networks=[clip.model])


def load_pickscore(
    *,
    model: str = PICKSCORE,
    tokenizer: str = VIT_H,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, by the scaled cosine; arguments as in `load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    clip = load_embedder(model, tokenizer, device=device, dtype=dtype, threads=threads)
    scale = clip.model.logit_scale.detach().float().exp()

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        return scale * (clip.images(images) * clip.texts(prompts)).float().sum(dim=-1)

    return neural.image_scorer(rate, f"{neural.short_name(model)} {dtype}", networks=[clip.model])
