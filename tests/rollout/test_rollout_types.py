"""Samples as plain data: select, split, cat, trim by masks alone, and what the parameters refuse."""

from dataclasses import replace

import pytest
import torch
from omni_rollout import Params, Prompt, Samples, Trajectory

PARAMS = Params(3, 2, 2, noise_level=0.7, sde_steps=(0, 1))


def trajectory(size: int, tokens: int, version: int = 0, first: int = 0, **cond: torch.Tensor) -> Trajectory:
    ids = torch.arange(first, first + size)
    text = {"embeds": torch.ones(size, tokens, 4), "embeds_mask": torch.ones(size, tokens, dtype=torch.bool)}
    return Trajectory(
        prompts=tuple(Prompt(str(i), group=0, index=10 + i, seed=i) for i in ids.tolist()),
        media={"image": ids.view(-1, 1, 1, 1).expand(size, 2, 2, 3).byte(), "audio": torch.zeros(size, 5, 1)},
        rates={"sample_rate": 16_000.0},
        weight_version=version,
        x=ids.view(-1, 1, 1).expand(size, 2, 3).float(),
        x_next=ids.view(-1, 1, 1).expand(size, 2, 3).float() + 0.5,
        sde_steps=torch.tensor([[0, 1]]).expand(size, 2),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.0]),
        rollout_log_prob=ids.view(-1, 1).expand(size, 2).float(),
        rollout_mean=None,
        cond=text | cond,
        x0=ids.view(-1, 1).expand(size, 3).float(),
        params=PARAMS,
    )


def test_select_picks_samples_in_order():
    picked = trajectory(4, 5).select([2, 0])
    assert picked.x[:, 0, 0].tolist() == [2, 0]
    assert picked.media["image"][:, 0, 0, 0].tolist() == [2, 0]
    assert picked.indices.tolist() == [12, 10]
    assert picked.cond["embeds_mask"].shape == (2, 5)
    assert picked.sigmas.tolist() == [1.0, 0.75, 0.5, 0.0]
    assert (len(picked), picked.num_kept) == (2, 2)


def test_split_and_cat_are_inverse():
    whole = trajectory(5, 4)
    parts = whole.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    again = Trajectory.cat(parts)
    for name in ("x", "x_next", "sde_steps", "sigmas", "rollout_log_prob", "x0"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
    for name in ("prompts", "rates", "weight_version", "rollout_mean", "params"):
        assert getattr(again, name) == getattr(whole, name), name
    for name in ("media", "cond"):
        for key, tensor in getattr(whole, name).items():
            assert torch.equal(getattr(again, name)[key], tensor), key


def test_finished_samples_alone_are_selected_and_put_together_too():
    whole = trajectory(3, 2)
    finished = Samples(whole.prompts, whole.media, whole.rates, whole.weight_version)
    again = Samples.cat([finished.select([0]), finished.select([1, 2])])
    assert again.prompts == whole.prompts
    assert torch.equal(again.media["image"], whole.media["image"])


def test_cat_pads_the_shorter_texts_and_masks_the_padding():
    both = Trajectory.cat([trajectory(1, 2), trajectory(1, 4, first=1)])
    assert both.cond["embeds_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert both.cond["embeds"][0].sum(dim=1).tolist() == [4, 4, 0, 0]


def test_trim_cuts_what_no_sample_s_mask_holds_and_cat_had_added():
    short, long = trajectory(2, 2), trajectory(1, 5, first=2)
    again = Trajectory.cat([short, long]).select([0, 1]).trim()
    for name in short.cond:
        assert torch.equal(again.cond[name], short.cond[name]), name


def test_what_has_no_mask_is_never_padded_or_cut():
    """Wan attends to the zeros after a text, tokens may have the id 0, and other inputs are no texts at all."""
    others = {
        "text": torch.tensor([[1.0, 2.0, 0.0, 0.0]]).view(1, 4, 1),
        "ids": torch.tensor([[5, 6, 0, 0]]),
        "pooled": torch.tensor([[1.0, 0.0, 0.0]]),
        "image_latents": torch.cat([torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)], dim=1),
    }
    one, two = (trajectory(1, 3, first=i, **others) for i in range(2))
    both = Trajectory.cat([one, two]).select([1]).trim()
    for name, tensor in others.items():
        assert torch.equal(both.cond[name], tensor), name
    longer = trajectory(1, 3, first=1, text=torch.ones(1, 5, 1), ids=others["ids"], pooled=others["pooled"])
    with pytest.raises(ValueError, match=r"cond must have the same entries in every part, got \['image_latents'\]"):
        Trajectory.cat([one, longer])
    longer = trajectory(1, 3, first=1, **others | {"text": torch.ones(1, 5, 1)})
    with pytest.raises(ValueError, match=r"cond\['text'\] must have one shape for all samples of a batch, got"):
        Trajectory.cat([one, longer])


def test_token_ids_that_end_in_zero_survive_under_their_mask():
    ids, mask = torch.tensor([[5, 6, 0, 0]]), torch.tensor([[True, True, True, False]])
    trimmed = trajectory(1, 2, ids=ids, ids_mask=mask).trim()
    assert trimmed.cond["ids"].tolist() == [[5, 6, 0]]
    assert trimmed.cond["ids_mask"].tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_version": 1}, r"parts must share weight_version, got \[0, 1\]"),
        ({"sigmas": torch.tensor([1.0, 0.5, 0.25, 0.0])}, "parts must share sigmas"),
        ({"params": replace(PARAMS, guidance_scale=2.0)}, "parts must share params"),
        ({"rates": {"sample_rate": 8_000.0}}, "parts must share rates"),
        ({"x": torch.zeros(1, 2, 4)}, r"x must have one shape for all samples of a batch, got \[\(2, 3\), \(2, 4\)\]"),
        ({"rollout_mean": torch.zeros(1, 2, 3)}, "parts must share rollout_mean"),
    ],
)
def test_cat_refuses_samples_that_do_not_belong_together(change, message):
    with pytest.raises(ValueError, match=message):
        Trajectory.cat([trajectory(1, 2), replace(trajectory(1, 2), **change)])


def test_sigmas_of_a_kept_step_are_per_sample():
    assert trajectory(2, 2).sigma(1).tolist() == [0.75, 0.75]
    assert trajectory(2, 2).sigma_next(1).tolist() == [0.5, 0.5]


def test_to_moves_every_tensor():
    moved = trajectory(2, 2).to("meta")
    tensors = [moved.x, moved.sigmas, *moved.media.values(), *moved.cond.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps must be >= 1, got 0"),
        ({"num_frames": 0}, "num_frames must be >= 1, got 0"),
        ({"sde_steps": (5,), "noise_level": 0.7}, r"sde_steps must be increasing indices in \[0, 4\).*got \(5,\)"),
        ({"sde_steps": (4,), "noise_level": 0.7}, r"the last step's density degenerates .*, got \(4,\)"),
        ({"sde_steps": (2, 1), "noise_level": 0.7}, "sde_steps must be increasing"),
        ({"sde_steps": (1,)}, "noise_level must be > 0"),
        ({"guidance_scale": float("inf")}, "guidance_scale must be finite, got inf"),
        ({"guidance": {"true_cfg_scale": float("nan")}}, "true_cfg_scale must be finite, got nan"),
        ({"solver": "heun"}, "solver must be one of euler, dpmpp, got 'heun'"),
        *(
            ({"compress_ratio": ratio}, r"compress_ratio must be in \(0, 1\], got")
            for ratio in (0.0, -0.5, 1.1, float("nan"))
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Params(**({"num_inference_steps": 5, "height": 32, "width": 96} | change))
