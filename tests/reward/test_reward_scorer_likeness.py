"""The likeness scorer: equal pictures, known differences, the ground of signs, boxes and other sizes."""

import random
from typing import Any

import numpy as np
import pytest
import tiny_signs
from omni_reward import Score
from omni_reward.scorers import load_scorer
from omni_reward.scorers.likeness import load_likeness, resize

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 200, (6, 8, 3), dtype=np.uint8)


def grade(image: np.ndarray, *references: np.ndarray, **options: Any) -> Score:
    """Score of one picture [H, W, 3] beside its references."""
    [score] = load_likeness(**options)({"image": image[None]}, ["edit"], [{}], [references])
    return score


def sign(color: str, word: str, seed: int = 0) -> np.ndarray:
    return tiny_signs.render(random.Random(seed), color, word)


@pytest.mark.parametrize("measure", ["pixels", "ground"])
def test_equal_pictures_score_1_and_a_shift_scores_its_share_of_the_range(measure: str) -> None:
    assert grade(PICTURE, PICTURE, measure=measure).value == 1.0
    assert grade(PICTURE + 51, PICTURE, measure=measure).value == pytest.approx(1 - 51 / 255)
    assert grade(PICTURE + 51, PICTURE, measure=measure, zero_at=0.4).value == pytest.approx(0.5)
    assert grade(PICTURE + 51, PICTURE, measure=measure, zero_at=0.1).value == 0.0
    one_channel = PICTURE + np.array([0, 30, 0], np.uint8)
    assert grade(one_channel, PICTURE, measure=measure).value == pytest.approx(1 - 30 / 3 / 255)


def test_black_and_white_are_as_far_apart_as_can_be() -> None:
    black = np.zeros((4, 4, 3), np.uint8)
    assert grade(black, ~black).value == 0.0


def test_pixels_count_by_their_number() -> None:
    changed = PICTURE.copy()
    changed[:3] += 51  # half of the rows
    assert grade(changed, PICTURE).value == pytest.approx(1 - 51 / 255 / 2)


def test_a_box_is_left_out_or_is_all_that_counts() -> None:
    changed = PICTURE.copy()
    changed[:3, :2] += 51  # the upper half of the left quarter
    box = "0,0,0.5,0.25"
    assert grade(changed, PICTURE, leave_out=box).value == 1.0
    assert grade(changed, PICTURE, only=box).value == pytest.approx(1 - 51 / 255)
    assert grade(changed, PICTURE, only="0,0,1,0.25").value == pytest.approx(1 - 51 / 255 / 2)
    assert grade(changed, PICTURE, leave_out="0.5,0.25,1,1").value == pytest.approx(1 - 51 / 255 * 6 / 30)


@pytest.mark.parametrize("color", tiny_signs.COLORS)
def test_the_ground_of_a_sign_is_compared_and_not_its_word(color: str) -> None:
    reference = sign(color, "K7QX")
    same = [grade(sign(color, word), reference, measure="ground").value for word in ("AB", "WMWM", "")]
    assert same == [1.0] * 3  # the shades of seed 0 are the same
    for other in set(tiny_signs.COLORS) - {color}:
        wanted = np.abs(np.subtract(tiny_signs.COLORS[color], tiny_signs.COLORS[other])).mean() / 255
        score = grade(sign(other, "AB"), reference, measure="ground")
        assert score.value == pytest.approx(1 - wanted, abs=1e-6)
        assert score.details["difference"] == pytest.approx(wanted, abs=1e-5)


def test_a_word_alone_costs_pixels_but_not_ground() -> None:
    empty, word = sign("green", ""), sign("green", "K7QX")
    assert grade(word, empty, measure="ground").value == 1.0
    assert grade(word, empty).value < 0.95
    assert grade(word, empty, leave_out="0.1,0,0.9,1").value == 1.0  # its rows


def test_a_reference_of_another_size_is_averaged_to_the_sample_s() -> None:
    assert grade(PICTURE, PICTURE.repeat(3, axis=0).repeat(2, axis=1)).value == pytest.approx(1)
    fine = RNG.integers(0, 256, (12, 24, 3), dtype=np.uint8)
    np.testing.assert_allclose(resize(fine, 6, 8), fine.reshape(6, 2, 8, 3, 3).mean(axis=(1, 3)))
    flat = np.full((5, 7, 3), 100, np.uint8)
    np.testing.assert_allclose(resize(flat, 3, 11), 100)
    ramp = np.arange(3, dtype=np.uint8)[:, None, None].repeat(3, axis=2)
    np.testing.assert_allclose(resize(ramp, 2, 1)[:, 0, 0], [1 / 3, 5 / 3])


def test_the_first_reference_counts_and_none_is_an_abstention() -> None:
    assert grade(PICTURE, PICTURE, PICTURE + 51).value == 1.0
    assert grade(PICTURE).abstained == "the sample has no reference"


def test_a_box_smaller_than_a_pixel_is_an_abstention() -> None:
    assert grade(PICTURE, PICTURE, only="0,0,0.01,0.01").abstained == "the box leaves no pixel of (6, 8)"


def test_an_edit_is_graded_by_what_it_says_and_by_what_it_leaves_alone() -> None:
    options = {"ocr.reading": "line", "likeness.measure": "ground", "likeness.zero_at": "0.25"}
    both = load_scorer("0.5*ocr + 0.5*likeness", options=options)
    reference = sign("yellow", "K7QX")
    images = np.stack([sign("yellow", "AB"), sign("yellow", "K7QX"), sign("white", "AB")])
    scores = both({"image": images}, ['Change the word to "AB".'] * 3, [{}] * 3, [(reference,)] * 3)
    right, unread, unlike = (score.parts for score in scores)
    assert right == {"ocr": 1.0, "likeness": 1.0}
    assert (unread["likeness"], unlike["ocr"]) == (1.0, 1.0)
    assert unread["ocr"] < 0.5
    assert unlike["likeness"] < 0.1
