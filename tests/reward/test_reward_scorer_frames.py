"""Scorers of images on the frames of a video, against the same scorers on the frames themselves."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omni_reward import RewardClient, Score, Scorer
from omni_reward.scorers import load_scorer
from omni_reward.scorers.frames import over_frames

CLIPS = np.random.default_rng(0).integers(0, 256, (2, 5, 32, 48, 3), np.uint8)
PROMPTS = ["a", "b"]
META: list[dict[str, object]] = [{"fps": 8}, {"fps": 8}]


def brightness(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
    assert len(prompts) == len(meta) == len(media["image"]) <= 2
    levels = media["image"].astype(np.float64).mean(axis=(1, 2, 3))
    return [Score(x, parts={"half": x / 2}, details={"prompt": p}) for x, p in zip(levels, prompts, strict=True)]


LEVELS = CLIPS.astype(np.float64).mean(axis=(2, 3, 4))  # [N, T]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, LEVELS.mean(axis=1)),
        ({"frames": "min"}, LEVELS.min(axis=1)),
        ({"frames": "first"}, LEVELS[:, 0]),
        ({"frames": "last", "every": 2}, LEVELS[:, -1]),
        ({"every": 2}, LEVELS[:, ::2].mean(axis=1)),
        ({"every": 9}, LEVELS[:, 0]),
    ],
)
def test_the_score_is_that_of_the_frames_put_together(options: dict[str, object], values: np.ndarray) -> None:
    scorer = over_frames(Scorer(brightness, batch_size=2, version="7"), **options)  # type: ignore[arg-type]
    assert (scorer.media, scorer.version) == (("video",), "7")
    scores = scorer({"video": CLIPS}, PROMPTS, META)
    assert [score.value for score in scores] == pytest.approx(values, abs=1e-5)
    assert [score.parts["half"] for score in scores] == pytest.approx(values / 2, abs=1e-5)
    every = options.get("every", 1) if options.get("frames") in (None, "min") else 5
    assert all(len(score.details["frames"]) == len(range(0, 5, int(str(every)))) for score in scores)  # type: ignore[arg-type]


def test_the_worst_frame_speaks_for_the_video() -> None:
    [score, _] = over_frames(Scorer(brightness, batch_size=2), frames="min")({"video": CLIPS}, PROMPTS, META)
    assert score.details["prompt"] == "a"


def test_frames_without_any_of_the_word_do_not_count_where_flow_grpo_leaves_them_out() -> None:
    """Source of the numbers: every fourth frame, and the mean of the scores above 0, or 0."""

    def first_pixel(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        return [float(value) for value in media["image"][:, 0, 0, 0] / 100]

    clips = np.zeros((2, 9, 4, 4, 3), np.uint8)
    clips[0, ::4] = np.array([0, 50, 100])[:, None, None, None]
    clips[:, 1] = 100  # not looked at
    scores = over_frames(Scorer(first_pixel), frames="positive", every=4)({"video": clips}, PROMPTS, META)
    assert [score.value for score in scores] == [0.75, 0.0]
    assert scores[0].details["frames"] == [0.0, 0.5, 1.0]


def test_a_frame_that_cannot_be_judged_makes_an_abstention() -> None:
    def dark(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        means = media["image"].mean(axis=(1, 2, 3))
        return [Score(float(mean)) if mean else Score(None, abstained="too dark") for mean in means]

    clips = CLIPS.copy()
    clips[1, 3] = 0
    scores = over_frames(Scorer(dark))({"video": clips}, PROMPTS, META)
    assert [score.abstained for score in scores] == [None, "too dark"]


def test_the_first_frame_is_held_against_the_picture_it_was_made_from() -> None:
    scorer = load_scorer("frames:likeness", options={"frames": "first", "zero_at": "0.5"})
    assert scorer.references
    other = np.clip(CLIPS[1, 0].astype(int) + 10, 0, 255).astype(np.uint8)
    same, near = scorer({"video": CLIPS}, PROMPTS, META, [(CLIPS[0, 0],), (other,)])
    difference = np.abs(CLIPS[1, 0].astype(float) - other).mean() / 255
    assert (same.value, near.value) == (1.0, pytest.approx(1 - difference / 0.5))


def test_it_is_served_alone_and_in_a_combination(serve: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def red(media, prompts, meta):\n    return media['image'][..., 0].mean((1, 2))\n")
    text = f"0.5*frames:jpeg + video + frames:python:{tmp_path}/own.py:red"
    options = {"jpeg.every": "2", "jpeg.mode": "incompressibility", "red.frames": "last"}
    with RewardClient(serve(load_scorer(text, options=options))) as client:
        score, _ = client.submit({"video": CLIPS}, PROMPTS, META).result()
    jpeg = load_scorer("jpeg", options={"mode": "incompressibility"})({"image": CLIPS[0, ::2]}, ["a"] * 3, [{}] * 3)
    sizes = [each.value for each in jpeg if each.value is not None]
    assert score.parts["jpeg"] == pytest.approx(sum(sizes) / 3)
    assert score.parts["red"] == pytest.approx(CLIPS[0, -1, ..., 0].mean())
    assert score.details["jpeg.frames"] == pytest.approx(sizes)
    assert score.value == pytest.approx(0.5 * score.parts["jpeg"] + score.parts["video"] + score.parts["red"])
