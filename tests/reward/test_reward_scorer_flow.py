"""Optical flow on textures that move by known steps, and the direction that a prompt names."""

import numpy as np
import pytest
from omni_reward import Score
from omni_reward.scorers.flow import load_flow, optical_flow
from reward.reward_helpers import texture

FPS = 8.0
SIDE = 64


def moving(down: float, right: float, num_frames: int = 4) -> np.ndarray:
    """Clip [T, H, W, 3], uint8, of a texture whose content moves that many pixels a frame, moved in Fourier space."""
    y, x = np.meshgrid(np.fft.fftfreq(256), np.fft.fftfreq(256), indexing="ij")
    spectrum = np.fft.fft2(texture())
    shifts = [np.exp(-2j * np.pi * t * (y * down + x * right)) for t in range(num_frames)]
    frames = np.stack([np.fft.ifft2(spectrum * shift).real[:SIDE, :SIDE] for shift in shifts])
    return frames.clip(0, 255).round().astype(np.uint8)[..., None].repeat(3, axis=-1)


def score(clip: np.ndarray, prompt: str = "", **options: object) -> Score:
    [result] = load_flow(**options)({"video": clip[None]}, [prompt], [{"fps": FPS}])  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("step", [(0.0, 0.5), (1.0, 0.0), (2.0, -3.0), (-4.0, 4.0), (0.25, 6.0)])
def test_the_flow_is_the_step_of_the_texture(step: tuple[float, float]) -> None:
    before, after = moving(*step, num_frames=2)[..., 0].astype(np.float32)
    flow = optical_flow(before, after)
    assert np.median(flow, axis=(1, 2)) == pytest.approx(step, abs=0.1)
    inside = flow[:, 8:-8, 8:-8]
    assert inside.mean(axis=(1, 2)) == pytest.approx(step, abs=0.15)


def test_speed_is_in_frame_heights_per_second() -> None:
    result = score(moving(0, 2))
    assert result.value == pytest.approx(2 * FPS / SIDE, rel=0.03)
    assert result.parts["right"] == pytest.approx(2 * FPS / SIDE, rel=0.03)
    assert result.parts["down"] == pytest.approx(0, abs=0.01)
    large = score(moving(0, 2).repeat(3, axis=1).repeat(3, axis=2))
    assert large.value == pytest.approx(result.value, rel=1e-4)


def test_a_still_does_not_move() -> None:
    assert score(moving(0, 0)).value == 0.0
    assert score(moving(0, 0), "to the left", measure="direction").value == 0.0


def test_noise_on_flat_ground_hardly_moves() -> None:
    noise = np.random.default_rng(0).integers(126, 130, (3, SIDE, SIDE, 1), np.uint8).repeat(3, axis=-1)
    assert score(noise).value == pytest.approx(0, abs=0.05)


def test_the_fastest_pixels_are_those_of_what_moves() -> None:
    clip = moving(0, 0)
    clip[:, 24:40] = moving(0, 2)[:, 24:40]  # a quarter of the picture
    whole, fastest = (score(clip, top=top).value for top in (1.0, 0.15))
    assert whole is not None
    assert fastest == pytest.approx(2 * FPS / SIDE, rel=0.25)
    assert whole < 0.5 * fastest


@pytest.mark.parametrize(
    ("prompt", "value"),
    [("a sign that moves right", 1), ("Moving LEFTWARDS", -1), ('the word "left" goes right', 1), ("it falls down", 0)],
)
def test_direction_is_the_share_of_the_motion_along_the_named_one(prompt: str, value: float) -> None:
    assert score(moving(0, 2), prompt, measure="direction").value == pytest.approx(value, abs=0.06)


@pytest.mark.parametrize("prompt", ["a bright sign", "from left to right"])
def test_a_prompt_without_one_direction_is_an_abstention(prompt: str) -> None:
    result = score(moving(0, 2), prompt, measure="direction")
    assert str(result.abstained).startswith("the prompt must name one of ['left', 'right', 'up', 'down'], got")


@pytest.mark.parametrize("shape", [(1, 64, 64, 3), (4, 15, 64, 3)])
def test_too_little_to_follow_abstains(shape: tuple[int, ...]) -> None:
    assert score(np.zeros(shape, np.uint8)).abstained == "the video has fewer than 2 frames or 16 pixels a side"


def test_odd_sizes_are_followed() -> None:
    assert score(moving(0, 2)[:, :47, :53]).value == pytest.approx(2 * FPS / 47, rel=0.05)
