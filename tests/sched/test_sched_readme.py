"""The package's README and its public surface."""

import math
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "packages" / "omni-sched" / "README.md"


def run_examples() -> list[dict[str, object]]:
    """The names that each example of the README leaves behind; every example stands alone."""
    scopes: list[dict[str, object]] = []
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        scope: dict[str, object] = {}
        exec(compile(code, str(README), "exec"), scope)
        scopes.append(scope)
    return scopes


def test_the_readme_examples_run_and_end_near_standard_normal_data() -> None:
    sampled, compressed = run_examples()
    x = sampled["x"]
    assert isinstance(x, torch.Tensor)
    assert x.shape == (2, 4, 8, 8)
    assert 0.7 < x.std().item() < 1.3
    assert compressed["window"] == (7, 8, 9, 10)
    assert compressed["num_steps"] == 17
    sigmas, x = compressed["sigmas"], compressed["x"]
    assert isinstance(sigmas, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    start = sigmas[11].item()
    assert x.item() == pytest.approx(1 / math.sqrt((1 - start) ** 2 + start**2), rel=0.05)  # the ODE's own solution
