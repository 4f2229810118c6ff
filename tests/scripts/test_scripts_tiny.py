"""The shipped tiny models: data and models are what their scripts write, and the models are half taught."""

import random
import re
import sys
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pretrain
import pretraining.moving
import pretraining.tones
import pytest
import tiny_edit
import tiny_moving
import tiny_signs
import torch
from helpers import CHECKPOINT, REPO, sampled
from moved import score as score_moved
from omni_reward.scorers import load_scorer
from omni_reward.scorers.likeness import load_likeness
from omni_reward.scorers.sound import named_pitch
from omni_reward.scorers.text import target_text
from omni_rl.flow.direct_rewards import READER_FILE
from omni_rl.media.images import read_image
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.prompts.files import load_prompts
from safetensors.torch import load_file

CHECKPOINTS, DATA = REPO / "checkpoints", REPO / "data"
MB = 2**20
EDIT = Params(4, height=32, width=96, guidance={"image_area": 3072})


@dataclass(frozen=True)
class Tiny:
    """A shipped model: its folder, how its samples are drawn, and the scorers whose mean scores are within bounds."""

    folder: str
    prompts: str
    count: int
    params: Params
    bounds: dict[str, tuple[float, float]]


TINY = {
    "signs": Tiny(CHECKPOINT.name, "tiny-signs/eval.txt", 48, Params(10, height=32, width=96), {"ocr": (0.4, 0.8)}),
    "edit": Tiny("tiny-signs-qwen-image-edit", "tiny-edit/eval.jsonl", 24, EDIT,
                 {"ocr": (0.4, 0.8), "likeness": (0.8, 1.0)}),
    "moving": Tiny("tiny-moving-wan", "tiny-moving/eval.jsonl", 12, pretraining.moving.SAMPLING,
                   {"moved": (0.6, 0.85)}),
    "tones": Tiny("tiny-tones-ltx2", "tiny-tones/eval.txt", 16, pretraining.tones.SAMPLING,
                  {"pitch": (0.3, 0.6), "frames:color": (0.9, 1.0)}),
}  # fmt: skip
OPTIONS = {"ocr": {"reading": "line"}, "likeness": {"measure": "ground", "zero_at": 0.1}}
META = {"sample_rate": 8000, "fps": 9.0}


def mean_score(name, media, texts, references):
    """The mean score of the media; NumPy arrays of all samples by kind."""
    if name == "moved":
        return np.mean(score_moved(media, texts, [], references))
    more = [references] if name == "likeness" else []
    found = load_scorer(name, options=OPTIONS.get(name, {}))(media, texts, [META] * len(texts), *more)
    return np.mean([score.value for score in found])


def write_signs(folder):
    for name, count, avoid in (("train", 2048, []), ("eval", 256, []), ("test", 256, [folder / "eval.txt"])):
        tiny_signs.write_prompts(folder / f"{name}.txt", count=count, evaluation=name != "train", avoid=avoid)


WRITERS = {
    "tiny-signs": write_signs, "tiny-edit": tiny_edit.write_data, "tiny-moving": tiny_moving.write_data,
    "tiny-tones": pretraining.tones.write_prompts,
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(WRITERS, 1))
def test_data_are_what_the_script_writes(name, tmp_path):
    WRITERS[name](tmp_path)
    written, shipped = (
        {path.relative_to(place) for path in place.rglob("*.*")} for place in (tmp_path, DATA / name)
    )  # fmt: skip
    assert written == shipped != set()
    for path in shipped:
        if path.suffix == ".png":
            assert read_image(tmp_path / path).equal(read_image(DATA / name / path))
        else:
            assert (tmp_path / path).read_text() == (DATA / name / path).read_text()


def test_each_shipped_model_has_a_task_that_writes_it(tmp_path, monkeypatch):
    named = re.findall(r"scripts/pretrain\.py (\w+)", (CHECKPOINTS / "README.md").read_text())
    assert sorted(named) == sorted(pretrain.TASKS)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "reader", f"--out={tmp_path}", "--steps=1", "--signs=4"])
    pretrain.main()
    made, shipped = (load_file(folder / READER_FILE) for folder in (tmp_path, CHECKPOINTS / "tiny-signs-reader"))
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


@pytest.mark.parametrize("part", ["train", "eval"])
def test_words_of_training_and_of_evaluation_never_meet(part):
    for folder in ("tiny-edit", "tiny-moving"):
        records = load_prompts(DATA / folder / f"{part}.jsonl")
        words = {target_text(record.text) for record in records}
        words |= {image.stem.split("-")[1] for record in records for image in record.images}
        assert {tiny_signs.is_eval_word(word) for word in words} == {part == "eval"}
    rng = random.Random(0)
    drawn = {tiny_signs.draw_word(rng, evaluation=part == "eval") for _ in range(2000)}
    assert {tiny_signs.is_eval_word(word) for word in drawn} == {part == "eval"}


def test_tones_held_out_are_known_colors_and_pitches_in_new_pairs():
    pairs = {}
    for part in ("train", "eval"):
        texts = [record.text for record in load_prompts(DATA / "tiny-tones" / f"{part}.txt")]
        pairs[part] = {(text.split()[1], named_pitch(text)) for text in texts}
    assert pairs["train"].isdisjoint(pairs["eval"])
    sides = [{pair[side] for pair in pairs["train"]} for side in range(2)]
    assert sides == [set(pretraining.tones.COLORS), set(pretraining.tones.PITCHES)]
    assert {pitch for _, pitch in pairs["eval"]} == set(pretraining.tones.PITCHES)


@pytest.mark.parametrize("name", sampled(TINY, 1))
def test_the_model_is_small_and_half_taught(name):
    tiny = TINY[name]
    assert sum(path.stat().st_size for path in (CHECKPOINTS / tiny.folder).rglob("*")) < 15 * MB
    model = open_model(CHECKPOINTS / tiny.folder)
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    prompts = [
        Prompt(record.text, group=i, index=i, seed=i, images=tuple(map(read_image, record.images)))
        for i, record in enumerate(load_prompts(DATA / tiny.prompts)[: tiny.count])
    ]
    drawn = engine.generate(prompts, tiny.params)
    media = {kind: value.numpy() for kind, value in drawn.media.items()}
    references = [[image.numpy() for image in prompt.images] for prompt in prompts]
    for scorer, (least, most) in tiny.bounds.items():
        assert least < mean_score(scorer, media, [prompt.text for prompt in prompts], references) <= most, scorer


def test_the_scorer_reads_every_rendered_sign():
    rng = random.Random(0)
    signs = [tiny_signs.draw_prompt(rng) for _ in range(32)]
    images = np.stack([tiny_signs.render(rng, color, word) for _, color, word in signs])
    assert mean_score("ocr", {"image": images}, [prompt for prompt, _, _ in signs], []) > 0.97


def test_an_edit_changes_the_word_and_nothing_else():
    rng, likeness = random.Random(0), load_likeness(measure="ground")
    prompts, before, after = zip(*[tiny_edit.draw_edit(rng) for _ in range(24)], strict=True)
    assert mean_score("ocr", {"image": np.stack(before)}, list(prompts), []) <= 0.3
    assert mean_score("ocr", {"image": np.stack(after)}, list(prompts), []) >= 0.97
    kept = likeness({"image": np.stack(after)}, list(prompts), [{}] * 24, [(image,) for image in before])
    assert [score.value for score in kept] == [1.0] * 24


@pytest.fixture(scope="module")
def moving():
    """Prompts, and the videos that they ask for, uint8 [8, F, H, W, 3]."""
    rng, prompts, videos = random.Random(0), [], []
    for direction in 4 * list(tiny_moving.DIRECTIONS):
        sign = tiny_moving.draw_sign(rng)
        prompts.append(tiny_moving.prompt(*sign, direction))
        videos.append(tiny_moving.render(*sign, direction))
    return prompts, np.stack(videos)


def test_only_a_word_that_moves_as_asked_scores_much(moving):
    prompts, videos = moving
    given = [(video[0],) for video in videos]
    assert score_moved({"video": videos}, prompts, [], given) == pytest.approx([1.0] * 8)
    other_way = [prompts[i] for i in (1, 0, 3, 2, 5, 4, 7, 6)]
    still, empty, stripes = videos[:, :1].repeat(9, axis=1), np.full_like(videos, 200), np.zeros_like(videos)
    stripes[:, :, 4:9] = 200  # which look the same wherever they move
    assert max(score_moved({"video": videos}, other_way, [], given)) < 0.3
    assert max(score_moved({"video": still}, prompts, [], given)) < 0.3
    assert np.abs(score_moved({"video": stripes}, prompts, [], given)).max() < 0.3
    assert score_moved({"video": empty}, prompts, [], given) == [0.0] * 8
    flow = load_scorer("flow", options={"measure": "direction"})({"video": videos}, prompts, [{"fps": 8.0}] * 8)
    assert min(score.value for score in flow) > 0


def test_the_score_script_gives_the_base_and_equal_weights_the_same_score(tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "few.txt"
    prompts.write_text('a blue sign that says "YX"\na pink sign that says "FQT"\n')
    outputs = []
    for more in ([], ["--weights", str(CHECKPOINT)]):
        monkeypatch.setattr(sys, "argv", ["score.py", "--prompts", str(prompts), *more])
        import_module("score").main()
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert 0 <= float(outputs[0].split()[1]) <= 1
    monkeypatch.setattr(sys, "argv", ["score.py", "--prompts", str(prompts), "--weights", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^2$"):
        import_module("score").main()
    assert str(tmp_path / "none") in capsys.readouterr().err.splitlines()[-1]
