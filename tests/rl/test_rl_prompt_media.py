"""Sounds and videos of prompts: what is read is bounded, and so is what is remembered."""

import io
import os
import random
import wave

import numpy as np
import omni_rl.media.prompts as media
import pytest
from omni_rl.media import images as pictures
from omni_rl.media import videos, write
from PIL import Image


def sound(path, points):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * points))
    return path


def test_what_is_remembered_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "MAX_CACHED", 4 * 300)
    one, two, three = (sound(tmp_path / f"{i}.wav", 100 * i) for i in (1, 2, 3))
    first, second = media.read_sound(one)[0], media.read_sound(two)[0]
    assert media.read_sound(one)[0] is first
    third = media.read_sound(three)[0]  # as large as both together
    assert media.read_sound(three)[0] is third
    assert media.read_sound(two)[0] is not second


def test_a_video_of_too_many_pixels_is_refused_by_its_header(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "MAX_PIXELS", 2 * 8 * 4)
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "blue", "green")]
    for name, count in (("short", 2), ("long", 3)):
        frames[0].save(tmp_path / f"{name}.webp", save_all=True, append_images=frames[1:count], lossless=True)
    assert media.read_video(tmp_path / "short.webp")[0].shape == (2, 4, 8, 3)
    with pytest.raises(ValueError, match=r"long\.webp must have at most 64 pixels in all, got 3 frames of 8 x 4"):
        media.read_video(tmp_path / "long.webp")


@pytest.mark.parametrize("kind", [".mp4", ".webm"])
def test_a_video_of_a_prompt_may_be_compressed(tmp_path, kind):
    shades = np.arange(40, 240, 50, dtype=np.uint8)
    path = tmp_path / f"a{kind}"
    path.write_bytes(write.encode_video(np.broadcast_to(shades[:, None, None, None], (4, 32, 48, 3)).copy(), 8, kind))
    frames, fps = media.read_video(path)
    assert (frames.shape, fps) == ((4, 32, 48, 3), 8)
    assert np.abs(frames.numpy().mean(axis=(1, 2, 3)) - shades).max() < 4


def test_a_cut_sound_is_refused_by_name_and_not_read_as_a_shorter_one(tmp_path):
    whole = sound(tmp_path / "a.wav", 100).read_bytes()
    for size in (len(whole) - 1, len(whole) - 100, 50, 10, 0):
        (tmp_path / "a.wav").write_bytes(whole[:size])
        with pytest.raises(
            ValueError,
            match=r"a\.wav (is cut short: its header has 200 bytes of sound, got|is no whole file|must have 1 point)",
        ):
            media.read_sound(tmp_path / "a.wav")


def picture(kind, **options):
    """A still picture, or with frames a moving one, as the bytes of its file."""
    gradient = Image.fromarray(np.tile(np.arange(40, dtype=np.uint8)[None, :, None] * 6, (24, 1, 3)))
    frames = [gradient.rotate(30 * i) for i in range(4 if options.get("save_all") else 1)]
    written = io.BytesIO()
    frames[0].save(written, kind, append_images=frames[1:], **options)
    return written.getvalue()


def tone():
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setparams((2, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.arange(-400, 400, dtype="<i2").tobytes())
    return written.getvalue()


def frames_of(path):
    return videos.video_facts(path) and videos.read_video(path)[0]


def film(kind):
    return lambda: write.encode_video(np.arange(4 * 24 * 40 * 3, dtype=np.uint8).reshape(4, 24, 40, 3), 8, kind)


FILES = {  # the file's name, its bytes, and what reads it
    "png": ("a.png", lambda: picture("PNG"), pictures.read_image),
    "jpg": ("a.jpg", lambda: picture("JPEG"), pictures.read_image),
    "webp": ("a.webp", lambda: picture("WEBP", lossless=True), pictures.read_image),
    "gif of a prompt": ("a.gif", lambda: picture("GIF", save_all=True, duration=100), media.read_video),
    "gif of a pair": ("a.gif", lambda: picture("GIF", save_all=True, duration=100), frames_of),
    "moving webp": ("a.webp", lambda: picture("WEBP", save_all=True, duration=100, lossless=True), media.read_video),
    "mp4": ("a.mp4", film(".mp4"), frames_of),
    "webm": ("a.webm", film(".webm"), frames_of),
    "mp4 of a prompt": ("a.mp4", film(".mp4"), media.read_video),
    "wav": ("a.wav", tone, media.read_sound),
}


def broken(rng, data):
    """The bytes cut, with one bit flipped, with a few of them missing, or with another byte in their head."""
    at, changed = rng.randrange(len(data)), bytearray(data)
    match rng.randrange(4):
        case 0:
            del changed[at:]
        case 1:
            changed[at] ^= 1 << rng.randrange(8)
        case 2:
            del changed[at : at + rng.randint(1, 9)]
        case _:
            changed[at % 100] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")  # PIL's, of what it finds in broken files
@pytest.mark.parametrize("kind", FILES)
def test_a_broken_file_is_read_or_refused_by_its_name(tmp_path, kind):
    name, write, read = FILES[kind]
    rng, data, messages = random.Random(0), write(), []
    for i in range(60):
        path = tmp_path / str(i) / name  # for every file its own, as what was read is remembered
        path.parent.mkdir()
        path.write_bytes(broken(rng, data))
        try:
            read(path)
        except ValueError as exc:
            messages.append(str(exc))
    assert len(messages) > 5
    assert all(str(tmp_path) in message for message in messages)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.wav", media.read_sound), ("a.flac", media.read_sound), ("a.mp4", media.read_video),
        ("a.gif", media.read_video), ("a.png", pictures.read_pixels),
    ],
)  # fmt: skip
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"must be a regular file$|must name a file that exists"):
        read(tmp_path / name)
