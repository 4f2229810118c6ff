"""Contact sheets: many pictures in one, each with a label below."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


def contact_sheet(
    images: Sequence[np.ndarray],
    labels: Sequence[str],
    *,
    columns: int = 8,
    margin: int = 4,
    max_side: float = math.inf,
) -> "Image.Image":
    """Return one picture of all `images` in rows of `columns`, each with its label below. Needs pillow.

    images: N of uint8 [H, W, 3], RGB, of any sizes. Where all are narrower than 192 pixels they are enlarged by a whole
    factor, so that labels fit and pixels stay sharp. labels: N texts; what the font lacks becomes a question mark, what
    is too long is cut. max_side: pixels; if an image is larger, all are reduced until it is so large.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    scale = max(1, 192 // width) if max(height, width) <= max_side else max_side / max(height, width)
    height, width = round(height * scale), round(width * scale)
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    columns = min(columns, len(images))
    cell_width, cell_height = width + margin, height + margin + 16
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * cell_width + margin, rows * cell_height + margin), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = margin + i % columns * cell_width, margin + i // columns * cell_height
        size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
        sheet.paste(Image.fromarray(image).resize(size, resample), (x, y))
        text = unicodedata.normalize("NFKC", label).encode("ascii", "replace").decode()
        draw.text((x, y + height), text[: width // 6], font=font, fill="black")
    return sheet


def score_label(value: float | None, details: Mapping[str, object]) -> str:
    """Return the label of a scored picture: the text that was wanted, the text that was read, the score."""
    if value is None:
        return "no score"
    return f"{details['target']} -> {details.get('read', '')}   {value:.2f}" if "target" in details else f"{value:.2f}"
