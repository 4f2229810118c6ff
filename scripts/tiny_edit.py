"""Edits of street signs: the image of a sign, an instruction to change its word, and the same sign with that word.

Signs and words are those of tiny_signs; the evaluation has its own words, in instructions and in references.
"""

import json
import random
from pathlib import Path

import numpy as np
import tiny_signs
from PIL import Image

REFERENCES = {"train": 6, "eval": 4}  # images of each color


def instruction(word: str) -> str:
    """Return the model's instruction."""
    return f'change the word on the sign to "{word}"'


def draw_edit(rng: random.Random, *, evaluation: bool = False) -> tuple[str, np.ndarray, np.ndarray]:
    """Sample an instruction and the sign before and after it, uint8 [HEIGHT, WIDTH, 3]; only the word differs."""
    color, look = rng.choice(list(tiny_signs.COLORS)), rng.random()
    words = [tiny_signs.draw_word(rng, evaluation=evaluation) for _ in range(2)]
    before, after = (tiny_signs.render(random.Random(look), color, word) for word in words)
    return instruction(words[1]), before, after


def write_references(folder: Path, name: str, *, count: int, evaluation: bool) -> list[str]:
    """Write images of signs, `count` of each color; return their relative paths by color and word."""
    rng = random.Random(f"tiny-edit references, {name}")
    paths = []
    (folder / name).mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        for color in tiny_signs.COLORS:
            word = tiny_signs.draw_word(rng, evaluation=evaluation)
            paths.append(f"{name}/{color}-{word}.png")
            Image.fromarray(tiny_signs.render(rng, color, word)).save(folder / paths[-1], optimize=True)
    return paths


def write_prompts(folder: Path, name: str, references: list[str], *, count: int, evaluation: bool) -> None:
    """Write a prompt file with `count` different words, each with one of the references, all equally often."""
    rng = random.Random(f"tiny-edit words, {name}")
    words: dict[str, None] = {}
    while len(words) < count:
        words.setdefault(tiny_signs.draw_word(rng, evaluation=evaluation))
    lines = [{"prompt": instruction(word), "images": references[i % len(references)]} for i, word in enumerate(words)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_data(folder: Path) -> None:
    """Write the repository's prompt files and references."""
    for name, count in (("train", 1024), ("eval", 192)):
        evaluation = name == "eval"
        references = write_references(folder, name, count=REFERENCES[name], evaluation=evaluation)
        write_prompts(folder, name, references, count=count, evaluation=evaluation)


if __name__ == "__main__":
    write_data(Path(__file__).parent.parent / "data" / "tiny-edit")
