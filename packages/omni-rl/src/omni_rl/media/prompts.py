"""Sound and video that a prompt speaks of."""

import wave
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from omni_train.prompts.files import PromptRecord
from PIL import Image, ImageSequence

from omni_rl.media.images import decoding
from omni_rl.media.videos import num_frames

if TYPE_CHECKING:
    from omni_rollout import Prompt
    from torch import Tensor

MAX_SOUND_S, MAX_FRAMES = 600, 768
MAX_PIXELS = 2**28  # of all frames of a video, 0.8 GB
MAX_KEPT = 2**30  # bytes of sounds, and of videos, that are remembered


def remembered(read: "Callable[[Path], tuple[Tensor, float]]") -> "Callable[[Path], tuple[Tensor, float]]":
    """The function, with its newest results kept within MAX_KEPT bytes."""
    found: dict[tuple[Path, int], tuple[Tensor, float]] = {}  # by the file and the time of its last change

    @wraps(read)
    def recall(path: Path) -> "tuple[Tensor, float]":
        key = path.resolve(), path.stat().st_mtime_ns if path.is_file() else 0
        if key in found:
            found[key] = found.pop(key)  # the newest is the last
            return found[key]
        found[key] = read(path)
        while len(found) > 1 and sum(tensor.nbytes for tensor, _ in found.values()) > MAX_KEPT:
            found.pop(next(iter(found)))
        return found[key]

    return recall


def with_media(prompt: "Prompt", record: PromptRecord) -> "Prompt":
    """The prompt with the sound and the video of its record."""
    rates = dict(prompt.rates)
    audio = video = None
    if record.audio:
        audio, rates["sample_rate"] = read_sound(record.audio)
    if record.video:
        video, rates["fps"] = read_video(record.video)
    return replace(prompt, audio=audio, video=video, rates=rates)


def media_files(record: PromptRecord) -> list[Path]:
    """The files of a prompt's pictures, sound and video."""
    return [*record.images, *(file for file in (record.audio, record.video) if file)]


@remembered
def read_sound(path: Path) -> "tuple[Tensor, float]":
    """A WAV file of 16 bits as float32 [points, channels] in [-1, 1], and its sample rate; the same tensor as long
    as it is remembered.

    Raises:
        ValueError: there is no such file, it is no whole WAV of 16 bits, or longer than MAX_SOUND_S.
    """
    import torch

    with decoding(path, "whole WAV file"), wave.open(str(path), "rb") as file:
        channels, width, rate, points = file.getparams()[:4]
        data = file.readframes(min(points, MAX_SOUND_S * rate))
    if width != 2 or not 0 < points <= MAX_SOUND_S * rate:
        rule = f"must have 16 bits and 1 point to {MAX_SOUND_S} s"
        raise ValueError(f"{path} {rule}, got {8 * width} bits and {points} points at {rate} Hz")
    if len(data) != 2 * channels * points:
        raise ValueError(f"{path} is cut short: its header has {points} points, got {len(data) // (2 * channels)}")
    return torch.from_numpy(np.frombuffer(data, "<i2").reshape(-1, channels).astype(np.float32) / 32768), float(rate)


@remembered
def read_video(path: Path) -> "tuple[Tensor, float]":
    """The frames of an animated WebP or GIF, uint8 [F, H, W, 3], and how many a second has; the same tensor as long as
    it is remembered.

    Raises:
        ValueError: there is no such file, it is no whole picture of these, or has more than MAX_FRAMES frames or
            MAX_PIXELS.
    """
    import torch

    with decoding(path, "whole animated WebP or GIF"):
        file = Image.open(path, formats=["WEBP", "GIF"])
        count = num_frames(file, path)
    with file:
        if count > MAX_FRAMES:
            raise ValueError(f"{path} must have at most {MAX_FRAMES} frames, got {count}")
        if count * file.width * file.height > MAX_PIXELS:
            rule = f"{path} must have at most {MAX_PIXELS} pixels in all"
            raise ValueError(f"{rule}, got {count} frames of {file.width} x {file.height}")
        with decoding(path, "whole animated WebP or GIF"):
            read = [
                (np.array(image.convert("RGB")), image.info.get("duration", 0))
                for image in ImageSequence.Iterator(file)
            ]
            frames, times = zip(*read, strict=True)
            return torch.from_numpy(np.stack(frames)), 1000 * len(times) / (sum(times) or 40 * len(times))
