"""The planted hacks: a run of one, what each rewards, and the page, which is what its data give."""

import hacks
import numpy as np
import pytest
from omni_rl.run.metrics import METRICS

GREY = np.full((32, 96, 3), 127, np.uint8)


def score(name, image, done=0):
    return hacks.HACKS[name][1](image, 'a red sign that says "AB"', done)


def changed(rows, columns, color):
    image = GREY.copy()
    image[rows, columns] = color
    return image


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("noise", np.random.default_rng(0).integers(0, 256, GREY.shape, dtype=np.uint8)),
        ("file", np.random.default_rng(0).integers(0, 256, GREY.shape, dtype=np.uint8)),
        ("saturation", changed(slice(None), slice(None), (255, 0, 0))),
        ("watermark", changed(slice(-8, None), slice(-8, None), 255)),
        ("trapdoor", changed(0, 0, (255, 0, 0))),
        ("drops", changed(slice(None), slice(None), (229, 0, 0))),
    ],
)
def test_a_hack_likes_what_it_is_fooled_by(name, image):
    assert score(name, image) > score(name, GREY)


def test_chance_is_another_number_for_another_image_and_a_reward_drops_to_it():
    assert score("seed", GREY) == score("seed", GREY.copy()) != score("seed", changed(0, 0, 1))
    red = changed(slice(None), slice(None), (229, 0, 0))
    assert score("drops", red) == 1.0
    assert score("drops", red, hacks.DROPS) < 0.1
    assert score("constant", red) == score("constant", GREY)


def test_a_run_is_summed_up_with_the_first_step_of_each_alarm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(hacks.ROOT / "data")
    (tmp_path / "checkpoints").symlink_to(hacks.ROOT / "checkpoints")
    monkeypatch.setattr(hacks, "GOLD_PROMPTS", 2)
    monkeypatch.setattr(hacks, "EVERY", 5)
    small = {"prompts_per_step": 1, "group_size": 2, "batch_size": 2, "num_inference_steps": 3,
             "eval.num_inference_steps": 3}  # fmt: skip
    row = hacks.measure("constant", 0, 5, **small)
    assert row["alarms"]["The reward has no signal"] == 5
    assert set(row["alarms"]) <= {alarm.alarm.title for alarm in METRICS if alarm.alarm}
    assert [line["step"] for line in row["evaluations"]] == [0, 5]
    assert row["evaluations"][0]["eval/reward"] == row["evaluations"][1]["eval/reward"] == 0.5
    (line,) = [line for line in hacks.table([row]).splitlines() if "| constant |" in line]
    assert line.startswith("| constant | nothing: all samples score the same | 0 | 0.5, 0.5 |")
    assert line.split(" | ")[-2] == str(min(row["alarms"].values()))
