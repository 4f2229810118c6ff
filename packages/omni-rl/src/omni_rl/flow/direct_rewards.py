"""Differentiable rewards, for train_srpo.py.

A reward is a function `(images, texts) -> rewards`: images [B, 3, H, W] in [0, 1], B texts, rewards [B], all float32.
To add one, add a row to REWARDS: a function of a folder or hub id and a device that returns the reward.

Notation: B images, L letters of all their words, H height, W width.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from omni_rollout.types import to_device
from safetensors.torch import load_file
from torch import Tensor, nn

Reward = Callable[[Tensor, list[str]], Tensor]

# 1. Signs

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
SMUDGED = len(ALPHABET)  # the class after the letters
SIGN_HEIGHT, SIGN_WIDTH = 32, 96  # pixels
PITCH, CROP = 22, 28  # pixels from letter to letter, and the width of a crop
MAX_LETTERS = 4
READER_FILE = "reader.safetensors"


class SignReader(nn.Module):
    """A classifier of single letters of tiny-signs: logits [L, 33] of crops [L, 3, 32, 28] in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, SMUDGED + 1),
        )

    def forward(self, crops: Tensor) -> Tensor:
        """Return the logits [L, 33]."""
        logits: Tensor = self.layers(2 * crops - 1)
        return logits


def crop_letters(image: Tensor, count: int) -> Tensor:
    """Crop the `count` letters of a sign [3, 32, 96] by its layout: [count, 3, 32, 28]."""
    centers = [(SIGN_WIDTH + PITCH * (2 * i - count + 1)) // 2 for i in range(count)]
    return torch.stack([image[:, :, center - CROP // 2 : center + CROP // 2] for center in centers])


def sign_classes(text: str) -> list[int]:
    """Return the expected classes of a sign's letters: those of the quoted word, or SMUDGED for a smudged sign.

    Raises:
        ValueError: the text has no valid word in quotes.
    """
    word = text.partition('"')[2].partition('"')[0]
    if not 1 <= len(word) <= MAX_LETTERS or not set(word) <= set(ALPHABET):
        raise ValueError(f"texts must have 1 to {MAX_LETTERS} of {ALPHABET} between double quotes, got {text!r}")
    return [SMUDGED] * len(word) if text.lower().startswith("smudged") else [ALPHABET.index(c) for c in word]


def load_sign_reader(path: str, device: torch.device) -> Reward:
    """Load the reward of tiny-signs: the mean probability of the letters of the text's word.

    path: a folder written by `scripts/pretrain.py reader`.
    """
    reader = SignReader()
    reader.load_state_dict(load_file(Path(path) / READER_FILE))
    reader.to(device).eval().requires_grad_(False)

    def reward(images: Tensor, texts: list[str]) -> Tensor:
        if images.shape[1:] != (3, SIGN_HEIGHT, SIGN_WIDTH):
            raise ValueError(f"images must be signs [B, 3, 32, 96], got shape {tuple(images.shape)}")
        classes = [sign_classes(text) for text in texts]
        crops = torch.cat([crop_letters(image, len(c)) for image, c in zip(images, classes, strict=True)])
        targets = to_device(torch.tensor([i for c in classes for i in c]), images.device)
        probabilities = reader(crops).softmax(dim=1).gather(1, targets[:, None])[:, 0]
        return torch.stack([letters.mean() for letters in probabilities.split([len(c) for c in classes])])

    return reward


# 2. CLIP

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP_SCALE = 1 / 20  # from the released code: scales PickScore's logits to HPS-v2.1's cosines


def load_clip(path: str, device: torch.device) -> Reward:
    """Load the reward of a CLIP model, its logit / 20. With yuvalkirstain/PickScore_v1 it is SRPO's PickScore.

    path: folder or hub id of a transformers CLIPModel with its tokenizer.
    """
    from omni_reward.scorers.neural import load_model, load_part
    from transformers import AutoTokenizer, CLIPModel

    model, tokenizer = load_model(CLIPModel, path, torch.float32, device), load_part(AutoTokenizer, path)
    side = model.config.vision_config.image_size
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))

    def reward(images: Tensor, texts: list[str]) -> Tensor:
        max_length = model.config.text_config.max_position_embeddings
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt").to(device)
        pixels = (square(images, side) - mean) / std
        output = model(pixel_values=pixels, input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        cosines = (output.image_embeds * output.text_embeds).sum(dim=1)
        return cosines.float() * model.logit_scale.exp() * CLIP_SCALE

    return reward


def square(images: Tensor, side: int) -> Tensor:
    """Resize the shorter side of images [B, 3, H, W] to `side` and crop the center: [B, 3, side, side].

    Bicubic interpolation as matrix products, because the gradients of torch's interpolation are not deterministic.
    """
    rows, columns = (_resize_weights(length, side, min(images.shape[-2:]), images) for length in images.shape[-2:])
    return rows @ images @ columns.T


def _resize_weights(length: int, side: int, shorter: int, like: Tensor) -> Tensor:
    """Return the interpolation weights [side, length] from an edge's pixels to the central `side` resized pixels."""
    size = round(length * side / shorter)
    eye = torch.eye(length, device=like.device, dtype=like.dtype)[None, None]
    weights = nn.functional.interpolate(eye, size=(size, length), mode="bicubic", antialias=True)[0, 0]
    return weights[(first := (size - side) // 2) : first + side]


REWARDS: dict[str, Callable[[str, torch.device], Reward]] = {"sign-reader": load_sign_reader, "clip": load_clip}
