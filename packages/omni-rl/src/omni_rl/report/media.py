"""A sample of any kind as small files that a browser shows: pictures, moving pictures, sound.

| kind | as it comes | what is written |
|---|---|---|
| image | uint8 [H, W, 3] | the picture |
| video | uint8 [F, H, W, 3] | it moving, and a strip of some of its frames |
| audio | float32 [S, C] | the sound, and its waveform where there is no video |

Letters: F frames, H height, W width, S points in time, C channels.
"""

import io
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_rl.media.videos import encode_flac, encode_video, has_av

EXACT_SIDE = 128  # pixels; pictures no larger keep every bit, as PNG
MAX_SIDE = 320  # pixels; larger pictures are reduced to this and stored as WebP
MAX_FRAMES = 32  # of a video; of a longer one every second or third is kept, and so on, at its own speed
STRIP_FRAMES = 6
SOUND_RATE = 24_000  # Hz; sound with twice as much or more is reduced to less than twice as much
MAX_SOUND_S = 10  # seconds of a sound that are kept
Media = Mapping[str, np.ndarray]  # of one sample, by kind


def files_of(name: str, media: Media, rates: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the page shows of a sample, the names of its files and its size in pixels; and the files."""
    if not media:
        return {"file": None, "size": [0, 0]}, {}
    picture = still(media)
    data, suffix = encode(picture, max_side=MAX_SIDE * (STRIP_FRAMES // 2 if "video" in media else 1))
    row: dict[str, Any] = {"file": f"{name}{suffix}", "size": [picture.shape[1], picture.shape[0]]}
    files = {row["file"]: data}
    if "video" in media:
        few, slower = few_frames(media, rates)
        _, height, width, _ = few["video"].shape
        data, suffix = animate(few["video"], slower["fps"])
        row |= {"strip": row["file"], "file": f"{name}-moving{suffix}", "size": [width, height]}
        files[row["file"]] = data
    if "audio" in media:
        data, suffix = encode_sound(media["audio"], rates["sample_rate"])
        row["sound"] = f"{name}{suffix}"
        files[row["sound"]] = data
    return row, files


def whole_files(media: Media, rates: Mapping[str, float]) -> dict[str, bytes]:
    """A sample by the suffixes of its files: a picture as it is; what plays whole with PyAV, else as on the page."""
    if "image" in media:
        return {".png": encode_png(media["image"])}
    video, sound, rate = media.get("video"), media.get("audio"), rates.get("sample_rate", 0)
    if has_av() and video is not None:
        return {".mp4": encode_video(video, rates["fps"], ".mp4", sound, rate)}
    if has_av() and sound is not None:
        return {".flac": encode_flac(sound, round(rate))}
    made = [animate(video, rates["fps"])] if video is not None else []
    made += [encode_sound(sound, rate)] if sound is not None else []
    return {suffix: data for data, suffix in made}


def still(media: Media) -> np.ndarray:
    """One picture, uint8 [height, width, 3], of a sample of any kind."""
    if "image" in media:
        return media["image"]
    return strip(media["video"]) if "video" in media else waveform(media["audio"])


def strip(video: np.ndarray, count: int = STRIP_FRAMES) -> np.ndarray:
    """Kept frames of a video side by side, the first and the last and others evenly between: uint8 [H, width, 3]."""
    video = video[:: _every(video)]
    chosen = np.unique(np.linspace(0, len(video) - 1, count).round().astype(int))
    gap = np.full((video.shape[1], max(1, video.shape[2] // 64), 3), 255, np.uint8)
    return np.concatenate([part for i in chosen for part in (gap, video[i])][1:], axis=1)


def waveform(sound: np.ndarray, height: int = 48, width: int = 192) -> np.ndarray:
    """A picture of how far a sound swings over its length."""
    pieces = np.array_split(np.abs(sound).max(axis=1), min(width, len(sound)))
    swing = np.array([piece.max() for piece in pieces]).clip(0, 1).repeat(width // len(pieces))
    far = np.abs(np.linspace(-1, 1, height))[:, None]
    return np.where((far <= np.maximum(swing, 0.03))[..., None], (70, 110, 170), (245, 245, 245)).astype(np.uint8)


def few_frames(media: Media, rates: Mapping[str, float]) -> tuple[Media, Mapping[str, float]]:
    """The media with every n-th frame of a video, at most MAX_FRAMES, and the rates at which they play."""
    every = _every(media["video"])
    return {**media, "video": media["video"][::every]}, {**rates, "fps": rates["fps"] / every}


def _every(video: np.ndarray) -> int:
    return -(-len(video) // MAX_FRAMES)


def encode(image: np.ndarray, *, max_side: int = MAX_SIDE) -> tuple[bytes, str]:
    """A picture, uint8 [H, W, 3], as the bytes of a small file, and the suffix of its name."""
    from PIL import Image

    if max(image.shape) <= EXACT_SIDE:
        return encode_png(image), ".png"
    picture, file = Image.fromarray(image), io.BytesIO()
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    picture.save(file, "WEBP", quality=82)
    return file.getvalue(), ".webp"


def encode_png(image: np.ndarray) -> bytes:
    """A picture, uint8 [H, W, 3], to the last bit."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def animate(frames: np.ndarray, fps: float) -> tuple[bytes, str]:
    """Frames, uint8 [F, H, W, 3], as the bytes of a small file that plays, and the suffix of its name.

    It is an animated WebP; small frames keep every bit. Larger ones are a WebM where PyAV is installed.
    """
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    exact = max(pictures[0].size) <= EXACT_SIDE
    for picture in pictures:
        picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    width, height = (side // 2 * 2 for side in pictures[0].size)
    if not exact and has_av() and min(width, height):
        return encode_video(np.stack([np.asarray(p)[:height, :width] for p in pictures]), fps, ".webm"), ".webm"
    file, times = io.BytesIO(), np.diff(np.round(np.arange(len(frames) + 1) * 1000 / fps)).astype(int).tolist()
    settings: dict[str, Any] = {"lossless": True} if exact else {"quality": 75, "method": 2}
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:], duration=times, loop=0, **settings)
    return file.getvalue(), ".webp"


def encode_sound(sound: np.ndarray, rate: float) -> tuple[bytes, str]:
    """The beginning of a sound, float32 [S, C], in one channel of 16 bits: FLAC with PyAV, else WAV, and its suffix."""
    every = max(1, int(rate // SOUND_RATE))
    mono = sound[: int(MAX_SOUND_S * rate)].mean(axis=1)
    mono = np.pad(mono, (0, -len(mono) % every)).reshape(-1, every).mean(axis=1)
    written_rate = max(1, round(rate / every))
    if has_av():
        return encode_flac(mono[:, None], written_rate), ".flac"
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, written_rate, 0, "NONE", ""))
        written.writeframes((mono.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue(), ".wav"
