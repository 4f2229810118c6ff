"""Small models learn from a reward: each recipe raises the score of prompts that it holds out."""

from pathlib import Path

import pytest
from helpers import REPO
from model_rows import ROWS
from omni_reward.scorers import load_scorer
from omni_reward.scorers.color import load_color, named_colors
from omni_reward.scorers.ocr import load_ocr
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change, values_of
from trainer_runs import recipe, train

import train_flowgrpo
import train_nft

PRESETS = {"tiny-sd35-medium": "sd35-medium", "tiny-z-image": "z-image", "tiny-flux-dev": "flux-dev"}
MOVING = [
    (train_nft, "tiny-moving"),
    (train_flowgrpo, "tiny-moving-flowgrpo"),
    (train_flowgrpo, "tiny-moving-dancegrpo"),
]
PROMPTS = {"prompts": str(REPO / "data/red/train.txt"), "eval_prompts": str(REPO / "data/red/eval.txt")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_model_learns_to_draw_in_red(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(ROWS[PRESETS[preset]].checkpoint())
    with serving_in_thread(load_color(), name="color") as url:
        args = change(recipe(train_flowgrpo, preset), model=model, scorer_url=url, **PROMPTS)
        lines = train(train_flowgrpo, args)
    scores = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert scores[-1] - scores[0] >= 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_model_learns_to_change_a_word_and_still_keeps_the_board(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {
        "prompts": str(REPO / "data/tiny-edit/train.jsonl"),
        "eval_prompts": str(REPO / "data/tiny-edit/eval.jsonl"),
    }
    options = {"ocr.reading": "line", "likeness.measure": "ground", "likeness.zero_at": "0.1"}
    reward = load_scorer("0.5*ocr + 0.5*likeness", options=options)
    with (
        serving_in_thread(reward, name="edit") as url,
        serving_in_thread(load_ocr(reading="line"), name="ocr") as ocr_url,
    ):
        args = change(recipe(train_nft, "tiny-signs-edit"), scorer_url=url, scorer_watch_url=ocr_url, **data)
        lines = train(train_nft, change(args, model=str(REPO / args.policy.model)))
    rewards, ocr = ([line[name] for line in lines if name in line] for name in ("eval/reward", "eval/watch"))
    likeness = [(total - 0.5 * read) / 0.5 for total, read in zip(rewards, ocr, strict=True)]
    assert rewards[-1] - rewards[0] >= 0.1
    assert ocr[-1] - ocr[0] >= 0.1
    assert likeness[-1] >= likeness[0] - 0.02


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_model_of_videos_with_sound_learns_to_draw_the_tone_that_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving_in_thread(load_scorer("pitch"), name="pitch") as url:
        args = recipe(train_flowgrpo, "tiny-tones")
        places = {name: str(REPO / values_of(args)[name]) for name in ("model", "prompts", "eval.prompts")}
        lines = train(train_flowgrpo, change(args, scorer_url=url, **places))
    scores = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert scores[-1] - scores[0] >= 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("app", "preset"), MOVING)
def test_a_small_video_model_learns_to_move_a_word_as_it_is_told(app, preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving_in_thread(load_scorer(f"python:{REPO}/scripts/moved.py:moved"), name="moved") as url:
        args = recipe(app, preset)
        places = {name: str(REPO / values_of(args)[name]) for name in ("model", "prompts", "eval.prompts")}
        lines = train(app, change(args, scorer_url=url, **places))
    scores = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert scores[-1] - scores[0] >= 0.1


def test_things_to_draw_are_trained_on_or_held_out_and_all_are_red():
    trained, held_out = (Path(path).read_text().splitlines() for path in PROMPTS.values())
    assert {prompt.split()[-1] for prompt in trained}.isdisjoint(prompt.split()[-1] for prompt in held_out)
    assert {color for prompt in trained + held_out for color in named_colors(prompt)} == {"red"}
