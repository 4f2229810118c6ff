"""Drawn scenes with text to find: boards, banners and screens among clutter, from 256 to 1,024 pixels."""

import random
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-BoldItalic", "DejaVuSansMono",
    "DejaVuSansMono-Bold", "STIXGeneral", "cmss10",
)  # fmt: skip
TEXTS = (
    "OPEN", "Hello World", "Fresh Bread", "New York", "SALE 50%", "Open 24 Hours", "Grand\nOpening", "No\nParking",
    "Exit 12B", "Happy Birthday", "K7QX", "Coffee\nand Cake",
)  # fmt: skip
SIZES = ((512, 512), (256, 256), (768, 512), (1024, 1024), (384, 640), (512, 512))
ANGLES = (0, 0, 8, -12, 20, -30)
CLUTTER = ("plain", "ramp", "lines", "shapes", "noise")


@dataclass(frozen=True)
class Scene:
    """Scene to draw: a text, or "" for none, and how it is drawn."""

    text: str
    face: str
    height: int
    width: int
    angle: int
    clutter: str
    seed: int

    @property
    def prompt(self) -> str:
        """Prompt that asks for the text."""
        return f'a board that says "{self.text or "Nothing"}"'


def scenes(count: int, *, empty: int) -> list[Scene]:
    """Return scenes with text, then scenes without; each property cycles independently."""
    rng = random.Random(0)
    texts = [TEXTS[i % len(TEXTS)] for i in range(count)] + [""] * empty
    rounds = [[own[i % len(own)] for i in range(len(texts))] for own in (FACES, SIZES, ANGLES, CLUTTER)]
    for own in rounds:
        rng.shuffle(own)
    return [
        Scene(text, face, *size, angle, clutter, seed)
        for seed, (text, face, size, angle, clutter) in enumerate(zip(texts, *rounds, strict=True))
    ]


def draw_scene(scene: Scene) -> np.ndarray:
    """Return the scene as an image [H, W, 3], uint8: a board with the text, rotated, before its clutter."""
    rng = random.Random(scene.seed)
    image = _background(scene, rng)
    if scene.text:
        board, mask = _board(scene, rng)
        place = [rng.randint(0, most - own) for most, own in zip(image.size, board.size, strict=True)]
        image.paste(board, (place[0], place[1]), mask)
    return np.asarray(image)


def _board(scene: Scene, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Return the board and the mask of what it covers; its larger side takes 0.5 to 0.9 of the scene's."""
    light, dark = rng.randint(190, 255), rng.randint(0, 60)
    colors = [tuple(min(255, max(0, tone + rng.randint(-30, 30))) for _ in range(3)) for tone in (light, dark)]
    if rng.random() < 0.4:
        colors.reverse()
    share, turn = rng.uniform(0.5, 0.9), np.radians(abs(scene.angle))
    for size in range(200, 8, -2):
        font = ImageFont.truetype(str(FONTS / f"{scene.face}.ttf"), size)
        left, top, right, bottom = ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox((0, 0), scene.text, font=font)
        pad = size // 2
        width, height = round(right - left) + 2 * pad, round(bottom - top) + 2 * pad
        turned = width * np.cos(turn) + height * np.sin(turn), width * np.sin(turn) + height * np.cos(turn)
        if turned[0] <= share * scene.width and turned[1] <= share * scene.height:
            break
    board = Image.new("RGB", (width, height), colors[0])
    ImageDraw.Draw(board).text((pad - left, pad - top), scene.text, fill=colors[1], font=font, align="center")
    mask = Image.new("L", board.size, 255)
    smooth = Image.Resampling.BICUBIC
    return board.rotate(scene.angle, smooth, expand=True), mask.rotate(scene.angle, smooth, expand=True)


def _background(scene: Scene, rng: random.Random) -> Image.Image:
    """Return the image behind the board."""
    base = np.array([rng.randint(60, 200) for _ in range(3)], float)
    ramp = np.linspace(0, 90 if scene.clutter == "ramp" else 0, scene.width)[None, :, None]
    noise = np.random.default_rng(scene.seed).normal(
        0, 25 if scene.clutter == "noise" else 3, (scene.height, scene.width, 3)
    )
    image = Image.fromarray((base + ramp + noise).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12 if scene.clutter in ("lines", "shapes") else 0):
        ends = [rng.randint(0, most) for most in (scene.width, scene.height) * 2]
        color = tuple(rng.randint(0, 255) for _ in range(3))
        if scene.clutter == "lines":
            draw.line(ends, fill=color, width=rng.randint(1, 8))
        else:
            box = [*sorted(ends[::2]), *sorted(ends[1::2])]
            getattr(draw, rng.choice(("rectangle", "ellipse")))((box[0], box[2], box[1], box[3]), fill=color)
    return image
