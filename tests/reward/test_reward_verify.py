"""Whether a scorer is the published one: what `python -m omni_reward.verify` compares, and what it says."""

import hashlib
import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build_tiny_scorers
import numpy as np
import pytest
import torch
from omni_reward import Score, Scorer
from omni_reward.scorers import published
from omni_reward.scorers.published import Check, check_order, check_scores, main, read_file
from PIL import Image
from reward.reward_helpers import trickle

THINGS = ["dog", "car", "bird"]


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def wav(seed: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, 8000, 0, "NONE", "not compressed"))
        out.writeframes(np.random.default_rng(seed).integers(-9000, 9000, (800, 2)).astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What published.toml says, of files in tmp_path."""
    written: dict[str, bytes] = {f"{thing}_image.jpg": png(i) for i, thing in enumerate(THINGS)}
    written |= {f"{thing}_audio.wav": wav(i) for i, thing in enumerate(THINGS)}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
    scores = {
        f"{thing}_image.jpg": {"score": float(i), "sha256": digests[f"{thing}_image.jpg"]}
        for i, thing in enumerate(THINGS)
    }
    table: dict[str, Any] = {"order": {"folder": "", "things": THINGS, "files": digests}}
    table["scores"] = {
        "pickscore": {"source": "a page", "folder": "", "prompt": "a cat", "within": 0.1, "files": scores}
    }
    monkeypatch.setattr(published, "PUBLISHED", table)
    return table


def test_each_published_score_is_compared_within_its_tolerance(known: dict[str, Any], tmp_path: Path) -> None:
    values = iter([0.05, 1.2, None])

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        assert prompts == ["a cat"]
        value = next(values)
        return [Score(value) if value is not None else Score(None, abstained="dark")]

    checks = list(check_scores(Scorer(score), known["scores"]["pickscore"], tmp_path))
    assert [check.passed for check in checks] == [True, False, False]
    assert checks[1] == Check(False, "car_image.jpg scores 1.2000, published 1.0000")
    assert "dark" in checks[2].text


@pytest.mark.parametrize("media", [("image",), ("audio",), ("video",), ("video", "audio")])
def test_each_thing_must_score_highest_with_its_own(
    media: tuple[str, ...], known: dict[str, Any], tmp_path: Path
) -> None:
    """A scorer that knows the files by their bytes."""
    images = [np.asarray(Image.open(io.BytesIO(png(i)))) for i in range(3)]
    sounds = [published.decode_sound(wav(i))[0] for i in range(3)]

    def score(given: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        assert given.keys() == set(media)
        assert meta[0]["sample_rate"] == 8000
        seen = {kind: index(given[kind][0], kind) for kind in media}
        named = prompts[0].removeprefix("a ")
        return [Score(float(seen["video"] == seen["audio"] if len(media) == 2 else named == THINGS[seen[media[0]]]))]

    def index(sample: np.ndarray, kind: str) -> int:
        every = sounds if kind == "audio" else images
        return next(i for i, own in enumerate(every) if np.array_equal(sample[0] if kind == "video" else sample, own))

    checks = list(check_order("any", Scorer(score, media=media), known["order"], tmp_path))
    assert [check.passed for check in checks] == [True] * 3
    swapped = list(
        check_order(
            "any",
            Scorer(lambda *given: [Score(-own.value) for own in score(*given)], media=media),
            known["order"],
            tmp_path,
        )
    )
    assert [check.passed for check in swapped] == [False] * 3
    shares = {"any": {"scale": 2.0, "published": [[0.7, 0.2, 0.1]] * 3}}
    first, *_ = check_order("any", Scorer(score, media=media), known["order"] | {"shares": shares}, tmp_path)
    own = " ".join(f"{share:.4f}" for share in torch.tensor([2.0, 0.0, 0.0]).softmax(0).tolist())
    assert first.text.endswith(f"; shares {own}, published of one crop 0.7000 0.2000 0.1000")


def test_a_sound_is_read_as_floats(known: dict[str, Any]) -> None:
    sound, rate = published.decode_sound(wav(0))
    assert (sound.shape, sound.dtype, rate) == ((800, 2), np.float32, 8000)
    assert sound[0, 0] * 2**15 == np.random.default_rng(0).integers(-9000, 9000, (800, 2))[0, 0]


def test_a_command_says_what_was_compared_and_ends_with_the_verdict(
    known: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    build_tiny_scorers.write_clip(tmp_path / "clip")
    clip = str(tmp_path / "clip")
    given = ["--scorer", "pickscore", "--option", f"model={clip}", "--option", f"tokenizer={clip}"]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--files", str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1  # as random weights give other scores
    assert said[:2] == ["pickscore clip float32: all weights are there", "published scores: a page"]
    assert [line[:4] for line in said[2:]] == ["NOT "] * 3
    for own in known["scores"]["pickscore"]["files"].values():
        own["score"] = float(said.pop(2).partition(" scores ")[2].partition(",")[0])
    with pytest.raises(SystemExit) as ended:
        main([*given, "--files", str(tmp_path)])
    assert ended.value.code == 0
    assert "none are known here" not in capsys.readouterr().out
    known["scores"]["pickscore"]["version"] = "other weights"
    for command in (given, ["--scorer", "clip", "--option", f"model={clip}"]):
        with pytest.raises(SystemExit):
            main([*command, "--files", str(tmp_path)])
        assert "published scores: none are known here, so an order is checked" in capsys.readouterr().out


def test_another_file_is_refused(known: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "dog_image.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"dog_image\.jpg must have the SHA-256 .*, got 2d711642"):
        list(check_scores(Scorer(lambda *_: [Score(1.0)]), known["scores"]["pickscore"], tmp_path))


def test_a_file_is_downloaded_whole_and_checked(misbehave: Callable[..., str]) -> None:
    content = png(0)
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    url = misbehave(lambda conn, request: conn.sendall(head + content))
    assert read_file(url, "a.png", hashlib.sha256(content).hexdigest(), None) == content
    with pytest.raises(ValueError, match="must have the SHA-256 0, got"):
        read_file(url, "a.png", "0", None)
    gone = misbehave(lambda conn, request: conn.sendall(b"HTTP/1.1 404 Gone\r\nConnection: close\r\n\r\n"))
    with pytest.raises(OSError, match="404"):
        read_file(gone, "a.png", "0", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--scorer", "ocr"], "--scorer must be one with a network of"),
        (["--scorer", "clip", "--option", "model=/no/such"], "a model must be a folder, or a repository"),
        (["--scorer", "clip", "--option", "x"], "--option must be NAME=VALUE, got 'x'"),
    ],
)
def test_a_bad_command_is_one_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_published_table_names_commits_and_digests() -> None:
    assert set(published.PUBLISHED["scores"]) <= set(published.SCORERS)
    for known in (*published.PUBLISHED["scores"].values(), published.PUBLISHED["order"]):
        assert len(known["folder"].split("/")[5]) == 40  # a commit, whose files never change
        digests = [own if isinstance(own, str) else own["sha256"] for own in known["files"].values()]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


def test_a_server_that_drips_is_left(monkeypatch: pytest.MonkeyPatch, misbehave: Callable[..., str]) -> None:
    monkeypatch.setattr(published, "TIMEOUT_S", 0.3)
    url = misbehave(lambda conn, body: trickle(conn, b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10_000))
    with pytest.raises(OSError, match=r"/a\.png must arrive within 0\.3 s"):
        read_file(url, "a.png", "", None)
