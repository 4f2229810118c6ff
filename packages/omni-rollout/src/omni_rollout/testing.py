"""The contract of all engines, as one function for tests."""

from dataclasses import replace

import torch
from omni_sched import compress_sigmas
from torch import nn

from omni_rollout.model import Model
from omni_rollout.sampler import replay
from omni_rollout.types import Engine, Params, Prompt, Trajectory


def check_engine(
    engine: Engine,
    model: Model,
    params: Params,
    *,
    net: nn.Module | None = None,
    tolerance: float = 0.0,
    num_images: int | None = None,
) -> None:
    """Raise AssertionError unless `engine` keeps the contract.

    params: must have at least two consecutive kept steps. net: the trainer's, with equal weights; by default the
    engine's. tolerance: largest |log-prob(trainer) - log-prob(engine)| in nats per element; 0 requires bit-identity.
    num_images: number of references per prompt; by default the fewest that the model supports.
    """
    words = ["A", "B", "C", "D"]
    num_images = model.IMAGES[0] if num_images is None else num_images
    images = tuple(torch.full((64, 80, 3), 120 + i, dtype=torch.uint8) for i in range(num_images))
    prompts = [
        Prompt(f'a red sign that says "{word}"', i // 2, i, 100 + i, images=images) for i, word in enumerate(words)
    ]
    assert isinstance(engine.net, nn.Module)
    assert engine.parts.net is engine.net
    trajectory = engine.generate(prompts, params)
    check_fields(trajectory, prompts, model, params)
    check_chain(trajectory)
    check_scores(trajectory, model, engine.net if net is None else net, tolerance=tolerance)
    check_noise(engine, prompts, params, trajectory)
    check_starts(engine, model, prompts, params)
    check_versions(engine, prompts, params)


def check_fields(trajectory: Trajectory, prompts: list[Prompt], model: Model, params: Params) -> None:
    """Check shapes, dtypes and order against the types."""
    B, K = len(prompts), len(params.sde_steps)
    assert trajectory.prompts == tuple(prompts)
    assert trajectory.params == params
    assert trajectory.num_kept == K
    assert trajectory.indices.tolist() == [prompt.index for prompt in prompts]
    sigmas = compress_sigmas(model.sigmas(params), params.first_after, params.compress_ratio)
    assert torch.equal(trajectory.sigmas.cpu(), sigmas)
    assert trajectory.sigmas[0] == 1
    assert trajectory.sigmas[-1] == 0
    assert trajectory.sde_steps.tolist() == [list(params.sde_steps)] * B
    for tensor in (trajectory.x, trajectory.x_next, trajectory.rollout_log_prob):
        assert tensor.shape[:2] == (B, K)
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
        assert not tensor.requires_grad
    assert trajectory.x.shape[2:] == trajectory.x0.shape[1:] == model.latent_shape(params)
    check_media(trajectory, model, params)
    assert all(len(tensor) == B for tensor in trajectory.cond.values())
    assert (trajectory.rollout_mean is not None) == params.keep_mean


def check_media(trajectory: Trajectory, model: Model, params: Params) -> None:
    """Check the kinds, layout and rates of the media."""
    assert tuple(trajectory.media) == model.MEDIA
    B, size = len(trajectory), (params.height, params.width, 3)
    for kind, tensor in trajectory.media.items():
        if kind == "audio":
            assert (tensor.dtype, tensor.dim(), len(tensor)) == (torch.float32, 3, B)
            assert trajectory.rates["sample_rate"] > 0
        else:
            assert tensor.dtype == torch.uint8
            assert tensor.shape == ((B, *size) if kind == "image" else (B, params.num_frames, *size))
            assert kind == "image" or trajectory.rates["fps"] == params.frame_rate


def check_chain(trajectory: Trajectory) -> None:
    """Check that a kept step starts exactly where the previous kept step ended."""
    steps = trajectory.sde_steps[0].tolist()
    consecutive = [k for k in range(1, len(steps)) if steps[k] == steps[k - 1] + 1]
    assert consecutive, f"params.sde_steps must hold two consecutive steps, got {steps}"
    for k in consecutive:
        assert torch.equal(trajectory.x[:, k], trajectory.x_next[:, k - 1])


def check_scores(trajectory: Trajectory, model: Model, net: nn.Module, *, tolerance: float) -> None:
    """Check that replaying a sampled step under the trainer's net gives the engine's log-probability."""
    for k in range(trajectory.num_kept):
        with torch.no_grad():
            score = replay(model, net, trajectory, k).log_prob
        gap = (score - trajectory.rollout_log_prob[:, k]).abs().max().item()
        assert gap <= tolerance, f"kept step {k}: log-prob differs by {gap}, tolerance {tolerance}"


def check_noise(engine: Engine, prompts: list[Prompt], params: Params, trajectory: Trajectory) -> None:
    """Check that a sample's noise does not depend on its batch, and differs for another seed.

    The first step starts from pure noise, so its x must be bit-identical; later values may round differently in a batch
    of another shape.
    """
    if 0 not in params.sde_steps:
        params = replace(params, sde_steps=(0, *params.sde_steps))
        trajectory = engine.generate(prompts, params)
    engine.prepare(prompts, params)  # not the next batch
    other = engine.generate([prompts[2], replace(prompts[0], seed=7)], params)
    assert torch.equal(other.x[0, 0], trajectory.x[2, 0])
    assert not torch.equal(other.x[1, 0], trajectory.x[0, 0])
    torch.testing.assert_close(other.x_next[0, 0], trajectory.x_next[2, 0], rtol=0, atol=1e-4)


def check_starts(engine: Engine, model: Model, prompts: list[Prompt], params: Params) -> None:
    """Check that samples with one initial seed start from the same noise and differ after the first stochastic step."""
    shared = [replace(prompts[0], initial_seed=5), replace(prompts[0], seed=6, initial_seed=5), prompts[1]]
    trajectory = engine.generate(shared, params)
    check_fields(trajectory, shared, model, params)
    assert torch.equal(trajectory.x[0, 0], trajectory.x[1, 0])
    assert not torch.equal(trajectory.x[0, 0], trajectory.x[2, 0])
    assert not torch.equal(trajectory.x_next[0, 0], trajectory.x_next[1, 0])


def check_versions(engine: Engine, prompts: list[Prompt], params: Params) -> None:
    """Check that trajectories have the version of the last sync, and that sleeping and waking change nothing."""
    before = engine.generate(prompts, params)
    engine.load_weights((), version=before.weight_version + 1)
    engine.sleep()
    engine.wake()
    after = engine.generate(prompts, params)
    assert after.weight_version == before.weight_version + 1
    assert torch.equal(after.x0, before.x0)
