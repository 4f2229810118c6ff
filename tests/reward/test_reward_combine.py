"""Combinations: what is read, what is refused, and what comes out for values, vetoes and abstentions."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omni_reward import RewardClient, Score, Scorer, scorers
from omni_reward.combine import combine, stack_parts
from omni_reward.scorers import find_loader, load_scorer
from omni_reward.scorers.frames import over_frames
from omni_reward.scorers.jpeg import num_kilobytes
from omni_reward.terms import Reward, parse

IMAGES = {"image": np.zeros((3, 8, 8, 3), np.uint8)}


def fixed(*values: float | Score, **options: object) -> Scorer:
    """Scorer that gives its samples these values in order."""
    return Scorer(lambda media, prompts, meta: list(values), **options)


def run(text: str, given: dict[str, Scorer]) -> list[Score]:
    return list(combine(parse(text), given)(IMAGES, ["a", "b", "c"], [{}, {}, {}]))


@pytest.mark.parametrize("takes", [False, True])
def test_a_scorer_with_a_time_limit_is_told_when_a_request_came_among_others_and_over_frames_too(takes: bool) -> None:
    seen: list[tuple[object, ...]] = []

    def score(media: object, prompts: list[str], meta: object, *more: object) -> list[float]:
        seen.append(more)
        return [0.0] * len(prompts)

    timed, own = Scorer(score, timed=True, references=takes), [(IMAGES["image"][0],)] * takes
    combine(parse("a + b"), {"a": timed, "b": fixed(1.0)})({"image": IMAGES["image"][:1]}, ["a"], [{}], own, since=7.0)
    over_frames(timed)({"video": IMAGES["image"][None, :1]}, ["a"], [{}], own, since=7.0)
    assert seen == [(*[own] * takes, 7.0)] * 2


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("ocr", Reward({"ocr": "ocr"}, {"ocr": 1.0}, {}, None)),
        ("  0.7*ocr+0.3 * jpeg ", Reward({"ocr": "ocr", "jpeg": "jpeg"}, {"ocr": 0.7, "jpeg": 0.3}, {}, None)),
        ("-2*ocr - .5*jpeg", Reward({"ocr": "ocr", "jpeg": "jpeg"}, {"ocr": -2.0, "jpeg": -0.5}, {}, None)),
        ("1e-2*ocr + jpeg", Reward({"ocr": "ocr", "jpeg": "jpeg"}, {"ocr": 0.01, "jpeg": 1.0}, {}, None)),
        ("vlm as look + vlm", Reward({"look": "vlm", "vlm": "vlm"}, {"look": 1.0, "vlm": 1.0}, {}, None)),
        ("ocr if clip >= 0.2 else 0", Reward({"ocr": "ocr", "clip": "clip"}, {"ocr": 1.0}, {"clip": 0.2}, 0.0)),
        ("ocr if ocr>=-1 else -1.5", Reward({"ocr": "ocr"}, {"ocr": 1.0}, {"ocr": -1.0}, -1.5)),
        (
            "ocr + vlm as look if look >= .5 and clip as c >= 1 else -1",
            Reward(
                {"ocr": "ocr", "look": "vlm", "c": "clip"}, {"ocr": 1.0, "look": 1.0}, {"look": 0.5, "c": 1.0}, -1.0
            ),
        ),
        ("0*ocr - -2*jpeg", Reward({"ocr": "ocr", "jpeg": "jpeg"}, {"ocr": 0.0, "jpeg": 2.0}, {}, None)),
        ("python:a-b/c+d.py:f", Reward({"f": "python:a-b/c+d.py:f"}, {"f": 1.0}, {}, None)),
        (
            "0.5*python:a.py:f+python:b.py:g",
            Reward({"f": "python:a.py:f", "g": "python:b.py:g"}, {"f": 0.5, "g": 1.0}, {}, None),
        ),
    ],
)
def test_a_text_is_read(text: str, reward: Reward) -> None:
    assert parse(text) == reward


def test_only_a_name_alone_is_plain() -> None:
    assert parse("ocr").is_plain
    assert parse("1*ocr").is_plain
    assert not any(parse(text).is_plain for text in ("2*ocr", "-ocr", "ocr+jpeg", "ocr if ocr >= 0 else 0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a reward must be a name or read like"),
        ("   ", "a reward must be a name or read like"),
        ("0.7", "got '0.7' in it"),
        ("0.7*", "got '0.7*' in it"),
        ("ocr jpeg", "got 'ocr jpeg' in it"),
        ("ocr + + jpeg", "got '+ + jpeg' in it"),
        ("ocr +", "got '+' in it"),
        ("ocr*0.7", "got 'ocr*0.7' in it"),
        ("0.7*0.3*ocr", "got '0.7*0.3*ocr' in it"),
        ("(ocr + jpeg)*2", "got '(ocr + jpeg)*2' in it"),
        ("__import__('os').system('true')", "in it"),
        ("ocr; jpeg", "in it"),
        ("ocr\njpeg", "in it"),
        ("1e999*ocr", "a number must be finite, got"),
        ("nan*ocr", "got 'nan*ocr' in it"),
        ("ocr + ocr", "must not have two terms 'ocr'; 'as' gives one another name"),
        ("ocr as a + jpeg as a", "must not call both ocr and jpeg 'a'"),
        ("python:a.py:f + python:b.py:f", "must not call both python:a.py:f and python:b.py:f 'f'"),
        ("ocr + gate", "must not have a term 'gate'"),
        ("ocr if clip >= 0.2", "got 'ocr if clip >= 0.2' in it"),
        ("ocr if clip >= 0.2 else", "in it"),
        ("ocr if clip >= 0.2 else jpeg", "in it"),
        ("ocr if clip > 0.2 else 0", "a gate must read like 'clip >= 0.2', got 'clip > 0.2'"),
        ("ocr if 0.2 >= clip else 0", "a gate must read like"),
        ("ocr if clip >= 0.2 or ocr >= 1 else 0", "a gate must read like"),
        ("ocr if clip >= 0.2 and clip >= 0.3 else 0", "must not have two gates 'clip'"),
        ("ocr if clip >= 1e999 else 0", "a number must be finite"),
        ("ocr if clip >= 0 else 1e999", "a number must be finite"),
        ("if clip >= 0 else 1", "in it"),
    ],
)
def test_a_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a " * 2_000, "ocr if " * 500, "1*" * 2_000, "a if " + "a >= 1 and " * 300 + "else 0"]
)
def test_a_long_bad_text_makes_a_short_message(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert len(str(caught.value)) < 400


def test_the_value_is_the_weighted_sum_and_the_parts_are_raw() -> None:
    scores = run("2*a - 0.5*b", {"a": fixed(1.0, 2.0, 3.0), "b": fixed(10, -10, 0)})
    assert [score.value for score in scores] == [2 - 5, 4 + 5, 6]
    assert scores[0].parts == {"a": 1.0, "b": 10.0}


def test_parts_are_kept_under_their_scorers_names_and_details_that_one_gives_under_their_own() -> None:
    rich = Score(0.5, parts={"style": 4.0}, details={"read": "K7"})
    [score, *_] = run("a + b", {"a": fixed(rich, rich, rich), "b": fixed(1.0, 1.0, 1.0)})
    assert score.parts == {"a": 0.5, "a.style": 4.0, "b": 1.0}
    assert score.details == {"read": "K7"}


def test_one_abstention_is_an_abstention_and_says_whose() -> None:
    unsure = Score(None, abstained="too dark", details={"mean": 3})
    scores = run("a + b", {"a": fixed(1.0, 1.0, unsure), "b": fixed(2.0, math.nan, unsure)})
    assert scores[0].value == 3.0
    assert scores[1] == Score(None, abstained="b: the scorer returned nan", parts={"a": 1.0})
    assert scores[2].abstained == "a: too dark; b: too dark"
    assert scores[2].details == {"a.mean": 3, "b.mean": 3}


def test_a_gate_vetoes_below_its_threshold_and_never_pays() -> None:
    given = {"a": fixed(5.0, 5.0, -9.0), "g": fixed(0.2, 0.1999, 0.0)}
    scores = run("a if g >= 0.2 else -1", given)
    assert [score.value for score in scores] == [5.0, -1.0, -9.0]
    assert [score.parts["gate"] for score in scores] == [1.0, 0.0, 0.0]
    assert scores[1].parts == {"a": 5.0, "g": 0.1999, "gate": 0.0}


def test_all_gates_must_pass() -> None:
    given = {"a": fixed(1.0, 1.0, 1.0), "b": fixed(1.0, 0.0, 1.0), "c": fixed(1.0, 1.0, 0.0)}
    assert [score.value for score in run("a if b >= 1 and c >= 1 else 0", given)] == [1.0, 0.0, 0.0]


def test_a_gate_that_abstains_is_no_veto() -> None:
    unsure = Score(None, abstained="no face")
    [score, *_] = run("a if g >= 1 else 0", {"a": fixed(1.0, 1.0, 1.0), "g": fixed(unsure, 1.0, 1.0)})
    assert score == Score(None, abstained="g: no face", parts={"a": 1.0})


def test_a_sum_too_large_abstains() -> None:
    [score, *_] = run("1e300*a", {"a": fixed(1e300, 1.0, 1.0)})
    assert score.value is None


def test_a_scorer_in_the_sum_and_in_a_gate_is_asked_once() -> None:
    calls = []

    def score(media: dict, prompts: list[str], meta: list[dict]) -> list[float]:
        calls.append(prompts)
        return [1.0] * len(prompts)

    run("a if a >= 1 else 0", {"a": Scorer(score)})
    assert calls == [["a", "b", "c"]]


def test_each_scorer_gets_its_own_media_in_its_own_batches() -> None:
    seen = []

    def watch(media: dict, prompts: list[str], meta: list[dict]) -> list[float]:
        seen.append((sorted(media), prompts, meta, [array[0].tolist() for array in media.values()]))
        return [float(prompt) for prompt in prompts]

    given = {"a": Scorer(watch, ("latent",), 2), "b": Scorer(watch, ("image",), 5)}
    both = combine(parse("a + b"), given)
    assert both.media == ("image", "latent")
    assert both.batch_size == 2
    media = {"latent": np.arange(3.0), "image": np.arange(10, 13)}
    scores = both(media, ["1", "2", "3"], [{"i": i} for i in range(3)])
    assert [score.value for score in scores] == [2.0, 4.0, 6.0]
    assert seen == [
        (["latent"], ["1", "2"], [{"i": 0}, {"i": 1}], [0.0]),
        (["latent"], ["3"], [{"i": 2}], [2.0]),
        (["image"], ["1", "2", "3"], [{"i": 0}, {"i": 1}, {"i": 2}], [10]),
    ]


def test_a_scorer_that_wants_whole_requests_gets_them() -> None:
    given = {"a": fixed(1.0, 1.0, 1.0, batch_size=2), "b": fixed(1.0, 1.0, 1.0)}
    assert combine(parse("a + b"), given).batch_size is None


def test_versions_are_told_together() -> None:
    given = {"a": fixed(1.0, version="7"), "b": fixed(1.0), "c": fixed(1.0, version="x y")}
    assert combine(parse("a + b + c"), given).version == "a: 7; c: x y"


def test_a_wrong_count_of_one_scorer_is_an_error() -> None:
    with pytest.raises(ValueError, match="must return 3 numbers, got 2"):
        run("a + b", {"a": fixed(1.0, 1.0), "b": fixed(1.0, 1.0, 1.0)})


def test_parts_stack_into_a_table_for_per_reward_advantages() -> None:
    scores = run("a if b >= 0 else 0", {"a": fixed(1.0, 2.0, math.nan), "b": fixed(-1.0, 5.0, 6.0)})
    table = stack_parts(scores, ["b", "a", "gate"])
    np.testing.assert_array_equal(table, [[-1, 1, 0], [5, 2, 1], [6, math.nan, math.nan]])
    assert table.dtype == np.float64
    assert stack_parts([], ["a", "b"]).shape == (0, 2)


def test_options_reach_the_scorer_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def load(*, threads: int, low: str = "", x: str = "") -> Scorer:
        seen[low] = (threads, x)
        return fixed(0.0)

    monkeypatch.setattr(scorers, "find_loader", lambda name: load if name == "fake" else find_loader(name))
    load_scorer("fake as a + fake as b", threads=3, options={"a.low": "1", "b.low": "2", "b.x": "a=b"})
    assert seen == {"1": (3, ""), "2": (3, "a=b")}


@pytest.mark.parametrize("key", ["mode", "ocr.mode", "jpeg.", ".mode", "jpeg"])
def test_options_of_a_combination_must_name_a_scorer(key: str) -> None:
    with pytest.raises(ValueError, match=r"an option of a combination must be SCORER.OPTION of \['jpeg'\], got"):
        load_scorer("2*jpeg", options={key: "compressibility"})


@pytest.mark.parametrize("text", ["spam + jpeg", "jpeg if spam >= 0 else 0"])
def test_an_unknown_scorer_in_a_combination_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"scorer must be one of .*, got 'spam'"):
        load_scorer(text)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(threads: int) -> Scorer:
        raise ModuleNotFoundError("No module named 'lib'", name="lib")

    monkeypatch.setattr(scorers, "find_loader", lambda name: load if name == "fake" else find_loader(name))
    with pytest.raises(ImportError, match=r"scorer fake needs lib: install omni-reward\[fake\]"):
        load_scorer("jpeg + fake")


def test_a_combination_is_served(serve: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def bright(media, prompts, meta):\n    return media['image'].mean((1, 2, 3))\n")
    text = f"0.5*jpeg + 2*python:{tmp_path}/own.py:bright if bright >= 1 else -100"
    images = np.stack([np.full((16, 16, 3), value, np.uint8) for value in (0, 40)])
    with RewardClient(serve(load_scorer(text, options={"jpeg.mode": "incompressibility"}))) as client:
        dark, light = client.submit({"image": images}, ["a", "b"]).result()
    size = num_kilobytes(images[1])
    assert light.value == pytest.approx(0.5 * size + 80)
    assert light.parts == {"jpeg": size, "bright": 40.0, "gate": 1.0}
    assert (dark.value, dark.parts["gate"]) == (-100.0, 0.0)
