"""Image files: their check before any weight is loaded, and their pixels."""

import struct
import wave
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from omni_train.prompts.files import PromptRecord
from PIL import Image, ImageOps

if TYPE_CHECKING:  # the check runs before torch is imported
    from numpy import ndarray
    from torch import Tensor

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
ENDINGS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "WEBP": b""}  # of a whole file; WebP's header has its size
MAX_PIXELS = 2**25  # 8K and a little more, 0.1 GB
EXIF_ORIENTATION, ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
DECODER_ERRORS = (  # of PIL, wave and PyAV, seen on files with broken bytes
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError,
    struct.error, wave.Error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


@contextmanager
def decoding(path: Path, kind: str) -> Iterator[None]:
    """Raise a decoder's errors as a ValueError that names the file and its expected kind."""
    try:
        yield
    except DECODER_ERRORS as exc:
        raise ValueError(f"{path} is no {kind}: {str(exc) or type(exc).__name__}") from exc


def image_size(path: Path) -> tuple[int, int]:
    """Return (width, height) in pixels, upright; reads the header and the last bytes, a PNG without EXIF to its end.

    Raises:
        ValueError: the file is missing, damaged, not of the kind of its suffix, or has more than MAX_PIXELS.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None or not path.is_file():
        raise ValueError(f"must name a file that exists and ends in one of {(*FORMATS,)}, got {path}")
    with decoding(path, f"{kind} image"):
        image = Image.open(path, formats=[kind])
    with image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{path} must have at most {MAX_PIXELS:,} pixels, got {image.width} x {image.height}")
        with decoding(path, f"{kind} image"):
            turned = image.getexif().get(EXIF_ORIENTATION) in ON_ITS_SIDE
        size = image.size[::-1] if turned else image.size
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), 2)
        if ENDINGS[kind] not in file.read():
            raise ValueError(f"{path} is cut short")
    return size


def read_image(path: Path) -> "Tensor":
    """Return the pixels of an image, upright, uint8 [H, W, 3]; a cached tensor.

    Raises:
        ValueError: as `image_size`, or its pixels are damaged.
    """
    return _pixels(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _pixels(path: Path, changed_ns: int) -> "Tensor":
    import torch

    return torch.from_numpy(read_pixels(path))


def read_pixels(path: Path) -> "ndarray":
    """Return the pixels of an image as `read_image` does, in an array of the caller's own."""
    import numpy as np

    image_size(path)  # before its pixels take memory
    with decoding(path, "whole image"), Image.open(path) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def reference_sizes(record: PromptRecord) -> list[tuple[int, int]]:
    """Return (height, width) of each of a prompt's references.

    Raises:
        ValueError: as `image_size`.
    """
    return [image_size(path)[::-1] for path in record.images]


class AllOrNone:
    """A check of prompts in turn: all have references, of any number and sizes, or none has.

    References may add calls of the net, and ranks with sharded weights must all call it equally often.
    """

    def __init__(self) -> None:
        self.first: int | None = None

    def __call__(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt that differs from the first, a chat, or a damaged image."""
        if "messages" in record.meta:
            raise ValueError('must have the key "prompt", a string: messages are for models that answer in text')
        num = len(reference_sizes(record))
        self.first = num if self.first is None else self.first
        if bool(num) != bool(self.first):
            raise ValueError(
                f'"images" must be in all lines of a file or in none, the first has {self.first}, got {num}'
            )
