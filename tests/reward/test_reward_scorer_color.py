"""The color scorer: flat pictures, mixtures of two colors, and the signs that the repository draws."""

import random

import numpy as np
import pytest
import tiny_signs
from omni_reward import Score
from omni_reward.scorers.color import COLORS, SHADES, load_color, named_colors, oklab

score_color = load_color()


def grade(image: np.ndarray, prompt: str) -> Score:
    """Score of one picture [H, W, 3]."""
    [score] = score_color({"image": image[None]}, [prompt], [{}])
    assert isinstance(score, Score)
    return score


def flat(shade: str, *, width: int = 8) -> np.ndarray:
    """[8, width, 3], uint8, of one color, RRGGBB."""
    return np.broadcast_to(np.frombuffer(bytes.fromhex(shade), np.uint8), (8, width, 3))


@pytest.mark.parametrize("color", COLORS)
def test_every_shade_of_a_color_is_that_color_and_no_other(color: str) -> None:
    for shade in SHADES[color]:
        scores = {name: grade(flat(shade), f"a {name} door") for name in COLORS}
        assert scores[color].value == 1
        assert max(score.value for name, score in scores.items() if name != color) < 0.6
        assert {score.details["most"] for score in scores.values()} == {color}


@pytest.mark.parametrize(
    ("rgb", "lightness", "chroma", "hue"),  # of CSS Color 4, degrees
    [((1, 1, 1), 1, 0, None), ((1, 0, 0), 0.628, 0.2577, 29.23), ((0, 1, 0), 0.8664, 0.2948, 142.5),
     ((0, 0, 1), 0.452, 0.3132, 264.05)],
)  # fmt: skip
def test_oklab_is_that_of_css(rgb: tuple[int, ...], lightness: float, chroma: float, hue: float | None) -> None:
    place = oklab(np.array(rgb, float))
    assert place[0] == pytest.approx(lightness, abs=1e-3)
    assert np.hypot(place[1], place[2]) == pytest.approx(chroma, abs=1e-3)
    if hue is not None:
        assert np.degrees(np.arctan2(place[2], place[1])) % 360 == pytest.approx(hue, abs=0.1)


@pytest.mark.parametrize("color", tiny_signs.COLORS)
def test_letters_on_a_sign_do_not_hide_its_color(color: str) -> None:
    rng = random.Random(0)
    for word in (tiny_signs.draw_word(rng) for _ in range(20)):
        score = grade(tiny_signs.render(rng, color, word), f'a {color} sign that says "{word}"')
        assert score.value > 0.5
        assert score.details["most"] == color


def test_more_of_a_color_scores_more_until_it_has_twice_as_much_as_any_other() -> None:
    values = [
        grade(np.concatenate([flat("e50000", width=red), flat("0343df", width=16 - red)], axis=1), "red").value
        for red in range(17)
    ]
    assert values[:11] == sorted(set(values[:11]))
    assert values[8] == pytest.approx(1 / 2, abs=0.06)
    assert values[12:] == [1.0] * 5


def test_a_mixture_of_all_colors_earns_half_at_most_on_average() -> None:
    image = np.concatenate([flat(shades[0]) for shades in SHADES.values()], axis=1)
    assert np.mean([grade(image, color).value for color in COLORS]) < 0.5


def test_a_step_towards_a_color_is_seen_long_before_it_leads() -> None:
    values = [grade(flat(f"{128 + step:02x}8080"), "a red boat").value for step in (0, 10, 20, 40)]
    assert values == sorted(set(values))
    assert values[-1] < 1


def test_words_in_quotes_name_no_color() -> None:
    assert grade(flat("0343df"), 'a blue sign that says "RED"').value == 1
    assert named_colors('Grey, with "red" on it; reddish') == {"gray"}


@pytest.mark.parametrize("prompt", ["a boat", "a red boat on a blue lake", 'a sign that says "RED"', ""])
def test_a_prompt_that_names_no_color_or_several_is_an_abstention(prompt: str) -> None:
    score = grade(flat("0343df"), prompt)
    assert score.value is None
    assert "the prompt must name one color" in str(score.abstained)
