"""Video files: their frames, and pairs of them, whole and alike, or an error before anything is loaded."""

import json
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from model_rows import ROWS
from omni_rl.media import preferences, videos
from omni_rl.media.preferences import check_preferences, read_latent
from omni_rl.media.prompts import read_sound
from omni_rl.media.videos import ANIMATIONS, read_video, video_facts
from omni_rl.media.write import encode_video
from omni_rl.settings.groups import Data, Sampling
from omni_rollout import Params
from omni_rollout.models import open_model
from PIL import Image

KINDS = [*ANIMATIONS, *videos.CONTAINERS]
VIDEO = Sampling(num_frames=5, height=32, width=64, frame_rate=12.5)


def film(num_frames=5, height=32, width=64):
    """A bright bar that moves over a dark ground, uint8 [F, H, W, 3]."""
    frames = np.full((num_frames, height, width, 3), 20, np.uint8)
    for i, frame in enumerate(frames):
        frame[:, 8 * i : 8 * i + 16] = (200, 40, 90)
    return frames


def write(path, frames, fps=12.5):
    """The frames in a file of the kind that its name says."""
    if path.suffix in ANIMATIONS:
        first, *others = map(Image.fromarray, frames)
        options = {"lossless": True} if path.suffix == ".webp" else {}
        first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), **options)
    else:
        path.write_bytes(encode_video(frames, fps, path.suffix))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_has_the_frames_that_were_written(tmp_path, kind):
    path = write(tmp_path / f"a{kind}", film())
    assert video_facts(path) == (5, 32, 64, 12.5)
    frames = read_video(path)[0]
    assert frames.dtype == torch.uint8
    assert np.abs(frames.numpy().astype(int) - film()).mean() < (0.01 if kind in ANIMATIONS else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_that_is_torn_or_something_else_is_refused(tmp_path, kind):
    path = write(tmp_path / f"a{kind}", film())
    path.write_bytes(path.read_bytes()[:-100])
    pair(tmp_path, path.name, path.name)
    with pytest.raises(
        ValueError, match=f'pair 1, "win": .*a{kind} (is no whole|is no WEBP|must be a video of 5 frames)'
    ):
        check_preferences(tmp_path / "pairs.jsonl", Data(), VIDEO)
    path.write_text("no video")
    with pytest.raises(ValueError, match=f"a{kind} is no whole {kind} file"):
        video_facts(path)


def moved_ahead(path):
    """The bytes of an .mp4 whose index stands before its frames."""
    ahead = path.with_name("ahead.mp4")
    with av.open(str(path)) as read, av.open(str(ahead), "w", options={"movflags": "faststart"}) as written:
        streams = [written.add_stream_from_template(stream) for stream in read.streams]
        for packet in read.demux():
            if packet.size:
                packet.stream = streams[packet.stream.index]
                written.mux(packet)
    return ahead.read_bytes()


@pytest.mark.parametrize("with_sound", [False, True])
@pytest.mark.parametrize("kind", videos.CONTAINERS)
def test_a_video_whose_frames_or_sound_end_early_is_refused(tmp_path, kind, with_sound):
    frames = np.random.default_rng(0).integers(0, 256, (12, 32, 64, 3), np.uint8)
    sound = np.sin(np.arange(24_000) / 8)[:, None].astype(np.float32) if with_sound else None
    path = tmp_path / f"a{kind}"
    path.write_bytes(encode_video(frames, 24, kind, sound, 48_000))
    data = moved_ahead(path) if kind == ".mp4" else path.read_bytes()
    path.write_bytes(data)
    assert video_facts(path)[0] == 12
    for share in (0.95, 0.9, 0.6, 0.3):
        path.write_bytes(data[: int(share * len(data))])
        for read in (video_facts, *([read_sound] if with_sound else [])):
            with pytest.raises(ValueError, match=rf"a{kind} is no whole .*it is cut short: it says 0\.5\d s, got 0\."):
                read(path)


def pair(folder, win, lose):
    """A preference file of one pair."""
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "a bar moves", "win": win, "lose": lose}))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"frames": film(9)}, "must be a video of 5 frames of 64 x 32 pixels, got a video of 9 frames of 64 x 32"),
        (
            {"frames": film(height=16)},
            "must be a video of 5 frames of 64 x 32 pixels, got a video of 5 frames of 64 x 16",
        ),
        ({"fps": 25}, "must have 12.5 frames per second, as --frame-rate says, got 25"),
    ],
)
def test_a_video_of_another_length_size_or_speed_is_named(tmp_path, changes, rule):
    write(tmp_path / "a.mp4", film())
    write(tmp_path / "b.webp", **({"frames": film()} | changes))
    pair(tmp_path, "a.mp4", "b.webp")
    with pytest.raises(ValueError, match=f'pair 1, "lose": .*b.webp {rule}'):
        check_preferences(tmp_path / "pairs.jsonl", Data(), VIDEO)


def test_a_picture_is_no_video_and_a_video_no_picture(tmp_path):
    Image.fromarray(film()[0]).save(tmp_path / "a.png")
    write(tmp_path / "b.gif", film())
    pair(tmp_path, "a.png", "b.gif")
    with pytest.raises(ValueError, match=r"a\.png must be a video of 5 frames .*, got an image of 64 x 32 pixels"):
        check_preferences(tmp_path / "pairs.jsonl", Data(), VIDEO)
    with pytest.raises(ValueError, match=r"b\.gif must be an image of 64 x 32 pixels, got a video of 5 frames"):
        check_preferences(tmp_path / "pairs.jsonl", Data(), replace(VIDEO, num_frames=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_video_may_have_further_bytes_after_its_end(tmp_path, kind):
    path = write(tmp_path / f"a{kind}", film())
    whole = read_video(path)[0]
    path.write_bytes(path.read_bytes() + bytes(range(256)))
    assert video_facts(path) == (5, 32, 64, 12.5)
    assert torch.equal(read_video(path)[0], whole)


def test_a_list_of_other_files_is_no_video(tmp_path):
    write(tmp_path / "b.mp4", film())
    (tmp_path / "a.mp4").write_text("#EXTM3U\n#EXTINF:1,\nb.mp4\n#EXT-X-ENDLIST\n")
    with pytest.raises(ValueError, match=r"a\.mp4 is no whole \.mp4 file"):
        read_video(tmp_path / "a.mp4")


def test_a_video_is_trained_on_as_the_code_of_its_frames(tmp_path):
    model = open_model(ROWS["wan21"].checkpoint())
    parts, params = model.load(device="cpu", dtype=torch.float32), Params(2, 32, 64, num_frames=5)
    path = write(tmp_path / "a.webp", film())
    assert preferences._is_video(path)
    code = model.encode_media(parts, {"video": torch.from_numpy(film())[None]}, params)[0]
    assert torch.equal(read_latent(model, parts, path, params), code)
