"""Signs on which a word of two characters hops from the center to the left or to the right: data for tiny-moving-wan.

A video shows its first frame, then four frames per hop, as many as Wan has in a latent frame; a hop is one latent
pixel, so that the latents of a hop are those of the first frame, moved. Boards, letters and the split of words into
training and evaluation are those of tiny_signs. A prompt has a first frame, which is the same for both directions.
"""

import json
import random
from pathlib import Path

import numpy as np
import tiny_signs
from PIL import Image, ImageDraw, ImageFont

FRAMES, HOLD = 9, 4
HOP = 8  # pixels
CELL = 24  # pixels from letter to letter
DIRECTIONS = {"left": -1, "right": 1}
WORD = 2  # characters
SIGNS = {"train": 4, "eval": 2}  # of each color
TIMES = {"train": 1, "eval": 2}  # repetitions of a line in its file; each is sampled with different noise


def draw_sign(rng: random.Random, *, evaluation: bool = False) -> tuple[str, str]:
    """Sample a (color, word)."""
    color, word = rng.choice(list(tiny_signs.COLORS)), ""
    while len(word) != WORD:
        word = tiny_signs.draw_word(rng, evaluation=evaluation)
    return color, word


def prompt(color: str, word: str, direction: str) -> str:
    """Return the prompt for a sign whose word moves in this direction."""
    return f'a {color} sign on which "{word}" moves {direction}'


def render(color: str, word: str, direction: str) -> np.ndarray:
    """Render the video, uint8 [FRAMES, HEIGHT, WIDTH, 3]."""
    font, frames = ImageFont.load_default(size=tiny_signs.FONT_SIZES[-1]), []
    for frame in range(FRAMES):
        board = Image.new("RGB", (tiny_signs.WIDTH, tiny_signs.HEIGHT), tiny_signs.COLORS[color])
        middle = board.width / 2 + DIRECTIONS[direction] * HOP * -(-frame // HOLD)
        for i, letter in enumerate(word):
            place = (middle + CELL * (i - (WORD - 1) / 2), board.height / 2)
            ImageDraw.Draw(board).text(place, letter, font=font, fill=tiny_signs.INK, anchor="mm")
        frames.append(np.asarray(board))
    return np.stack(frames)


def write_data(folder: Path) -> None:
    """Write the repository's prompt files and the first frames that they name."""
    for name, count in SIGNS.items():
        rng, lines, words = random.Random(f"tiny-moving, {name}"), [], set[str]()
        (folder / name).mkdir(parents=True, exist_ok=True)
        for color in count * list(tiny_signs.COLORS):
            while (word := draw_sign(rng, evaluation=name == "eval")[1]) in words:
                pass
            words.add(word)
            path = f"{name}/{color}-{word}.png"
            Image.fromarray(render(color, word, "left")[0]).save(folder / path, optimize=True)
            lines += [{"prompt": prompt(color, word, direction), "images": path} for direction in DIRECTIONS]
        (folder / f"{name}.jsonl").write_text(TIMES[name] * "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    write_data(Path(__file__).parent.parent / "data" / "tiny-moving")
