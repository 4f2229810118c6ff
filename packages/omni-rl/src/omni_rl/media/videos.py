"""Video files: their check before any weight is loaded, their frames, and how they are written.

PIL reads .gif and .webp. PyAV (`omni-rl[video]`) reads .mp4 and .webm, and writes them, and sound as .flac.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageSequence

from omni_rl.media.images import decoding

if TYPE_CHECKING:  # preference files are checked before torch is imported
    from torch import Tensor

ANIMATIONS = {".gif": "GIF", ".webp": "WEBP"}
CONTAINERS = {".mp4": ("libx264", "aac"), ".webm": ("libvpx-vp9", "libopus")}  # what they are written with
VIDEOS = (*ANIMATIONS, *CONTAINERS)


def has_av() -> bool:
    """Whether PyAV is installed."""
    return find_spec("av") is not None


def video_facts(path: Path) -> tuple[int, int, int, float]:
    """(frames, height, width, frames per second); decodes no more than a first frame.

    Raises:
        ValueError: it is no whole file of the kind that its name says, or it takes PyAV to read it, which is missing.
    """
    kind = path.suffix.lower()
    if kind in CONTAINERS:
        return _container_facts(path)
    with decoding(path, f"whole {kind} video"), Image.open(path, formats=[ANIMATIONS[kind]]) as image:
        frames = num_frames(image, path)
        image.load()
        (width, height), ms = image.size, image.info.get("duration", 0)
    return frames, height, width, 1000 / ms if ms else 0.0


def num_frames(image: Image.Image, path: Path) -> int:
    """The number of frames of a WebP or GIF file; a GIF that lacks its last byte is a ValueError."""
    if image.format == "GIF" and not path.read_bytes().rstrip(b"\0").endswith(b";"):
        raise ValueError("it is cut short")
    return getattr(image, "n_frames", 1)


def _container_facts(path: Path) -> tuple[int, int, int, float]:
    if not has_av():
        raise ValueError(f"{path} takes PyAV to read it: pip install 'omni-rl[video]'")
    with _opened(path) as file:
        stream = file.streams.video[0]
        frames = sum(packet.size > 0 for packet in file.demux(stream))  # what a header says may be cut off
        return frames, stream.height, stream.width, float(stream.average_rate or 0)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The container, open, with whatever is wrong with it as a ValueError that names the file."""
    import av

    kind = path.suffix.lower()
    with decoding(path, f"whole {kind} video"):
        try:
            with av.open(str(path), format=kind[1:], metadata_errors="replace") as file:
                yield file
        except av.FFmpegError as exc:  # some of which are of no built-in class
            raise ValueError(str(exc)) from exc


def read_video(path: Path) -> "Tensor":
    """The frames, uint8 [F, H, W, 3], of a video that `video_facts` has found whole.

    Raises:
        ValueError: its frames are broken.
    """
    import torch

    if (kind := path.suffix.lower()) in ANIMATIONS:
        with decoding(path, f"whole {kind} video"), Image.open(path, formats=[ANIMATIONS[kind]]) as image:
            return torch.from_numpy(
                np.stack([np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
            )
    with _opened(path) as file:
        return torch.from_numpy(np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]))


def encode_video(frames: np.ndarray, fps: float, kind: str, sound: np.ndarray | None = None, rate: float = 0) -> bytes:
    """Frames, uint8 [F, H, W, 3], of even height and width, and a sound, float32 [S, C], of one or two channels.

    kind: a key of CONTAINERS. rate: of the sound, Hz.
    """
    import av

    picture_codec, sound_codec = CONTAINERS[kind]
    written = io.BytesIO()
    with av.open(written, "w", format=kind[1:]) as file:
        stream: Any = file.add_stream(picture_codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.options = {"crf": "30", "b": "0", "cpu-used": "6"} if kind == ".webm" else {"crf": "18"}
        heard = None if sound is None else _add_sound(file, sound_codec, sound, rate)
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
        if heard is not None:
            file.mux(heard())
    return written.getvalue()


def encode_flac(sound: np.ndarray, rate: int) -> bytes:
    """A sound, float32 [S, C], in 16 bits, without loss."""
    import av

    written = io.BytesIO()
    with av.open(written, "w", format="flac") as file:
        file.mux(_add_sound(file, "flac", sound, rate)())
    return written.getvalue()


def _add_sound(file: Any, codec: str, sound: np.ndarray, rate: float) -> Callable[[], list[Any]]:
    """Give a file a stream of sound, before it is begun; the function makes the stream's packets."""
    import av

    layout = "mono" if sound.shape[1] == 1 else "stereo"
    stream = file.add_stream(codec, rate=round(rate), layout=layout)
    levels = (sound.clip(-1, 1) * 32767).round().astype(np.int16).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(levels, format="s16", layout=layout)
    frame.sample_rate = round(rate)
    return lambda: [*stream.encode(frame), *stream.encode()]
