"""The shipped checkpoint that draws tones, the script that makes it, and its prompts."""

import sys

import numpy as np
import pretrain_tiny_tones as tones
import torch
from helpers import REPO, absolute_paths
from omni_reward.scorers import load_scorer
from omni_reward.scorers.sound import named_pitch
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.prompts.files import load_prompts

CHECKPOINT, DATA = REPO / "checkpoints" / "tiny-tones-ltx2", REPO / "data" / "tiny-tones"
MB = 2**20


def test_the_vocoder_makes_of_each_pitch_its_sinusoid():
    vocoder, seconds = tones.build_vocoder(), (torch.arange(7200) + 80) / 8000
    for place, pitch in enumerate(tones.PITCHES):
        spectrogram = torch.zeros(1, 2, 45, 64)
        spectrogram[..., 4 * place : 4 * place + 4] = 0.5
        sine = 0.15 * torch.sin(2 * torch.pi * pitch * seconds)
        for sound in vocoder(spectrogram)[0]:
            torch.testing.assert_close(sound[80:-80], sine[80:-80], atol=1e-3, rtol=0)


def test_prompts_held_out_ask_for_known_colors_and_pitches_in_new_pairs(tmp_path):
    tones.write_prompts(tmp_path)
    pairs = {}
    for part in ("train", "eval"):
        assert (tmp_path / f"{part}.txt").read_text() == (DATA / f"{part}.txt").read_text()
        texts = [record.text for record in load_prompts(DATA / f"{part}.txt")]
        pairs[part] = {(text.split()[1], named_pitch(text)) for text in texts}
    assert pairs["train"].isdisjoint(pairs["eval"])
    assert [{pair[side] for pair in pairs["train"]} for side in range(2)] == [set(tones.COLORS), set(tones.PITCHES)]
    assert {pitch for _, pitch in pairs["eval"]} == set(tones.PITCHES)


def test_the_checkpoint_is_small_draws_the_color_and_is_unsure_of_the_pitch():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 5 * MB
    model = open_model(CHECKPOINT)
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    texts = [record.text for record in load_prompts(DATA / "eval.txt")[:16]]
    media = engine.generate([Prompt(text, i, i, i) for i, text in enumerate(texts)], tones.SAMPLING).media
    assert media["audio"].shape == (16, 7200, 2)
    heard = load_scorer("pitch")({"audio": media["audio"].numpy()}, texts, [{"sample_rate": 8000}] * 16)
    assert 0.3 < np.mean([score.value for score in heard]) < 0.6
    frames = {"video": media["video"].numpy()}
    assert np.mean([score.value for score in load_scorer("frames:color")(frames, texts, [{"fps": 9.0}] * 16)]) > 0.9


def test_the_pretraining_script_writes_the_pipeline(tmp_path, monkeypatch):
    few = [f"--{name}steps=1" for name in ("", "vae-", "text-")]
    places = ["--out", str(tmp_path / "pipe"), "--data", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", ["pretrain_tiny_tones.py", *places, *few])
    tones.main()
    open_model(tmp_path / "pipe").check_files()
    for part in ("transformer", "audio_vae", "vocoder", "connectors"):
        written, shipped = ((place / part / "config.json").read_text() for place in (tmp_path / "pipe", CHECKPOINT))
        assert written == shipped
    assert absolute_paths(tmp_path / "pipe") == absolute_paths(CHECKPOINT) == []
