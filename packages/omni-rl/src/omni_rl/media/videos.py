"""Video files: their check before any weight is loaded, and their frames.

PIL reads .gif and .webp, PyAV (`omni-rl[video]`) reads .mp4 and .webm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageSequence

from omni_rl.media.images import decoding

if TYPE_CHECKING:  # preference files are checked before torch is imported
    from torch import Tensor

ANIMATIONS = {".gif": "GIF", ".webp": "WEBP"}
CONTAINERS = {".mp4": ("libx264", "aac"), ".webm": ("libvpx-vp9", "libopus")}  # the codecs of written files
VIDEOS = (*ANIMATIONS, *CONTAINERS)


def has_av() -> bool:
    """Return True if PyAV is installed."""
    return find_spec("av") is not None


def video_facts(path: Path) -> tuple[int, int, int, float]:
    """Return (frames, height, width, frames per second); decodes at most the first frame.

    Raises:
        ValueError: the file is missing, damaged or not of the kind of its suffix, or PyAV is needed and missing.
    """
    with _opened(path) as file:
        if isinstance(file, Image.Image):
            file.load()
            ms = file.info.get("duration", 0)
            return getattr(file, "n_frames", 1), file.height, file.width, 1000 / ms if ms else 0.0
        stream = file.streams.video[0]
        frames = sum(packet.size > 0 for packet in file.demux(stream))  # the header also counts frames that are cut off
        return frames, stream.height, stream.width, float(stream.average_rate or 0)


def read_video(path: Path) -> "tuple[Tensor, float]":
    """Return the frames, uint8 [F, H, W, 3], of a video that `video_facts` accepts, and its mean frames per second.

    Raises:
        ValueError: its frames are damaged.
    """
    import torch

    with _opened(path) as file:
        if isinstance(file, Image.Image):
            read = [(np.array(i.convert("RGB")), i.info.get("duration", 0)) for i in ImageSequence.Iterator(file)]
            frames, times = zip(*read, strict=True)
            fps = 1000 * len(times) / (sum(times) or 40 * len(times))
        else:
            fps = float(file.streams.video[0].average_rate or 25)
            frames = tuple(frame.to_ndarray(format="rgb24") for frame in file.decode(video=0))
        return torch.from_numpy(np.stack(frames)), fps


def read_track(path: Path) -> tuple[np.ndarray, float]:
    """Return the sound of a file that PyAV reads, float32 [points, channels], and its sample rate.

    Raises:
        ValueError: the file is missing, damaged or without sound, or PyAV is missing.
    """
    if not has_av():
        raise ValueError(f"{path} needs PyAV: pip install 'omni-rl[video]'")
    import av

    with decoding(path, "whole file with sound"), av.open(str(path)) as file:
        floats = av.AudioResampler(format="fltp")
        frames = [part.to_ndarray() for frame in file.decode(audio=0) for part in floats.resample(frame)]
        return np.concatenate(frames, axis=1).T, float(file.streams.audio[0].rate)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a PIL image or a PyAV container; an error of its decoder becomes a ValueError that names the file."""
    kind = path.suffix.lower()
    if kind not in VIDEOS:
        raise ValueError(f"{path} must end in one of {VIDEOS}")
    if kind in ANIMATIONS:
        with decoding(path, f"whole {kind} file"), Image.open(path, formats=[ANIMATIONS[kind]]) as image:
            if kind == ".gif" and not path.read_bytes().rstrip(b"\0").endswith(b";"):
                raise ValueError("it is cut short")
            yield image
        return
    if not has_av():
        raise ValueError(f"{path} needs PyAV: pip install 'omni-rl[video]'")
    import av

    with decoding(path, f"whole {kind} file"):
        try:
            with av.open(str(path), format=kind[1:], metadata_errors="replace") as file:
                yield file
        except av.FFmpegError as exc:  # some of which are of no built-in class
            raise ValueError(str(exc)) from exc
