"""The shipped checkpoint that edits, and the scripts that make it and its data."""

import random
import subprocess
import sys

import numpy as np
import pytest
import tiny_edit
import torch
from helpers import REPO, absolute_paths
from omni_reward.scorers.likeness import load_likeness
from omni_reward.scorers.ocr import load_ocr
from omni_reward.scorers.text import target_text
from omni_rl.media.images import read_picture
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.prompts.files import load_prompts
from tiny_signs import is_eval_word

CHECKPOINT = REPO / "checkpoints" / "tiny-signs-qwen-image-edit"
DATA = REPO / "data" / "tiny-edit"
PARTS = {"train": False, "eval": True}
MB = 2**20


def test_prompts_and_references_are_what_the_script_writes(tmp_path):
    tiny_edit.write_data(tmp_path)
    written, shipped = (sorted(path.relative_to(place) for path in place.rglob("*.*")) for place in (tmp_path, DATA))
    assert written == shipped
    for name in shipped:
        if name.suffix == ".png":
            assert read_picture(tmp_path / name).equal(read_picture(DATA / name))
        else:
            assert (tmp_path / name).read_text() == (DATA / name).read_text()


@pytest.mark.parametrize(("part", "evaluation"), PARTS.items())
def test_words_of_instructions_and_of_references_are_those_of_the_part_alone(part, evaluation):
    records = load_prompts(DATA / f"{part}.jsonl")
    asked = {target_text(record.text) for record in records}
    there = {image.stem.split("-")[1] for record in records for image in record.images}
    assert len(asked) == len(records)
    assert {is_eval_word(word) for word in asked | there} == {evaluation}


def test_an_edit_changes_the_word_and_nothing_else():
    rng, ocr, likeness = random.Random(0), load_ocr(reading="line"), load_likeness(measure="ground")
    edits = [tiny_edit.draw_edit(rng) for _ in range(24)]
    prompts, before, after = zip(*edits, strict=True)
    for images, least, most in ((before, 0.0, 0.3), (after, 0.97, 1.0)):
        scores = ocr({"image": np.stack(images)}, list(prompts), [{}] * len(edits))
        assert least <= np.mean([score.value for score in scores]) <= most
    kept = likeness({"image": np.stack(after)}, list(prompts), [{}] * len(edits), [(image,) for image in before])
    assert [score.value for score in kept] == [1.0] * len(edits)


def test_the_checkpoint_is_small_keeps_the_board_and_is_half_taught():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 15 * MB
    model = open_model(CHECKPOINT)
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    prompts = [
        Prompt(record.text, group=i, index=i, seed=i, images=tuple(map(read_picture, record.images)))
        for i, record in enumerate(load_prompts(DATA / "eval.jsonl")[:24])
    ]
    drawn = engine.generate(prompts, Params(4, height=32, width=96, guidance={"image_area": 3072}))
    media, texts = {"image": drawn.media["image"].numpy()}, [prompt.text for prompt in prompts]
    references = [(prompt.images[0].numpy(),) for prompt in prompts]
    assert 0.4 < np.mean([score.value for score in load_ocr(reading="line")(media, texts, [{}] * 24)]) < 0.8
    likeness = load_likeness(measure="ground", zero_at=0.1)
    assert np.mean([score.value for score in likeness(media, texts, [{}] * 24, references)]) > 0.8


@pytest.mark.timeout(600)
def test_the_pretraining_script_writes_a_model_that_edits(tmp_path):
    script, few = REPO / "scripts" / "pretrain_tiny_edit.py", ["--edits", "8", "--text-steps", "2", "--steps", "2"]
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "pipe"), *few], check=True)
    model = open_model(tmp_path / "pipe")
    model.check_files()
    assert model.config["_class_name"] == "QwenImageEditPipeline"
    assert absolute_paths(tmp_path / "pipe") == absolute_paths(REPO / "checkpoints") == []
