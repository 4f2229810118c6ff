"""What saves forwards in a rollout: one prefix for samples that start alike, and fewer steps after the window."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from helpers import CHECKPOINT
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, compress_sigmas, step_noise

torch.set_num_threads(1)

PARAMS = Params(8, 32, 96, noise_level=0.7, sde_steps=(2, 3))
SIGN, OTHER = 'a red sign that says "AB"', 'a blue sign that says "K7QX"'
PROMPTS = [  # two groups that start alike, shuffled, and one sample that starts alone
    Prompt(SIGN, 0, 0, seed=1, initial_seed=9),
    Prompt(OTHER, 1, 1, seed=2, initial_seed=9),
    Prompt(SIGN, 0, 2, seed=3, initial_seed=9),
    Prompt(SIGN, 0, 3, seed=4),
    Prompt(OTHER, 1, 4, seed=5, initial_seed=9),
]


@pytest.fixture(scope="module")
def model():
    return open_model(CHECKPOINT)


@pytest.fixture(scope="module")
def engine(model):
    return DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))


@pytest.fixture
def rows(engine):
    """The number of samples in each forward, in order."""
    seen = []
    hook = engine.net.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    yield seen
    hook.remove()


def test_samples_that_start_alike_are_one_until_the_window(engine, rows):
    trajectory = engine.generate(PROMPTS, PARAMS)
    assert rows == [3, 3, 5, 5, 5, 5, 5, 5]
    assert torch.equal(trajectory.x[0, 0], trajectory.x[2, 0])
    assert torch.equal(trajectory.x[1, 0], trajectory.x[4, 0])
    assert not torch.equal(trajectory.x[0, 0], trajectory.x[3, 0])
    assert not torch.equal(trajectory.x[0, 0], trajectory.x[1, 0])
    assert not torch.equal(trajectory.x0[0], trajectory.x0[2])


def test_the_batches_of_a_group_compute_their_common_start_once(engine, rows):
    """To the bit what two batches compute for themselves; an update in between, or samples drawn again, end it."""
    first, second = ([Prompt(SIGN, 0, i, seed=i, initial_seed=9) for i in own] for own in ((1, 2), (3, 4)))
    start, rest = [1, 1], [2] * 6

    def drawn(prompts):
        rows.clear()
        return engine.generate(prompts, PARAMS), list(rows)

    (alone, all_rows), (again, same_rows) = drawn(second), drawn(second)
    assert all_rows == same_rows == start + rest
    assert torch.equal(alone.x, again.x)
    assert drawn(first)[1] == rest
    engine.load_weights((), version=engine.weight_version + 1)
    assert drawn(first)[1] == start + rest
    after, fewer_rows = drawn(second)
    assert fewer_rows == rest
    for name in ("x", "x_next", "x0", "rollout_log_prob"):
        assert torch.equal(getattr(after, name), getattr(alone, name)), name


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_shared_prefix_is_what_each_sample_draws_alone(engine, scale):
    params = replace(PARAMS, guidance={"true_cfg_scale": scale})
    together = engine.generate(PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], params)
        for name in ("x", "x_next", "x0"):
            torch.testing.assert_close(getattr(together, name)[i], getattr(alone, name)[0], rtol=0, atol=1e-4)


def test_a_window_at_the_start_leaves_no_prefix(engine, rows):
    trajectory = engine.generate(PROMPTS, replace(PARAMS, sde_steps=(0,)))
    assert rows == [5] * 8
    assert torch.equal(trajectory.x[0, 0], trajectory.x[1, 0])  # the same noise, whatever the text
    assert not torch.equal(trajectory.x_next[0, 0], trajectory.x_next[2, 0])


def test_other_pictures_do_not_start_alike(engine, rows, monkeypatch):
    monkeypatch.setattr(engine.sampler.model, "IMAGES", range(2))
    monkeypatch.setattr(engine.sampler.model, "condition", lambda parts, prompt, params: {})
    first, second = (replace(PROMPTS[0], images=(torch.full((32, 96, 3), level),)) for level in (0, 1))
    engine.generate([first, second, replace(first, seed=8)], PARAMS)
    assert rows == [2, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("ratio", "steps"), [(0.4, 6), (1.0, 8), (0.01, 5)])
def test_after_the_window_only_a_share_of_the_steps_is_left(engine, rows, ratio, steps):
    plain = engine.generate(PROMPTS, PARAMS)
    rows.clear()
    params = replace(PARAMS, solver="dpmpp", compress_ratio=ratio)
    short = engine.generate(PROMPTS, params)
    assert len(rows) == steps  # 4 till the window's end, then ceil(4 * ratio)
    assert torch.equal(short.sigmas, compress_sigmas(plain.sigmas, 4, ratio))
    for name in ("x", "x_next", "rollout_log_prob"):  # what is trained does not change
        assert torch.equal(getattr(short, name), getattr(plain, name)), name
    assert not torch.equal(short.x0, plain.x0)


@torch.no_grad()
def test_the_steps_after_the_window_are_diffusers_solver(engine, model):
    """DPM-Solver++(2M) of diffusers takes the same model from the window's end to the same picture."""
    params = replace(PARAMS, solver="dpmpp", compress_ratio=0.8, sde_steps=(0, 1))
    trajectory = engine.generate(PROMPTS, params)
    sigmas = trajectory.sigmas[2:]
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", solver_order=2, solver_type="midpoint"
    )
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas, scheduler.timesteps = sigmas, sigmas[:-1] * 1000
    x = trajectory.x_next[:, -1]
    for sigma, timestep in zip(sigmas, scheduler.timesteps, strict=False):
        velocity = model.predict_velocity(engine.net, x, sigma.expand(len(x)), trajectory.cond, params)
        x = scheduler.step(velocity, timestep, x).prev_sample
    torch.testing.assert_close(trajectory.x0, x, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_a_window_the_whole_schedule_is_the_solver_s(engine, model, rows):
    trajectory = engine.generate(PROMPTS[:2], replace(PARAMS, sde_steps=(), solver="dpmpp", compress_ratio=0.5))
    assert rows == [2] * 4
    x = step_noise([9, 9], INITIAL_NOISE, trajectory.x0.shape[1:])
    data, last = None, None
    for sigma, sigma_next in pairwise(trajectory.sigmas.tolist()):
        velocity = model.predict_velocity(engine.net, x, torch.full((2,), sigma), trajectory.cond, PARAMS)
        # Exactly the data for sigma_next if the prediction went on as a line in the half log of the SNR.
        predicted = x - sigma * velocity
        ahead = predicted
        if data is not None and sigma_next > 0 and last < 1:
            lambdas = [torch.tensor((1 - s) / s, dtype=torch.float64).log() for s in (last, sigma, sigma_next)]
            ahead = predicted + (predicted - data) * float((lambdas[2] - lambdas[1]) / (lambdas[1] - lambdas[0])) / 2
        x = sigma_next / sigma * x + (1 - sigma_next / sigma) * ahead
        data, last = predicted, sigma
    torch.testing.assert_close(trajectory.x0, x, rtol=1e-4, atol=1e-4)
