"""Color scorer: the area of the color that the prompt names, compared with the largest other color.

    p(c | pixel) ~ max over shades s of c of exp(-d(pixel, s)^2 / 2w^2),    share(c) = mean over pixels of p(c | pixel)
    score = min(1, share(named) / (2 max over other c of share(c)))        in [0, 1]

The score is 1 if the named color has at least twice the area of any other, so letters on a sign cost little, and 1/2 at
a tie, so a mixture of all colors does not pay. The colors are the eleven basic color terms of English (Berlin and Kay,
1969). Shades of the chromatic colors are from the color survey of xkcd.com (CC0): the plain name, light, dark and dull.
d is the distance in Oklab (Ottosson, 2020) with half weight for lightness.

Notation: N samples, H height, W width, C colors, S shades, L levels of a channel.
"""

import re

import numpy as np

from omni_reward.wire import Score, ScoreFn

SHADES = {
    "black": ("000000",),
    "gray": ("929591",),
    "white": ("ffffff",),
    "red": ("e50000", "ff474c", "840000", "bb3f3f"),
    "orange": ("f97306", "fdaa48", "c65102", "d8863b"),
    "yellow": ("ffff14", "fffe7a", "d5b60a", "eedc5b"),
    "green": ("15b01a", "96f97b", "033500", "74a662"),
    "blue": ("0343df", "95d0fc", "00035b", "49759c"),
    "purple": ("7e1e9c", "bf77f6", "35063e", "84597e"),
    "pink": ("ff81c0", "ffd1df", "cb416b", "d5869d"),
    "brown": ("653700", "ad8150", "341c02", "876e4b"),
}
COLORS = tuple(SHADES)
WIDTH = 0.04  # w, in units of Oklab
LIGHTNESS = 0.5  # weight of lightness relative to the two axes of color
LEVELS = 32  # distinct levels of each channel

_LMS = np.array([[0.4122214708, 0.5363325363, 0.0514459929],
                 [0.2119034982, 0.6806995451, 0.1073969566],
                 [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_OKLAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468],
                   [1.9779984951, -2.4285922050, 0.4505937099],
                   [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip


def load_color() -> ScoreFn:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, with the most frequent color in `details`."""
    table = _color_probabilities()

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        return [_score_image(image, prompt, table) for image, prompt in zip(media["image"], prompts, strict=True)]

    return score


def named_colors(prompt: str) -> set[str]:
    """Return the basic colors that the prompt names outside double quotes."""
    words = re.sub(r'"[^"]*"', " ", prompt.lower()).replace("grey", "gray")
    return set(re.findall(r"\b[a-z]+\b", words)) & set(COLORS)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Return Oklab coordinates [..., 3] of sRGB colors [..., 3] in [0, 1]."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _LMS.T) @ _OKLAB.T


def _scaled_oklab(rgb: np.ndarray) -> np.ndarray:
    return oklab(rgb) * (LIGHTNESS, 1, 1)


def _color_probabilities() -> np.ndarray:
    """Return p(c | pixel), [L^3, C], for each distinct pixel."""
    levels = np.linspace(0, 1, LEVELS)
    pixels = _scaled_oklab(np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3))
    weights = []
    for shades in SHADES.values():
        places = _scaled_oklab(np.array([tuple(bytes.fromhex(shade)) for shade in shades]) / 255)
        squares = ((pixels[:, None] - places) ** 2).sum(axis=-1)  # [L^3, S]
        weights.append(np.exp(-squares.min(axis=1) / (2 * WIDTH**2)))
    table = np.stack(weights, axis=1)
    return table / table.sum(axis=1, keepdims=True)


def _score_image(image: np.ndarray, prompt: str, table: np.ndarray) -> Score:
    colors = sorted(named_colors(prompt))
    if len(colors) != 1:
        return Score(None, abstained=f"the prompt must name one color of {list(COLORS)}, got {colors}")
    levels = (image.reshape(-1, 3).astype(np.int64) * (LEVELS - 1) + 127) // 255
    counts = np.bincount(levels @ (LEVELS**2, LEVELS, 1), minlength=LEVELS**3)
    shares = counts @ table / counts.sum()
    index = COLORS.index(colors[0])
    lead = shares[index] / max(np.delete(shares, index).max(), 1e-9)
    return Score(min(1.0, float(lead) / 2), details={"named": colors[0], "most": COLORS[int(shares.argmax())]})
