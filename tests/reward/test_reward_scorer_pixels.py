"""What networks get to see: the same numbers as from transformers' own processors in their Pillow form."""

import numpy as np
import pytest
from omni_reward.scorers.pixels import fit_size, square_pixels, to_patches
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

SIZES = [(32, 32), (224, 224), (64, 48), (33, 57), (300, 100), (101, 400), (512, 512), (20, 24), (225, 223), (7, 5)]


def image(height: int, width: int) -> np.ndarray:
    """[H, W, 3], uint8: noise on a slope, so that every pixel counts."""
    noise = np.random.default_rng(height * 1000 + width).integers(0, 128, (height, width, 3))
    return (noise + np.linspace(0, 127, width).astype(int)[:, None]).astype(np.uint8)


@pytest.mark.parametrize("side", [32, 224])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_squares_are_those_of_clips_processor(height: int, width: int, side: int) -> None:
    picture = image(height, width)
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    theirs = processor(picture, input_data_format="channels_last", return_tensors="np")["pixel_values"]
    ours = square_pixels(picture[None], side)
    assert ours.dtype == np.float32
    assert ours.shape == (1, 3, side, side)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_image_of_the_right_size_is_only_normalized() -> None:
    picture = image(32, 32)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    wanted = np.moveaxis((picture / 255 - mean) / std, -1, 0)
    np.testing.assert_allclose(square_pixels(picture[None], 32)[0], wanted, atol=1e-5)


LONG = [(1, 200), (1000, 5), (1024, 1024), (720, 1280), (448, 448)]


@pytest.mark.parametrize(
    ("height", "width", "num_tokens"), [(*size, 256) for size in SIZES + LONG] + [(*size, 4) for size in SIZES[:-1]]
)
def test_the_size_is_that_of_qwens_rule(height: int, width: int, num_tokens: int) -> None:
    pixels = num_tokens * 28 * 28
    for least, most in ((pixels, pixels), (pixels // 2, pixels), (pixels, 4 * pixels)):
        found = fit_size(height, width, min_pixels=least, max_pixels=most)
        assert found == smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
    assert found[0] % 28 == found[1] % 28 == 0


def test_a_ribbon_has_no_size() -> None:
    with pytest.raises(ValueError, match="not be more than 200 times as long as wide, got 1 x 201"):
        fit_size(1, 201, min_pixels=28 * 28, max_pixels=28 * 28 * 256)


@pytest.mark.parametrize(("height", "width"), [(64, 48), (33, 57), (300, 100), (56, 56)])
def test_patches_are_those_of_qwens_processor(height: int, width: int) -> None:
    first, second, pixels = image(height, width), image(height, width)[::-1], 16 * 28**2
    processor = Qwen2VLImageProcessorPil(min_pixels=pixels, max_pixels=pixels)
    size = fit_size(height, width, min_pixels=pixels, max_pixels=pixels)
    still = processor(first, input_data_format="channels_last", return_tensors="np")
    assert still["image_grid_thw"].tolist() == [[1, size[0] // 14, size[1] // 14]]
    np.testing.assert_allclose(to_patches(np.stack([first, first]), *size), still["pixel_values"], atol=1e-5)
    other = processor(second, input_data_format="channels_last", return_tensors="np")["pixel_values"]
    both = [patches.reshape(-1, 3, 2, 14, 14)[:, :, :1] for patches in (still["pixel_values"], other)]
    moving = np.concatenate(both, axis=2).reshape(len(other), -1)  # the processor's stills, a frame of each
    clip = np.stack([first, second, second, second])
    np.testing.assert_allclose(to_patches(clip, *size), np.concatenate([moving, other]), atol=1e-5)
