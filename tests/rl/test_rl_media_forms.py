"""The forms in which people have images and sounds: each is made here, read, and read as what was made."""

import io
import re
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers.utils import load_image
from omni_reward.scorers.published import decode_image
from omni_rl.media import prompts
from omni_rl.media.images import image_size, read_image, read_pixels
from omni_rl.media.prompts import read_sound
from omni_rl.tools.score import read_media
from omni_train.prompts.table import SIGNS
from PIL import Image

LEVELS = np.linspace(0, 1, 48, dtype=np.float64).reshape(6, 8)  # of an image
COLORS = np.stack([LEVELS, LEVELS[::-1], LEVELS[:, ::-1]], axis=-1)
EIGHT = (COLORS * 255).round().astype(np.uint8)
AFTER = b"\xff\xd9MotionPhoto_Data" + bytes(range(256)) * 4  # an ending of a JPEG, and a film


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_16(levels: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which PIL writes of gray only: [H, W] or [H, W, 2, 3 or 4] in [0, 1]."""
    channels = 1 if levels.ndim == 2 else levels.shape[2]
    kind = {1: "gray16be", 2: "ya16be", 3: "rgb48be", 4: "rgba64be"}[channels]
    data = (levels * 65535).round().astype(">u2").reshape(*levels.shape[:2], -1)
    frame = av.VideoFrame(*levels.shape[1::-1], kind)
    row = frame.planes[0].line_size
    rows = [line.tobytes().ljust(row, b"\0") for line in data]
    frame.planes[0].update(b"".join(rows))
    encoder = av.CodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, kind
    encoder.time_base = Fraction(1)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


GRAY = Image.fromarray(EIGHT[..., 0])
COLOR = Image.fromarray(EIGHT)
CLEAR = Image.fromarray(np.concatenate([EIGHT, EIGHT[..., :1]], axis=-1), "RGBA")  # whose alpha goes from 0 to 255
GRAY_CLEAR = Image.merge("LA", [GRAY, GRAY])
LIGHT = np.repeat(EIGHT[..., :1], 3, axis=-1)
IMAGES = {  # a form -> the bytes of a file of it, its pixels, and the most by which they may differ
    "png 1": (saved(GRAY.convert("1"), "PNG"), np.array(GRAY.convert("1").convert("RGB")), 0),
    "png L": (saved(GRAY, "PNG"), LIGHT, 0),
    "png L 16": (png_16(LEVELS), LIGHT, 1),
    "png L 16 by PIL": (saved(Image.fromarray((LEVELS * 65535).astype(np.uint16)), "PNG"), LIGHT, 1),
    "png LA": (saved(GRAY_CLEAR, "PNG"), LIGHT, 0),
    "png LA 16": (png_16(np.stack([LEVELS, LEVELS], axis=-1)), LIGHT, 1),
    "png P": (saved(COLOR.quantize(48), "PNG"), np.array(COLOR.quantize(48).convert("RGB")), 0),
    "png P clear": (saved(COLOR.quantize(48), "PNG", transparency=0), np.array(COLOR.quantize(48).convert("RGB")), 0),
    "png RGB": (saved(COLOR, "PNG"), EIGHT, 0),
    "png RGB 16": (png_16(COLORS), EIGHT, 1),
    "png RGB clear": (saved(COLOR, "PNG", transparency=(0, 0, 0)), EIGHT, 0),
    "png RGBA": (saved(CLEAR, "PNG"), EIGHT, 0),
    "png RGBA 16": (png_16(np.concatenate([COLORS, COLORS[..., :1]], axis=-1)), EIGHT, 1),
    "png moving": (saved(COLOR, "PNG", save_all=True, append_images=[GRAY.convert("RGB")]), EIGHT, 0),
    "jpeg L": (saved(GRAY, "JPEG", quality=100), LIGHT, 3),
    "jpeg RGB": (saved(COLOR, "JPEG", quality=100, subsampling=0), EIGHT, 4),
    "jpeg in scans": (saved(COLOR, "JPEG", quality=100, subsampling=0, progressive=True), EIGHT, 4),
    "jpeg CMYK": (saved(COLOR.convert("CMYK"), "JPEG", quality=100), EIGHT, 6),
    "jpeg of two": (saved(COLOR, "MPO", quality=100, subsampling=0, save_all=True, append_images=[COLOR]), EIGHT, 4),
    "webp RGB": (saved(COLOR, "WEBP", lossless=True), EIGHT, 0),
    "webp lossy": (saved(Image.new("RGB", (8, 6), (90, 90, 90)), "WEBP"), np.full((6, 8, 3), 90, np.uint8), 4),
    "webp RGBA": (saved(CLEAR, "WEBP", lossless=True, exact=True), EIGHT, 0),
    "webp moving": (saved(COLOR, "WEBP", lossless=True, save_all=True, append_images=[GRAY.convert("RGB")]), EIGHT, 0),
}
SUFFIX = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


@pytest.mark.parametrize("after", [b"", AFTER], ids=["alone", "with bytes after its end"])
@pytest.mark.parametrize("form", IMAGES)
def test_every_form_of_an_image_is_read_as_its_pixels(form: str, after: bytes, tmp_path: Path) -> None:
    data, pixels, most = IMAGES[form]
    path = tmp_path / f"a{SUFFIX[form.split()[0]]}"
    path.write_bytes(data + after)
    assert image_size(path) == (8, 6)
    for found in (read_image(path).numpy(), read_pixels(path), read_media(path, ["image"], {})[0]["image"]):
        assert (found.dtype, found.shape) == (np.uint8, (6, 8, 3))
        assert np.abs(found.astype(int) - pixels).max() <= most
    assert np.array_equal(decode_image(path.read_bytes()), found)
    if not form.startswith("png L 16"):  # which diffusers reads as white
        assert np.array_equal(np.array(load_image(str(path))), found)


@pytest.mark.parametrize("form", [form for form in IMAGES if form not in ("png moving", "jpeg of two")])
def test_every_form_of_an_image_that_is_cut_is_refused(form: str, tmp_path: Path) -> None:
    data, path = IMAGES[form][0], tmp_path / f"a{SUFFIX[form.split()[0]]}"
    for size in (len(data) - 2, len(data) * 3 // 4, len(data) // 2, 9, 0):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"a\.\w+ is (cut short|no \w+ image)"):
            image_size(path)


def test_an_image_that_is_cut_after_a_smaller_one_within_it_is_refused(tmp_path: Path) -> None:
    """Which ends as it should: the thumbnail of a photograph."""
    data, inner = saved(COLOR.resize((320, 240)), "JPEG", quality=95), saved(COLOR, "JPEG")
    note = b"\xff\xe2" + struct.pack(">H", len(inner) + 2) + inner
    path = tmp_path / "a.jpg"
    path.write_bytes(data[:2] + note + data[2:] + AFTER)
    assert read_image(path).shape == (240, 320, 3)
    path.write_bytes((data[:2] + note + data[2:])[: -len(data) // 2])
    with pytest.raises(ValueError, match=r"a\.jpg is no whole image: image file is truncated"):
        image_size(path)


@pytest.mark.parametrize("form", ["png RGB", "jpeg RGB", "webp RGB"])
def test_an_image_is_known_by_its_bytes_whatever_its_name(form: str, tmp_path: Path) -> None:
    for suffix in (".png", ".jpeg", ".webp"):
        (tmp_path / f"a{suffix}").write_bytes(IMAGES[form][0])
        assert image_size(tmp_path / f"a{suffix}") == (8, 6)


WAVE = np.linspace(-1, 1, 400, endpoint=False)  # of a sound
TONE = (np.sin(np.arange(16_000) / 8) / 2).astype(np.float32)
MEDIA_CODE = "000000001000800000aa00389b71"  # of the kinds of an extensible WAV


def wav(kind: int, data: bytes, bits: int, *, channels: int = 1, size: int | None = None, wide: bool = False) -> bytes:
    """A WAV of 16 kHz. size: of the sound, as its header has it. wide: WAVE_FORMAT_EXTENSIBLE."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if wide else kind, channels, 16_000, 16_000 * block, block, bits)
    if wide:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + bytes.fromhex(MEDIA_CODE)
    head = b"note" + struct.pack("<I", 3) + b"abc\0" + b"data" + struct.pack("<I", len(data) if size is None else size)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + head + data
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def pcm(bits: int) -> bytes:
    whole = (WAVE * 2 ** (bits - 1)).astype(np.int64)
    return b"".join(int(level).to_bytes(bits // 8, "little", signed=True) for level in whole)


def encoded(codec: str, kind: str, rate: int = 16_000, **options: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options) as written:
        stream = written.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((TONE[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.codec_context.format)
        for part in resampler.resample(frame):
            written.mux(stream.encode(part))
        written.mux(stream.encode())
    return file.getvalue()


BYTE = (WAVE * 128 + 128).astype(np.uint8).tobytes()
WAVS = {  # a form of WAV -> the bytes of a file of it, its channels, and the most by which it may differ
    "8 bits": (wav(1, BYTE, 8), 1, 1 / 128),
    "16 bits": (wav(1, pcm(16), 16), 1, 1 / 2**15),
    "24 bits": (wav(1, pcm(24), 24), 1, 1e-6),
    "32 bits": (wav(1, pcm(32), 32), 1, 1e-6),
    "float": (wav(3, WAVE.astype("<f4").tobytes(), 32), 1, 1e-6),
    "double": (wav(3, WAVE.astype("<f8").tobytes(), 64), 1, 1e-6),
    "extensible, 16 bits": (wav(1, pcm(16), 16, wide=True), 1, 1 / 2**15),
    "extensible, 24 bits": (wav(1, pcm(24), 24, wide=True), 1, 1e-6),
    "extensible, float": (wav(3, WAVE.astype("<f4").tobytes(), 32, wide=True), 1, 1e-6),
    "twelve channels": (wav(3, np.repeat(WAVE.astype("<f4"), 12).tobytes(), 32, channels=12), 12, 1e-6),
    "streamed": (wav(1, pcm(16), 16, size=2**32 - 1), 1, 1 / 2**15),
    "streamed, half as long": (wav(1, pcm(16), 16, size=2**31 - 1), 1, 1 / 2**15),
    "streamed, no length": (wav(1, pcm(16), 16, size=0), 1, 1 / 2**15),
    "bytes after its end": (wav(1, pcm(16), 16) + b"LIST" + struct.pack("<I", 4) + b"INFO", 1, 1 / 2**15),
}
SOUNDS = {  # a form of sound -> the bytes of a file of it, its rate, and the most by which it may differ
    "FLAC": (encoded("flac", "flac"), 16_000, 1e-4),
    "FLAC and a tag": (encoded("flac", "flac") + b"TAG" + bytes(125), 16_000, 1e-4),
    "MP3": (encoded("libmp3lame", "mp3"), 16_000, 0.05),
    "MP3 between tags": (
        b"ID3\x03\0\0\0\0\0\x0fTIT2\0\0\0\x05\0\0\0\xe9\xe8xx" + encoded("libmp3lame", "mp3") + b"TAG" + bytes(125),
        16_000, 0.05,
    ),
    "Ogg": (encoded("libopus", "ogg", 48_000, page_duration="50000"), 48_000, None),
    "m4a": (encoded("aac", "mp4"), 16_000, None),
    "WebM": (encoded("libopus", "webm", 48_000), 48_000, None), "A-law WAV": (encoded("pcm_alaw", "wav"), 16_000, 0.02),
    "mu-law WAV": (encoded("pcm_mulaw", "wav"), 16_000, 0.02), "ADPCM WAV": (encoded("adpcm_ms", "wav"), 16_000, 0.05),
    "RF64": (encoded("pcm_s16le", "wav", rf64="always"), 16_000, 1e-4),
}  # fmt: skip


@pytest.mark.parametrize("form", WAVS)
def test_every_form_of_wav_is_read_as_its_sound(form: str, tmp_path: Path) -> None:
    data, channels, most = WAVS[form]
    (tmp_path / "a.wav").write_bytes(data)
    for sound, rate in (read_sound(tmp_path / "a.wav"), of_score(tmp_path / "a.wav")):
        assert (sound.dtype, sound.shape, rate) == (torch.float32, (400, channels), 16_000)
        assert np.abs(sound.numpy() - WAVE[:, None]).max() <= most


def of_score(path: Path) -> tuple[torch.Tensor, object]:
    """What `omni-rl score` gives a scorer."""
    media, meta = read_media(path, ["audio"], {})
    return torch.from_numpy(media["audio"]), meta["sample_rate"]


def test_a_wav_of_16_bits_is_read_to_the_bit(tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(-(2**15), 2**15, 4000).astype("<i2")
    (tmp_path / "a.wav").write_bytes(wav(1, levels.tobytes(), 16, channels=2))
    assert np.array_equal(read_sound(tmp_path / "a.wav")[0].numpy(), levels.reshape(-1, 2).astype(np.float32) / 2**15)


@pytest.mark.parametrize("form", SOUNDS)
def test_every_form_of_sound_is_read_as_what_was_heard(form: str, tmp_path: Path) -> None:
    data, rate, most = SOUNDS[form]
    path = tmp_path / "a.sound"
    path.write_bytes(data)
    sound, found = read_sound(path)
    assert found == rate
    assert sound.shape[1] == 1
    assert len(sound) == pytest.approx(len(TONE), abs=1600)  # lossy codecs add a part of a block
    pitch = np.fft.rfftfreq(len(sound), 8)[np.abs(np.fft.rfft(sound[:, 0].numpy())).argmax()] * 2 * np.pi * 8
    assert pitch == pytest.approx(1 / 8, rel=0.01)
    if most:
        assert np.abs(sound[: len(TONE), 0].numpy() - TONE)[800:-800].max() <= most
    if form not in ("m4a", "WebM", "RF64"):
        assert any(re.match(sign, data, re.DOTALL) for sign in SIGNS)  # so parquet files may hold it


@pytest.mark.parametrize("form", ["8 bits", "16 bits", "24 bits", "float", "extensible, 24 bits"])
def test_every_form_of_wav_that_is_cut_is_refused(form: str, tmp_path: Path) -> None:
    data = WAVS[form][0]
    for size in (len(data) - 1, len(data) - 24, len(data) - 200, 60, 20, 0):
        (tmp_path / "a.wav").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"a\.wav (is cut short|is no whole file with sound|must have 1 point)"):
            read_sound(tmp_path / "a.wav")


@pytest.mark.parametrize("form", ["FLAC", "MP3", "Ogg", "WebM", "m4a", "RF64"])
def test_a_sound_that_is_cut_is_refused(form: str, tmp_path: Path) -> None:
    data, path = SOUNDS[form][0], tmp_path / "a.sound"
    path.write_bytes(data[: len(data) * 6 // 10])
    with pytest.raises(ValueError, match=r"a\.sound is (cut short|no whole file)"):
        read_sound(path)


def test_an_ogg_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data, path = SOUNDS["Ogg"][0], tmp_path / "a.ogg"
    for size in (len(data) - 1, data.rindex(b"OggS") + 20, data.rindex(b"OggS"), 30, 0):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"a\.ogg (is cut short|is no whole file|must have 1 point)"):
            read_sound(path)


def test_a_file_without_sound_is_told_as_that_also_where_its_name_has_a_colon(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with av.open("file:12:30.mp4", "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=8, width=32, height=32, pix_fmt="yuv420p")
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode())
    with pytest.raises(ValueError, match=r"12:30\.mp4 is no whole file with sound: it has no sound"):
        read_sound(Path("12:30.mp4"))


def test_a_small_file_of_much_sound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_POINTS", 2**21)
    with av.open(str(tmp_path / "a.flac"), "w") as file:
        stream = file.add_stream("flac", rate=192_000, layout="7.1")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8 * 192_000), np.int16), format="s16", layout="7.1")
        frame.sample_rate = 192_000
        for _ in range(3):
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    assert (tmp_path / "a.flac").stat().st_size < 2**15
    with pytest.raises(ValueError, match=r"a\.flac must have at most 2097152 points of sound in all its 8 channels"):
        read_sound(tmp_path / "a.flac")


def test_a_sound_that_is_too_long_is_refused_before_it_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(1, bytes(2 * 16_000 * 601), 16))
    with pytest.raises(
        ValueError, match=r"a\.wav must have 1 point to 600 s of sound, got more than 600 s at 16000 Hz"
    ):
        read_sound(tmp_path / "a.wav")


def test_a_list_of_other_files_is_no_sound(tmp_path: Path) -> None:
    (tmp_path / "b.wav").write_bytes(WAVS["16 bits"][0])
    for text in ("ffconcat version 1.0\nfile b.wav\n", "#EXTM3U\n#EXTINF:1,\nb.wav\n#EXT-X-ENDLIST\n"):
        (tmp_path / "a.wav").write_text(text)
        with pytest.raises(ValueError, match=r"a\.wav is no whole file with sound"):
            read_sound(tmp_path / "a.wav")
