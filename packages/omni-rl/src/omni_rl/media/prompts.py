"""Sound and video files of prompts."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from os import SEEK_CUR
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from omni_train.prompts.files import PromptRecord

from omni_rl.media import videos

if TYPE_CHECKING:
    from omni_rollout import Prompt
    from torch import Tensor

MAX_SOUND_S, MAX_FRAMES = 600, 768
STREAMED = 2**31 - 2**16  # a WAV whose header was written before its length was known claims at least so many bytes
OGG_END = 4  # bit in the flags of a page
MAX_PIXELS = 2**28  # of all frames of a video, 0.8 GB
MAX_CACHED = 2**30  # bytes of sounds, and of videos
MAX_POINTS = 2**28  # of all channels of a sound, 1 GB


def cache_media(read: "Callable[[Path], tuple[Tensor, float]]") -> "Callable[[Path], tuple[Tensor, float]]":
    """Wrap the function with a cache of its most recently used results, within MAX_CACHED bytes."""
    results: dict[tuple[Path, int], tuple[Tensor, float]] = {}  # by file and its modification time

    @wraps(read)
    def cached_read(path: Path) -> "tuple[Tensor, float]":
        key = path.resolve(), path.stat().st_mtime_ns if path.is_file() else 0
        results[key] = results.pop(key) if key in results else read(path)  # the most recent is last
        while len(results) > 1 and sum(tensor.nbytes for tensor, _ in results.values()) > MAX_CACHED:
            results.pop(next(iter(results)))
        return results[key]

    return cached_read


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


@cache_media
def read_sound(path: Path) -> "tuple[Tensor, float]":
    """Return a sound as float32 [points, channels] with full scale 1, and its sample rate. The tensor is cached.

    The file is a WAV, FLAC, MP3 or Ogg, or an .m4a, .mp4 or .webm with sound.

    Raises:
        ValueError: the file is missing, truncated, damaged, of another kind, without sound, or longer than MAX_SOUND_S
            or MAX_POINTS. A truncated MP3 without a length in its header is not detected.
    """
    import av
    import torch

    parts, points = [], 0
    with videos.open_av(path, "whole file with sound") as file:
        if not file.streams.audio:
            raise ValueError("it has no sound")
        stream, resampler = file.streams.audio[0], av.AudioResampler(format="flt")
        channels, rate = stream.codec_context.channels, stream.codec_context.sample_rate
        packets = (packet for packet in videos.demux_packets(file) if packet.stream is stream)
        for part in (
            part for packet in packets for frame in stream.decode(packet) for part in resampler.resample(frame)
        ):
            parts.append(part.to_ndarray().reshape(-1, channels))
            if (points := points + len(parts[-1])) > MAX_SOUND_S * rate or points * channels > MAX_POINTS:
                break
    if points * channels > MAX_POINTS:
        raise ValueError(f"{path} must have at most {MAX_POINTS} points of sound in all its {channels} channels")
    if not 0 < points <= MAX_SOUND_S * rate:
        length = f"more than {MAX_SOUND_S} s" if points else "none"
        raise ValueError(f"{path} must have 1 point to {MAX_SOUND_S} s of sound, got {length} at {rate} Hz")
    _check_wav_length(path)
    _check_ogg_end(path)
    return torch.from_numpy(np.concatenate(parts)), float(rate)


def _check_wav_length(path: Path) -> None:
    """Raise ValueError for a WAV with less sound than its header says. FFmpeg would read it as a shorter sound."""
    with path.open("rb") as file:
        header, chunk = file.read(12), file.read(8)
        if header[:4] != b"RIFF" or header[8:] != b"WAVE":
            return
        while chunk[:4] != b"data" and len(chunk) == 8:
            size = int.from_bytes(chunk[4:], "little")
            file.seek(size + size % 2, SEEK_CUR)
            chunk = file.read(8)
        size, available = int.from_bytes(chunk[4:], "little"), path.stat().st_size - file.tell()
    if available < size < STREAMED:
        raise ValueError(f"{path} is cut short: its header has {size} bytes of sound, got {available}")


def _check_ogg_end(path: Path) -> None:
    """Raise ValueError for an Ogg whose last page is truncated or not marked as the last. FFmpeg accepts both."""
    data = path.read_bytes()
    page = data[data.rfind(b"OggS") :]
    sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
    is_whole = sizes and page[5] & OGG_END and len(page) >= 27 + len(sizes) + sum(sizes)
    if data.startswith(b"OggS") and not is_whole:
        raise ValueError(f"{path} is cut short: its last page must be whole and marked as the last")


@cache_media
def read_video(path: Path) -> "tuple[Tensor, float]":
    """Return the frames of a video file, uint8 [F, H, W, 3], and its frames per second. The tensor is cached.

    Raises:
        ValueError: as in `videos.video_facts`, or it has more than MAX_FRAMES frames or MAX_PIXELS.
    """
    count, height, width, _ = videos.video_facts(path)
    if count > MAX_FRAMES:
        raise ValueError(f"{path} must have at most {MAX_FRAMES} frames, got {count}")
    if count * height * width > MAX_PIXELS:
        size = f"{count} frames of {width} x {height}"
        raise ValueError(f"{path} must have at most {MAX_PIXELS} pixels in all, got {size}")
    return videos.read_video(path)
