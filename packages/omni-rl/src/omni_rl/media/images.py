"""Image files: checks before any weights are loaded, and reading of pixels."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from omni_train.files import check_fetched
from omni_train.prompts.files import PromptRecord
from PIL import Image

if TYPE_CHECKING:  # the check runs before torch is imported
    from numpy import ndarray
    from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FORMATS = ("PNG", "JPEG", "WEBP")
ENDINGS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "WEBP": b""}  # WebP's header has its size
MAX_PIXELS = 2**25  # 8K and a little more, 0.1 GB
EXIF_ORIENTATION, ROTATED = 0x0112, (5, 6, 7, 8)
DECODER_ERRORS = (  # raised by PIL and PyAV for damaged files
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


@contextmanager
def decoding(path: Path, kind: str) -> Iterator[None]:
    """Convert a decoder's errors to a ValueError with the file and its expected kind. Only regular files are opened."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a regular file")
    try:
        yield
    except DECODER_ERRORS as exc:
        check_fetched(path)
        raise ValueError(f"{path} is no {kind}: {str(exc) or type(exc).__name__}") from exc


def image_size(path: Path) -> tuple[int, int]:
    """Return (width, height) of the upright image in pixels.

    Reads the header and the last bytes, or all of a PNG without EXIF data. If other data follow the image, such as a
    phone's motion photo, the image is decoded.

    Raises:
        ValueError: the file is missing, damaged, not a PNG, JPEG or WebP, or has more than MAX_PIXELS.
    """
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        raise ValueError(f"must name a file that exists and ends in one of {SUFFIXES}, got {path}")
    with decoding(path, f"{path.suffix[1:].upper()} image"):
        image = Image.open(path, formats=FORMATS)
    with image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{path} must have at most {MAX_PIXELS:,} pixels, got {image.width} x {image.height}")
        with decoding(path, "whole image"):
            is_rotated = image.getexif().get(EXIF_ORIENTATION) in ROTATED
        size = image.size[::-1] if is_rotated else image.size
        ending = ENDINGS[str(image.format)]
        with path.open("rb") as file:
            file.seek(-min(64, path.stat().st_size), 2)
            has_ending = ending in file.read()
        if not has_ending and ending not in path.read_bytes():
            raise ValueError(f"{path} is cut short")
        if not has_ending:
            with decoding(path, "whole image"):
                image.load()  # raises if the ending was that of an embedded thumbnail
    return size


def read_image(path: Path) -> "Tensor":
    """Return the pixels of an upright image, uint8 [H, W, 3]. The tensor is cached.

    Raises:
        ValueError: as in `image_size`, or the pixels are damaged.
    """
    return _pixels(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _pixels(path: Path, changed_ns: int) -> "Tensor":
    import torch

    return torch.from_numpy(read_pixels(path))


def read_pixels(path: Path) -> "ndarray":
    """Return the pixels of an image as in `read_image`, in a new array."""
    from omni_reward.scorers import pixels

    image_size(path)  # before its pixels take memory
    with decoding(path, "whole image"), Image.open(path, formats=FORMATS) as image:
        return pixels.read_pixels(image)


def reference_sizes(record: PromptRecord) -> list[tuple[int, int]]:
    """Return (height, width) of each reference image of a prompt.

    Raises:
        ValueError: as in `image_size`.
    """
    return [image_size(path)[::-1] for path in record.images]


def check_media_prompt(record: PromptRecord) -> None:
    """Raise ValueError for a prompt that only models of text take: a chat of several messages, or sound or video.

    A single message of the user is a prompt, which the model puts into its own chat. Also raises as `reference_sizes`.
    """
    chat = record.meta.get("messages")
    if isinstance(chat, list) and len(chat) > 1:
        roles = ", ".join(str(message["role"]) for message in chat)
        rule = "messages must hold one message of the user"
        rule += "; system messages and earlier turns are for models that answer in text"
        raise ValueError(f"{rule}, got {roles}")
    for key, file in (("audio", record.audio), ("video", record.video)):
        if file:
            raise ValueError(f'"{key}" must be left out: only models that answer in text take it, got {file}')
    if not record.text.strip():
        raise ValueError("messages must hold a text: only models that answer in text take files without one")
    reference_sizes(record)


class AllOrNone:
    """Check of prompts, one after another: either all have reference images, of any number and size, or none has.

    References may add forward passes, and all ranks of a sharded net must run the same number.
    """

    def __init__(self) -> None:
        self.first: int | None = None

    def __call__(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt that differs from the first, a chat of several turns, or a damaged image."""
        check_media_prompt(record)
        num = len(record.images)
        self.first = num if self.first is None else self.first
        if bool(num) != bool(self.first):
            raise ValueError(
                f'"images" must be in all lines of a file or in none, the first has {self.first}, got {num}'
            )
