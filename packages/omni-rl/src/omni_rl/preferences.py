"""Preference files, which docs/preferences.md describes: what is wrong with one, and the latents that it names.

Letters: C, h, w channels, height and width of a latent; H, W height and width of an image, pixels.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from omni_reward import Score
from omni_rollout.models.qwen_image import QwenImage
from omni_train.data import PromptRecord
from PIL import Image
from safetensors import safe_open
from torch import Tensor

SIDES = ("win", "lose")
SUFFIXES = (".safetensors", ".png", ".jpg", ".jpeg", ".webp")


def check_preferences(records: Sequence[PromptRecord], folder: Path) -> None:
    """Raises ValueError unless every pair names two files that exist, in `folder` or below, of a known kind."""
    for record in records:
        for side in SIDES:
            name = record.meta.get(side)
            if not isinstance(name, str) or Path(name).suffix.lower() not in SUFFIXES:
                raise ValueError(
                    f'pair {record.index + 1}: "{side}" must name a file that ends in one of {SUFFIXES}, got {name!r}'
                )
            if not (folder / name).is_file():
                raise ValueError(f'pair {record.index + 1}: "{side}" must name a file that exists, got {folder / name}')


@torch.no_grad()
def read_latent(model: QwenImage, path: Path, shape: tuple[int, int, int]) -> Tensor:
    """A sample's latent, float32 [C, h, w]: the tensor `x0` of a .safetensors file, or what the VAE makes of an image.

    Raises:
        ValueError: it is not of that shape, or there is no such tensor.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            if "x0" not in file.keys():  # noqa: SIM118 - the file is no mapping
                raise ValueError(f"{path} must hold a tensor x0, has {sorted(file.keys())}")
            x0 = file.get_tensor("x0").float()
    else:
        x0 = encode_image(model, Image.open(path).convert("RGB"))
    if x0.shape != shape:
        raise ValueError(f"{path} must be a sample of latent shape {shape}, got {tuple(x0.shape)}")
    return x0


def encode_image(model: QwenImage, image: Image.Image) -> Tensor:
    """The clean latent [C, H/8, W/8] of an RGB image: the mean of the VAE's code, the inverse of `decode`."""
    vae = model.vae
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    video = (pixels.permute(2, 0, 1).float() / 127.5 - 1)[None, :, None].to(vae.device, vae.dtype)
    code = vae.encode(video).latent_dist.mode()[0, :, 0].float()
    mean, std = (
        torch.tensor(values, device=code.device).view(-1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (code - mean) / std


class NoScorer:
    """In the place of a RewardClient: grades nothing."""

    busy_s = 0.0

    def submit(self, media: object, prompts: Sequence[str], meta: object = None) -> Future[list[Score]]:
        """No score for any of the prompts."""
        future: Future[list[Score]] = Future()
        future.set_result([Score(None, abstained="there is no scorer")] * len(prompts))
        return future

    def close(self) -> None:
        """Nothing to close."""
