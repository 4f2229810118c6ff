"""Check that a scorer with a network is the published one, by its scores of files that everybody can download.

The files and the published values are in published.toml. Few authors publish scores of single samples. For the other
scorers an order must hold: of three things, each image, sound or still video scores highest with its own name, or with
its own sound. A network with missing or unexpected weights fails to load.
"""

import argparse
import hashlib
import sys
import tomllib
import wave
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from urllib3.exceptions import HTTPError

from omni_reward import files
from omni_reward.cli import Parser, read_options
from omni_reward.media import Arrays
from omni_reward.scorers import SCORERS, find_empty, load_scorer
from omni_reward.scorers.pixels import read_pixels
from omni_reward.transport import open_url, run_with_timeout
from omni_reward.wire import Scorer

TABLE = resources.files("omni_reward.scorers") / "published.toml"
PUBLISHED: dict[str, Any] = tomllib.loads(TABLE.read_text("utf-8"))
MAX_BYTES = 2**22  # of a file
TIMEOUT_S = 60.0
FRAMES, FPS = 16, 8  # of a still video
NO_PROMPT = {"aesthetic": (1.0, 10.0)}  # range of the scores of scorers that ignore the prompt


class Check(NamedTuple):
    """Result of a check: whether it passed, and its line on the terminal."""

    passed: bool
    text: str


def read_file(folder: str, name: str, sha256: str, local: Path | None) -> bytes:
    """Return a published file, which is downloaded unless it is in a local folder.

    Raises:
        ValueError: the file has a different content.
        OSError: it cannot be read or downloaded.
    """
    if local:
        content = files.read_file(local / name, MAX_BYTES)
    else:
        try:
            content = run_with_timeout(TIMEOUT_S, partial(download, f"{folder}/{name}"))
        except TimeoutError as exc:
            raise OSError(f"{folder}/{name} must arrive within {TIMEOUT_S:g} s") from exc
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(f"{name} must have the SHA-256 {sha256}, got {digest}")
    return content


def download(url: str) -> bytes:
    """Return the first MAX_BYTES at a URL."""
    with open_url(url, {}, TIMEOUT_S) as reply:
        reply.raise_for_status()
        try:
            return reply.raw.read(MAX_BYTES, decode_content=True)
        except HTTPError as exc:  # truncated, or not in its stated encoding
            raise OSError(f"{url} must arrive whole: {exc}") from exc


def decode_image(content: bytes) -> np.ndarray:
    """Return the image [H, W, 3], uint8, RGB, of a file."""
    return read_pixels(Image.open(BytesIO(content)))


def decode_sound(content: bytes) -> tuple[np.ndarray, int]:
    """Return the sound [S, C], float32, of a 16-bit .wav file, and its rate."""
    with wave.open(BytesIO(content)) as file:
        points = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return points.astype(np.float32) / 2**15, file.getframerate()


def check_scores(scorer: Scorer, known: Mapping[str, Any], local: Path | None) -> Iterator[Check]:
    """Compare a scorer of images with published scores."""
    for name, published in known["files"].items():
        image = decode_image(read_file(known["folder"], name, published["sha256"], local))
        [score] = scorer({"image": image[None]}, [known["prompt"]], [{}])
        passed = score.value is not None and abs(score.value - published["score"]) <= known["within"]
        result = score.abstained if score.value is None else f"{score.value:.4f}"
        yield Check(passed, f"{name} scores {result}, published {published['score']:.4f}")


def check_order(name: str, scorer: Scorer, known: Mapping[str, Any], local: Path | None) -> Iterator[Check]:
    """Check that each thing scores highest with its own name or sound."""
    labels = known["things"]
    contents = {file: read_file(known["folder"], file, sha256, local) for file, sha256 in known["files"].items()}
    images = [decode_image(contents[f"{label}_image.jpg"]) for label in labels]
    sounds = [decode_sound(contents[f"{label}_audio.wav"]) for label in labels]
    for i, label in enumerate(labels):
        scores = [
            score_label(scorer, images[i], *(sounds[j] if "video" in scorer.media else sounds[i]), labels[j])
            for j in range(len(labels))
        ]
        summary = ", ".join(f"{other} {value:.4f}" for other, value in zip(labels, scores, strict=True))
        if shares := known.get("shares", {}).get(name):
            weights = np.exp(shares["scale"] * np.array(scores))
            summary += f"; shares {format_shares(weights / weights.sum())}"
            summary += f", published of one crop {format_shares(shares['published'][i])}"
        if name in NO_PROMPT:
            low, high = NO_PROMPT[name]
            yield Check(low <= scores[i] <= high, f"the {label} scores {scores[i]:.4f}, possible {low:g} to {high:g}")
        else:
            is_best = all(scores[i] > value for j, value in enumerate(scores) if j != i)  # False if it abstains
            yield Check(is_best, f"the {label} scores highest with its own: {summary}")


def format_shares(shares: Iterable[float]) -> str:
    """Return shares as a line."""
    return " ".join(f"{share:.4f}" for share in shares)


def score_label(scorer: Scorer, image: np.ndarray, sound: np.ndarray, rate: int, label: str) -> float:
    """Return the score of an image, sound or still video with its label; NaN if the scorer abstains."""
    kinds: Arrays = {"image": image[None], "audio": sound[None], "video": image[None, None].repeat(FRAMES, axis=1)}
    meta = {"fps": FPS, "sample_rate": rate, "tag": "single_object", "include": [{"class": label, "count": 1}]}
    [score] = scorer({kind: kinds[kind] for kind in scorer.media}, [f"a {label}"], [meta])
    return float("nan") if score.value is None else score.value


def main(argv: list[str] | None = None) -> None:
    """Run `python -m omni_reward.verify`, which exits with 0 if all checks pass, 1 if one fails, and 2 on an error."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="omni_reward.verify", description=__doc__, formatter_class=formatter)
    parser.add_argument("--scorer", required=True, help="name of a scorer with a network")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of the scorer")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="folder of the files; downloaded by default")
    args = parser.parse_args(argv)
    try:
        if args.scorer not in SCORERS or not find_empty(args.scorer):
            raise ValueError(f"--scorer must be one with a network of {list(SCORERS)}, got {args.scorer!r}")
        scorer = load_scorer(args.scorer, options=read_options(args.option))
        print(f"{args.scorer} {scorer.version}: all weights are there")
        known = PUBLISHED["scores"].get(args.scorer)
        if known and not scorer.version.startswith(known.get("version", "")):
            known = None
        print(f"published scores: {known['source'] if known else 'none are known here, so an order is checked'}")
        checks = (
            check_scores(scorer, known, args.files)
            if known
            else check_order(args.scorer, scorer, PUBLISHED["order"], args.files)
        )
        passed = [print(f"{'ok  ' if check.passed else 'NOT '} {check.text}") or check.passed for check in checks]
    except (ImportError, OSError, ValueError) as exc:
        parser.error(str(exc))
    sys.exit(not all(passed))
