"""Videos and sounds in a run folder, and in the page: what is kept of them, and its size."""

import io
import json

import av
import numpy as np
import pytest
import torch
from omni_rl.media.videos import read_video, video_facts
from omni_rl.media.write import MAX_FRAMES, animate, encode_sound, thin_frames, whole_files
from omni_rl.report import Sample, data, write_eval, write_report, write_samples
from PIL import Image, ImageSequence
from rl.report_runs import RATES, clips, film, metrics, tone, write_metrics


def row(i: int, reward: float = 0.5) -> Sample:
    return Sample(f"prompt {i}", reward, i // 2, i, rates=RATES)


def pictures_in(data: bytes) -> tuple[list[np.ndarray], list[int]]:
    """The frames of an animation and how many milliseconds each stands."""
    found = [
        (np.asarray(frame.convert("RGB")), frame.info["duration"])
        for frame in ImageSequence.all_frames(Image.open(io.BytesIO(data)))
    ]
    return [frame for frame, _ in found], [time for _, time in found]


def test_a_small_video_keeps_every_bit_and_its_speed():
    frames, times = pictures_in(animate(film(), 8)[0])
    np.testing.assert_array_equal(frames, film())
    assert times == [125] * 9
    assert sum(pictures_in(animate(film(24), 24)[0])[1]) == 1000  # no third of a millisecond is lost


def test_a_large_video_is_reduced_and_a_long_one_loses_frames_and_no_time(tmp_path):
    clip = np.full((81, 240, 480, 3), (200, 40, 90), np.uint8)
    few, rates = thin_frames({"video": clip}, {"fps": 24.0})
    assert few["video"].shape[0] == 27 <= MAX_FRAMES
    assert np.shares_memory(few["video"], clip)
    assert rates["fps"] == 8
    two = few["video"][:2] // np.array([[[[1]]], [[[2]]]], np.uint8)
    (tmp_path / "a.webm").write_bytes(animate(two, rates["fps"])[0])
    assert video_facts(tmp_path / "a.webm") == (2, 160, 320, 8)


def test_a_large_video_is_a_webm_of_its_speed(tmp_path):
    data, suffix = animate(np.full((9, 241, 481, 3), (200, 40, 90), np.uint8), 12.5)
    (tmp_path / f"a{suffix}").write_bytes(data)
    assert video_facts(tmp_path / "a.webm") == (9, 160, 320, 12.5)
    assert (read_video(tmp_path / "a.webm")[0] - torch.tensor([200.0, 40, 90])).abs().max() < 8


def read_levels(data: bytes) -> tuple[np.ndarray, int]:
    """The levels of 16 bits of a sound in one channel, and its rate."""
    with av.open(io.BytesIO(data)) as file:
        assert file.streams.audio[0].channels == 1
        return np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)]), file.streams.audio[0].rate


def test_a_sound_is_a_flac_without_loss():
    heard, _ = read_levels(encode_sound(tone(rate=16_000), 16_000))
    np.testing.assert_array_equal(heard, (tone()[:, 0] * 32767).round())


@pytest.mark.parametrize("channels", [1, 2])
def test_a_sample_s_file_has_all_frames_and_the_sound(tmp_path, channels):
    clip = film(9, 160, 320)
    files = whole_files({"video": clip, "audio": tone(0.75, channels=channels)}, {"fps": 12.0, "sample_rate": 16_000})
    (tmp_path / "a.mp4").write_bytes(files[".mp4"])
    assert video_facts(tmp_path / "a.mp4") == (9, 160, 320, 12)
    with av.open(str(tmp_path / "a.mp4")) as file:
        assert [stream.channels for stream in file.streams.audio] == [channels]
        assert float(file.streams.audio[0].duration * file.streams.audio[0].time_base) == pytest.approx(0.75, abs=0.1)
    assert whole_files({"audio": tone()}, {"sample_rate": 16_000}).keys() == {".flac"}


@pytest.mark.parametrize(("rate", "written"), [(16_000, 16_000), (44_100, 44_100), (48_000, 24_000)])
def test_a_sound_keeps_its_pitch_and_its_length(rate, written):
    levels, found = read_levels(encode_sound(tone(rate=rate), rate))
    sound = levels / 32767
    assert found == written
    assert len(sound) == pytest.approx(0.5 * written, abs=1)
    spectrum = np.abs(np.fft.rfft(sound))
    assert np.fft.rfftfreq(len(sound), 1 / found)[spectrum.argmax()] == pytest.approx(440, abs=2)
    assert np.abs(sound).max() == pytest.approx(0.5, abs=0.01)


def test_a_video_and_its_sound_stay_beside_what_is_known_of_them(tmp_path):
    write_eval(tmp_path, 8, clips(2), [row(i) for i in range(2)])
    folder = tmp_path / "eval" / "000008"
    rows = json.loads((folder / "rows.json").read_text())
    assert [each["size"] for each in rows] == [[96, 32]] * 2
    names = [each[name] for each in rows for name in ("file", "strip", "sound")]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "rows.json"])
    np.testing.assert_array_equal(pictures_in((folder / rows[1]["file"]).read_bytes())[0], film(seed=1))
    assert rows[0]["rates"] == RATES
    sheet = Image.open(tmp_path / "eval" / "000008.png")
    assert sheet.width > 6 * 96  # strips, and no single frames


def test_a_page_of_long_videos_stays_below_20_mb(tmp_path, monkeypatch):
    noise = film(MAX_FRAMES, 128, 128)  # which no format makes small
    media = [{"video": noise, "audio": tone(10, 24_000)} for _ in range(8)]
    for step in range(0, 24, 4):
        write_eval(tmp_path, step, media[:4], [row(i) for i in range(4)])
    write_samples(tmp_path, 20, media, [row(i, i / 8) for i in range(8)])
    write_metrics(tmp_path, metrics(48))
    whole = sum(path.stat().st_size for path in tmp_path.rglob("*.w*"))
    assert whole > 25e6
    page = write_report(tmp_path)
    assert 2e6 < page.stat().st_size < 20e6
    assert data.EVAL_BYTES + data.SAMPLE_BYTES < 20e6 / data.PLAYED
