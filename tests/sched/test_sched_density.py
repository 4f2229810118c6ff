"""The log-density of any step's end, and the importance weights that it gives."""

from collections.abc import Callable

import pytest
import torch
from omni_sched import Transition, cps_step, dance_step, gaussian_log_prob, sde_step
from torch import Tensor

RULES = pytest.mark.parametrize("step", [sde_step, cps_step, dance_step])
Step = Callable[..., Transition]


def tensors(count: int, shape: tuple[int, ...] = (3, 4, 5, 6)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@RULES
def test_gaussian_log_prob_of_a_steps_moments_is_its_normal_log_density(step: Step) -> None:
    velocity, x, x_next = tensors(3)
    out = step(velocity, x, 0.5, torch.tensor([0.1, 0.25, 0.4]), noise_level=0.6, x_next=x_next)
    normal = torch.distributions.Normal(out.mean.double(), out.std.double().view(-1, 1, 1, 1))
    expected = normal.log_prob(x_next.double()).flatten(1).mean(1)
    density = gaussian_log_prob(x_next, out.mean, out.std)
    torch.testing.assert_close(density.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(density, out.log_prob) == (step is not cps_step)


def test_where_std_is_zero_there_is_no_density() -> None:
    x_next, mean = tensors(2)
    std = torch.tensor([0.0, 0.5, 0.0])
    assert gaussian_log_prob(x_next, mean, std).isnan().tolist() == [True, False, True]
    assert gaussian_log_prob(mean, mean, std).isnan().tolist() == [True, False, True]


@RULES
def test_ratios_of_densities_turn_one_policys_samples_into_anothers(step: Step) -> None:
    """Importance sampling of E[x_next], of single elements: what `rollout_log_prob` is corrected with."""
    count = 100_000
    x, noise = torch.full((count, 1), 0.8), tensors(1, (count, 1))[0]
    policies = [torch.full((count, 1), velocity) for velocity in (0.3, 0.9)]
    drawn = step(policies[0], x, 0.6, 0.4, noise_level=0.3, noise=noise)
    wanted = step(policies[1], x, 0.6, 0.4, noise_level=0.3, x_next=drawn.x_next)
    expected = wanted.mean[0].item()
    assert abs(drawn.x_next.mean().item() - expected) > 0.1

    def corrected(old: Tensor, rollout: Tensor) -> float:
        return ((old - rollout).exp() * drawn.x_next[:, 0]).mean().item()

    by_density = corrected(*(gaussian_log_prob(drawn.x_next, out.mean, out.std) for out in (wanted, drawn)))
    assert by_density == pytest.approx(expected, abs=0.01)
    by_log_prob = corrected(wanted.log_prob, drawn.log_prob)
    assert (abs(by_log_prob - expected) < 0.01) == (step is not cps_step)  # whose log_prob is no density


def test_half_precision_is_scored_in_float32() -> None:
    x_next, mean = (tensor.bfloat16() for tensor in tensors(2))
    std = torch.tensor([0.25, 0.5, 1.0])
    density = gaussian_log_prob(x_next, mean, std.bfloat16())
    assert density.dtype == torch.float32
    assert torch.equal(density, gaussian_log_prob(x_next.float(), mean.float(), std))


def test_wrong_shapes_are_named() -> None:
    for shapes in (((3, 4), (3, 1), (3,)), ((3, 4), (3, 4), (3, 1)), ((3, 4), (3, 4), ()), ((3,), (3,), (3,))):
        with pytest.raises(ValueError, match=r"x_next and mean must both be \[B, ...\], and std \[B\], got shapes"):
            gaussian_log_prob(*(torch.ones(shape) for shape in shapes))
