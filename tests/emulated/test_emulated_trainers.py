"""Every trainer on an accelerator without float64, float8 and complex numbers: the CPU's bits, also where interrupted.

A tensor on the wrong device ends a run here, as it would on any accelerator.
"""

from dataclasses import replace

import pytest
from emulated import emulated_runs as runs
from emulated.npu import build, load_strict
from helpers import sampled
from records import record


@pytest.fixture(scope="module")
def url():
    """URL of a server in this process that scores brightness."""
    build()
    with record.scoring() as url:
        yield url


@pytest.mark.parametrize("name", sampled(runs.CASES, 3))
def test_an_accelerator_trains_like_the_cpu_and_continues(tmp_path, url, fresh, name):
    case = runs.CASES[name]
    expected = fresh(runs.run, case, tmp_path / "cpu", url, before=runs.rotate_in_real_numbers)
    found = fresh(runs.run, case, tmp_path / "npu", url, lives=(1, 2), before=runs.tell_algorithms)
    assert "continues after step 1" in found.text
    assert "on npu" in found.text
    told = [line for line in found.text.splitlines() if line.endswith(" algorithms")]
    assert sorted(told) == ["backward by deterministic algorithms", "forward by warned algorithms"]  # as an NPU is set
    assert found.lines == expected.lines
    assert found.weights == expected.weights


def test_by_any_algorithms_two_runs_differ(tmp_path, url, fresh):
    case = runs.CASES["nft full"]
    case = replace(case, settings=case.settings | {"deterministic": False})
    found = [fresh(runs.run, case, tmp_path / name, url, before=load_strict) for name in ("one", "other")]
    assert found[0].weights != found[1].weights
