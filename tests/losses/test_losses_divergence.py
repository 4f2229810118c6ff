"""The KL of a step, and the README's example."""

import re
from pathlib import Path

import pytest
import torch
from omni_losses import gaussian_kl
from torch.distributions import Normal, kl_divergence

torch.set_num_threads(1)

README = Path(__file__).parents[2] / "packages" / "omni-losses" / "README.md"


def test_a_worked_example():
    mean = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    ref_mean = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert gaussian_kl(mean, ref_mean, torch.tensor([0.5, 2.0])).tolist() == [5.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 7), (3, 4, 2, 5), (3, 2, 2, 2, 2)])
def test_it_is_the_kl_of_normal_distributions_per_element(shape):
    generator = torch.Generator().manual_seed(0)
    mean, ref_mean = (torch.randn(shape, generator=generator) for _ in range(2))
    std = torch.tensor([0.1, 0.7, 3.0])
    wide = std.view(3, *[1] * (len(shape) - 1))
    expected = kl_divergence(Normal(mean, wide), Normal(ref_mean, wide)).flatten(1).mean(dim=1)
    torch.testing.assert_close(gaussian_kl(mean, ref_mean, std), expected)


def test_its_gradient_points_from_the_reference_to_the_mean():
    mean, ref_mean = torch.tensor([[1.0, 3.0]], requires_grad=True), torch.tensor([[0.0, 1.0]], requires_grad=True)
    std = torch.tensor([0.5], requires_grad=True)
    gaussian_kl(mean, ref_mean, std).sum().backward()
    assert mean.grad.tolist() == [[2.0, 4.0]]  # difference / (elements * std^2)
    assert ref_mean.grad is std.grad is None


def test_it_is_computed_in_float32():
    mean = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    kl = gaussian_kl(mean, torch.zeros(1, 2), torch.tensor([1e-3]))
    assert kl.dtype == torch.float32
    assert kl.item() == pytest.approx(5e5)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"\[B, ...\] alike, got shapes \(2, 3\) and \(2, 1\)"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2))
    with pytest.raises(ValueError, match=r"\[B, ...\] alike"):
        gaussian_kl(torch.zeros(2), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"std must be \[B\] = \(2,\), got shape \(2, 1\)"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 1))


def test_the_readme_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["advantages"][2:].tolist() == [0.0, 0.0]
    assert names["mean"].grad.abs().sum() > 0
    assert "ratio_max_dev=0.0e+00" in capsys.readouterr().out
