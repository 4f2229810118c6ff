"""Inputs of vision models: images are read, resized, cropped, normalized and cut into patches with Pillow and numpy.

The libraries' processors have variants with different rounding, and some need torchvision. The models were trained with
Pillow's bicubic filter on 8-bit pixels, as used here.

Notation: N samples, H height, W width, S side of the model's input, P number of patches, D numbers in a patch.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
from PIL import Image, ImageOps

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # CLIP's, which BLIP and Qwen2-VL use too
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
PATCH, MERGE, FRAMES = 14, 2, 2  # Qwen2-VL: pixels of a patch, patches and frames of a token
SIDE = PATCH * MERGE  # pixels of a token
MAX_ASPECT = 200  # longer side / shorter side, limit of Qwen2-VL


def read_pixels(image: Image.Image) -> np.ndarray:
    """Return an opened image of any mode, upright and without alpha, as diffusers' load_image does: uint8 [H, W, 3].

    16-bit gray keeps its upper 8 bits, as Pillow does for 16-bit colors; Pillow's conversion of gray would clip.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    return np.array(upright.convert("RGB"))


def square_pixels(
    images: Iterable[np.ndarray], side: int, *, halve: Callable[[int], int] = lambda rest: rest // 2
) -> np.ndarray:
    """Return CLIP's input [N, 3, S, S], float32, normalized, of N images [H, W, 3], uint8, RGB.

    The shorter side is resized to S and the longer in proportion, rounded down; then the center is cropped.

    halve: returns how many of the cropped pixels come before the center; by default as in transformers.
    """
    return np.stack([_normalize(_center_crop(image, side, halve)) for image in images])


def _center_crop(image: np.ndarray, side: int, halve: Callable[[int], int]) -> np.ndarray:
    height, width = image.shape[:2]
    shorter = min(height, width)
    height, width = side * height // shorter, side * width // shorter
    top, left = halve(height - side), halve(width - side)
    return _resize(image, height, width)[top : top + side, left : left + side]


def fit_size(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return height and width as multiples of SIDE, with `min_pixels` to `max_pixels` pixels and nearly the same ratio.

    This is Qwen2-VL's rule: round both sides to multiples; with too many pixels, scale down and round down; with too
    few, scale up and round up.

    Raises:
        ValueError: the aspect ratio is above MAX_ASPECT.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"an image must not be more than {MAX_ASPECT} times as long as wide, got {height} x {width}")
    rounded = [max(SIDE, round(side / SIDE) * SIDE) for side in (height, width)]
    if math.prod(rounded) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rounded = [max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (height, width)]
    elif math.prod(rounded) < min_pixels:
        scale = math.sqrt(height * width / min_pixels)
        rounded = [math.ceil(side / scale / SIDE) * SIDE for side in (height, width)]
    return rounded[0], rounded[1]


def to_patches(clip: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return patches [P, D], float32, of a resized clip [F, H, W, 3], uint8, RGB, for Qwen2-VL's vision tower.

    Groups of FRAMES frames are in order; within a group, squares of MERGE x MERGE patches, which become one token, are
    in row order. The order within a patch is channel, frame, row, column.
    """
    pixels = np.stack([_normalize(_resize(image, height, width)) for image in clip])
    sides = (height // SIDE, MERGE, PATCH, width // SIDE, MERGE, PATCH)
    grid = pixels.reshape(len(clip) // FRAMES, FRAMES, 3, *sides)
    return grid.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * FRAMES * PATCH**2)


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def _normalize(image: np.ndarray) -> np.ndarray:
    """Normalize an image [H, W, 3], uint8, to [3, H, W], float32, by CLIP's mean and standard deviation."""
    return np.moveaxis((image.astype(np.float32) / 255 - MEAN) / STD, -1, 0)
