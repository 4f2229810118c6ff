"""A checkpoint, or weights to draw with, that cannot serve: exit code 2 and one line, before any weight is loaded."""

import json
import os
import shutil
from hashlib import sha256

import pytest
import torch
from apps import app_lives as lives
from apps.conftest import brightness
from helpers import CHECKPOINT
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from omni_rollout.models import open_model
from omni_rollout.models.qwen_image import QwenImage
from omni_train.lora import add_lora
from omni_train.weights.full import save_weights
from safetensors.torch import load_file, save_file
from trainer_runs import PROMPTS, place, write_eval_prompts

import sample


@pytest.fixture(scope="module")
def trained(tmp_path_factory, bright_url):
    """The folder of a run of one step with an adapter of rank 2, whose model is in its folder."""
    home = tmp_path_factory.mktemp("trained")
    here = os.getcwd()
    os.chdir(home)
    write_eval_prompts(home)
    shutil.copy(PROMPTS / "train.txt", home / "prompts.txt")
    shutil.copytree(CHECKPOINT, home / "model", copy_function=os.symlink)
    args = change(lives.TINY, train_steps=1, model="model", prompts="prompts.txt", lora_rank=2, lora_alpha=4)
    args = change(args, scorer_url=bright_url)
    life = lives.train(home, args)
    os.chdir(here)
    assert life.wait() == [0], life.text()
    (home / "tiny.toml").write_text(to_toml(args))
    return home


def newest_file(home):
    return next((home / "runs/run/checkpoints/step-00000001").glob("*.safetensors"))


def flip(home):
    file = newest_file(home)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def poison(home):
    """NaN in a tensor, under checksums that are right."""
    file, index = newest_file(home), newest_file(home).with_name("checkpoint.json")
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("weight/"))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file)
    content = json.loads(index.read_text())
    del content["sha256"]
    content["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    content["sha256"] = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    index.write_text(json.dumps(content))


def change_weights(part, change):
    """What makes other base weights of a part's."""

    def apply(home):
        (file,) = (home / "model" / part).glob("*.safetensors")
        tensors = load_file(file)
        file.unlink()
        save_file(change(tensors), file)

    return apply


def shift(tensors):
    return {name: tensor + 0.01 for name, tensor in tensors.items()}


ANOTHER_MODEL = "with other settings: a file of the weights has other contents than at the start"
CHECKPOINTS = {
    "another lr": (None, "--lr 2e-3", r"of step 1 was made with other settings: lr was 0\.001, is 0\.002\. Continue"),
    "two others": (None, "--seed 1 --group-size 2", "other settings: seed was 0, is 1, group_size was 4, is 2"),
    "other prompts": (
        lambda h: (h / "prompts.txt").write_text('a red sign that says "XY"\n' * 3), "",
        r"with other settings: prompts\.txt has other contents than at the start"
    ),
    "other weights": (change_weights("transformer", shift), "", ANOTHER_MODEL),
    "another text encoder": (change_weights("text_encoder", shift), "", ANOTHER_MODEL),
    "another byte": (flip, "", r"checkpoint .*step-00000001 is damaged: rank-00000-000\.safetensors has the SHA-256"),
    "no index": (
        lambda h: newest_file(h).with_name("checkpoint.json").write_text("{"), "", r"checkpoint\.json is not valid JSON"
    ),
    "NaN": (poison, "", r"is damaged: .* NaN or infinity in weight/.* Move it away to continue from .*step-00000000"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHECKPOINTS)
def test_a_checkpoint(tmp_path, monkeypatch, trained, change):
    break_it, flags, message = CHECKPOINTS[change]
    home = shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(home)
    if break_it:
        break_it(home)
    lives.assert_refused(home, flags.split(), message)


def test_a_dry_run_finds_what_a_run_would(tmp_path, monkeypatch, trained):
    home = shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(home)
    life = lives.command(home, ["--config", "tiny.toml", "--dry-run"], before=lives.no_loading)
    assert life.wait() == [0]
    assert "plan: start: continues after step 1, in runs/run" in life.text()
    flip(home)
    lives.assert_refused(home, ["--dry-run"], "is damaged")


def test_another_scorer(tmp_path, monkeypatch, trained):
    home = shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(home)
    with serving_in_thread(brightness, name="brightness-2") as url:
        message = "--scorer.url must be the scorer that the run began with, brightness, got brightness-2$"
        lives.assert_refused(home, ["--scorer.url", url], message)


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter for a transformer with one more block than ours has."""
    net = open_model(CHECKPOINT).empty_net()
    config = dict(net.config) | {"num_layers": net.config.num_layers + 1}
    net = type(net).from_config(config)
    add_lora(net, QwenImage.LORA_TARGETS, rank=2, alpha=4, seed=0)
    save_weights(net, tmp_path / "adapter", place())
    return tmp_path / "adapter"


def test_weights_that_cannot_be_sampled_with_are_found_before_a_model_is_loaded(tmp_path, adapter, monkeypatch):
    monkeypatch.setattr(QwenImage, "load", None)
    args = sample.Args(model=str(CHECKPOINT), weights=str(adapter))
    lives.cut(adapter / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match=r"--weights: .*_weights\.safetensors is no whole safetensors file"):
        sample.main(args)
    with pytest.raises(ValueError, match="--weights: folder must hold"):
        sample.main(change(args, weights=str(tmp_path)))
