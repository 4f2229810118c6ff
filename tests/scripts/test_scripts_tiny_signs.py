"""The shipped checkpoint and the scripts that make it."""

import random
import subprocess
import sys

import numpy as np
import pytest
import tiny_signs
import torch
from diffusers import QwenImagePipeline
from helpers import CHECKPOINT, REPO, absolute_paths
from omni_reward.scorers.ocr import load_ocr

MB = 2**20


def test_prompt_files_are_what_the_script_writes(tmp_path):
    shipped_eval = REPO / "data" / "tiny-signs" / "eval.txt"
    files = (("train", 2048, False, None), ("eval", 256, True, None), ("test", 256, True, shipped_eval))
    for name, count, evaluation, avoid in files:
        tiny_signs.write_prompts(tmp_path / f"{name}.txt", count=count, evaluation=evaluation, avoid=avoid)
        shipped = REPO / "data" / "tiny-signs" / f"{name}.txt"
        assert (tmp_path / f"{name}.txt").read_text() == shipped.read_text()


def test_the_score_script_scores_the_base_and_trained_weights_alike_when_they_are_the_same(tmp_path):
    prompts = tmp_path / "few.txt"
    prompts.write_text('a blue sign that says "YX"\na pink sign that says "FQT"\n')
    command = [sys.executable, str(REPO / "scripts" / "score.py"), "--prompts", str(prompts)]
    outputs = [
        subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
        for more in ([], ["--weights", str(CHECKPOINT)])
    ]
    assert outputs[0] == outputs[1]
    assert 0 <= float(outputs[0].split()[1]) <= 1
    wrong = subprocess.run([*command, "--weights", str(tmp_path / "none")], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    assert str(tmp_path / "none") in wrong.stderr.splitlines()[-1]


def test_words_of_the_two_sets_never_meet():
    rng = random.Random(0)
    words = {flag: {tiny_signs.draw_word(rng, evaluation=flag) for _ in range(5000)} for flag in (False, True)}
    assert not words[False] & words[True]


def test_the_scorer_reads_every_rendered_sign():
    rng = random.Random(0)
    signs = [tiny_signs.draw_prompt(rng) for _ in range(32)]
    images = np.stack([tiny_signs.render(rng, color, word) for _, color, word in signs])
    scores = load_ocr(reading="line")({"image": images}, [prompt for prompt, _, _ in signs], [{}] * 32)
    assert np.mean([score.value for score in scores]) > 0.97


def test_the_checkpoint_is_small_and_half_taught():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 15 * MB
    pipe = QwenImagePipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    prompts = (REPO / "data" / "tiny-signs" / "eval.txt").read_text().splitlines()[:48]
    images = pipe(
        prompts,
        true_cfg_scale=1.0,
        height=32,
        width=96,
        num_inference_steps=10,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    pixels = (images * 255).round().astype(np.uint8)
    scores = load_ocr(reading="line")({"image": pixels}, prompts, [{}] * len(prompts))
    assert 0.4 < np.mean([score.value for score in scores]) < 0.8


@pytest.mark.timeout(600)
def test_the_pretraining_script_writes_a_pipeline_that_stock_diffusers_runs(tmp_path):
    few = ["--signs", "64", "--vae-steps", "4", "--text-steps", "2", "--steps", "2"]
    script = REPO / "scripts" / "pretrain_tiny_signs.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "pipe"), *few], check=True)
    assert absolute_paths(tmp_path / "pipe") == []
    pipe = QwenImagePipeline.from_pretrained(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    image = pipe('a red sign that says "AB"', height=32, width=96, num_inference_steps=2, output_type="np").images[0]
    assert image.shape == (32, 96, 3)
    assert np.isfinite(image).all()
