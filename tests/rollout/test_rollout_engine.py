"""The embedded engine: the contract, what it keeps, what it encodes, what a weight sync moves."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import CHECKPOINT
from omni_rollout import Prompt, SamplingParams
from omni_rollout.diffusers_engine import DiffusersEngine
from omni_rollout.models import qwen_image
from omni_rollout.testing import check_engine
from omni_sched import cps_step, dance_step, sde_step

PARAMS = SamplingParams(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))
PROMPTS = [Prompt(f'a red sign that says "{word}"', group=0, seed=i) for i, word in enumerate(["AB", "K7QX", "AB"])]


@pytest.fixture
def engine():
    return DiffusersEngine(qwen_image, qwen_image.load(CHECKPOINT))


@pytest.mark.parametrize("step", [sde_step, cps_step, dance_step])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_the_engine_keeps_the_contract(engine, step, guidance_scale):
    params = replace(PARAMS, step=step, guidance_scale=guidance_scale, keep_mean=True)

    def velocity(x, sigma, cond):
        return qwen_image.predict_velocity(engine.net, x, sigma, cond, guidance_scale=guidance_scale)

    check_engine(engine, params, velocity)


def test_only_the_stochastic_steps_are_kept(engine):
    trajectory = engine.generate(PROMPTS, PARAMS)
    assert trajectory.x.shape == (3, 2, 16, 4, 12)
    assert trajectory.sde_steps.tolist() == [[1, 2]] * 3
    assert trajectory.rollout_mean is None
    without = engine.generate(PROMPTS, replace(PARAMS, sde_steps=()))
    assert without.x.shape == (3, 0, 16, 4, 12)
    assert without.rollout_log_prob.shape == (3, 0)


def test_each_text_is_encoded_once(engine, monkeypatch):
    encoded = []
    monkeypatch.setattr(
        engine.sampler,
        "family",
        type("Family", (), vars(qwen_image) | {"encode": lambda m, t: encoded.append(t) or real(m, t)}),
    )
    real = qwen_image.encode
    engine.generate(PROMPTS, replace(PARAMS, guidance_scale=2.0))
    engine.generate(PROMPTS, replace(PARAMS, guidance_scale=2.0))
    assert sorted(encoded) == sorted({p.text for p in PROMPTS} | {" "})


def test_a_sync_with_the_trainers_own_module_moves_nothing(engine):
    net = engine.net
    before = {name: p.data_ptr() for name, p in net.named_parameters()}
    engine.load_weights(net.named_parameters(), version=3)
    assert engine.net is net
    assert {name: p.data_ptr() for name, p in engine.net.named_parameters()} == before
    with torch.no_grad():
        next(net.parameters()).add_(1.0)  # what the trainer changes, the engine has
    assert torch.equal(next(engine.net.parameters()), next(net.parameters()))
    assert engine.generate(PROMPTS, PARAMS).weight_version == 3


def test_a_sync_from_another_module_copies(engine):
    trained = copy.deepcopy(engine.net)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    stale = engine.generate(PROMPTS, PARAMS)
    engine.load_weights(trained.named_parameters(), version=1)
    assert all(torch.equal(a, b) for a, b in zip(engine.net.parameters(), trained.parameters(), strict=True))
    assert not torch.equal(engine.generate(PROMPTS, PARAMS).x0, stale.x0)


@pytest.mark.parametrize("name", ["no_such_weight", "proj_out.bias"])
def test_a_weight_that_does_not_fit_is_refused(engine, name):
    with pytest.raises(ValueError, match=f"tensors must fit the transformer, got {name}"):
        engine.load_weights([(name, torch.zeros(3))], version=1)


def test_the_last_step_may_not_be_stochastic(engine):
    with pytest.raises(ValueError, match="last step"):
        engine.generate(PROMPTS, replace(PARAMS, sde_steps=(4,)))


def test_no_prompts_are_refused(engine):
    with pytest.raises(ValueError, match="at least one prompt"):
        engine.generate([], PARAMS)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_same_seeds_are_the_same_images_in_batches_of_any_size(engine, size):
    """Noise is the same to the bit; the model rounds otherwise at another shape, by less than an 8-bit level."""
    prompts = [Prompt(f'a red sign that says "{word}"', 0, i) for i, word in enumerate(["ABCD", "K", "HJ", "EF2", "7"])]
    whole = engine.generate(prompts, PARAMS)
    parts = [engine.generate(prompts[i : i + size], PARAMS).media for i in range(0, len(prompts), size)]
    difference = (torch.cat(parts).int() - whole.media.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    assert size < 5 or difference.max() == 0
