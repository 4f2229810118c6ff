"""Samples of any kind as files for browsers, and contact sheets.

| kind | sample | files |
|---|---|---|
| image | uint8 [H, W, 3] | the image |
| video | uint8 [F, H, W, 3] | a video, and a strip of some of its frames |
| audio | float32 [S, C] | the sound, and its waveform if there is no video |

Notation: F frames, H height, W width, S points in time, C channels. PyAV writes .mp4, .webm and .flac.
"""

import io
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from omni_rl.media.videos import CONTAINERS

EXACT_SIDE = 128  # pixels; images up to this size are lossless
MAX_SIDE = 320  # pixels; larger images are reduced to this and stored as WebP
MAX_FRAMES = 32  # of a video; a longer video keeps every n-th frame, at the original speed
STRIP_FRAMES = 6
SOUND_RATE = 24_000  # Hz; sound at twice this rate or more is downsampled to less than twice
MAX_SOUND_S = 10  # seconds of a sound to keep
Media = Mapping[str, np.ndarray]  # of one sample, by kind


def sample_files(name: str, media: Media, rates: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a sample's row for the page, with the names of its files and its size in pixels, and the files."""
    if not media:
        return {"file": None, "size": [0, 0]}, {}
    image = still_image(media)
    data, suffix = encode(image, max_side=MAX_SIDE * (STRIP_FRAMES // 2 if "video" in media else 1))
    row: dict[str, Any] = {"file": f"{name}{suffix}", "size": [image.shape[1], image.shape[0]]}
    files = {row["file"]: data}
    if "video" in media:
        thinned, thinned_rates = thin_frames(media, rates)
        data, suffix = animate(thinned["video"], thinned_rates["fps"])
        row |= {"strip": row["file"], "file": f"{name}-moving{suffix}", "size": [*thinned["video"].shape[2:0:-1]]}
        files[row["file"]] = data
    if "audio" in media:
        row["sound"] = f"{name}.flac"
        files[row["sound"]] = encode_sound(media["audio"], rates["sample_rate"])
    return row, files


def whole_files(media: Media, rates: Mapping[str, float]) -> dict[str, bytes]:
    """Return a sample's complete files by suffix. An image is stored without loss."""
    if "image" in media:
        return {".png": encode_png(media["image"])}
    video, sound, rate = media.get("video"), media.get("audio"), rates.get("sample_rate", 0)
    if video is not None:
        return {".mp4": encode_video(video, rates["fps"], ".mp4", sound, rate)}
    return {".flac": encode_flac(sound, round(rate))} if sound is not None else {}


def still_image(media: Media) -> np.ndarray:
    """Return an image, uint8 [height, width, 3], that shows a sample of any kind."""
    if "image" in media:
        return media["image"]
    return film_strip(media["video"]) if "video" in media else waveform(media["audio"])


def film_strip(video: np.ndarray, count: int = STRIP_FRAMES) -> np.ndarray:
    """Return frames of a video side by side, uint8 [H, width, 3]: the first, the last and some between."""
    video = video[:: _frame_stride(video)]
    chosen = np.unique(np.linspace(0, len(video) - 1, count).round().astype(int))
    gap = np.full((video.shape[1], max(1, video.shape[2] // 64), 3), 255, np.uint8)
    return np.concatenate([part for i in chosen for part in (gap, video[i])][1:], axis=1)


def waveform(sound: np.ndarray, height: int = 48, width: int = 192) -> np.ndarray:
    """Return an image of a sound's amplitude over time."""
    chunks = np.array_split(np.abs(sound).max(axis=1), min(width, len(sound)))
    amplitude = np.array([chunk.max() for chunk in chunks]).clip(0, 1).repeat(width // len(chunks))
    distance = np.abs(np.linspace(-1, 1, height))[:, None]
    return np.where((distance <= np.maximum(amplitude, 0.03))[..., None], (70, 110, 170), (245, 245, 245)).astype(
        np.uint8
    )


def thin_frames(media: Media, rates: Mapping[str, float]) -> tuple[Media, Mapping[str, float]]:
    """Return the media with every n-th frame of the video, at most MAX_FRAMES, and rates that keep its speed."""
    stride = _frame_stride(media["video"])
    return {**media, "video": media["video"][::stride]}, {**rates, "fps": rates["fps"] / stride}


def _frame_stride(video: np.ndarray) -> int:
    return -(-len(video) // MAX_FRAMES)


def encode(image: np.ndarray, *, max_side: int = MAX_SIDE) -> tuple[bytes, str]:
    """Encode an image, uint8 [H, W, 3], as a small file; return it with its suffix."""
    if max(image.shape) <= EXACT_SIDE:
        return encode_png(image), ".png"
    reduced = Image.fromarray(image)
    reduced.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    return _encode_image(reduced, "WEBP", quality=82), ".webp"


def encode_png(image: np.ndarray) -> bytes:
    """Encode an image, uint8 [H, W, 3], without loss."""
    return _encode_image(Image.fromarray(image), "PNG")


def _encode_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animate(frames: np.ndarray, fps: float) -> tuple[bytes, str]:
    """Encode frames, uint8 [F, H, W, 3], as a small video; return it with its suffix.

    Small frames give a lossless animated WebP, larger ones a WebM.
    """
    images = [Image.fromarray(frame) for frame in frames]
    is_lossless = max(images[0].size) <= EXACT_SIDE
    for image in images:
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    width, height = (side // 2 * 2 for side in images[0].size)
    if not is_lossless and min(width, height):
        return encode_video(np.stack([np.asarray(image)[:height, :width] for image in images]), fps, ".webm"), ".webm"
    times = np.diff(np.round(np.arange(len(frames) + 1) * 1000 / fps)).astype(int).tolist()
    options: dict[str, Any] = {"lossless": True} if is_lossless else {"quality": 75, "method": 2}
    options |= {"save_all": True, "append_images": images[1:], "duration": times, "loop": 0}
    return _encode_image(images[0], "WEBP", **options), ".webp"


def encode_sound(sound: np.ndarray, rate: float) -> bytes:
    """Encode the beginning of a sound, float32 [S, C], as mono FLAC with 16 bits."""
    stride = max(1, int(rate // SOUND_RATE))
    mono = sound[: int(MAX_SOUND_S * rate)].mean(axis=1)
    mono = np.pad(mono, (0, -len(mono) % stride)).reshape(-1, stride).mean(axis=1)
    return encode_flac(mono[:, None], max(1, round(rate / stride)))


def encode_video(frames: np.ndarray, fps: float, kind: str, sound: np.ndarray | None = None, rate: float = 0) -> bytes:
    """Encode frames, uint8 [F, H, W, 3] with even height and width, and a sound, float32 [S, C], as a video.

    kind: a key of CONTAINERS. sound: mono or stereo. rate: sample rate of the sound in Hz.
    """
    import av

    video_codec, sound_codec = CONTAINERS[kind]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind[1:]) as file:
        stream: Any = file.add_stream(video_codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.options = {"crf": "30", "b": "0", "cpu-used": "6"} if kind == ".webm" else {"crf": "18"}
        encode_sound_packets = None if sound is None else _add_sound(file, sound_codec, sound, rate)
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
        if encode_sound_packets is not None:
            file.mux(encode_sound_packets())
    return buffer.getvalue()


def encode_flac(sound: np.ndarray, rate: int) -> bytes:
    """Encode a sound, float32 [S, C], as lossless FLAC with 16 bits."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as file:
        file.mux(_add_sound(file, "flac", sound, rate)())
    return buffer.getvalue()


def _add_sound(file: Any, codec: str, sound: np.ndarray, rate: float) -> Callable[[], list[Any]]:
    """Add a sound stream to a file before its first packet; return a function that encodes the stream's packets."""
    import av

    layout = "mono" if sound.shape[1] == 1 else "stereo"
    stream = file.add_stream(codec, rate=round(rate), layout=layout)
    levels = (sound.clip(-1, 1) * 32767).round().astype(np.int16)
    frame = av.AudioFrame.from_ndarray(levels.reshape(1, -1), format="s16", layout=layout)
    frame.sample_rate = round(rate)
    return lambda: [*stream.encode(frame), *stream.encode()]


def contact_sheet(
    images: Sequence[np.ndarray],
    labels: Sequence[str],
    *,
    columns: int = 8,
    margin: int = 4,
    max_side: float = math.inf,
) -> Image.Image:
    """Return one image with all `images` in rows of `columns`, each with its label below.

    images: N images, uint8 [H, W, 3], RGB, of any size. If all are narrower than 192 pixels, they are enlarged by an
    integer factor, so that labels fit and pixels stay sharp. labels: N texts, cut to the width; a glyph missing in the
    font becomes a question mark. max_side: pixels; if an image is larger, all are scaled down.
    """
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    scale = max(1, 192 // width) if max(height, width) <= max_side else max_side / max(height, width)
    height, width = round(height * scale), round(width * scale)
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    columns = min(columns, len(images))
    cell_width, cell_height = width + margin, height + margin + 16
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * cell_width + margin, rows * cell_height + margin), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = margin + i % columns * cell_width, margin + i // columns * cell_height
        size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
        sheet.paste(Image.fromarray(image).resize(size, resample), (x, y))
        draw.text((x, y + height), replace_missing_glyphs(label)[: width // 6], font=font, fill="black")
    return sheet


def replace_missing_glyphs(text: str) -> str:
    """Return a text with a question mark for each glyph missing in PIL's font."""
    return unicodedata.normalize("NFKC", text).encode("ascii", "replace").decode()


def score_label(value: float | None, details: Mapping[str, object]) -> str:
    """Return the label of a scored image: the target text, the recognized text, the score."""
    if value is None:
        return "no score"
    text = format_score(value, 2)
    return f"{details['target']} -> {details.get('read', '')}   {text}" if "target" in details else text


def format_score(score: float, places: int) -> str:
    """Format a score with `places` decimals, or with five significant digits if it is below 0.1 or at least 10."""
    return f"{score:.{places}f}" if score == 0 or 0.1 <= abs(score) < 10 else f"{score:.5g}"
