"""`omni-rl score`: any scorer that a trainer takes scores image files, and a mistake is one line."""

import json
import os
import subprocess
import sys
import wave

import numpy as np
import pytest
from omni_reward.scorers import load_scorer
from omni_reward.scorers.likeness import load_likeness
from omni_reward.serving import serving_in_thread
from omni_rl.media.write import encode_flac, encode_video
from omni_rl.tools import score
from PIL import Image
from reward.reward_helpers import draw_sign

MINE = """
from omni_reward import Score

def red(media, prompts, meta):
    red = [float(image[..., 0].mean()) for image in media["image"]]
    return [Score.of(m["weight"] * r, details={"prompt": p}) for r, p, m in zip(red, prompts, meta)]
def leave(media, prompts, meta):
    raise SystemExit(0)
"""


BOTH = """
from omni_reward import Scorer

def both(media, prompts, meta):
    (video,), (sound,) = media["video"], media["audio"]
    return [len(video) / meta[0]["fps"] - len(sound) / meta[0]["sample_rate"]]

both = Scorer(both, media=("video", "audio"))
"""
FRAMES = np.repeat(np.arange(0, 240, 20, dtype=np.uint8)[:, None, None, None], 3, axis=3).repeat(16, 1).repeat(16, 2)
TONE = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000, dtype=np.float32)[:, None] / 2


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder with two images, one of them transparent, and a function; a video, a sound and both in one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent.mp4").write_bytes(encode_video(FRAMES, 12.0, ".mp4"))
    (tmp_path / "loud.mp4").write_bytes(encode_video(FRAMES, 12.0, ".mp4", TONE, 8000))
    (tmp_path / "tone.flac").write_bytes(encode_flac(TONE, 8000))
    with wave.open("tone.wav", "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((TONE * 32767).round().astype("<i2").tobytes())
    (tmp_path / "both.py").write_text(BOTH)
    Image.new("RGB", (8, 4), (10, 0, 0)).save("a.png")
    Image.new("RGBA", (6, 6), (30, 0, 0, 255)).save("b.webp", lossless=True)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "leaves.py").write_text(f"raise SystemExit(0)\n{MINE}")
    os.mkfifo("pipe")


def rows(capfd, *words):
    """What the command prints for these words."""
    score.main([*words])
    out, err = capfd.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def test_a_function_scores_files_of_any_sizes_with_the_prompt_and_its_keys(capfd):
    words = ["a.png", "b.webp", "--prompt", "a cat", "--meta", '{"weight": 2}']
    expected = [
        {"file": file, "score": value, "parts": {}, "abstained": None, "details": {"prompt": "a cat"}}
        for file, value in (("a.png", 20.0), ("b.webp", 60.0))
    ]
    assert rows(capfd, "--scorer", "python:mine.py:red", *words) == expected


def test_a_weighted_sum_shows_its_parts_and_a_scorer_without_a_text_to_read_its_reason(capfd):
    Image.fromarray(draw_sign("K7QX")).save("sign.png")
    asked = ["sign.png", "--prompt", 'a sign that says "K7QX"']
    (row,) = rows(capfd, "--scorer", "0.5*ocr + 0.25*jpeg", "--option", "ocr.reading=line", *asked)
    assert row["parts"]["ocr"] == 1.0
    assert row["score"] == pytest.approx(0.5 + 0.25 * row["parts"]["jpeg"])
    assert row["details"]["read"] == "K7QX"
    (row,) = rows(capfd, "--scorer", "ocr --option reading=line", "sign.png")
    assert (row["score"], row["abstained"]) == (None, "the prompt has no text between double quotes")


@pytest.mark.parametrize("file", ["tone.wav", "tone.flac", "loud.mp4"])
def test_a_sound_is_read_at_its_rate(capfd, file):
    (row,) = rows(capfd, "--scorer", "pitch", file, "--prompt", "a tone of 440 Hz")
    assert row["score"] > 0.99


def test_a_video_has_its_frames_a_second_and_its_own_sound(capfd):
    """Which last as long: 12 frames at 12 a second, and 8,000 points at 8,000; AAC adds the rest of its last block."""
    assert rows(capfd, "--scorer", "python:both.py:both", "loud.mp4")[0]["score"] == pytest.approx(0, abs=0.2)
    slow = ["loud.mp4", "--meta", '{"fps": 6}']
    assert rows(capfd, "--scorer", "python:both.py:both", *slow)[0]["score"] == pytest.approx(1, abs=0.2)
    assert rows(capfd, "--scorer", "frames:jpeg", "silent.mp4")[0]["score"] < 0


def test_a_server_gives_the_scores_that_it_gives_a_trainer(capfd, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")

    def level(media, prompts, meta):
        return [float(media["image"].mean())]

    with serving_in_thread(level, token="s3cret") as url:
        asked = ["--scorer.url", url, "--scorer.token-file", "token", "a.png", "b.webp"]
        assert [row["score"] for row in rows(capfd, *asked)] == [10 / 3, 10.0]


def test_a_scorer_that_compares_gets_the_reference(capfd):
    asked = ["--scorer", "likeness", "a.png", "--reference", "b.webp"]
    image, other = (np.full((*size, 3), (level, 0, 0), np.uint8) for size, level in (((4, 8), 10), ((6, 6), 30)))
    (expected,) = load_likeness()({"image": image[None]}, [""], [{}], [(other,)])
    assert [row["score"] for row in rows(capfd, *asked)] == [expected.value]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.png", "one of the arguments --scorer --scorer.url is required"),
        ("--scorer orc a.png", "scorer must be one of ['aesthetic', "),
        ("--scorer jpeg gone.png", "FILE: must name a file that exists and ends in one of ('.png', "),
        ("--scorer jpeg mine.py", "FILE: must name a file that exists and ends in one of ('.png', "),
        ("--scorer video a.png", "FILE: a.png must end in one of ('.gif', '.webp', '.mp4', '.webm')"),
        ("--scorer pitch mine.py", "FILE: mine.py is no whole file with sound: "),
        ("--scorer pitch silent.mp4", "FILE: silent.mp4 is no whole file with sound: "),
        ("--scorer rules:exact a.png", "the scorer must grade images, videos or sounds, takes text"),
        ("--scorer likeness a.png", "--reference must be given, as the scorer compares with it"),
        ("--scorer jpeg --reference a.png a.png", "--reference must be left out, as the scorer compares with none"),
        ("--scorer jpeg --meta [1] a.png", "--meta: must be an object, got [1]"),
        ("--scorer jpeg --meta {1 a.png", "--meta: Expecting property name"),
        (f"--scorer jpeg --meta {'[' * 100_000} a.png", "--meta: must be nested at most 64 deep"),
        (f"--scorer jpeg --meta {'[' * 900}{']' * 900} a.png", "--meta: must be nested at most 64 deep"),
        ("--scorer.url http://127.0.0.1:9 --scorer.token-file /dev/zero a.png",
         "--scorer.token-file: /dev/zero must be a regular file"),
        ("--scorer.url http://127.0.0.1:9 --scorer.token-file pipe a.png",
         "--scorer.token-file: token must be printable ASCII without spaces, at least one character"),
        ("--scorer python:mine.py:leave a.png", "the scorer raised SystemExit: 0 ("),
        ("--scorer python:leaves.py:red a.png", "leaves.py must run, line 1 raised SystemExit: 0"),
        ("--scorer jpeg --option mod=1 a.png", "options of jpeg must fit it: "),
        ("--scorer python:mine.py:red a.png", "the scorer raised KeyError: 'weight' ("),
        ("--scorer.url 127.0.0.1 a.png", "--scorer.url: url must be http(s)://host"),
        ("--scorer.url http://127.0.0.1:9 a.png", "GET http://127.0.0.1:9/info: [Errno 111] Connection refused"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words, message, capfd):
    with pytest.raises(SystemExit, match=r"^2$"):
        score.main(words.split())
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"omni-rl score: error: {message}")


def test_what_a_function_raises_names_its_line(capfd, tmp_path):
    with pytest.raises(SystemExit):
        score.main(["--scorer", "python:mine.py:red", "a.png"])
    number = next(i for i, line in enumerate(MINE.splitlines(), 1) if "weight" in line)
    assert capfd.readouterr().err.endswith(f"/mine.py, line {number})\n")


def test_the_command_starts_without_torch():
    code = "import sys; from omni_rl.tools import score; score.main(sys.argv[1:]); print('torch' in sys.modules)"
    words = ["--scorer", "python:mine.py:red", "a.png", "--meta", '{"weight": 1}']
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=os.environ)
    assert result.stdout.splitlines()[1:] == ["False"], result.stderr


def test_a_scorer_of_groups_compares_the_images_in_this_process_or_at_a_server(capfd, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from omni_reward import Scorer\n"
        "def above(media, prompts, meta):\n"
        "    means = media['image'].mean(axis=(1, 2, 3))\n"
        "    return (means[:, None] > means).sum(axis=1) / max(1, len(means) - 1)\n"
        "brightest = Scorer(above, groups=True)\n"
    )
    for name, value in (("x.png", 5), ("y.png", 50), ("z.png", 20)):
        Image.new("RGB", (4, 4), (value,) * 3).save(name)
    files = ["x.png", "y.png", "z.png"]
    here = rows(capfd, "--scorer", "python:mine.py:brightest", *files)
    assert [(row["file"], row["score"]) for row in here] == [("x.png", 0), ("y.png", 1), ("z.png", 0.5)]
    with serving_in_thread(load_scorer("python:mine.py:brightest")) as url:
        assert rows(capfd, "--scorer.url", url, *files) == here
    with pytest.raises(SystemExit):
        score.main(["--scorer", "python:mine.py:brightest", "a.png", "b.webp"])
    assert "files must have one size, where a scorer compares them" in capfd.readouterr().err
