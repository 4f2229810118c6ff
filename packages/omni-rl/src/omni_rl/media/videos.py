"""Video files: checks before any weights are loaded, and reading of frames.

PIL reads .gif and .webp, PyAV the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_CUR
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from PIL import Image, ImageFile, ImageSequence

from omni_rl.media.images import decoding

if TYPE_CHECKING:  # preference files are checked before torch is imported
    from av import Packet
    from av.container import InputContainer
    from torch import Tensor

ANIMATIONS = {".gif": "GIF", ".webp": "WEBP"}
CONTAINERS = {".mp4": ("libx264", "aac"), ".webm": ("libvpx-vp9", "libopus")}  # the codecs of written files
VIDEOS = (*ANIMATIONS, *CONTAINERS)
MISSING_S = 0.1  # a complete sound may be this much shorter than stated, because encoders add a little
AV_OPTIONS = {  # for FFmpeg, because some of its formats refer to other files and addresses
    "format_whitelist": "flac,matroska,mov,mp3,ogg,wav", "protocol_whitelist": "file",
}  # fmt: skip


def video_facts(path: Path) -> tuple[int, int, int, float]:
    """Return (frames, height, width, frames per second); decodes at most the first frame.

    Raises:
        ValueError: the file is missing, truncated, damaged or of another kind.
    """
    with _open_video(path) as file:
        if isinstance(file, Image.Image):
            file.load()
            ms = file.info.get("duration", 0)
            return getattr(file, "n_frames", 1), file.height, file.width, 1000 / ms if ms else 0.0
        stream = file.streams.video[0]
        frames = sum(packet.size > 0 for packet in demux_packets(file) if packet.stream is stream)
        return frames, stream.height, stream.width, float(stream.average_rate or 0)


def read_video(path: Path) -> "tuple[Tensor, float]":
    """Return the frames, uint8 [F, H, W, 3], of a video that `video_facts` accepts, and its mean frames per second.

    Raises:
        ValueError: the frames are damaged.
    """
    import torch

    with _open_video(path) as file:
        if isinstance(file, Image.Image):
            frames_and_times = [
                (np.array(image.convert("RGB")), image.info.get("duration", 0))
                for image in ImageSequence.Iterator(file)
            ]
            frames, times = zip(*frames_and_times, strict=True)
            fps = 1000 * len(times) / (sum(times) or 40 * len(times))
        else:
            fps = float(file.streams.video[0].average_rate or 25)
            frames = tuple(frame.to_ndarray(format="rgb24") for frame in file.decode(video=0))
        return torch.from_numpy(np.stack(frames)), fps


@contextmanager
def open_av(path: Path, kind: str) -> "Iterator[InputContainer]":
    """Open a file of sound or video. Errors of its decoder become a ValueError with the file and the kind."""
    import av

    with decoding(path, kind):
        try:
            with av.open(f"file:{path}", metadata_errors="replace", options=AV_OPTIONS) as file:
                yield file
        except av.FFmpegError as exc:  # some have no built-in base class
            raise ValueError(str(exc)) from exc


def demux_packets(file: "InputContainer") -> "Iterator[Packet]":
    """Yield the packets of all streams; the last ones are empty.

    Raises:
        ValueError: the file ends before its stated length, or within a packet if it has a video. A sound may end within
            a packet, because its length may have been unknown when its header was written.
    """
    import av

    end_s, stated_s, video = 0.0, (file.duration or 0) / av.time_base, file.streams.video
    tolerance_s = 0.75 / float(video[0].average_rate or 1) if video else MISSING_S
    for packet in file.demux():
        if packet.size and packet.pts is not None:
            end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if (video and packet.is_corrupt) or (not packet.size and end_s < stated_s - tolerance_s):
            raise ValueError(f"it is cut short: it says {stated_s:.2f} s, got {end_s:.2f}")
        yield packet


@contextmanager
def _open_video(path: Path) -> Iterator[Any]:
    """Open a PIL image or a PyAV container. Errors of its decoder become a ValueError with the file."""
    kind = path.suffix.lower()
    if kind not in VIDEOS:
        raise ValueError(f"{path} must end in one of {VIDEOS}")
    if kind in ANIMATIONS:
        with decoding(path, f"whole {kind} file"), Image.open(path, formats=[ANIMATIONS[kind]]) as image:
            if kind == ".gif" and not _has_end(image):
                raise ValueError("it is cut short")
            yield image
        return
    with open_av(path, f"whole {kind} file") as file:
        yield file


def _has_end(image: ImageFile.ImageFile) -> bool:
    """Return True if a GIF's last frame is followed by the trailer. PIL also accepts the end of the file."""
    try:
        while True:
            image.seek(image.tell() + 1)
    except EOFError:
        file = cast("BinaryIO", image.fp)
        file.seek(-1, SEEK_CUR)
        has_end = file.read(1) == b";"
    image.seek(0)
    return has_end
