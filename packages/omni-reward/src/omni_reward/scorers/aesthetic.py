"""LAION's aesthetic score: people's mean rating of an image, from 1 to 10, independent of the prompt.

    score = head(embedding / |embedding|)      with the embedding of CLIP ViT-L/14

The head is five linear layers without activations. Its published weights are the PyTorch file
sac+logos+ava1-l14-linearMSE.pth of the repository christophschuhmann/improved-aesthetic-predictor. Only tensors are
read from it; a .safetensors file of the same tensors works too. Most scores are between 4 and 7; some divide by 10.

Notation: N samples, H height, W width, E size of an embedding.
"""

from pathlib import Path

import numpy as np
from torch import Tensor

from omni_reward.scorers import neural
from omni_reward.scorers.clip import CLIP, empty_clip, load_embedder
from omni_reward.scorers.heads import build_head
from omni_reward.wire import Scorer


def empty_aesthetic(device: str, *, model: str = CLIP, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_aesthetic`, uninitialized and without the small head; see `empty_clip`."""
    return empty_clip(device, model=model, dtype=dtype)


def load_aesthetic(
    *, head: str, model: str = CLIP, device: str | None = None, dtype: str = "float32", threads: int = 1
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB; it ignores the prompt.

    Args:
        head: path of the head's weights.
        model: name of the CLIP model that the head was trained on.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`; the head computes in float32.

    Raises:
        ValueError: an argument is invalid, the model cannot be read, or the head does not fit it.
        OSError: the head cannot be read.
    """
    clip = load_embedder(model, None, device=device, dtype=dtype, threads=threads)
    weights = neural.strip_prefix("layers.", neural.read_weights(Path(head)))
    grade = build_head(weights, clip.model.config.projection_dim, 1, has_relu=False).to(clip.model.device)

    def rate(images: np.ndarray, prompts: list[str]) -> Tensor:
        return grade(clip.images(images).float())[:, 0]

    return neural.image_scorer(
        rate, f"{neural.short_name(head)} on {neural.short_name(model)} {dtype}", networks=[clip.model]
    )
