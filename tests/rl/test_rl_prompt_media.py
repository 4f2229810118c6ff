"""Sounds and videos of prompts: what is read is bounded, and so is what is remembered."""

import wave

import omni_rl.prompt_media as media
import pytest
from PIL import Image


def sound(path, points):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * points))
    return path


def test_what_is_remembered_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "MAX_KEPT", 4 * 300)
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
