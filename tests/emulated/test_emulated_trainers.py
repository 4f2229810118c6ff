"""Every trainer on an accelerator without float64, float8 and complex numbers: the CPU's bits, also where interrupted.

A tensor on the wrong device ends a run here, as it would on any accelerator.
"""

from dataclasses import replace

import pytest
from emulated import emulated_runs as runs
from emulated.npu import build, load_strict
from helpers import in_turn, sampled
from records import record


@pytest.fixture(scope="module")
def url():
    """URL of a server in this process that scores brightness."""
    build()
    with record.scoring() as url:
        yield url


@pytest.mark.parametrize("name", sampled(runs.CASES, 1))
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


HALF = runs.RECOMPUTED | {"dtype": "float16"}


HALVES = {
    "flowgrpo LoRA": record.grpo(**runs.FEW, **record.LORA, **HALF),
    "nft LoRA, ddp": record.nft(ranks=2, sharding_mode="ddp", adv_std="group", **runs.FEW, **record.LORA, **HALF),
    "sft full, fsdp2": record.sft(ranks=2, sharding_mode="fsdp2", **runs.FEW, **HALF),
    "gspo LoRA": runs.tokens(**record.LORA, **HALF),
}


@in_turn(0, 2)
@pytest.mark.parametrize("name", sampled(HALVES, 1))
def test_without_bfloat16_a_loss_in_float16_is_scaled_and_a_run_continues_with_its_factor(tmp_path, url, fresh, name):
    case, before = HALVES[name], runs.tell_factors
    whole = fresh(runs.run, case, tmp_path / "whole", url, before=before)
    found = fresh(runs.run, case, tmp_path / "found", url, lives=(1, 2), before=before)
    told = [line for line in whole.text.splitlines() if line.startswith("times ")]
    assert told[0] == "times 65536" != told[len(told) // 2]
    assert [line for line in found.text.splitlines() if line.startswith("times ")] == told[len(told) // 2 :]
    assert found.lines == whole.lines
    assert found.weights == whole.weights
    plain = replace(case, settings=case.settings | {"dtype": "float32"})
    other = fresh(runs.run, plain, tmp_path / "plain", url, before=before)
    assert whole.lines[1] != other.lines[1]
    for name in ("policy/grad_norm", "policy/loss"):
        assert whole.lines[1][name] == pytest.approx(other.lines[1][name], rel=0.05, abs=1e-4)


@in_turn(1, 2)
def test_by_any_algorithms_two_runs_differ(tmp_path, url, fresh):
    case = runs.CASES["nft full"]
    case = replace(case, settings=case.settings | {"deterministic": False})
    found = [fresh(runs.run, case, tmp_path / name, url, before=load_strict) for name in ("one", "other")]
    assert found[0].weights != found[1].weights
