"""The video scorer: closed forms on clips made for them, and the order of clips that anybody would put them in."""

import numpy as np
import pytest
from omni_reward import Score
from omni_reward.scorers import load_scorer
from omni_reward.scorers.video import MEASURES, consistency, load_video, motion_smoothness, sharpness, shrink
from reward.reward_helpers import texture

NUM_FRAMES = 12
SIDE = 64


def film(offsets: list[int], image: np.ndarray | None = None) -> np.ndarray:
    """Clip [T, H, W, 3], uint8: a window over a texture, that many pixels to the right in each frame."""
    wide = texture() if image is None else image
    frames = np.stack([np.roll(wide, -offset, axis=1)[:SIDE, :SIDE] for offset in offsets])
    return frames.round().astype(np.uint8)[..., None].repeat(3, axis=-1)


STILL = film([0] * NUM_FRAMES)
PAN = film([2 * t for t in range(NUM_FRAMES)])
JERKY = film([2 * t + 3 * (t % 2) for t in range(NUM_FRAMES)])
SHUFFLED = film([13 * (5 * t % NUM_FRAMES) for t in range(NUM_FRAMES)])


def parts(clip: np.ndarray, fps: float = 8.0) -> dict[str, float]:
    [score] = load_video()({"video": clip[None]}, [""], [{"fps": fps}])
    assert score.value == pytest.approx(
        (score.parts["smoothness"] + score.parts["sharpness"] + score.parts["consistency"]) / 3
    )
    return dict(score.parts)


def test_a_steady_pan_is_as_smooth_as_a_still_and_the_rest_is_less() -> None:
    still, pan, jerky, shuffled = (parts(clip)["smoothness"] for clip in (STILL, PAN, JERKY, SHUFFLED))
    assert still == 1.0
    assert pan == pytest.approx(1.0, abs=1e-6)
    assert pan > jerky + 0.005
    assert jerky > shuffled + 0.02


def test_motion_is_in_frame_heights_per_second() -> None:
    assert parts(STILL)["motion"] == 0.0
    assert parts(PAN, fps=8)["motion"] == pytest.approx(2 * 8 / SIDE, rel=1e-6)
    assert parts(PAN, fps=24)["motion"] == pytest.approx(2 * 24 / SIDE, rel=1e-6)
    assert parts(film([4 * t for t in range(NUM_FRAMES)]))["motion"] == pytest.approx(4 * 8 / SIDE, rel=1e-6)


def test_smoothness_is_the_mean_error_of_the_middle_frame() -> None:
    flat = np.zeros((3, 32, 32), np.float32)
    flat[1] = 51
    assert motion_smoothness(flat) == (pytest.approx(1 - 51 / 255), 0.0)
    fading = np.arange(5, dtype=np.float32)[:, None, None] * np.ones((5, 32, 32), np.float32)
    assert motion_smoothness(fading) == (pytest.approx(1.0), 0.0)


def test_sharpness_falls_with_blur_and_has_its_closed_form() -> None:
    def blurred(times: int) -> np.ndarray:
        clip = STILL.astype(np.float32)[..., 0]
        for _ in range(times):
            clip = (clip + np.roll(clip, 1, axis=2) + np.roll(clip, 1, axis=1)) / 3
        return clip[:, 8:, 8:]  # without the edges that the roll has joined

    values = [sharpness(blurred(times)) for times in (0, 2, 8)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[2] > 0
    assert sharpness(np.full((3, 32, 32), 77, np.float32)) == 0.0
    checks = (np.indices((32, 32)).sum(axis=0) % 2 * 10).astype(np.float32)[None]
    variance = 40.0**2  # the Laplacian of a chessboard of 0 and 10 is 40 and -40 in turn
    assert sharpness(checks) == pytest.approx(variance / (variance + 100))


def test_consistency_falls_from_still_to_pan_to_cuts() -> None:
    cuts = np.concatenate([film([0], texture(seed)) for seed in range(NUM_FRAMES)])
    still, slow, pan, cut = (parts(clip)["consistency"] for clip in (STILL, film(list(range(NUM_FRAMES))), PAN, cuts))
    assert still == pytest.approx(1.0)
    assert still > slow > pan > cut
    assert cut < 0.6


def test_consistency_is_the_mean_similarity_to_the_first_and_the_previous_frame() -> None:
    dark, light = np.full((8, 8), 50.0), np.full((8, 8), 150.0)
    flat = (2 * 50 * 150 + 6.5025) / (50**2 + 150**2 + 6.5025)  # structural similarity of flat frames
    assert consistency(np.stack([dark, dark, light])) == pytest.approx((2 + 2 * flat) / 4)
    assert consistency(np.stack([dark, light, dark])) == pytest.approx((2 * flat + 1 + flat) / 4)
    board = np.indices((8, 8)).sum(axis=0) % 2 * 100.0
    assert consistency(np.stack([board, 100 - board])) == 0.0  # opposite structure, not a negative score


def test_flicker_and_noise_cost_smoothness_and_consistency() -> None:
    flicker = STILL.copy()
    flicker[::2] = flicker[::2] // 2
    noise = np.random.default_rng(0).integers(0, 256, STILL.shape, np.uint8)
    for clip in (flicker, noise):
        assert parts(clip)["smoothness"] < 0.9
        assert parts(clip)["consistency"] < 0.8


def test_shrinking_takes_means_of_squares_and_cuts_the_rest() -> None:
    gray = np.arange(2 * 5 * 4, dtype=np.float64).reshape(2, 5, 4)
    wanted = [
        [[gray[t, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for j in range(2)] for i in range(2)] for t in range(2)
    ]
    np.testing.assert_allclose(shrink(gray, 2), wanted)


def test_large_clips_are_judged_like_small_ones() -> None:
    large = PAN.repeat(3, axis=1).repeat(3, axis=2)
    small = parts(PAN)
    assert parts(large) == pytest.approx(small | {"sharpness": parts(large)["sharpness"]}, rel=1e-5)


@pytest.mark.parametrize("measure", MEASURES[1:])
def test_one_measure_may_be_the_score(measure: str) -> None:
    [score] = load_scorer("video", options={"measure": measure})({"video": JERKY[None]}, [""], [{"fps": 8}])
    assert score.value == score.parts[measure]


def test_clips_are_judged_one_by_one() -> None:
    together = load_video()({"video": np.stack([PAN, JERKY])}, ["", ""], [{"fps": 8}, {"fps": 16}])
    assert [dict(score.parts) for score in together] == [parts(PAN), parts(JERKY, fps=16)]


@pytest.mark.parametrize("shape", [(2, 64, 64, 3), (3, 31, 64, 3), (1, 1, 1, 3)])
def test_too_little_to_judge_abstains(shape: tuple[int, ...]) -> None:
    [score] = load_video()({"video": np.zeros((1, *shape), np.uint8)}, [""], [{"fps": 8}])
    assert score == Score(None, abstained="the video has fewer than 3 frames or 32 pixels a side")


def test_the_smallest_clip_is_judged() -> None:
    assert parts(np.zeros((3, 32, 32, 3), np.uint8))["smoothness"] == 1.0
