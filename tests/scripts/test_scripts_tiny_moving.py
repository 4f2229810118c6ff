"""The shipped checkpoint of videos, the scripts that make it and its prompts, and its scorer."""

import random
import sys
from pathlib import Path

import numpy as np
import pretrain_tiny_moving
import pytest
import tiny_moving
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from helpers import REPO, absolute_paths
from model_rows import mend_wan
from moved import score
from omni_reward.scorers import load_scorer
from omni_reward.scorers.text import target_text
from omni_rl.media.images import read_picture
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model, wan
from omni_train.prompts.files import load_prompts
from PIL import Image
from tiny_signs import is_eval_word

CHECKPOINT = REPO / "checkpoints" / "tiny-moving-wan"
DATA = REPO / "data" / "tiny-moving"
MB = 2**20


def test_data_are_what_the_script_writes_with_words_of_the_part_alone(tmp_path):
    tiny_moving.write_data(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert written == {path.relative_to(DATA).as_posix() for path in DATA.rglob("*.*")}
    for name in written:
        if name.endswith(".png"):
            assert read_picture(tmp_path / name).equal(read_picture(DATA / name))
        else:
            assert (tmp_path / name).read_text() == (DATA / name).read_text()
    for part, evaluation in (("train", False), ("eval", True)):
        texts = [record.text for record in load_prompts(DATA / f"{part}.jsonl")]
        assert len(set(texts)) == 2 * 6 * tiny_moving.SIGNS[part]
        assert {is_eval_word(target_text(text)) for text in texts} == {evaluation}


@pytest.fixture(scope="module")
def signs():
    """Prompts, and the videos that they ask for, uint8 [8, F, H, W, 3]."""
    rng, prompts, videos = random.Random(0), [], []
    for direction in 4 * list(tiny_moving.DIRECTIONS):
        sign = tiny_moving.draw_sign(rng)
        prompts.append(tiny_moving.prompt(*sign, direction))
        videos.append(tiny_moving.render(*sign, direction))
    return prompts, np.stack(videos)


def test_the_word_of_a_rendered_sign_hops_as_told(signs):
    prompts, videos = signs
    assert videos.shape == (8, 9, 32, 96, 3)
    flow = load_scorer("flow", options={"measure": "direction"})({"video": videos}, prompts, [{"fps": 8.0}] * 8)
    assert min(score.value for score in flow) > 0
    for prompt, video in zip(prompts, videos, strict=True):
        way = tiny_moving.HOP if prompt.endswith("right") else -tiny_moving.HOP
        assert (video[1:5] == np.roll(video[0], way, axis=1)).all()
        assert (video[5:9] == np.roll(video[0], 2 * way, axis=1)).all()


def test_a_word_that_moves_as_told_scores_more_than_one_that_stands_moves_otherwise_or_is_gone(signs):
    prompts, videos = signs
    given = [(video[0],) for video in videos]
    assert score({"video": videos}, prompts, [], given) == pytest.approx([1.0] * 8)
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    others = score({"video": videos}, [prompts[i] for i in order], [], given)
    still, empty = videos[:, :1].repeat(9, axis=1), np.full_like(videos, 200)
    assert max(others + score({"video": still}, prompts, [], given)) < 0.3
    assert score({"video": empty}, prompts, [], given) == [0.0] * 8


def test_stripes_that_look_the_same_wherever_they_move_score_little(signs):
    prompts, videos = signs
    stripes = np.zeros_like(videos)
    stripes[:, :, 4:9] = 200
    given = [(video[0],) for video in videos]
    assert np.abs(score({"video": stripes}, prompts, [], given)).max() < 0.3


def test_a_video_is_coded_as_the_last_frame_of_four_is_as_an_image(signs):
    _, videos = signs
    image_vae = AutoencoderKLQwenImage.from_pretrained(pretrain_tiny_moving.SIGNS / "vae")
    vae = AutoencoderKLWan.from_pretrained(CHECKPOINT / "vae")
    x = torch.from_numpy(videos[:2]).movedim(-1, 1).float() / 127.5 - 1  # [N, C, F, H, W]
    x[:, :, 2] = 0.0  # is neither the first frame nor the last one of four
    with torch.no_grad():
        codes = vae.encode(x).latent_dist.mode()
        decoded = vae.decode(codes, return_dict=False)[0]
        of_images = [image_vae.encode(x[:, :, i : i + 1]).latent_dist.mode() for i in (0, 4, 8)]
        images = [image_vae.decode(code, return_dict=False)[0] for code in of_images]
    assert codes.shape == (2, 16, 3, 4, 12)
    torch.testing.assert_close(codes, torch.cat(of_images, dim=2), atol=1e-5, rtol=1e-5)
    shown = torch.cat(images, dim=2).repeat_interleave(torch.tensor([1, 4, 4]), dim=2)
    torch.testing.assert_close(decoded, shown, atol=1e-4, rtol=1e-4)


def test_texts_with_one_heavy_zero_are_those_that_zeros_fill():
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 24, "num_attention_heads": 2, "ffn_dim": 32, "text_dim": 8, "freq_dim": 16}
    net = WanTransformer3DModel(num_layers=2, in_channels=4, out_channels=4, rope_max_seq_len=64, **sizes)
    x, embeds = torch.randn(2, 4, 3, 4, 6), torch.zeros(2, wan.TEXT_TOKENS, 8)
    embeds[:, :5] = torch.randn(2, 5, 8)
    full = net(x, torch.tensor([300.0, 900.0]), embeds, return_dict=False)[0]
    net.set_attn_processor(pretrain_tiny_moving.ZerosAsOne())
    short = net(x, torch.tensor([300.0, 900.0]), embeds[:, :6], return_dict=False)[0]
    torch.testing.assert_close(short, full, atol=1e-5, rtol=1e-5)
    other = net(x, torch.tensor([300.0, 900.0]), embeds[:, :7], return_dict=False)[0]
    torch.testing.assert_close(other, full, atol=1e-5, rtol=1e-5)


def test_the_checkpoint_is_small_and_moves_words_but_often_the_other_way():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 15 * MB
    model = open_model(CHECKPOINT)
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    records = load_prompts(DATA / "eval.jsonl")[:12]
    drawn = engine.generate(
        [
            Prompt(record.text, group=i, index=i, seed=i, images=tuple(map(read_picture, record.images)))
            for i, record in enumerate(records)
        ],
        pretrain_tiny_moving.SAMPLING,
    )
    given = [[image.numpy() for image in prompt.images] for prompt in drawn.prompts]
    scores = score({"video": drawn.media["video"].numpy()}, [record.text for record in records], [], given)
    assert 0.6 < np.mean(scores) < 0.85
    assert np.sort(scores)[-6] > 0.9


def test_the_pretraining_script_writes_a_pipeline_that_stock_diffusers_runs(tmp_path, monkeypatch):
    few = ["--signs", "4", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["pretrain_tiny_moving.py", "--out", str(tmp_path / "pipe"), *few])
    pretrain_tiny_moving.main()
    assert absolute_paths(tmp_path / "pipe") == absolute_paths(Path(CHECKPOINT)) == []
    pipe = mend_wan(WanImageToVideoPipeline.from_pretrained(tmp_path / "pipe"))
    pipe.set_progress_bar_config(disable=True)
    first = Image.open(sorted((DATA / "eval").glob("blue-*.png"))[0])
    asked = {"height": 32, "width": 96, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 1.0}
    [video] = pipe(first, 'a blue sign on which "5D" moves left', **asked).frames
    assert video.shape == (9, 32, 96, 3)
    assert np.isfinite(video).all()
