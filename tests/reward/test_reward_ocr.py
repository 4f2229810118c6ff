"""The OCR scorer: what it compares, that it reads real signs, and that nothing but the right text pays."""

import random

import numpy as np
import pytest
from omni_reward.scorers.ocr import load_ocr
from omni_reward.scorers.text import normalize, target_text
from omni_reward.wire import ScoreFn
from reward.reward_helpers import draw_sign

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


@pytest.fixture(scope="module")
def ocr() -> ScoreFn:
    return load_ocr()


def score_one(ocr: ScoreFn, image: np.ndarray, prompt: str) -> float:
    [score] = ocr({"image": image[None]}, [prompt], [{}])
    assert score.value is not None
    return score.value


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that says "K7QX"', "K7QX"),
        ('"K7QX" and "ABCD"', "K7QX"),
        ("a sign that says \u201cK7QX\u201d", "K7QX"),
        ("ein Schild \u201eK7QX\u201c", "K7QX"),
        ('mixed \u201cK7QX"', "K7QX"),
        ("it's \"Bob's\"", "Bob's"),
        ('two\nlines "a\nb"', "a\nb"),
        ('empty ""', ""),
        ('5" high', None),
        ("a sign", None),
        ("", None),
    ],
)
def test_target_is_the_text_between_the_first_quotes(prompt: str, target: str | None) -> None:
    assert target_text(prompt) == target


def test_both_sides_are_brought_to_one_form() -> None:
    assert normalize(" k7\t q\u00a0x\n") == "K7QX"
    assert normalize("\uff2b\uff17\u0071\u2179") == "K7QX"  # full-width letters, a Roman numeral
    assert normalize("e\u0301") == normalize("\u00e9") == "\u00c9"


def test_signs_are_read(ocr: ScoreFn) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices(ALPHABET, k=rng.randint(2, 4))) for _ in range(24)]
    images = np.stack([draw_sign(word, rng.randint(24, 28)) for word in words])
    scores = ocr({"image": images}, [f'a sign that says "{word}"' for word in words], [{}] * len(words))
    assert np.mean([score.value == 1.0 for score in scores]) > 0.9
    for score, word in zip(scores, words, strict=True):
        assert (score.value == 1.0) == (normalize(str(score.details["read"])) == word)


def test_score_is_one_minus_the_edits_over_the_longer_text(ocr: ScoreFn) -> None:
    image = draw_sign("K7QX")
    for prompt, score in {
        "K7QX": 1.0,
        "k7 qx": 1.0,
        "K7QA": 3 / 4,
        "K7Q": 3 / 4,  # a character too many on the sign
        "K7": 2 / 4,
        "K7QXAB": 4 / 6,
        "MNPR": 0.0,
    }.items():
        assert score_one(ocr, image, f'a sign "{prompt}"') == pytest.approx(score, abs=1e-12), prompt


def test_extra_text_does_not_pay(ocr: ScoreFn) -> None:
    alone = score_one(ocr, draw_sign("K7", width=192), '"K7"')
    more = score_one(ocr, draw_sign("K7K7K7", width=192), '"K7"')
    most = score_one(ocr, draw_sign("K7K7K7K7K7", width=192), '"K7"')
    assert alone == 1.0
    assert alone > more > most


def test_an_image_without_text_is_a_real_zero(ocr: ScoreFn, capfd: pytest.CaptureFixture[str]) -> None:
    blank = np.full((2, 32, 96, 3), 235, np.uint8)
    for score in ocr({"image": blank}, ['"K7QX"'] * 2, [{}] * 2):
        assert score.value == 0.0
        assert score.details["read"] == ""
    assert capfd.readouterr() == ("", "")


def test_a_prompt_without_quoted_text_abstains(ocr: ScoreFn) -> None:
    image = draw_sign("K7QX")[None]
    for prompt in ("a sign", 'a "" sign', 'a " " sign'):
        [score] = ocr({"image": image}, [prompt], [{}])
        assert score.value is None
        assert score.abstained == "the prompt has no text between double quotes"


def test_score_does_not_depend_on_the_rest_of_the_batch(ocr: ScoreFn) -> None:
    rng = np.random.default_rng(0)
    signs = np.stack([draw_sign(word).astype(float) for word in ("K7QX", "AB", "3", "WWWW", "H2M", "PQR8", "Z", "55")])
    images = np.clip(signs + rng.normal(0, 70, signs.shape), 0, 255).astype(np.uint8)
    together = ocr({"image": images}, ['"K7QX"'] * 8, [{}] * 8)
    alone = [ocr({"image": image[None]}, ['"K7QX"'], [{}])[0] for image in images]
    reversed_order = ocr({"image": images[::-1]}, ['"K7QX"'] * 8, [{}] * 8)
    assert together == alone == reversed_order[::-1]


@pytest.mark.parametrize(
    ("height", "width", "size"), [(16, 48, 13), (32, 96, 26), (64, 192, 52), (256, 256, 90), (512, 512, 180)]
)
def test_sizes_and_aspects(ocr: ScoreFn, height: int, width: int, size: int) -> None:
    assert score_one(ocr, draw_sign("K7QX", size, height=height, width=width), '"K7QX"') == 1.0


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 40, 3), (40, 1, 3), (2000, 50, 3)])
def test_odd_shapes_score_zero(ocr: ScoreFn, shape: tuple[int, ...]) -> None:
    assert score_one(ocr, np.zeros(shape, np.uint8), '"K7QX"') == 0.0


@pytest.mark.parametrize("shape", [(1, 41), (41, 1), (4000, 10), (20_000, 1)])  # the recogniser raises on the last two
def test_a_ribbon_abstains(ocr: ScoreFn, shape: tuple[int, int]) -> None:
    [score] = ocr({"image": np.zeros((1, *shape, 3), np.uint8)}, ['"K7QX"'], [{}])
    assert score.abstained == "the image has an aspect ratio above 40"


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
        load_ocr(threads=0)
