"""Contact sheets: many pictures in one, each with a label below."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


def contact_sheet(
    images: np.ndarray, labels: Sequence[str], *, columns: int = 8, margin: int = 4, max_side: float = math.inf
) -> "Image.Image":
    """Return one picture of all `images` in rows of `columns`, each with its label below. Needs pillow.

    images: uint8 [N, H, W, 3], RGB. Those narrower than 192 pixels are enlarged by a whole factor, so that labels fit
    and pixels stay sharp. labels: N texts; what the font lacks becomes a question mark, what is too long is cut.
    max_side: pixels; larger images are reduced to it.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale = max(1, 192 // images.shape[2]) if max(images.shape[1:3]) <= max_side else max_side / max(images.shape[1:3])
    height, width = (round(size * scale) for size in images.shape[1:3])
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    columns = min(columns, len(images))
    cell_width, cell_height = width + margin, height + margin + 16
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * cell_width + margin, rows * cell_height + margin), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = margin + i % columns * cell_width, margin + i // columns * cell_height
        sheet.paste(Image.fromarray(image).resize((width, height), resample), (x, y))
        text = unicodedata.normalize("NFKC", label).encode("ascii", "replace").decode()
        draw.text((x, y + height), text[: width // 6], font=font, fill="black")
    return sheet


def score_label(value: float | None, details: Mapping[str, object]) -> str:
    """Return the label of a scored picture: the text that was wanted, the text that was read, the score."""
    if value is None:
        return "no score"
    return f"{details['target']} -> {details.get('read', '')}   {value:.2f}" if "target" in details else f"{value:.2f}"
