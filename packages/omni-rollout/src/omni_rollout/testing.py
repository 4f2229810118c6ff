"""The contract that any engine passes, as one function a test calls."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from omni_rollout.types import Engine, Prompt, SamplingParams, Trajectory

Velocity = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]  # (x, sigma [B], cond) -> velocity


def check_engine(engine: Engine, params: SamplingParams, velocity: Velocity, *, tolerance: float = 0.0) -> None:
    """Raises AssertionError unless `engine` keeps the contract.

    params: at least two kept steps in a row. velocity: the trainer's prediction, on the weights that the engine has.
    tolerance: largest |log-prob(trainer) - log-prob(engine)| in nats per element; 0 demands equality bit for bit.
    """
    prompts = [Prompt(f'a red sign that says "{word}"', group=i // 2, seed=100 + i) for i, word in enumerate("ABCD")]
    assert isinstance(engine.net, nn.Module)
    trajectory = engine.generate(prompts, params)
    check_fields(trajectory, prompts, params)
    check_chain(trajectory)
    check_scores(trajectory, params, velocity, tolerance=tolerance)
    check_noise(engine, prompts, params, trajectory)
    check_starts(engine, prompts, params)
    check_versions(engine, prompts, params)


def check_fields(trajectory: Trajectory, prompts: list[Prompt], params: SamplingParams) -> None:
    """Shapes, dtypes and order are as the types say."""
    B, K = len(prompts), len(params.sde_steps)
    assert trajectory.prompts == tuple(prompts)
    assert trajectory.sigmas.shape == (params.num_flash_steps + 1,)
    assert trajectory.sigmas[0] == 1
    assert trajectory.sigmas[-1] == 0
    assert trajectory.sde_steps.tolist() == [list(params.sde_steps)] * B
    for tensor in (trajectory.x, trajectory.x_next, trajectory.rollout_log_prob):
        assert tensor.shape[:2] == (B, K)
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
        assert not tensor.requires_grad
    assert trajectory.x.shape[2:] == trajectory.x0.shape[1:]
    assert trajectory.media.shape == (B, 3, params.height, params.width)
    assert trajectory.media.dtype == torch.uint8
    assert all(len(tensor) == B for tensor in trajectory.cond.values())
    assert (trajectory.rollout_mean is not None) == params.keep_mean


def check_chain(trajectory: Trajectory) -> None:
    """A kept step starts exactly where the kept step before it ended."""
    steps = trajectory.sde_steps[0].tolist()
    in_a_row = [k for k in range(1, len(steps)) if steps[k] == steps[k - 1] + 1]
    assert in_a_row, f"params.sde_steps must hold two steps in a row, got {steps}"
    for k in in_a_row:
        assert torch.equal(trajectory.x[:, k], trajectory.x_next[:, k - 1])


def check_scores(trajectory: Trajectory, params: SamplingParams, velocity: Velocity, *, tolerance: float) -> None:
    """Scoring a sampled step with the trainer's velocity gives the log-prob that the engine stored."""
    for k in range(trajectory.x.shape[1]):
        x, sigma = trajectory.x[:, k], trajectory.sigma(k)
        with torch.no_grad():
            predicted = velocity(x, sigma, trajectory.cond)
        score = params.step(
            predicted,
            x,
            sigma,
            trajectory.sigma_next(k),
            noise_level=params.noise_level,
            x_next=trajectory.x_next[:, k],
        )
        gap = (score.log_prob - trajectory.rollout_log_prob[:, k]).abs().max().item()
        assert gap <= tolerance, f"kept step {k}: log-prob differs by {gap}, tolerance {tolerance}"


def check_noise(engine: Engine, prompts: list[Prompt], params: SamplingParams, trajectory: Trajectory) -> None:
    """The same sample in another batch gets the same noise, and another seed gets other noise.

    The first step starts from pure noise, so its x is compared bit for bit; what the model adds later may differ in
    the last place when the batch has another shape.
    """
    if 0 not in params.sde_steps:
        params = replace(params, sde_steps=(0, *params.sde_steps))
        trajectory = engine.generate(prompts, params)
    other = engine.generate([prompts[2], replace(prompts[0], seed=7)], params)
    assert torch.equal(other.x[0, 0], trajectory.x[2, 0])
    assert not torch.equal(other.x[1, 0], trajectory.x[0, 0])
    torch.testing.assert_close(other.x_next[0, 0], trajectory.x_next[2, 0], rtol=0, atol=1e-4)


def check_starts(engine: Engine, prompts: list[Prompt], params: SamplingParams) -> None:
    """Samples with one initial seed start from one noise, and go apart in the first stochastic step."""
    alike = [replace(prompts[0], initial_seed=5), replace(prompts[0], seed=6, initial_seed=5), prompts[1]]
    trajectory = engine.generate(alike, params)
    check_fields(trajectory, alike, params)
    assert torch.equal(trajectory.x[0, 0], trajectory.x[1, 0])
    assert not torch.equal(trajectory.x[0, 0], trajectory.x[2, 0])
    assert not torch.equal(trajectory.x_next[0, 0], trajectory.x_next[1, 0])


def check_versions(engine: Engine, prompts: list[Prompt], params: SamplingParams) -> None:
    """Every sync is visible in the trajectories that follow; sleeping and waking changes nothing."""
    before = engine.generate(prompts, params)
    engine.load_weights((), version=before.weight_version + 1)
    engine.sleep()
    engine.wake()
    after = engine.generate(prompts, params)
    assert after.weight_version == before.weight_version + 1
    assert torch.equal(after.x0, before.x0)
