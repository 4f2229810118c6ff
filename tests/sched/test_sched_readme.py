"""The package's README and its public surface."""

import re
from pathlib import Path

import omni_sched
import torch

README = Path(__file__).parents[2] / "packages" / "omni-sched" / "README.md"


def test_the_readme_example_runs_and_ends_near_standard_normal_data() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), scope)
    x = scope["x"]
    assert isinstance(x, torch.Tensor)
    assert x.shape == (2, 4, 8, 8)
    assert 0.7 < x.std().item() < 1.3


def test_every_public_name_is_documented_and_the_functions_are_in_the_readme() -> None:
    readme = README.read_text(encoding="utf-8")
    for name in omni_sched.__all__:
        value = getattr(omni_sched, name)
        if callable(value) and not isinstance(value, type):
            assert value.__doc__
            assert f"`{name}`" in readme
