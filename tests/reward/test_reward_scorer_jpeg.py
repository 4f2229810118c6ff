"""The JPEG scorer: kB as an encoder in its own right counts them, and the order that DDPO's two rewards stand for."""

import cv2
import numpy as np
import pytest
from omni_reward import Score
from omni_reward.scorers.jpeg import load_jpeg, num_kilobytes

SIDE = 64


def picture(kind: str) -> np.ndarray:
    """[H, W, 3], uint8: flat, a slope, or noise."""
    if kind == "noise":
        return np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    slope = np.linspace(0, 255, SIDE).astype(np.uint8)[None, :, None]
    return np.broadcast_to(slope if kind == "slope" else np.uint8(128), (SIDE, SIDE, 3)).copy()


def test_noise_is_larger_than_a_slope_and_a_slope_than_nothing() -> None:
    images = np.stack([picture(kind) for kind in ("flat", "slope", "noise")])
    sizes = load_jpeg(mode="incompressibility")({"image": images}, ["", "", ""], [{}] * 3)
    small = load_jpeg()({"image": images}, ["", "", ""], [{}] * 3)
    assert sizes[0].value < sizes[1].value < sizes[2].value
    assert [-score.value for score in small] == [score.value for score in sizes]


@pytest.mark.parametrize("kind", ["flat", "slope", "noise"])
def test_size_is_in_kb_at_quality_95(kind: str) -> None:
    image = picture(kind)
    settings = [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
    written = cv2.imencode(".jpg", image[..., ::-1], settings)[1]
    assert num_kilobytes(image) == pytest.approx(len(written) / 1000, rel=0.02, abs=0.02)


def test_any_layout_of_memory_gives_the_same_size() -> None:
    image = picture("noise")[:, :33]
    assert num_kilobytes(image) == num_kilobytes(image.copy()) == num_kilobytes(np.asfortranarray(image))


def test_a_side_beyond_the_format_abstains() -> None:
    [score] = load_jpeg()({"image": np.zeros((1, 1, 65_501, 3), np.uint8)}, [""], [{}])
    assert score == Score(None, abstained="the image has a side of more than 65500 pixels")
    assert load_jpeg()({"image": np.zeros((1, 1, 65_500, 3), np.uint8)}, [""], [{}])[0].value is not None
