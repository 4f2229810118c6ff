"""Runs on prompts in the forms that users have them, by the apps' own settings."""

import csv
from pathlib import Path

import pytest
from omni_rl.report.data import run_data
from omni_rl.settings.fields import change
from omni_train.files import load_metrics
from trainer_runs import recipe, tiny, train

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, optim_lr_scheduler_type="constant", save_every=1, lora_rank=4, lora_alpha=8,
)  # fmt: skip


def write_table(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("caption", "answer"), *((text, "K7QX") for text in texts)])


def test_a_run_trains_on_a_split_of_a_folder_by_a_named_column_and_not_on_after_a_change(here, bright_url):
    for i in range(2):
        write_table(here / "mine" / f"train-0000{i}-of-00002.csv", [f"sign {i}", f"board {i}"])
    write_table(here / "mine" / "test.csv", ["door"])
    args = change(TINY, name="run", scorer_url=bright_url, prompts="mine/train", eval_prompts="mine/test")
    with pytest.raises(ValueError, match=r"^--prompts: mine/train-00000-of-00002.csv, row 2: must have the key"):
        app.check_args(args)
    args = change(args, prompt_key="caption", train_steps=1)
    app.check_args(args)
    train(app, args, report=True)
    assert [entry["text"] for entry in run_data(Path("runs/run"))["prompts"]] == ["door"]
    write_table(here / "mine" / "train-00001-of-00002.csv", ["sign 1", "board 2"])
    with pytest.raises(ValueError, match="mine/train has other contents than at the start"):
        train(app, change(args, train_steps=2))
    write_table(here / "mine" / "train-00001-of-00002.csv", ["sign 1", "board 1"])
    with pytest.raises(ValueError, match="prompt_key"):
        train(app, change(args, train_steps=2, prompt_key="answer"))
    train(app, change(args, train_steps=2))
    assert load_metrics(Path("runs/run/metrics.jsonl"))[-1]["step"] == 2
