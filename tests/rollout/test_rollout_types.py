"""Trajectories as plain data: select, split, cat, and what the settings refuse."""

import pytest
import torch
from omni_rollout import Prompt, SamplingParams, Trajectory


def trajectory(size: int, tokens: int, version: int = 0, first: int = 0) -> Trajectory:
    ids = torch.arange(first, first + size)
    return Trajectory(
        x=ids.view(-1, 1, 1).expand(size, 2, 3).float(),
        x_next=ids.view(-1, 1, 1).expand(size, 2, 3).float() + 0.5,
        sde_steps=torch.tensor([[0, 2]]).expand(size, 2),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.0]),
        rollout_log_prob=ids.view(-1, 1).expand(size, 2).float(),
        rollout_mean=None,
        cond={"embeds": torch.ones(size, tokens, 4), "mask": torch.ones(size, tokens, dtype=torch.bool)},
        x0=ids.view(-1, 1).expand(size, 3).float(),
        media=torch.zeros(size, 3, 2, 2, dtype=torch.uint8),
        prompts=tuple(Prompt(str(i), group=0, seed=i) for i in ids.tolist()),
        weight_version=version,
    )


def test_select_picks_samples_in_order():
    picked = trajectory(4, 5).select([2, 0])
    assert picked.x[:, 0, 0].tolist() == [2, 0]
    assert [p.seed for p in picked.prompts] == [2, 0]
    assert picked.cond["mask"].shape == (2, 5)


def test_split_and_cat_are_inverse():
    whole = trajectory(5, 4)
    parts = whole.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    again = Trajectory.cat(parts)
    assert torch.equal(again.x, whole.x)
    assert again.prompts == whole.prompts
    assert torch.equal(again.cond["embeds"], whole.cond["embeds"])


def test_cat_pads_the_shorter_texts_and_masks_the_padding():
    both = Trajectory.cat([trajectory(1, 2), trajectory(1, 4, first=1)])
    assert both.cond["mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert both.cond["embeds"].shape == (2, 4, 4)


def test_cat_refuses_samples_of_different_weights():
    with pytest.raises(ValueError, match=r"weight_version, got \[0, 1\]"):
        Trajectory.cat([trajectory(1, 2), trajectory(1, 2, version=1)])


def test_sigmas_of_a_kept_step_are_per_sample():
    assert trajectory(2, 2).sigma(1).tolist() == [0.5, 0.5]
    assert trajectory(2, 2).sigma_next(1).tolist() == [0, 0]


def test_to_moves_every_tensor():
    moved = trajectory(2, 2).to("meta")
    assert {t.device.type for t in (moved.x, moved.sigmas, moved.media, *moved.cond.values())} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps must be >= 1, got 0"),
        ({"sde_steps": (5,), "noise_level": 0.7}, r"sde_steps must be increasing indices in \[0, 5\), got \(5,\)"),
        ({"sde_steps": (2, 1), "noise_level": 0.7}, "sde_steps must be increasing"),
        ({"sde_steps": (1,)}, "noise_level must be > 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"num_steps": 5, "height": 32, "width": 96} | change))
