"""Sound and video files of prompts."""

import wave
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from omni_train.prompts.files import PromptRecord

from omni_rl.media import videos
from omni_rl.media.images import decoding

if TYPE_CHECKING:
    from omni_rollout import Prompt
    from torch import Tensor

MAX_SOUND_S, MAX_FRAMES = 600, 768
MAX_PIXELS = 2**28  # of all frames of a video, 0.8 GB
MAX_CACHED = 2**30  # bytes of sounds, and of videos


def cached(read: "Callable[[Path], tuple[Tensor, float]]") -> "Callable[[Path], tuple[Tensor, float]]":
    """Wrap the function with a cache of its newest results, within MAX_CACHED bytes."""
    found: dict[tuple[Path, int], tuple[Tensor, float]] = {}  # by file and time of its last change

    @wraps(read)
    def recall(path: Path) -> "tuple[Tensor, float]":
        key = path.resolve(), path.stat().st_mtime_ns if path.is_file() else 0
        found[key] = found.pop(key) if key in found else read(path)  # the newest is the last
        while len(found) > 1 and sum(tensor.nbytes for tensor, _ in found.values()) > MAX_CACHED:
            found.pop(next(iter(found)))
        return found[key]

    return recall


def with_media(prompt: "Prompt", record: PromptRecord) -> "Prompt":
    """Return the prompt with the sound and the video of its record."""
    rates = dict(prompt.rates)
    audio = video = None
    if record.audio:
        audio, rates["sample_rate"] = read_sound(record.audio)
    if record.video:
        video, rates["fps"] = read_video(record.video)
    return replace(prompt, audio=audio, video=video, rates=rates)


def media_files(record: PromptRecord) -> list[Path]:
    """Return the files of a prompt's images, sound and video."""
    return [*record.images, *(file for file in (record.audio, record.video) if file)]


@cached
def read_sound(path: Path) -> "tuple[Tensor, float]":
    """Return a 16-bit WAV file as float32 [points, channels] in [-1, 1], and its sample rate; a cached tensor.

    Raises:
        ValueError: the file is missing, damaged, not 16-bit WAV, or longer than MAX_SOUND_S.
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


@cached
def read_video(path: Path) -> "tuple[Tensor, float]":
    """Return the frames of a video file, uint8 [F, H, W, 3], and its frames per second; a cached tensor.

    Raises:
        ValueError: as `videos.video_facts`, or it has more than MAX_FRAMES frames or MAX_PIXELS.
    """
    count, height, width, _ = videos.video_facts(path)
    if count > MAX_FRAMES:
        raise ValueError(f"{path} must have at most {MAX_FRAMES} frames, got {count}")
    if count * height * width > MAX_PIXELS:
        size = f"{count} frames of {width} x {height}"
        raise ValueError(f"{path} must have at most {MAX_PIXELS} pixels in all, got {size}")
    return videos.read_video(path)
