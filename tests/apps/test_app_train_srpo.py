"""The trainer of SRPO and its rewards: gradients, levels, what the rewards say."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import tiny_signs
import torch
from helpers import REPO
from omni_rl.flow import direct_rewards
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_sched import step_noise
from trainer_runs import (
    assert_same_gradients,
    keep_gradients,
    lone_run,
    recipe,
    rollout,
    tiny,
    train,
)

import train_srpo as app

READER = str(REPO / "checkpoints" / "tiny-signs-reader")
TINY = tiny(recipe(app, "tiny-signs"), reward_model=READER, prompts_per_step=8, batch_size=4)
CPU = torch.device("cpu")


def signs(count, *, seed=3):
    """Prompts of words that only evaluations may use, and their pictures [count, 3, 32, 96] in [0, 1]."""
    rng = random.Random(seed)
    drawn = [tiny_signs.draw_prompt(rng, evaluation=True) for _ in range(count)]
    images = torch.stack([torch.tensor(tiny_signs.render(rng, color, word)) for _, color, word in drawn])
    return [prompt for prompt, _, _ in drawn], images.permute(0, 3, 1, 2).float() / 255


def test_the_reader_reads_clean_signs_and_knows_smudged_ones():
    reward = direct_rewards.load_sign_reader(READER, CPU)
    prompts, images = signs(40)
    assert reward(images, prompts).min() > 0.8
    assert reward(images, [f"Smudged. {prompt}" for prompt in prompts]).max() < 0.1
    others = [prompt.split('"')[0] + f'"{"AB" if "A" not in prompt else "JK"}"' for prompt in prompts]
    assert reward(images, others).mean() < 0.1
    blurred = torch.nn.functional.avg_pool2d(images, 11, stride=1, padding=5, count_include_pad=False)
    assert reward(blurred, [f"Smudged. {prompt}" for prompt in prompts]).mean() > 0.8
    assert reward(blurred, prompts).mean() < 0.2


@pytest.mark.parametrize("text", ["a blue sign", 'a sign that says "ABCDE"', 'a sign that says "ab"', 'says ""'])
def test_a_text_without_a_sign_s_word_is_refused(text):
    with pytest.raises(ValueError, match="texts must have 1 to 4 of ABCDEF"):
        direct_rewards.sign_classes(text)


def test_images_of_another_size_are_refused():
    reward = direct_rewards.load_sign_reader(READER, CPU)
    with pytest.raises(ValueError, match=r"images must be signs \[B, 3, 32, 96\], got shape \(1, 3, 64, 96\)"):
        reward(torch.zeros(1, 3, 64, 96), ['a sign that says "AB"'])


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A tiny CLIP of random weights, with a tokenizer of single letters."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(i) for i in range(97, 123)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")).save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(tokens), "max_position_embeddings": 20, "eos_token_id": len(tokens) - 1}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=small | text, vision_config=small | {"image_size": 32, "patch_size": 8}, projection_dim=8
    )
    CLIPModel(config).save_pretrained(folder)
    return folder


def test_clip_s_reward_is_its_logit_over_20_and_has_a_gradient(clip_folder):
    from PIL import Image
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    reward = direct_rewards.load_clip(str(clip_folder), CPU)
    torch.manual_seed(1)
    pixels = torch.nn.functional.interpolate(torch.rand(2, 3, 6, 9), size=(40, 60), mode="bicubic").clamp(0, 1)
    pixels = (pixels * 255).round() / 255
    texts = ["a cat", "a blue dog"]
    pictures = [Image.fromarray((image.permute(1, 2, 0) * 255).byte().numpy()) for image in pixels]
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tokens = AutoTokenizer.from_pretrained(clip_folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        model = CLIPModel.from_pretrained(clip_folder)
        logits = model(**tokens, **processor(pictures, return_tensors="pt")).logits_per_image
    # Theirs are resized as bytes, hence rounded.
    torch.testing.assert_close(reward(pixels, texts), logits.diag() / 20, rtol=0, atol=2e-3)
    pixels.requires_grad_(True)
    reward(pixels, texts).sum().backward()
    assert pixels.grad.abs().max() > 0


def test_clip_s_own_code_never_runs_and_nobody_is_asked(clip_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="a model must load without remote code, got"):
        direct_rewards.load_clip(str(folder), CPU)
    assert not (tmp_path / "ran").exists()


def test_both_steps_end_at_one_level_and_stay_in_the_range():
    args = change(TINY, level_low=0.3, level_high=0.9, level_step=0.2)
    seeds = list(range(200))
    batch = SimpleNamespace(prompts=[SimpleNamespace(seed=seed) for seed in seeds], x0=torch.zeros(200, 1))
    run = SimpleNamespace(args=args, model=SimpleNamespace(boundary=0.0))
    down, up = (app.noise_levels(run, Step(0), batch, inversion=inversion) for inversion in (False, True))
    assert torch.equal(down[1], up[1])
    u = (down[1] - 0.3) / 0.6
    assert 0.4 < u.mean() < 0.6
    assert u.min() < 0.05
    assert u.max() > 0.95
    length = torch.minimum(torch.minimum(u, 1 - u), torch.tensor(0.2))
    torch.testing.assert_close(down[0], 0.3 + 0.6 * (u + length))
    torch.testing.assert_close(up[0], 0.3 + 0.6 * (u - length))
    for sigma in (down[0], up[0]):
        assert sigma.min() >= 0.3 - 1e-6
        assert sigma.max() <= 0.9 + 1e-6
    torch.testing.assert_close(down[2], 0.1 + 0.15 * u)
    torch.testing.assert_close(up[2], 0.3 - 0.29 * (u - length))


def test_gradients_are_one_pass_over_all_samples_and_both_steps():
    args, step = change(TINY, positive_words="Clear, Sharp", threshold=5.0), Step(1)
    run, reward = lone_run(args), direct_rewards.load_sign_reader(READER, CPU)
    batches, _ = rollout(run, run.base_params, number=1)
    kept = keep_gradients(run)
    metrics = app.update(run, step, reward, batches)
    run.policy.net.zero_grad()
    losses = []
    for batch in batches:
        texts = [p.text for p in batch.prompts]
        noise = step_noise([p.seed for p in batch.prompts], -1, batch.x0.shape[1:])
        for inversion in (False, True):
            start, end, discount = app.noise_levels(run, step, batch, inversion=inversion)
            s, t = start.view(-1, 1, 1, 1), end.view(-1, 1, 1, 1)
            x = (1 - s) * batch.x0 + s * noise
            velocity = run.model.predict_velocity(run.policy.net, x, start, batch.cond, batch.params)
            x0 = (x + (t - s) * velocity - t * noise) / (1 - t)
            image = run.model.decode(run.engine.parts, x0, batch.cond, batch.params)[0]["image"].permute(0, 3, 1, 2)
            good, bad = (reward(image, [f"{word}. {text}" for text in texts]) for word in ("Sharp", "Smudged"))
            relative = (1 + discount) * bad - good if inversion else (1 + discount) * good - bad
            losses.append(5.0 - relative)  # none reaches the threshold
    loss = torch.cat(losses).mean()
    loss.backward()
    assert_same_gradients(kept[0], run.policy.params)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_sample_past_the_threshold_has_no_gradient():
    run, reward = lone_run(change(TINY, threshold=-5.0)), direct_rewards.load_sign_reader(READER, CPU)
    batches, _ = rollout(run, run.base_params)
    kept = keep_gradients(run)
    assert app.update(run, Step(0), reward, batches)["policy/denoising_active_fraction"] == 0.0
    assert all(grad is None or not grad.any() for grad in kept[0])


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_decoder_whose_gradient_is_taken_runs_by_deterministic_algorithms_too(monkeypatch, is_asked):
    """On CUDA torch decides there whether gradients of padding, as HunyuanVideo's VAE has it, repeat their bits."""
    args = change(TINY, deterministic=is_asked)
    run, reward = lone_run(args), direct_rewards.load_sign_reader(READER, CPU)
    (batch, _), _ = rollout(run, run.base_params)
    decode, found = run.model.decode, []

    def noted(*given):
        found.append(torch.are_deterministic_algorithms_enabled())
        return decode(*given)

    monkeypatch.setattr(run.model, "decode", noted)
    app.alignment_loss(run, Step(0), reward, batch, inversion=False)
    assert found == [is_asked]
    assert not torch.are_deterministic_algorithms_enabled()


def test_clip_s_reward_trains_with_lora_and_guidance(here, clip_folder):
    args = change(
        TINY, name="clip", reward="clip", reward_model=str(clip_folder), width=64, lora_rank=4, batch_size=2,
        prompts_per_step=2, true_cfg_scale=2.0, threshold=100.0,
    )  # fmt: skip
    lines = train(app, args)
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])
