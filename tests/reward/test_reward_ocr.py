"""The OCR scorer: what it compares, that it finds and reads text, and that nothing but the right text pays."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from omni_reward import RewardClient, RewardError
from omni_reward.scorers import load_scorer
from omni_reward.scorers import ocr as ocr_module
from omni_reward.scorers.ocr import load_ocr, reading_order
from omni_reward.scorers.text import agreement, normalize, target_text
from omni_reward.wire import ScoreFn
from PIL import Image
from rapidocr import RapidOCR
from reward.reward_helpers import draw_sign
from reward.reward_scenes import Scene, draw_scene, scenes

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


@pytest.fixture(scope="module")
def ocr() -> ScoreFn:
    return load_ocr(reading="line")


@pytest.fixture(scope="module")
def finder() -> ScoreFn:
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"reading": "page"}, r"reading must be one of \['boxes', 'line'\], got 'page'"),
        ({"formula": "loose"}, r"formula must be one of \['strict', 'contained', 'capped'\], got 'loose'"),
    ],
)
def test_options_that_break_their_rule_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_ocr(**options)  # type: ignore[arg-type]


# Formulas


def published(target: str, read: str, *, contained: bool) -> float:
    """The arithmetic of flow_grpo and verl-omni, written from its description: lower case, no spaces, capped."""
    target, read = ("".join(text.lower().split()) for text in (target, read))
    row = list(range(len(read) + 1))
    for i, own in enumerate(target, 1):
        last, row = row, [i]
        for j, other in enumerate(read, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (own != other)))
    distance = 0 if contained and target in read else min(row[-1], len(target))
    return 1 - distance / len(target)


@pytest.mark.parametrize(
    ("target", "read", "strict", "contained", "capped"),
    [
        ("SALE", "SALE", 1, 1, 1),
        ("SALE", "s a l e", 1, 1, 1),
        ("SALE", "", 0, 0, 0),
        ("SALE", "SALT", 3 / 4, 3 / 4, 3 / 4),
        ("SALE", "SALE 50%", 4 / 7, 1, 1 / 4),
        ("SALE", "GRAND SALE TODAY", 4 / 14, 1, 0),
        ("SALE", "SAE LE", 4 / 5, 3 / 4, 3 / 4),
        ("SALE", "XYZXYZXYZXYZ", 0, 0, 0),
        ("New York", "New Yolk City", 6 / 11, 2 / 7, 2 / 7),
        ("Open 24 Hours", "Hours Open 24", 1 / 11, 1 / 11, 1 / 11),
        ("caf\u00e9", "CAF\u00c9 BAR", 4 / 7, 1, 1 / 4),
        ("A", "B", 0, 0, 0),
        ("A", "BANANA", 1 / 6, 1, 0),
    ],
)
def test_the_formulas_are_the_published_ones(
    target: str, read: str, strict: float, contained: float, capped: float
) -> None:
    wanted = normalize(target)
    values = [agreement(wanted, read, formula).value for formula in ("strict", "contained", "capped")]
    assert values == pytest.approx([strict, contained, capped], abs=1e-12)
    assert values[1:] == pytest.approx([published(target, read, contained=flag) for flag in (True, False)], abs=1e-12)
    assert agreement(wanted, read).value == values[0]


def test_the_formula_is_an_option_of_the_scorer() -> None:
    image = draw_sign("SALE 50%", 26, height=64, width=192)[None]
    for formula, least, most in (("strict", 0.5, 0.6), ("contained", 1, 1), ("capped", 0.2, 0.3)):
        scorer = load_scorer("ocr", options={"formula": formula})
        assert scorer.version == f"boxes {formula}"
        [score] = scorer({"image": image}, ['a "Sale" sign'], [{}])
        assert least <= score.value <= most  # type: ignore[operator]


# Text that stands somewhere in an image


def read_all(finder: ScoreFn, some: list[Scene]) -> list[str]:
    scores = [finder({"image": draw_scene(scene)[None]}, [scene.prompt], [{}])[0] for scene in some]
    return [str(score.details["read"]) for score in scores]  # type: ignore[union-attr]


def share_right(some: list[Scene], read: list[str]) -> float:
    return float(np.mean([normalize(text) == normalize(scene.text) for scene, text in zip(some, read, strict=True)]))


@pytest.mark.parametrize(("count", "empty"), [(10, 1), pytest.param(40, 4, marks=pytest.mark.slow)])
def test_text_is_found_in_scenes_of_many_sizes_fonts_angles_and_clutter(
    finder: ScoreFn, count: int, empty: int
) -> None:
    some = scenes(count, empty=empty)
    assert share_right(some, read_all(finder, some)) >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_as_many_scenes_are_read_right_as_by_the_library_alone(finder: ScoreFn) -> None:
    some = scenes(40, empty=4)
    alone = RapidOCR(params={"Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": 1})
    theirs = ["".join(alone(np.ascontiguousarray(draw_scene(scene)[..., ::-1])).txts or ()) for scene in some]
    assert share_right(some, read_all(finder, some)) >= share_right(some, theirs)


def corners(x: float, y: float, width: float, height: float, degrees: float = 0) -> list[list[float]]:
    """A box whose top left corner lies at (x, y) before all is turned about (256, 256)."""
    box = np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return ((box - 256) @ np.array([[c, s], [-s, c]]) + 256).tolist()


@pytest.mark.parametrize("degrees", [-40, -12, 0, 8, 30])
def test_boxes_are_read_line_by_line(degrees: float) -> None:
    lines = [
        [(100, 100, 90, 40), (200, 112, 80, 30), (300, 96, 60, 44)],  # letters of several heights
        [(90, 150, 200, 40)],
        [(120, 200, 60, 40), (200, 203, 100, 40)],
    ]
    boxes = np.array([corners(*box, degrees) for line in lines for box in line])
    shuffled = np.random.default_rng(0).permutation(len(boxes))
    order = [int(shuffled[i]) for i in reading_order(boxes[shuffled])]
    assert order == list(range(len(boxes)))


@pytest.mark.parametrize("degrees", [0, 6, -6])
def test_words_apart_and_lines_below_each_other_are_put_together_as_they_are_read(
    finder: ScoreFn, degrees: int
) -> None:
    page = Image.new("RGB", (512, 512), (235, 232, 220))
    for word, where in {"HAPPY": (40, 120), "NEW": (300, 120), "YEAR": (40, 260), "2027": (300, 260)}.items():
        page.paste(Image.fromarray(draw_sign(word, 48, height=80, width=180)), where)
    image = np.asarray(page.rotate(degrees, Image.Resampling.BICUBIC, fillcolor=(235, 232, 220)))
    assert score_one(finder, image, 'a page "Happy New Year 2027"') == 1.0


def test_an_image_without_text_is_a_real_zero_where_text_is_searched_for(
    finder: ScoreFn, capfd: pytest.CaptureFixture[str]
) -> None:
    [score] = finder({"image": np.full((1, 256, 256, 3), 200, np.uint8)}, ['"K7QX"'], [{}])
    assert (score.value, score.details["read"]) == (0.0, "")  # type: ignore[union-attr]
    assert capfd.readouterr() == ("", "")


def test_a_failure_of_the_reader_is_a_failed_request_and_no_zero(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[..., str]
) -> None:
    def broken(image: np.ndarray) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ocr_module, "RapidOCR", lambda params: broken)
    image = draw_sign("K7QX", height=128, width=256)[None]
    with RewardClient(serve(load_ocr()), timeout_s=2) as client, pytest.raises(RewardError):
        client.submit({"image": image}, ['"K7QX"']).result(30)


@pytest.mark.parametrize(
    ("reading", "height", "width", "hint"),
    [
        ("boxes", 32, 96, "ocr searches images of 96 x 32 for text; reading=line reads small signs"),
        ("line", 512, 512, "ocr reads images of 512 x 512 as one line; reading=boxes finds text"),
    ],
)
def test_who_has_images_of_the_other_kind_is_told_so(
    finder: ScoreFn, ocr: ScoreFn, reading: str, height: int, width: int, hint: str
) -> None:
    with pytest.warns(UserWarning, match=hint):
        score_one(finder if reading == "boxes" else ocr, draw_sign("K7", height=height, width=width), '"K7"')


def test_a_strip_abstains_where_text_is_searched_for(finder: ScoreFn) -> None:
    [score] = finder({"image": np.zeros((1, 64, 576, 3), np.uint8)}, ['"K7QX"'], [{}])
    assert score.abstained == "the image has an aspect ratio above 8"  # type: ignore[union-attr]
