"""Street signs with two to four characters: words, prompts and images for the tiny-signs checkpoint.

Words use an alphabet without the look-alikes 0/O and 1/I. A word's hash decides whether it is in the evaluation set, so
the two sets are disjoint.

    python scripts/tiny_signs.py                        # writes the prompts in data/tiny-signs again
    python scripts/tiny_signs.py --samples data/signs   # writes images for apps/train_sft.py, in a second
"""

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 32, 96
ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
COLORS = {  # name -> board color
    "white": (240, 240, 236),
    "yellow": (250, 214, 92),
    "green": (158, 214, 150),
    "blue": (150, 200, 240),
    "pink": (248, 182, 196),
    "orange": (250, 178, 110),
}
INK = (28, 28, 34)
FONT_SIZES = (26, 28)
CELL = 22  # pixels from letter to letter, as on a number plate


def is_eval_word(word: str) -> bool:
    """True for one eighth of all words, which only evaluation may use."""
    return hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 8 == 0


def draw_word(rng: random.Random, *, evaluation: bool = False) -> str:
    """Sample a word of 2 to 4 characters from the training set, or from the evaluation set."""
    while True:
        word = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(2, 4)))
        if is_eval_word(word) == evaluation:
            return word


def draw_prompt(rng: random.Random, *, evaluation: bool = False) -> tuple[str, str, str]:
    """Sample a (prompt, color, word)."""
    color, word = rng.choice(list(COLORS)), draw_word(rng, evaluation=evaluation)
    return f'a {color} sign that says "{word}"', color, word


def render(rng: random.Random, color: str, word: str) -> np.ndarray:
    """Render an image of the sign, uint8 [HEIGHT, WIDTH, 3], with small random changes of shade, size and position."""
    image = Image.new("RGB", (WIDTH, HEIGHT), tuple(c + rng.randint(-6, 6) for c in COLORS[color]))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=rng.choice(FONT_SIZES))
    x = (WIDTH - CELL * (len(word) - 1)) / 2 + rng.randint(-2, 2)
    y = HEIGHT / 2 + rng.randint(-1, 1)
    for i, letter in enumerate(word):
        draw.text((x + CELL * i, y), letter, font=font, fill=INK, anchor="mm")
    return np.asarray(image)


def write_prompts(path: Path, *, count: int, evaluation: bool, avoid: Sequence[Path] = ()) -> None:
    """Write a prompt file with `count` different words, none of which is in the files `avoid`."""
    taken = {line.split('"')[1] for other in avoid for line in other.read_text().splitlines()}
    rng = random.Random(f"tiny-signs words, {path.stem}")
    prompts: dict[str, str] = {}
    while len(prompts) < count:
        prompt, _, word = draw_prompt(rng, evaluation=evaluation)
        if word not in taken:
            prompts.setdefault(word, prompt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{prompt}\n" for prompt in prompts.values()))


def write_samples(folder: Path, prompts: Path) -> None:
    """Write an image for each prompt of a file, and samples.jsonl, which names them."""
    folder.mkdir(parents=True)  # an existing folder holds other samples
    rng, lines = random.Random("tiny-signs samples"), []
    for number, prompt in enumerate(prompts.read_text().splitlines()):
        color, word = prompt.split()[1], prompt.split('"')[1]
        name = f"{number:06}.png"
        Image.fromarray(render(rng, color, word)).save(folder / name)
        lines.append(json.dumps({"prompt": prompt, "sample": name}) + "\n")
    (folder / "samples.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=Path, help="new folder for images of the training prompts")
    home, out = Path(__file__).parent.parent / "data" / "tiny-signs", parser.parse_args().samples
    if out:
        write_samples(out, home / "train.txt")
    else:
        write_prompts(home / "train.txt", count=2048, evaluation=False)
        write_prompts(home / "eval.txt", count=256, evaluation=True)
        write_prompts(home / "test.txt", count=256, evaluation=True, avoid=[home / "eval.txt"])
