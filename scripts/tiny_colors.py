"""Things and their colors: a prompt names a thing, a thought must name its color, and the image must have it.

    omni-reward serve --scorer python:scripts/tiny_colors.py:color --port 8100

serves the scorer of the images; `contains` scores the thoughts.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SIDE = 32  # pixels
COLORS = {"red": (215, 40, 45), "green": (40, 165, 70), "blue": (45, 75, 205), "yellow": (240, 205, 45)}
THINGS = {
    "red": ("tomato", "cherry", "brick", "ruby"),
    "green": ("leaf", "frog", "lime", "cactus"),
    "blue": ("sky", "sea", "jeans", "iris"),
    "yellow": ("banana", "lemon", "sun", "corn"),
}
LOOKS = {"train": ("a", "one", "that", "my"), "eval": ("the", "this")}  # how a prompt begins
PROMPTS = {
    name: [(f"{look} {thing}", hue) for look in looks for hue, things in THINGS.items() for thing in things]
    for name, looks in LOOKS.items()
}


def render(rng: random.Random, hue: str) -> np.ndarray:
    """Return a disc of that color on white, uint8 [SIDE, SIDE, 3]; position, size and shade vary."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y = (SIDE / 2 + rng.uniform(-1.5, 1.5) for _ in range(2))
    inside = np.hypot(rows - y, columns - x) < rng.uniform(10, 14)
    shade = np.array(COLORS[hue]) * rng.uniform(0.9, 1.0)
    return np.where(inside[..., None], shade, 250.0).round().astype(np.uint8)


def color(media: Mapping[str, np.ndarray], prompts: Sequence[str], meta: Sequence[Mapping[str, object]]) -> list[float]:
    """Return the share of pixels in each image's center, uint8 [N, H, W, 3], that are closest to its line's color."""
    palette = np.array([*COLORS.values(), (250, 250, 250)], dtype=np.float32)
    scores = []
    for picture, line in zip(media["image"], meta, strict=True):
        middle = picture[12:20, 12:20].reshape(-1, 1, 3).astype(np.float32)
        nearest = np.abs(middle - palette).sum(axis=-1).argmin(axis=-1)
        scores.append(float((nearest == list(COLORS).index(str(line["answer"]))).mean()))
    return scores


def write_prompts(folder: Path) -> None:
    """Write the repository's prompt files; those of the evaluation begin with different words."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in PROMPTS.items():
        lines = [json.dumps({"prompt": prompt, "answer": hue}) for prompt, hue in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def words() -> list[str]:
    """Return all words of prompts and thoughts."""
    return sorted({word for prompt, _ in itertools.chain(*PROMPTS.values()) for word in prompt.split()} | set(COLORS))
